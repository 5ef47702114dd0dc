"""A client in a cgroup that asks a server for objects: `http_client.py CGROUP URL COUNT CONNECTIONS`.

Prints its own times per request in ns: to the first byte of the answer and to the last.
"""

import http.client
import json
import os
import ssl
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


def connect(url):
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(parts.hostname, parts.port, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port)


def ask(connection, path):
    begun = time.perf_counter_ns()
    connection.request("GET", path)
    response = connection.getresponse()
    first = time.perf_counter_ns()
    body = response.read()
    return first - begun, time.perf_counter_ns() - begun, len(body)


def main(cgroup, url, count, connections):
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    opened = [connect(url) for _ in range(int(connections))]
    times = [ask(opened[at % len(opened)], urlsplit(url).path) for at in range(int(count))]
    print(json.dumps(times), flush=True)
    sys.stdin.readline()  # connections stay open until told


if __name__ == "__main__":
    main(*sys.argv[1:])
