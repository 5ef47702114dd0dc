"""What the next iterations will need: bytes of the next batch, and from them bytes per second on each device.

The paper's fourth metric (section 3: estimated bytes of the next batch). Without a look into the future the estimate
is the smoothed past; a training loop that says what comes next (hint channel) is believed, scaled by the part of what
it asked for earlier that storage had to deliver (the page cache keeps the rest).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from agent.smoothing import clip
from agent.types import Need, Signals, make

SMOOTHING_BATCHES = 3.0
"""Batches over which bytes per batch are smoothed (policy prototype: 1 - exp(-n / 3))."""

BELIEVED_RATIOS = (0.02, 1.5)
"""What storage delivers for a batch corrects what a hint tells of it within these factors: below is what the page cache
keeps, above what read-ahead brings in besides. Beyond, one of the two is not about the batch."""


class BatchForecast(NamedTuple):
    """Bytes per batch as learned so far; `pending_bytes` were read but belong to no finished batch yet."""

    batch_bytes: float | None = None
    hinted_bytes: float | None = None
    pending_bytes: float = 0.0
    pending_batches: float = 0.0
    depth: float | None = None
    batches: float = 0.0


def observe(
    state: BatchForecast, new_iterations: int, read_bytes: float, depth: float | None, hinted: float | None
) -> BatchForecast:
    """Account `read_bytes` from storage to the batches produced: those taken, and the change of the queue's depth.

    What is ready behind a missing batch has been read as well, so it is the depth that counts, not what can be taken.
    """
    produced = state.pending_batches + new_iterations
    if depth is not None and state.depth is not None:
        produced += depth - state.depth
    pending = state.pending_bytes + read_bytes
    if produced < 1.0:
        return make(BatchForecast, (state.batch_bytes, state.hinted_bytes, pending, produced, depth, state.batches))
    weight = 1.0 - exp(-produced / SMOOTHING_BATCHES)
    each = pending / produced
    learned = each if state.batch_bytes is None else state.batch_bytes + weight * (each - state.batch_bytes)
    said = state.hinted_bytes
    if hinted is not None:
        said = hinted if said is None else said + weight * (hinted - said)
    return make(BatchForecast, (learned, said, 0.0, 0.0, depth, state.batches + produced))


def restarted(state: BatchForecast) -> BatchForecast:
    """The same after a start or resume: the cache may be cold, so what a hint says counts in full again."""
    return BatchForecast(state.batch_bytes, None, 0.0, 0.0, None, 0.0)


def expected_bytes(state: BatchForecast, hinted: float | None) -> float | None:
    """Bytes that storage must deliver for the next batch, None while nothing is known."""
    if hinted is None:
        return state.batch_bytes
    if state.batch_bytes is None or not state.hinted_bytes or state.batches < SMOOTHING_BATCHES:
        return hinted
    return hinted * clip(state.batch_bytes / state.hinted_bytes, *BELIEVED_RATIOS)


def told_too_little(signals: Signals) -> bool:
    """Whether batches make storage deliver more than what their hint tells can be corrected by, so the need is low."""
    told, read, taken = signals.hinted_batch_bytes, signals.read_batch_bytes, signals.next_batch_bytes
    if not told or read is None or taken is None:
        return False
    most = told * BELIEVED_RATIOS[1]
    return read > most and taken >= most * (1.0 - 1e-9)


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """How a need follows from signals: the queue is refilled to `target_fraction` within `horizon_seconds`."""

    horizon_seconds: float = 1.0
    target_fraction: float = 0.75
    compute_floor_seconds: float = 0.001


def needs(signals: Signals, settings: ForecastSettings) -> dict[str, Need]:
    """Bytes/s and requests/s that each device must give so that the queue keeps up and fills; empty while unknown.

    need = next_batch_bytes / compute_seconds + missing batches x next_batch_bytes / horizon, split by access share.
    Missing is what is not read yet: batches ready behind one that is late are not read again, so the depth counts here.
    A queue is never asked to fill faster than within one iteration, or a loop of many seconds would ask for its whole
    queue at once.
    """
    batch, compute = signals.next_batch_bytes, signals.compute_seconds
    if batch is None or compute is None:
        return {}
    compute = max(compute, settings.compute_floor_seconds)
    rate = batch / compute
    if signals.queue_depth is not None and signals.queue_capacity is not None:
        missing = max(0.0, settings.target_fraction * signals.queue_capacity - signals.queue_depth)
        rate += missing * batch / max(settings.horizon_seconds, compute)
    result = {}
    for name, device in signals.devices.items():
        if device.access_share <= 0.0:
            continue
        wanted = rate * device.access_share
        size = device.read_bytes_per_second
        per_byte = device.read_requests_per_second / size if size > 0.0 else 0.0
        result[name] = make(Need, (wanted, wanted * per_byte))
    return result
