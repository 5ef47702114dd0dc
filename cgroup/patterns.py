"""Glob patterns over cgroup paths. Pure."""

from __future__ import annotations

import re
from functools import lru_cache


def matches(pattern: str, path: str) -> bool:
    """Return whether the path (relative to the root) matches.

    `*`, `?` and `[...]` stay inside one folder's name; `**` stands for any number of folders, none included, but at
    the end of a pattern for one at least.

    >>> matches("/kubepods.slice/**/kubepods-*pod*.slice", "/kubepods.slice/kubepods-podabc.slice")
    True
    >>> matches("/batch.slice/**", "/batch.slice")
    False
    """
    return _compiled(pattern).fullmatch("/" + path.strip("/")) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    names = [name for name in pattern.split("/") if name]
    text = "".join("(?:/[^/]+)*" if name == "**" else "/" + _name(name) for name in names)
    if names and names[-1] == "**":
        text = text.removesuffix("*") + "+"
    return re.compile(text or "/", re.DOTALL)


def _name(name: str) -> str:
    """One folder's name. fnmatch.translate is no help: its `*` crosses slashes."""
    out = []
    position = 0
    while position < len(name):
        char = name[position]
        negated = name[position + 1 : position + 2] in ("!", "^")
        closing = name.find("]", position + 2 + negated) if char == "[" else -1
        if closing > 0:
            out.append(_char_set(name[position + 1 : closing]))
            position = closing
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char))
        position += 1
    return "".join(out)


def _char_set(inside: str) -> str:
    negated = inside[0] in "!^"
    chars = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside[1:] if negated else inside)
    text = f"(?!/)[{'^' if negated else ''}{chars}]"
    try:
        re.compile(text)
    except re.error:
        return r"(?!)"  # a range that runs backwards holds no character
    return text
