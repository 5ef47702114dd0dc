"""Small scenarios and drivers that the simulator's tests share."""

from agent.config import ByteRate
from agent.simulate.events import Events
from agent.simulate.machine import Machine
from agent.simulate.requests import Account, Request, Stage
from agent.simulate.scenario import ByteSize, Device, Job, Neighbour, Scenario

KIB = 1 << 10
MIB = 1 << 20

PLAIN = Machine(
    "plain",
    cpus=4,
    take_seconds=0.0,
    wake_seconds=0.0,
    read_seconds=0.0,
    copy_bytes_per_second=1e10,
    ssd_latency_seconds=0.0001,
    ssd_transfer_bytes_per_second=None,
    ssd_burst_seconds=0.0,
    hdd_in_flight=32,
)


def ssd(rate=100 * MIB, iops=100_000, name="ssd0"):
    return Device(name=name, kind="ssd", bytes_per_second=ByteRate(rate), iops=iops)


def job(name="job", **changes):
    fields = {
        "device": "ssd0",
        "batch_reads": 4,
        "read_size": ByteSize(256 * KIB),
        "workers": 2,
        "queue_batches": 4,
        "compute_ms": 100.0,
        "cold_batches": 0,
    }
    return Job(name=name, **{**fields, **changes})


def scan(name="scan", **changes):
    return Neighbour(name=name, **{"device": "ssd0", "threads": 8, "read_size": ByteSize(256 * KIB), **changes})


def scenario(*jobs, devices=(), best_effort=(), seconds=10.0):
    return Scenario(
        name="made-up",
        description="made up",
        duration_seconds=seconds,
        devices=tuple(devices) or (ssd(),),
        jobs=jobs,
        best_effort=tuple(best_effort),
    )


class Load:
    """`threads` closed-loop readers of one cgroup over a stage; counts what was served."""

    def __init__(self, events: Events, stage: Stage, *, size=256 * KIB, threads=8, cgroup=1, op=0, offset=None):
        self.events, self.stage, self.size, self.op = events, stage, size, op
        self.account = Account(cgroup)
        self.offset = offset or (lambda number: number * size)
        self.sent = 0
        self.finished: list[float] = []
        for _ in range(threads):
            self.send()

    def send(self, _=None):
        if _ is not None:
            self.finished.append(self.events.now)
        request = Request(self.account, self.op, self.size, self.offset(self.sent), self.send)
        self.sent += 1
        request.submit(self.events.now)
        self.stage.accept(request)

    @property
    def rate(self):
        return self.account.bytes[self.op] / self.events.now
