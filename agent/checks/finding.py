"""What a check says: its result, the evidence and the exact fix; and how much that matters in a mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from agent.config import Mode


class Result(StrEnum):
    """Outcome of one check; `note` is worth knowing but no fault, `unknown` could not be checked."""

    OK = "ok"
    NOTE = "note"
    UNKNOWN = "unknown"
    WARNING = "warning"
    FAILED = "failed"


Blocks = Literal["", "measuring", "enforcing"]
"""What cannot work while a check fails."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One named result. `evidence` is what was seen, `fix` what to do, ready to paste where a command does it.

    `detail` quotes what tools said of it, for who looks closer. `because` names the check of which this is a
    consequence: what mends that mends this.
    """

    name: str
    result: Result
    evidence: str
    fix: str = ""
    blocks: Blocks = ""
    detail: str = ""
    because: str = ""


def ok(name: str, evidence: str) -> Finding:
    """All is well."""
    return Finding(name, Result.OK, evidence)


def note(name: str, evidence: str, fix: str = "") -> Finding:
    """Worth knowing; nothing is broken."""
    return Finding(name, Result.NOTE, evidence, fix)


def unknown(name: str, evidence: str, fix: str = "") -> Finding:
    """Could not be checked."""
    return Finding(name, Result.UNKNOWN, evidence, fix)


def warning(name: str, evidence: str, fix: str) -> Finding:
    """Works, but worse than it could."""
    return Finding(name, Result.WARNING, evidence, fix)


def failed(name: str, evidence: str, fix: str, blocks: Blocks) -> Finding:
    """Something cannot work."""
    return Finding(name, Result.FAILED, evidence, fix, blocks)


def matters(finding: Finding, mode: Mode) -> bool:
    """Whether the finding stops this mode: what only enforcing needs stops nothing while observing."""
    if finding.result is not Result.FAILED:
        return False
    return finding.blocks == "measuring" or (finding.blocks == "enforcing" and mode == "enforce")


def severity(finding: Finding, mode: Mode) -> str:
    """`error` where the mode cannot work, `warning`, `unknown`, `note` or `ok`."""
    if matters(finding, mode):
        return "error"
    return "warning" if finding.result is Result.FAILED else str(finding.result)


def as_json(findings: Iterable[Finding], mode: Mode) -> list[dict[str, Any]]:
    """The findings as JSON-ready mappings."""
    return [
        {
            "check": finding.name,
            "result": str(finding.result),
            "severity": severity(finding, mode),
            "evidence": finding.evidence,
            "fix": finding.fix,
            "blocks": finding.blocks,
            "detail": finding.detail,
            "because": finding.because,
        }
        for finding in findings
    ]
