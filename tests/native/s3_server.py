"""An S3 server with a log of its own: `s3_server.py SECONDS_PER_GET [CERTIFICATE KEY]`, moto's S3 behind cheroot.

Prints its port; at the end of standard input it prints what it served as JSON, per request: method, bytes of the body,
ns from the request to the answer that is about to go, client's port.
"""

import json
import sys
import threading
import time

from cheroot import wsgi
from cheroot.ssl.builtin import BuiltinSSLAdapter
from moto.server import DomainDispatcherApplication, create_backend_app


class Logged:
    """The application, timed; GETs wait first, as a busy gateway does."""

    def __init__(self, application, seconds):
        self.application, self.seconds, self.log = application, seconds, []

    def __call__(self, environ, start_response):
        begun = time.perf_counter_ns()
        method = environ["REQUEST_METHOD"]
        if method == "GET":
            time.sleep(self.seconds)
        parts = list(self.application(environ, start_response))
        took_ns = time.perf_counter_ns() - begun  # before the last byte goes: after it the server may wait for its CPU
        yield from parts
        self.log.append((method, sum(map(len, parts)), took_ns, int(environ["REMOTE_PORT"])))


def main(seconds, *certificate):
    logged = Logged(DomainDispatcherApplication(create_backend_app), float(seconds))
    server = wsgi.Server(("127.0.0.1", 0), logged, numthreads=8, shutdown_timeout=1)
    if certificate:
        server.ssl_adapter = BuiltinSSLAdapter(*certificate)
    server.prepare()
    threading.Thread(target=server.serve, daemon=True).start()
    print(server.bind_addr[1], flush=True)
    sys.stdin.read()
    server.stop()  # first: an answer is logged once its last byte has been taken
    print(json.dumps(logged.log), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
