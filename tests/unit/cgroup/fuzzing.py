"""Broken variants of captured texts, the same for the same seed, and the loop that feeds them to a parser."""

import random

WORDS = [
    "8:0", "253:1048575", "(unknown)", "max", "=", "==", "rbps=", "rbytes=-1", "rios=9" * 9, "total=1e9", "\x00", "٣:٣",
    "rbytes=٣", "\\040", "\\777", "-", " - ", "default", "0" * 5000, "nan", "some", "avg10=inf", "\n", "\t", "\r",
    "\x85", "../..", "/", ",", "subvol=/@", "lowerdir=", "[bfq]", "\udc80", "4294967296:0", ":", "8:", ":0", "8:0:0",
]  # fmt: skip


def variants(seeds, count, seed=1):
    """Yield `count` texts: a captured one with one to six mutilations, now and then words alone."""
    rng = random.Random(seed)
    for _ in range(count):
        text = rng.choice(seeds) if rng.random() < 0.95 else ""
        for _ in range(rng.randint(1, 6)):
            text = _mutilate(text, rng)
        yield text


def _mutilate(text, rng):
    at, until = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    match rng.randrange(6):
        case 0:
            return text[:at] + text[until:]
        case 1:
            return text[:at] + rng.choice(WORDS) + text[at:]
        case 2:
            return text[:at]
        case 3:
            return text[:until] + text[at:]
        case 4:
            return text[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0x11000)))) + text[at + 1 :]
        case _:
            words = text.split(" ")
            rng.shuffle(words)
            return " ".join(words)


def survivors(parse, error, seeds, count):
    """Return how many variants were understood; any exception but `error` escapes, with the text in a note."""
    understood = 0
    for text in variants(seeds, count):
        try:
            parse(text)
        except error:
            continue
        except Exception as other:
            other.add_note(f"text: {text!r}")
            raise
        understood += 1
    return understood
