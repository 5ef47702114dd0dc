"""The alternatives to the agent, set up at their best and undone afterwards: static caps, bfq, io.cost, one fixed cap.

| name | what it sets |
|---|---|
| none | nothing |
| static | io.max: every user an equal part of each device it uses |
| nbcap | io.max: every best-effort neighbour 10 % of its device, training uncapped |
| bfq, bfqw | scheduler bfq, low_latency=0 (its documentation's advice for weights); weights equal, or 500:50 |
| iocost, iocostw | io.cost with a model measured on the device (`measure_model`) and QoS; weights equal, or 500:50 |
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.simulate.scenario import Device, Scenario
from tests.lab import groups
from tests.lab.disks import Disk, find_disk
from tests.lab.trainer import trainer_program
from tests.lab.truth import read_truth

JOB_WEIGHT, NEIGHBOUR_WEIGHT = 500, 50
NEIGHBOUR_CAP_RATIO = 0.10
QOS_LATENCY_US = {False: 20_000, True: 75_000}
"""io.cost's latency target (p95, µs) by rotational: what the device shows when busy but not overloaded."""

Folders = Mapping[str, Path]


@dataclass(frozen=True)
class CostModel:
    """io.cost's linear model: sequential bytes per second, sequential and random 4 KiB requests per second."""

    bytes_per_second: int
    sequential_iops: int
    random_iops: int

    def text(self, number: str) -> str:
        """Return the line for io.cost.model; writes are taken to cost what reads do, as on the lab's disks."""
        rates = {"bps": self.bytes_per_second, "seqiops": self.sequential_iops, "randiops": self.random_iops}
        fields = [f"{direction}{name}={value}" for direction in "rw" for name, value in rates.items()]
        return f"{number} ctrl=user model=linear {' '.join(fields)}"


@contextlib.contextmanager
def peer(name: str, scenario: Scenario, folders: Folders) -> Iterator[None]:
    """Keep a peer in force while the body runs. `folders` are the cgroups by user name."""
    disks = {device.name: find_disk(device.name) for device in scenario.devices if device.kind != "nfs"}
    with contextlib.ExitStack() as stack:
        PEERS[name](stack, scenario, folders, disks)
        yield


Setup = Callable[[contextlib.ExitStack, Scenario, Folders, Mapping[str, Disk]], None]


def _none(stack: contextlib.ExitStack, scenario: Scenario, folders: Folders, disks: Mapping[str, Disk]) -> None:
    pass


def _static(stack: contextlib.ExitStack, scenario: Scenario, folders: Folders, disks: Mapping[str, Disk]) -> None:
    for name, disk in disks.items():
        users = scenario.users_of(name)
        for user in users:
            _cap(stack, folders[user], disk, scenario.device(name), 1 / len(users))


def _neighbour_cap(
    stack: contextlib.ExitStack, scenario: Scenario, folders: Folders, disks: Mapping[str, Disk]
) -> None:
    for other in scenario.best_effort:
        device = scenario.device(other.device)
        _cap(stack, folders[other.name], disks[other.device], device, NEIGHBOUR_CAP_RATIO)


def _bfq(job_weight: int, neighbour_weight: int) -> Setup:
    def setup(stack: contextlib.ExitStack, scenario: Scenario, folders: Folders, disks: Mapping[str, Disk]) -> None:
        subprocess.run(["modprobe", "bfq"], check=True)
        for disk in disks.values():
            before = current_scheduler(disk.scheduler.read_text())
            disk.scheduler.write_text("bfq")
            stack.callback(disk.scheduler.write_text, before)
            (disk.scheduler.parent / "iosched" / "low_latency").write_text("0")
        _weigh("io.bfq.weight", 1000, scenario, folders, (job_weight, neighbour_weight))

    return setup


def _iocost(job_weight: int, neighbour_weight: int) -> Setup:
    def setup(stack: contextlib.ExitStack, scenario: Scenario, folders: Folders, disks: Mapping[str, Disk]) -> None:
        for disk in disks.values():
            model = measure_model(disk)
            (groups.ROOT / "io.cost.model").write_text(model.text(disk.number))
            latency = QOS_LATENCY_US[disk.rotational]
            (groups.ROOT / "io.cost.qos").write_text(
                f"{disk.number} enable=1 ctrl=user rpct=95 rlat={latency} wpct=95 wlat={latency} min=80 max=120"
            )
            stack.callback((groups.ROOT / "io.cost.qos").write_text, f"{disk.number} enable=0")
        _weigh("io.weight", 10_000, scenario, folders, (job_weight, neighbour_weight))

    return setup


