"""Linters, types and the house's import rules run as tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

COMMANDS = {
    "ruff check": [str(BIN / "ruff"), "check", "--quiet", "."],
    "ruff format": [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
    "mypy": [str(BIN / "mypy")],
    "import rules": [str(BIN / "lint-imports"), "--no-cache"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_clean(name):
    done = subprocess.run(COMMANDS[name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}:\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
