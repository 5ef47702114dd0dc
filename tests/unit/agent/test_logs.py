"""Log lines: readable, harmless whatever they quote, and never a reason to wait."""

import json
import logging
import os
import threading

from agent.config import LogSection
from agent.logs import ImpatientHandler, JsonFormatter, RareTracebacks, TextFormatter, setup


def record(message, *arguments, **extra):
    made = logging.LogRecord("agent.x", logging.WARNING, "x.py", 1, message, arguments, None)
    vars(made).update(extra)
    return made


def test_text_has_a_clock_or_the_priority_of_the_journal():
    assert TextFormatter(journald=True).format(record("two %d", 2)) == "<4>warning agent.x: two 2"
    assert TextFormatter(journald=False).format(record("two"))[12:] == " warning agent.x: two"


def test_what_a_line_quotes_neither_breaks_it_nor_steers_a_terminal():
    text = TextFormatter(journald=True).format(record("job %s", "a\r\n<3>b\x1b[31m\udcff"))
    assert text == "<4>warning agent.x: job a\\r\\n<3>b\\x1b[31m\\udcff"


def test_json_is_one_object_with_the_extra_fields():
    line = json.loads(JsonFormatter().format(record("a\nb %s", "\udcff", device="8:0")))
    assert (line["message"], line["level"], line["device"]) == ("a\nb \udcff", "warning", "8:0")


def fails(when, message="job %s cannot be evaluated", fault=ValueError):
    made = logging.LogRecord("agent.core", logging.ERROR, "core.py", 1, message, ("a",), (fault, fault("x"), None))
    made.created = when
    return made


def test_a_fault_in_every_pass_does_not_fill_the_disk():
    rare = RareTracebacks()
    hours = sum(rare.filter(fails(tick / 10)) for tick in range(72_000))
    assert hours == 17
    assert rare.filter(fails(1.0, fault=KeyError)), "another fault is another matter"
    assert rare.filter(fails(1.0, message="sample cannot be used"))
    assert rare.filter(fails(72_000 / 10 + 60.0)), "and so is one that comes again much later"
    assert all(rare.filter(record("wrote %d", 1)) for _ in range(10)), "nothing else is left out"


def test_a_reader_that_stopped_costs_lines_and_no_time():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as stream:
        handler = ImpatientHandler(stream)
        handler.setFormatter(TextFormatter(journald=True))
        logger = threading.Thread(target=lambda: [handler.emit(record("x" * 10_000)) for _ in range(50)], daemon=True)
        logger.start()
        logger.join(20)
        assert not logger.is_alive()
        os.read(reader.fileno(), 1 << 20)
        handler.emit(record("again"))
        told = os.read(reader.fileno(), 1 << 20).decode().splitlines()
    assert told[-1] == "<4>warning agent.x: again"
    assert "line(s) are missing here" in told[-2]


def test_the_root_logger_is_set_up(capsys):
    before = logging.root.level, logging.root.handlers[:]
    try:
        setup(LogSection(level="warning"))
        logging.getLogger("agent.y").info("unseen")
        logging.getLogger("agent.y").warning("seen")
    finally:
        logging.root.handlers[:] = before[1]
        logging.root.setLevel(before[0])
    assert "warning agent.y: seen" in capsys.readouterr().err
