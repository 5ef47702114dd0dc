"""`agent.types.make` checks nothing, so here every use of it is held to the fields of what it makes."""

import ast
import importlib
from pathlib import Path

import pytest

AGENT = Path(__file__).parents[3] / "agent"


def _targets(node):
    """The name that a tuple is given."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        return [target for target in node.targets if isinstance(target, ast.Name)]
    return []


def uses():
    """(place, the class, values given, whether some come unpacked) of each `make(Class, (…))` in the package."""
    for path in sorted(AGENT.rglob("*.py")):
        module = ".".join(("agent", *path.relative_to(AGENT).with_suffix("").parts))
        nodes = tuple(ast.walk(ast.parse(path.read_text())))
        named = {target.id: node.value for node in nodes for target in _targets(node)}
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "make"
                and len(node.args) == 2
            ):
                made, values = node.args
                values = named[values.id] if isinstance(values, ast.Name) else values
                starred = sum(isinstance(one, ast.Starred) for one in values.elts)
                yield pytest.param(module, made.id, len(values.elts), starred, id=f"{path.name}:{node.lineno}")


FOUND = list(uses())


def test_there_are_some():
    assert len(FOUND) > 10


@pytest.mark.parametrize(("module", "name", "count", "starred"), FOUND)
def test_every_field_is_given(module, name, count, starred):
    fields = getattr(importlib.import_module(module), name)._fields
    assert count == len(fields) if not starred else count <= len(fields)
