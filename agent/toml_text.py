"""Reading TOML that operators write: the text, and one sentence that quotes the bad value for all that can be wrong."""

from __future__ import annotations

import datetime as dt
import errno
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from agent.errors import UsageError
from agent.small_file import read_small

MAX_QUOTED = 120
"""Characters of a bad value that a message shows."""

_WORDS = {
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
    "`date`": "a date",
    "matching regex": "that matches",
}
_Tree = TypeVar("_Tree", bound=msgspec.Struct)


def read_text(path: Path, what: str, error: type[UsageError]) -> str:
    """The file's text, with or without a byte order mark. Raises `error`, whose sentence begins with `what`."""
    try:
        data = read_small(path)
    except OSError as problem:
        todo = "give the path of a TOML file" if problem.errno == errno.EFBIG else "check the path and rights"
        raise error(f"{what} {str(path)!r} cannot be read ({problem.strerror}); {todo}.") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"{what} {str(path)!r} is no UTF-8 text (byte {data[problem.start]:#04x} at {problem.start}); "
            "give the path of a TOML file, saved as UTF-8."
        ) from None


def parse_toml(text: str, source: str, error: type[UsageError]) -> dict[str, Any]:
    """The mapping that the text stands for. Raises `error`, whose sentence begins with `source`."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{source} is not valid TOML: its lists or tables are nested too deeply; flatten them.") from None
    except ValueError as problem:  # also for endless numbers
        told = str(problem).partition("; use sys.")[0]  # which no operator can
        raise error(f"{source} is not valid TOML: {told}; correct that line.") from None


def convert(raw: dict[str, Any], kind: type[_Tree], source: str, error: type[UsageError], hook: Any) -> _Tree:
    """The mapping as the frozen tree `kind`. Raises `error`: the key as written in TOML, the value, what to do."""
    try:
        return msgspec.convert(raw, kind, dec_hook=hook)
    except msgspec.ValidationError as problem:
        raise error(_sentence(source, raw, kind, str(problem))) from None


def quoted(value: object) -> str:
    """The value for a message, not longer than a line; truth and time as TOML has them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dt.date | dt.time):
        return _shortened(str(value))
    try:
        return _shortened(repr(value))
    except ValueError:  # Python writes out no integer of more than 4300 digits, and reads one in hexadecimal
        return "an endless number" if isinstance(value, int) else "one with an endless number in it"


def _sentence(source: str, raw: dict[str, Any], kind: type[msgspec.Struct], message: str) -> str:
    detail, _, path = message.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    unknown = re.search(r"unknown field `([^`]*)`", detail)
    if unknown:
        key = f"{path}.{unknown[1]}" if path else unknown[1]
        return f"{source}: key {quoted(key)} is unknown; remove it or correct its spelling{_known(kind, path)}."
    missing = re.search(r"missing required field `([^`]+)`", detail)
    if missing:
        return f"{source}: key {missing[1]!r} is missing in {repr(path) if path else 'the file'}; add it."
    if not path:
        return f"{source}: {detail}; correct it."
    choices = _choices(_type_at(kind, path)) if "enum" in detail else []
    told = f"it is one of {', '.join(choices)}" if choices else _plain(detail)
    if detail == "Expected `array`, got `object`":
        told += f", which [[{path}]] makes"
    value = quoted(_lookup(raw, path))
    if told.startswith(f"{value} is "):  # the words of a hook, which say what to do
        return f"{source}: key {path!r}: {told}."
    return f"{source}: key {path!r} has the value {value}: {told}; correct it."


def _plain(detail: str) -> str:
    """The checker's words in the operator's."""
    detail = detail.replace(" | null`", "`")
    for word, plain in _WORDS.items():
        detail = detail.replace(word, plain)
    detail = re.sub(r"(?<=\d)\.0$", "", detail)
    return _shortened(detail[:1].lower() + detail[1:], 2 * MAX_QUOTED)


def _shortened(text: str, limit: int = MAX_QUOTED) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _known(kind: type[msgspec.Struct], path: str) -> str:
    """The keys that the section at `path` does have, as a hint."""
    section = _type_at(kind, path)
    if not _is_section(section):
        return ""
    return f" (known here: {', '.join(field.encode_name for field in msgspec.structs.fields(section))})"


def _type_at(kind: Any, path: str) -> Any:
    """The type that belongs to a key such as `jobs[0].burst`; None where there is none."""
    for name in re.findall(r"[A-Za-z_]+", path):
        if not _is_section(kind):
            return None
        kind = next((field.type for field in msgspec.structs.fields(kind) if field.encode_name == name), None)
        sections = [inside for inside in get_args(kind) if _is_section(inside)]  # of a list, or of what may be left out
        kind = sections[0] if sections else kind
    return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _choices(kind: Any) -> list[str]:
    """The texts that a Literal allows, also one that may be left out."""
    return [text for inside in get_args(kind) for text in ([inside] if isinstance(inside, str) else _choices(inside))]


def _lookup(raw: Any, path: str) -> Any:
    for name, index in re.findall(r"([A-Za-z_]+)|\[(\d+)\]", path):
        try:
            raw = raw[name] if name else raw[int(index)]
        except (KeyError, IndexError, TypeError):
            return None
    return raw
