"""What is measured, in which order, and what follows from it for the configuration."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from agent.calibration.place import Place
from agent.calibration.readers import KIB, MIB, Kind, Reader

ROUNDS = 3
SURE_SPREAD, UNSURE_SPREAD = 0.10, 0.25
"""Spread over the rounds up to which a figure is sure, and from which it is unsure."""
SSD_REQUESTS_PER_SECOND = 1500.0
"""No rotating disk does as many random reads: it needs milliseconds for each (design, section 10)."""
KINDS = (
    Kind("read_bytes_per_second", "read", MIB, 16, sequential=True),
    Kind("read_requests_per_second", "read", 4 * KIB, 64, sequential=False),
    Kind("random_read_bytes_per_second", "read", 256 * KIB, 16, sequential=False),
    Kind("write_bytes_per_second", "write", MIB, 16, sequential=True),
    Kind("write_requests_per_second", "write", 4 * KIB, 64, sequential=False),
)

Progress = Callable[[str, float], None]
"""Told what is being done and how much of it all is done (0..1)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The median over the rounds, in the unit of its name, and (largest - smallest) / median."""

    value: float
    spread: float

    @property
    def confidence(self) -> str:
        """`high`, `medium` or `low`, by the spread."""
        if self.spread <= SURE_SPREAD:
            return "high"
        return "medium" if self.spread <= UNSURE_SPREAD else "low"


def fill(descriptor: int, size: int, progress: Progress) -> None:
    """Write the whole file with random bytes, so that later reads find blocks on the disk and nothing compresses."""
    with mmap.mmap(-1, 4 * MIB) as buffer:
        buffer.write(os.urandom(len(buffer)))
        for offset in range(0, size, len(buffer)):
            part = memoryview(buffer)[: min(len(buffer), size - offset)]
            os.pwritev(descriptor, [part], offset)
            part.release()
            progress("writing the test file", min(1.0, (offset + len(buffer)) / size))
    os.fsync(descriptor)


def measure(
    descriptor: int, size: int, reader: Reader, seconds: float, progress: Progress, *, writes: bool
) -> dict[str, Figure]:
    """Every kind of IO, `ROUNDS` rounds of `seconds` / `ROUNDS` each, reads before writes."""
    kinds = [kind for kind in KINDS if writes or kind.op == "read"]
    figures = {}
    for place, kind in enumerate(kinds):
        rates = []
        for turn in range(ROUNDS):
            progress(_told(kind), (place + turn / ROUNDS) / len(kinds))
            rates.append(reader.run(descriptor, size, kind, seconds / ROUNDS))
        unit = kind.piece if "requests" in kind.name else 1
        figures[kind.name] = figure([rate / unit for rate in rates])
    progress("done", 1.0)
    return figures


def _told(kind: Kind) -> str:
    order = "sequential" if kind.sequential else "random"
    return f"{order} {kind.op}s of {kind.piece // KIB} KiB"


def figure(rates: list[float]) -> Figure:
    """The figure of some rounds."""
    middle = median(rates)
    return Figure(middle, (max(rates) - min(rates)) / middle if middle > 0 else 1.0)


def medium(figures: Mapping[str, Figure]) -> str:
    """`ssd` or `hdd` by what random reads say; the kernel's flag is wrong for most virtual disks."""
    return "ssd" if figures["read_requests_per_second"].value >= SSD_REQUESTS_PER_SECOND else "hdd"


def rounded(value: float) -> int:
    """Down to three figures: a capacity that is set too high gives away what is not there."""
    step = int(10 ** max(len(str(int(value))) - 3, 0))
    return int(value) // step * step


def lines(place: Place, figures: Mapping[str, Figure], remarks: list[str]) -> str:
    """The configuration lines, with the confidence of each figure as a comment."""
    told = medium(figures)
    doubt = (
        "" if told == place.device.medium else f"   # the kernel says {place.device.medium}; random reads say {told}"
    )
    text = [*(f"# {remark}" for remark in remarks), "[[devices]]", f'device = "{place.node}"']
    text.append(f'medium = "{told}"{doubt}')
    for name, one in figures.items():
        if name != "random_read_bytes_per_second":
            text.append(
                f"{name} = {rounded(one.value):_}   # confidence {one.confidence}: rounds differ by {one.spread:.0%}"
            )
    apart = figures["random_read_bytes_per_second"]
    text.append(f"# reads of 256 KiB at random places: {rounded(apart.value):_} bytes per second")
    return "\n".join(text)


def document(place: Place, figures: Mapping[str, Figure], remarks: list[str]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "device": place.node,
        "number": place.device.device,
        "medium": medium(figures),
        "kernel_medium": place.device.medium,
        "remarks": remarks,
        "figures": {
            name: {"value": rounded(one.value), "spread_ratio": one.spread, "confidence": one.confidence}
            for name, one in figures.items()
        },
    }
