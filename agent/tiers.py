"""Merging the controllers of a job that uses several devices or media (paper, section 4: two-tier reservation)."""

from __future__ import annotations

from collections.abc import Mapping

from agent.types import DeviceSignals


def access_weights(devices: Mapping[str, DeviceSignals], among: Mapping[str, object]) -> dict[str, float]:
    """The job's share of bytes on each device of `among`, scaled to sum to 1; equal when no byte was moved yet."""
    shares = {name: devices[name].access_share for name in among if name in devices}
    total = sum(shares.values())
    if total <= 0.0:
        return {name: 1.0 / len(shares) for name in shares}
    return {name: share / total for name, share in shares.items()}


def merge(outputs: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted sum of the controllers' outputs: one relative change for the job's quota on each of its devices.

    `outputs` and `weights` have the same keys; outputs whose weight is missing do not count. Weighting by device
    equals weighting by medium, since a medium's share is the sum of its devices' shares and its output their mean.
    """
    total = sum([weights.get(name, 0.0) for name in outputs])
    if total <= 0.0:
        return 0.0
    return sum([output * weights.get(name, 0.0) for name, output in outputs.items()]) / total


def merged(devices: Mapping[str, DeviceSignals], outputs: Mapping[str, float]) -> float:
    """The outputs of a job's controllers by device as one relative change: of a single device, its own."""
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    if not any(outputs.values()):
        return 0.0
    return merge(outputs, access_weights(devices, outputs))