def _weigh(file: str, limit: int, scenario: Scenario, folders: Folders, weights: tuple[int, int]) -> None:
    """Write weights (of a job, of a neighbour) so that they hold across the two slices as well."""
    job_weight, neighbour_weight = weights
    for job in scenario.jobs:
        (folders[job.name] / file).write_text(f"default {job_weight}")
    for other in scenario.best_effort:
        (folders[other.name] / file).write_text(f"default {neighbour_weight}")
    counts = len(scenario.jobs), len(scenario.best_effort)
    train, batch = slice_weights(counts[0] * job_weight, counts[1] * neighbour_weight, limit)
    (groups.TRAIN / file).write_text(f"default {train}")
    if groups.BATCH.is_dir():
        (groups.BATCH / file).write_text(f"default {batch}")


def slice_weights(training: int, best_effort: int, limit: int) -> tuple[int, int]:
    """Scale the sums of two slices' weights into 1..limit, so that the hierarchy shares as a flat one would."""
    scale = min(1.0, limit / max(training, best_effort))
    return max(1, round(training * scale)), max(1, round(best_effort * scale))


def _cap(stack: contextlib.ExitStack, folder: Path, disk: Disk, device: Device, ratio: float) -> None:
    (folder / "io.max").write_text(cap_line(disk.number, device, ratio))
    stack.callback(_release, folder, disk.number)


def cap_line(number: str, device: Device, ratio: float) -> str:
    """Return the io.max line for a part of what a device can do: bytes both ways and, of an SSD, requests."""
    rate = int(device.bytes_per_second * ratio)
    requests = max(2, int(device.iops * ratio)) if device.kind == "ssd" else "max"
    return f"{number} rbps={rate} wbps={rate} riops={requests} wiops={requests}"


def _release(folder: Path, number: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / "io.max").write_text(f"{number} rbps=max wbps=max riops=max wiops=max")


def current_scheduler(text: str) -> str:
    """Return the scheduler in brackets of /sys/block/*/queue/scheduler."""
    return text[text.index("[") + 1 : text.index("]")]


def measure_model(disk: Disk, seconds: float = 2.0) -> CostModel:
    """Measure what io.cost's model wants with direct reads, once per guest and disk."""
    known = Path(tempfile.gettempdir()) / f"iocost-{disk.name}.json"
    if known.exists():
        return CostModel(**json.loads(known.read_text()))
    model = CostModel(
        bytes_per_second=round(_rate(disk, 1 << 20, 8, 0, seconds) * (1 << 20)),
        sequential_iops=round(_rate(disk, 4096, 1 if disk.rotational else 16, 0, seconds)),
        random_iops=round(_rate(disk, 4096, 16, 1, seconds)),
    )
    known.write_text(json.dumps(asdict(model)))
    return model


def _rate(disk: Disk, read_size: int, workers: int, random: int, seconds: float) -> float:
    """Return the requests per second that `workers` readers get from a disk."""
    log = Path(tempfile.gettempdir()) / "iocost-rate.log"
    size = int(Path(f"/sys/block/{disk.name}/size").read_text()) * 512
    options = {"path": disk.node, "span": size, "log": log, "read-size": read_size, "batch-reads": 4}
    options |= {"workers": workers, "queue": workers * 2, "random": random, "stop-ms": round(seconds * 1e3)}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    subprocess.run([str(trainer_program()), *words], check=True)
    return read_truth(log).end["reads"] / seconds


PEERS: dict[str, Setup] = {
    "none": _none,
    "static": _static,
    "nbcap": _neighbour_cap,
    "bfq": _bfq(100, 100),
    "bfqw": _bfq(JOB_WEIGHT, NEIGHBOUR_WEIGHT),
    "iocost": _iocost(100, 100),
    "iocostw": _iocost(JOB_WEIGHT, NEIGHBOUR_WEIGHT),
}
