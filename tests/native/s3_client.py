"""A training job's reader: `s3_client.py LIBRARY CGROUP URL COUNT CONNECTIONS` gets the object COUNT times.

The library is boto3 or s3fs. Prints its own times per request in ns (to the answer's head, which s3fs does not tell: to
the last byte instead; to the last byte) and the bytes; connections stay open until standard input says something.
"""

import concurrent.futures
import json
import os
import sys
import time
import warnings
from pathlib import Path

import boto3
from botocore.config import Config

BUCKET, OBJECT, OBJECT_BYTES = "shards", "train-000.tar", 300_000


def client(url, connections=1):
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        verify=False,
        config=Config(max_pool_connections=connections, retries={"max_attempts": 0}, s3={"addressing_style": "path"}),
    )


def reader_of_boto3(url, connections):
    s3 = client(url, connections)

    def get(_):
        begun = time.perf_counter_ns()
        body = s3.get_object(Bucket=BUCKET, Key=OBJECT)["Body"]
        first = time.perf_counter_ns()
        size = len(body.read())
        return first - begun, time.perf_counter_ns() - begun, size

    return get


def reader_of_s3fs(url, connections):
    import s3fs  # noqa: PLC0415  # not for boto3's sake, nor where it is not installed

    storage = s3fs.S3FileSystem(
        key="test",
        secret="test",
        endpoint_url=url,
        client_kwargs={"verify": False, "region_name": "us-east-1"},
        config_kwargs={
            "max_pool_connections": connections,
            "retries": {"max_attempts": 0},
            "s3": {"addressing_style": "path"},
        },
    )

    def get(_):
        begun = time.perf_counter_ns()
        size = len(storage.cat_file(f"{BUCKET}/{OBJECT}"))
        return time.perf_counter_ns() - begun, time.perf_counter_ns() - begun, size

    return get


def main(library, cgroup, url, count, connections):
    warnings.simplefilter("ignore")
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    get = {"boto3": reader_of_boto3, "s3fs": reader_of_s3fs}[library](url, int(connections))
    with concurrent.futures.ThreadPoolExecutor(int(connections)) as pool:
        times = list(pool.map(get, range(int(count))))
    print(json.dumps(times), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
