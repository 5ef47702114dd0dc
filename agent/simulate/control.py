"""What governs a simulated node: nothing, fixed caps, a scheduler, or the agent's own core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from agent.simulate.blk_throttle import Limits
from agent.simulate.closed_loop import Agent
from agent.simulate.node import BLOCK_KINDS, Scheduling, SimulatedNode
from agent.simulate.scenario import Device, Scenario
from agent.types import Slot

NEIGHBOUR_CAP_RATIO = 0.10
JOB_WEIGHT, NEIGHBOUR_WEIGHT = 500.0, 50.0
IOCOST_VRATE = 1.15
"""Where io.cost's rate settles between its bounds of 0.8 and 1.2: the linear model counts large reads as too dear."""
KINDS = (*BLOCK_KINDS, "nfs")
BFQ_DEPTH = 4
"""Requests that bfq keeps in an SSD: it serves one queue at a time and injects little. For disks see `Bfq`."""


class Controller(Protocol):
    """Called once at the start and then at its own interval (seconds; infinity: never again)."""

    interval: float
    writes: int
    busy_seconds: float

    def step(self, node: SimulatedNode, now: float) -> None:
        """Look at the node and set limits."""


@dataclass
class Fixed:
    """Caps that are set once: `share` of a slot's device (None: uncapped)."""

    share: Callable[[SimulatedNode, Slot], float | None]
    interval: float = inf
    writes: int = 0
    busy_seconds: float = 0.0

    def step(self, node: SimulatedNode, now: float) -> None:
        """Set every cap."""
        del now
        for slot, throttle in node.throttles().items():
            share = self.share(node, slot)
            if share is not None:
                throttle.set_limits(fixed_limits(node.scenario.device(slot[1]), share))
                self.writes += 1


def fixed_limits(device: Device, share: float) -> Limits:
    """A part of what a device can do at best: bytes both ways and, of an SSD, requests (as the lab's peers set it)."""
    rate = device.bytes_per_second * share
    requests = max(2.0, device.iops * share) if device.kind == "ssd" else inf
    return Limits(rate, rate, requests, requests)


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """How a policy is set up: its controller, the scheduler it needs, and the kinds of devices that are never short."""

    controller: Callable[[], Controller]
    scheduling: Callable[[Scenario], Scheduling] | None = None
    unlimited: tuple[str, ...] = ()
    about: str = ""


def _uncapped() -> Controller:
    return Fixed(_no_share)


def _no_share(node: SimulatedNode, slot: Slot) -> None:
    del node, slot


def _equal_share(node: SimulatedNode, slot: Slot) -> float | None:
    return 1.0 / len(node.scenario.users_of(slot[1]))


def _neighbour_share(node: SimulatedNode, slot: Slot) -> float | None:
    return None if slot[0] in node.trainers else NEIGHBOUR_CAP_RATIO


def _bfq(weights: tuple[float, float]) -> Callable[[Scenario], Scheduling]:
    def scheduling(scenario: Scenario) -> Scheduling:
        del scenario
        return Scheduling(weights, depth=BFQ_DEPTH)

    return scheduling


def _iocost(weights: tuple[float, float]) -> Callable[[Scenario], Scheduling]:
    """io.cost as the lab sets it up: rates as measured with large sequential and 4 KiB random reads."""

    def scheduling(scenario: Scenario) -> Scheduling:
        cost = {}
        for device in scenario.devices:
            rate = float(device.bytes_per_second)
            per_page = 1.0 / device.iops if device.kind == "ssd" else 4096 / rate
            cost[device.name] = (1.0 / rate / IOCOST_VRATE, max(0.0, per_page - 4096 / rate) / IOCOST_VRATE)
        return Scheduling(weights, pace=True, cost=cost)

    return scheduling


POLICIES: dict[str, PolicyKind] = {
    "none": PolicyKind(_uncapped, about="free for all"),
    "static": PolicyKind(lambda: Fixed(_equal_share), about="io.max: every user an equal part of each device"),
    "nbcap": PolicyKind(lambda: Fixed(_neighbour_share), about="io.max: neighbours 10 % of their device"),
    "bfq": PolicyKind(_uncapped, _bfq((100.0, 100.0)), about="bfq, equal weights (simple model)"),
    "bfqw": PolicyKind(_uncapped, _bfq((JOB_WEIGHT, NEIGHBOUR_WEIGHT)), about="bfq, 500:50 (simple model)"),
    "iocost": PolicyKind(_uncapped, _iocost((100.0, 100.0)), about="io.cost, equal weights (simple model)"),
    "iocostw": PolicyKind(_uncapped, _iocost((JOB_WEIGHT, NEIGHBOUR_WEIGHT)), about="io.cost, 500:50 (simple model)"),
    "paper": PolicyKind(lambda: Agent("paper"), about="the paper's law, literally"),
    "adaptive": PolicyKind(lambda: Agent("adaptive"), about="the default policy"),
    "local": PolicyKind(
        _uncapped, unlimited=BLOCK_KINDS, about="disks that are never short: the bound of local control"
    ),
    "unlimited": PolicyKind(_uncapped, unlimited=KINDS, about="storage that is never short: the upper bound"),
}
