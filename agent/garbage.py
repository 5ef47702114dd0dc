"""How Python's collector of reference cycles is set where the control core runs for long.

A pass makes some 40 small values per job and drops those of the pass before, none of them in a cycle. With Python's own
threshold of 700 the collector looks at them two or three times in every pass, which takes a twentieth of it.
"""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 10, 10)
"""New values until the youngest are looked at; how often that before the next generation is."""


def settle() -> None:
    """Leave what there is now out of all collections, and collect seldom; to be called once everything is set up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
