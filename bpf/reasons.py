"""Why a probe sees less than it could, or nothing: in a clause for people, and apart from it what the tools said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpf.btf import BtfError
from bpf.loader import ProbeError, RefusedError

NONE_TAKEN = "this kernel takes none of its programs"


class Reason(NamedTuple):
    """`why` is one clause; `detail` quotes compiler and kernel on each attempt, empty where they said nothing."""

    why: str = ""
    detail: str = ""


def failed(error: ProbeError | BtfError, refusals: Sequence[str] = ()) -> Reason:
    """Why nothing works: `error` ended the attempts, `refusals` is what was said of those before it."""
    if isinstance(error, RefusedError):
        return Reason(NONE_TAKEN, "; ".join([*refusals, str(error)]))
    return Reason(str(error), "; ".join(refusals))


def partly(meaning: str, refusals: Sequence[str]) -> Reason:
    """Why only a part works: what that means, after these refusals, or by choice where there are none."""
    return Reason(meaning, "; ".join(refusals)) if refusals else Reason(f"{meaning}: asked for")
