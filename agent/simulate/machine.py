"""What a simulated machine costs besides its devices, and how scenarios' devices are served on it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from agent.simulate.devices import Link, Ssd
from agent.simulate.events import Events
from agent.simulate.hdd import Geometry, Hdd
from agent.simulate.requests import Stage
from agent.simulate.scenario import Device
from agent.types import Capacity, DeviceInfo, Medium


@dataclass(frozen=True, slots=True)
class Machine:
    """Costs in seconds and bytes/s.

    `take_seconds`: the loop takes a batch that is ready; `wake_seconds`: it wakes up for one that was not.
    `read_seconds`: a worker between two reads. `copy_bytes_per_second`: reads from memory. `ssd_latency_seconds` and
    `ssd_transfer_bytes_per_second`: one request alone; `ssd_burst_seconds`: see `Ssd`. `hdd_in_flight`: requests that
    the host keeps in an HDD at most; `hdd_request_bytes`: size of the random reads that its capacity, as the agent is
    told, was measured with. `memory_bytes`: page cache of jobs without a limit of their own.
    """

    name: str
    cpus: int
    take_seconds: float
    wake_seconds: float
    read_seconds: float
    copy_bytes_per_second: float
    ssd_latency_seconds: float
    ssd_transfer_bytes_per_second: float | None
    ssd_burst_seconds: float
    hdd_in_flight: int
    hdd_request_bytes: int = 256 << 10
    memory_bytes: float = inf


LAB = Machine(
    "lab guest",
    cpus=2,
    take_seconds=0.0002,
    wake_seconds=0.0003,
    read_seconds=0.0002,
    copy_bytes_per_second=1e9,
    ssd_latency_seconds=0.0006,
    ssd_transfer_bytes_per_second=500e6,
    ssd_burst_seconds=0.1,
    hdd_in_flight=16,
)
"""The lab's guest: two emulated CPUs, an NVMe drive that QEMU throttles, a disk behind QEMU's NBD client."""

NODE = Machine(
    "bare metal",
    cpus=64,
    take_seconds=2e-5,
    wake_seconds=5e-5,
    read_seconds=2e-5,
    copy_bytes_per_second=5e9,
    ssd_latency_seconds=0.0001,
    ssd_transfer_bytes_per_second=None,
    ssd_burst_seconds=0.0,
    hdd_in_flight=32,
    hdd_request_bytes=4 << 20,
)
"""A bare-metal node of today; typical figures, not measured here."""


def build_device(events: Events, device: Device, machine: Machine) -> Stage:
    """The service model of a scenario's device."""
    if device.kind == "ssd":
        return Ssd(
            events,
            device.bytes_per_second,
            device.iops,
            latency=machine.ssd_latency_seconds,
            transfer=machine.ssd_transfer_bytes_per_second,
            burst_seconds=machine.ssd_burst_seconds,
        )
    if device.kind == "hdd":
        queue = machine.hdd_in_flight if device.queueing else 1
        return Hdd(events, Geometry(device.size, device.bytes_per_second, queue))
    return Link(events, device.bytes_per_second, device.round_trip_ms / 1e3)


def device_info(device: Device, machine: Machine) -> DeviceInfo:
    """The device as the agent is told of it: an SSD by its rates, an HDD by what random reads get, a mount without."""
    if device.kind == "ssd":
        rate, requests = float(device.bytes_per_second), float(device.iops)
        return DeviceInfo(device.name, device.name, Medium.SSD, Capacity(rate, rate, requests, requests))
    if device.kind == "hdd":
        positioning = Geometry(device.size, device.bytes_per_second).mean_positioning_seconds
        rate = machine.hdd_request_bytes / (positioning + machine.hdd_request_bytes / device.bytes_per_second)
        requests = 1.0 / positioning
        return DeviceInfo(device.name, device.name, Medium.HDD, Capacity(rate, rate, requests, requests))
    return DeviceInfo(device.name, device.name, Medium.REMOTE)
