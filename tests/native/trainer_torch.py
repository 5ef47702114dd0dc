"""A PyTorch training loop that keeps its own books: the ground truth of the DataLoader tests.

`python trainer_torch.py` imports PyTorch once and forks a trainer for each line that it reads, `{"cgroup": …, "out": …,
"socket": …, "plan": {"workers": 2, …}}`. A trainer joins the cgroup, connects to the socket, says "ready", waits for a
line, trains, says "done", and stays until the socket is closed. In `out` it leaves one record per batch: [loader,
epoch, asked ns, got ns]; in `out`.LOADER the times in ns at which batches were ready, 8 bytes each. Loading is a sleep.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import data


@dataclass
class Plan:
    """What to train. Times in ms; `uneven` spreads the loading time of a batch between 0 and twice its mean."""

    workers: int = 2
    prefetch: int = 2
    batch: int = 8
    batches: int = 60
    epochs: int = 1
    load: float = 20.0
    uneven: bool = False
    compute: float = 5.0
    persistent: bool = False
    iterable: bool = False
    in_order: bool = True
    pinned: bool = False
    shuffle: bool = False
    optimizer: bool = True
    validation_batches: int = 0
    validation_workers: int = 0
    break_after: int = 0
    in_thread: bool = False
    start: str | None = None
    values: int = 16
    pool: bool = False


def sleep_for_sample(index, plan):
    milliseconds = plan.load / plan.batch
    if plan.uneven:
        milliseconds *= 2 * ((index // plan.batch) * 7 % 11) / 10
    time.sleep(milliseconds / 1000)


@dataclass
class Collate:
    """Makes samples a batch, the last that is done before it is ready, and writes down when that was.

    The loader's own queues do not tell how many batches are ready: what says that a worker is at its end counts there.
    """

    path: str

    def __call__(self, samples):
        batch = data.default_collate(samples)
        with Path(self.path).open("ab", buffering=0) as file:
            file.write(struct.pack("=q", time.monotonic_ns()))
        return batch


def pretend_to_pin():
    """Make the loader believe in an accelerator, so that it reads through its pin-memory thread."""
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda *_: None
    torch.accelerator.current_accelerator = lambda *_, **__: types.SimpleNamespace(type="cpu")
    data._utils.pin_memory.pin_memory = lambda batch, device=None: batch


def loader_of(plan, batches, workers, *, shuffle, ready):
    options = {"batch_size": plan.batch, "collate_fn": Collate(ready)}
    options |= {"num_workers": workers, "pin_memory": plan.pinned}
    if workers:
        options |= {"prefetch_factor": plan.prefetch, "persistent_workers": plan.persistent}
        options |= {"in_order": plan.in_order, "multiprocessing_context": plan.start}
    if plan.iterable:
        return data.DataLoader(Iterable(plan, batches), **options)
    return data.DataLoader(Mapped(plan, batches), shuffle=shuffle, **options)


class Mapped(data.Dataset):
    def __init__(self, plan, batches):
        self.plan = plan
        self.batches = batches

    def __len__(self):
        return self.plan.batch * self.batches

    def __getitem__(self, index):
        sleep_for_sample(index, self.plan)
        return torch.full((self.plan.values,), float(index))


class Iterable(data.IterableDataset):
    def __init__(self, plan, batches):
        self.plan = plan
        self.samples = plan.batch * batches

    def __iter__(self):
        info = data.get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        for index in range(part * self.samples // parts, (part + 1) * self.samples // parts):
            sleep_for_sample(index, self.plan)
            yield torch.full((self.plan.values,), float(index))


class Books:
    """Takes batches and writes down when."""

    def __init__(self):
        self.records = []

    def epoch(self, name, number, loader):
        iterator = iter(loader)
        while True:
            asked = time.monotonic_ns()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.records.append((name, number, asked, time.monotonic_ns()))
            yield batch


def make_model(values):
    model = torch.nn.Linear(values, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-9)


def train(plan, out):
    books = Books()
    model, optimizer = make_model(plan.values)
    training = loader_of(plan, plan.batches, plan.workers, shuffle=plan.shuffle, ready=f"{out}.training")
    checking = None
    if plan.validation_batches:
        batches, workers = plan.validation_batches, plan.validation_workers
        checking = loader_of(plan, batches, workers, shuffle=False, ready=f"{out}.validation")
    for epoch in range(plan.epochs):
        batches = books.epoch("training", epoch, training)
        for number, batch in enumerate(batches, 1):
            if plan.optimizer:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            time.sleep(plan.compute / 1000)
            if number == plan.break_after:
                break
        batches.close()
        for _ in books.epoch("validation", epoch, checking) if checking else ():
            time.sleep(plan.compute / 1000)
    return books.records


def pool_of_strangers(plan):
    """Other users of multiprocessing send numbered messages as well."""
    if not plan.pool:
        return contextlib.nullcontext()
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.map(abs, range(200), chunksize=1)
    return pool


def trainer(cgroup, out, plan, talk):
    (Path(cgroup) / "cgroup.procs").write_text("0")
    if plan.pinned:
        pretend_to_pin()
    talk.write("ready\n")
    talk.flush()
    talk.readline()
    with pool_of_strangers(plan):
        records = []
        if plan.in_thread:
            thread = threading.Thread(target=lambda: records.extend(train(plan, out)))
            thread.start()
            thread.join()
        else:
            records = train(plan, out)
    Path(out).write_text(json.dumps(records))
    talk.write("done\n")
    talk.flush()
    with contextlib.suppress(ConnectionResetError):
        talk.read()


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the trainers
    torch.set_num_threads(1)
    make_model(1)[1].step()  # brings in what is imported late
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(order["socket"])
                trainer(order["cgroup"], order["out"], Plan(**order["plan"]), connection.makefile("rw"))
            os._exit(0)


if __name__ == "__main__":
    main()
