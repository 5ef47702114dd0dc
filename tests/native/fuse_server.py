"""A user-space file system that knows what it was asked: `fuse_server.py MOUNTPOINT BYTES SECONDS_PER_READ`.

Speaks the protocol of include/uapi/linux/fuse.h on /dev/fuse, with no library between: a folder with the file `data`.
Prints `mounted`; at the end of standard input it unmounts and prints its log as JSON: [opcode, bytes, ns] per request.
"""

import ctypes
import json
import os
import struct
import sys
import threading
import time

LOOKUP, FORGET, GETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FLUSH, INIT, OPENDIR, BATCH_FORGET = (
    1, 2, 3, 14, 15, 16, 17, 18, 25, 26, 27, 42
)  # fmt: skip
ENOENT, ENOSYS = 2, 38
ROOT, DATA = 1, 2
ASYNC_READ, BIG_WRITES, MAX_PAGES = 1, 1 << 5, 1 << 22
HEADER = struct.Struct("=IIQQIIIHH")
ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
MAX_WRITE = 1 << 20
THREADS = 24
MNT_DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


class Server:
    def __init__(self, size, seconds_per_read):
        self.device = os.open("/dev/fuse", os.O_RDWR)
        self.size, self.seconds = size, seconds_per_read
        self.log = []

    def attributes(self, node):
        mode, size = (0o40755, 4096) if node == ROOT else (0o100644, self.size)
        return ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, opcode, node, body):
        """The reply's error number and bytes; None where none is wanted."""
        if opcode == INIT:
            ahead, flags = struct.unpack_from("=II", body, 8)
            wanted = flags & (ASYNC_READ | BIG_WRITES | MAX_PAGES)
            return 0, struct.pack("=IIIIHHIIHH8I", 7, 31, ahead, wanted, 4, 3, MAX_WRITE, 1, 256, 0, *[0] * 8)
        if opcode in (FORGET, BATCH_FORGET):
            return None
        if opcode == LOOKUP:
            if body.rstrip(b"\0") != b"data":
                return ENOENT, b""
            return 0, struct.pack("=QQQQII", DATA, 0, 3600, 3600, 0, 0) + self.attributes(DATA)
        if opcode == GETATTR:
            return 0, struct.pack("=QII", 3600, 0, 0) + self.attributes(node)
        if opcode in (OPEN, OPENDIR):
            return 0, struct.pack("=QII", 1, 0, 0)
        if opcode == READ:
            offset, size = struct.unpack_from("=QI", body, 8)
            time.sleep(self.seconds)
            return 0, bytes(max(0, min(size, self.size - offset)))
        if opcode == WRITE:
            (size,) = struct.unpack_from("=I", body, 16)
            return 0, struct.pack("=II", size, 0)
        return (0, b"") if opcode in (RELEASE, FLUSH) else (ENOSYS, b"")

    def serve(self):
        while True:
            try:
                message = os.read(self.device, MAX_WRITE + 4096)
            except OSError:  # unmounted
                return
            begun = time.perf_counter_ns()
            _, opcode, unique, node, *_ = HEADER.unpack_from(message)
            reply = self.answer(opcode, node, message[HEADER.size :])
            if reply is None:
                continue
            error, body = reply
            size = len(body) if opcode == READ else struct.unpack_from("=I", body)[0] if opcode == WRITE else 0
            self.log.append((opcode, size, time.perf_counter_ns() - begun))
            try:
                os.write(self.device, struct.pack("=IiQ", 16 + len(body), -error, unique) + body)
            except OSError:  # the caller has gone
                continue


def main(where, size, seconds_per_read):
    server = Server(int(size), float(seconds_per_read))
    options = f"fd={server.device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"test", where.encode(), b"fuse.test", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), where)
    threads = [threading.Thread(target=server.serve, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    print("mounted", flush=True)
    sys.stdin.read()
    libc.umount2(where.encode(), MNT_DETACH)
    print(json.dumps(server.log), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
