"""A training job that reads files through the page cache, as its readers are in the wild; logs what its loop waited.

`python -m tests.lab.rearrange_job PLAN` with PLAN a JSON object:

* kind `numbered`: workers get (task, [numbers]) messages on pipes of their own, as PyTorch's DataLoader sends them
  (torch/utils/data/_utils/worker.py), and open file after file of a sorted list; shuffled anew every epoch;
* kind `shards`: every worker reads whole files of a folder to their end, the n-th of n workers every n-th file;
* kind `tiers`: every worker reads pieces of `READ_BYTES` anywhere in one of two files, `roots`; `phases` gives
  [seconds, part of the reads that go to the second one], one after the other;
* kind `ahead`: shuffled as well, but a worker opens all files of its next batches before it reads the first.

`direct` opens with O_DIRECT; `pause_seconds` is what a worker does with a file that it has open. The agent is told the
queue as training code does it, with agent/hint.py.
"""

import ctypes
import json
import mmap
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

from agent import hint

READ_BYTES = 64 << 10
PR_SET_NAME, PR_SET_PDEATHSIG = 15, 1


def become_worker(name):
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


class Reader:
    """Reads files with one buffer of its own; counts bytes."""

    def __init__(self, plan):
        self.flags = os.O_RDONLY | (os.O_DIRECT if plan.get("direct") else 0)
        self.pause_seconds = plan.get("pause_seconds", 0.0)
        self.buffer = mmap.mmap(-1, READ_BYTES)

    def open(self, path):
        return os.open(path, self.flags)

    def read(self, descriptor, most=1 << 40):
        done = 0
        while done < most and (got := os.readv(descriptor, [self.buffer])):
            done += got
        time.sleep(self.pause_seconds)
        return done


def numbered_worker(plan, index_queue, result_queue):
    become_worker("pt_data_worker")
    reader, files = Reader(plan), sorted_files(plan)
    while (message := index_queue.get()) is not None:
        task, numbers = message
        done = 0
        for number in numbers:
            descriptor = reader.open(files[number])
            done += reader.read(descriptor)
            os.close(descriptor)
        result_queue.put((task, {"bytes": done}))


def ahead_worker(plan, index_queue, result_queue):
    """Takes the numbers of `opened` batches at a time and opens all of their files first."""
    become_worker("ahead_worker")
    reader, files = Reader(plan), sorted_files(plan)
    pending = []
    while True:
        while len(pending) < plan["opened"]:
            task, numbers = index_queue.get()
            pending.append((task, [reader.open(files[number]) for number in numbers]))
        task, descriptors = pending.pop(0)
        done = 0
        for descriptor in descriptors:
            done += reader.read(descriptor)
            os.close(descriptor)
        result_queue.put((task, {"bytes": done}))


def shard_worker(plan, place, room, result_queue):
    become_worker("shard_worker")
    reader, files = Reader(plan), sorted_files(plan)
    task = 0
    while True:
        for path in files[place :: plan["workers"]]:
            descriptor = reader.open(path)
            left = os.fstat(descriptor).st_size
            while left > 0:
                room.acquire()
                done = reader.read(descriptor, plan["batch_bytes"])
                left -= done
                result_queue.put((task, {"bytes": done}))
                task += 1
            os.close(descriptor)


def tier_worker(plan, place, room, result_queue):
    become_worker("tier_worker")
    reader, chance = Reader(plan), random.Random(100 * plan["seed"] + place)
    files = [reader.open(path) for path in plan["roots"]]
    sizes = [os.fstat(descriptor).st_size // READ_BYTES for descriptor in files]
    began = time.monotonic()
    while True:
        room.acquire()
        slow_ratio = ratio_at(plan["phases"], time.monotonic() - began)
        for _ in range(plan["batch"]):
            tier = int(chance.random() < slow_ratio)
            os.preadv(files[tier], [reader.buffer], chance.randrange(sizes[tier]) * READ_BYTES)
        result_queue.put((place, {"bytes": plan["batch"] * READ_BYTES}))


def ratio_at(phases, seconds):
    """The ratio of the phase that this moment lies in; after the last one that of the last one."""
    for length, ratio in phases:
        if seconds < length:
            return ratio
        seconds -= length
    return phases[-1][1]


def sorted_files(plan):
    return sorted(str(path) for path in Path(plan["root"]).rglob("*") if path.is_file())


def numbers_of(plan, files):
    """Batches of numbers, shuffled anew every epoch, without end."""
    chance = random.Random(plan["seed"])
    while True:
        order = list(range(files))
        chance.shuffle(order)
        for start in range(0, files - plan["batch"] + 1, plan["batch"]):
            yield order[start : start + plan["batch"]]


class Feed:
    """The loop's side: what keeps `queue` batches under way."""

    def __init__(self, plan):
        self.plan = plan
        context = multiprocessing.get_context("fork")
        self.results = context.Queue()
        self.room = context.Semaphore(plan["queue"])
        self.sent = 0
        self.index_queues = []
        if plan["kind"] in {"shards", "tiers"}:
            worker = shard_worker if plan["kind"] == "shards" else tier_worker
            targets = [(worker, (plan, i, self.room, self.results)) for i in range(plan["workers"])]
        else:
            self.index_queues = [context.Queue() for _ in range(plan["workers"])]
            target = numbered_worker if plan["kind"] == "numbered" else ahead_worker
            targets = [(target, (plan, queue, self.results)) for queue in self.index_queues]
            self.numbers = numbers_of(plan, len(sorted_files(plan)))
        for target, arguments in targets:
            context.Process(target=target, args=arguments, daemon=True).start()
        for _ in range(plan["queue"] if self.index_queues else 0):
            self.send()

    def send(self):
        if self.index_queues:
            self.index_queues[self.sent % len(self.index_queues)].put((self.sent, next(self.numbers)))
            self.sent += 1
        else:
            self.room.release()


def main():
    plan = json.loads(sys.argv[1])
    Path(plan["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    feed = Feed(plan)
    end = time.monotonic() + plan["seconds"]
    with Path(plan["log"]).open("w", buffering=1) as log:
        while (began := time.monotonic()) < end:
            feed.results.get()
            waited = time.monotonic() - began
            feed.send()
            depth = feed.results.qsize()
            hint.iteration(depth, plan["queue"], next_batch_bytes=plan["batch_bytes"], wait_seconds=waited)
            log.write(f"{began:.4f} {waited:.6f} {depth}\n")
            time.sleep(plan["compute_seconds"])


if __name__ == "__main__":
    main()
