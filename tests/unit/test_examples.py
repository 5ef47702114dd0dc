"""The examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path.relative_to(ROOT) for folder in ("agent", "bpf", "cgroup") for path in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = [".".join(path.with_suffix("").parts) for path in FILES if ">>> " in (ROOT / path).read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
