from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroup import io_files
from cgroup.errors import IoFileError
from cgroup.io_files import IoMaxLine, IoStatLine, PressureLine
from tests.unit.cgroup.fuzzing import survivors

FIXTURES = Path(__file__).parent / "fixtures"
PARSERS = {
    "io.stat": (io_files.parse_io_stat, ["io.stat.glued", "io.stat.cost", "io.stat.torn"]),
    "io.max": (io_files.parse_io_max, ["io.max.several"]),
    "io.weight": (io_files.parse_io_weight, ["io.max.several", "io.weight.two"]),
    "io.pressure": (io_files.parse_io_pressure, ["io.pressure.stock"]),
    "io.cost.qos": (io_files.parse_cost_qos, ["io.cost.qos.two"]),
}


def captured(name):
    return (FIXTURES / name).read_text()


def test_io_stat_with_names_glued_in_front_of_the_next_device():
    lines = io_files.parse_io_stat(captured("io.stat.glued"))
    assert lines["7:4"] == IoStatLine("7:4", rbytes=28672, rios=22)
    assert lines["7:7"] == IoStatLine("7:7")
    assert lines["8:16"].dbytes == 53315555840
    assert set(lines) == {"8:32", "8:16", "7:7", "7:6", "7:5", "7:4", "7:3"}


def test_io_stat_keeps_foreign_fields_and_skips_unknown_devices():
    lines = io_files.parse_io_stat(captured("io.stat.cost"))
    assert set(lines) == {"259:0", "8:0", "253:1048575"}
    assert lines["259:0"].extra["cost.usage"] == "8150"
    assert lines["8:0"].rios == 1
    assert lines["253:1048575"] == IoStatLine("253:1048575", 1, 2, 3, 4, 5, 6)


def test_io_stat_read_while_the_cgroup_is_being_wired_up():
    assert io_files.parse_io_stat(captured("io.stat.torn")) == {"252:0": IoStatLine("252:0")}
    assert io_files.parse_io_stat("") == {}


def test_io_max():
    assert io_files.parse_io_max(captured("io.max.several")) == {
        "8:0": IoMaxLine("8:0", rbps=10485760),
        "259:300": IoMaxLine("259:300", wbps=2**64 - 2, riops=2**32 - 2, wiops=7),
    }


def test_io_max_skips_keys_that_a_later_kernel_may_add():
    assert io_files.parse_io_max("8:0 rbps=5 latency=7 wbps=max") == {"8:0": IoMaxLine("8:0", rbps=5)}


def test_weights_of_new_and_old_kernels():
    weights = io_files.parse_io_weight(captured("io.weight.two"))
    assert (weights.default, dict(weights.devices)) == (100, {"8:0": 250, "259:300": 10000})
    assert io_files.parse_io_weight("500\n", "io.bfq.weight").default == 500


def test_pressure():
    pressure = io_files.parse_io_pressure(captured("io.pressure.stock"))
    assert pressure.some == PressureLine(12.5, 3.1, 0.0, 184467440737)
    assert pressure.full is not None
    assert pressure.full.total_us == 7
    assert io_files.parse_io_pressure("") == io_files.IoPressure(None, None)


def test_cost_is_on_only_where_enabled():
    assert io_files.parse_cost_qos(captured("io.cost.qos.two")) == {"8:0"}


@pytest.mark.parametrize(
    ("text", "active"),
    [
        ("none [mq-deadline] bfq\n", "mq-deadline"),
        ("[none]", "none"),
        ("none\n", "none"),
        ("", "none"),
        ("a b", "none"),
    ],
)
def test_scheduler(text, active):
    assert io_files.parse_scheduler(text) == active


@pytest.mark.parametrize(
    ("parse", "text", "quoted"),
    [
        (io_files.parse_io_stat, "8:0 rbytes=-1", "'-1'"),
        (io_files.parse_io_stat, "sda rbytes=1", "'sda'"),
        (io_files.parse_io_max, "8:0 rbps=lots", "'lots'"),
        (io_files.parse_io_max, "rbps=1", "'rbps=1'"),
        (io_files.parse_io_weight, "eight 100", "'eight 100'"),
        (io_files.parse_io_pressure, "part avg10=0.00", "'part'"),
        (io_files.parse_io_pressure, "some avg10=nan avg60=0.00 avg300=0.00 total=0", "'nan'"),
    ],
)
def test_errors_quote_what_is_wrong(parse, text, quoted):
    with pytest.raises(IoFileError) as caught:
        parse(text)
    assert quoted in str(caught.value)


@pytest.mark.parametrize(
    ("device", "limits"),
    [("sda", {"rbps": 1}), ("8:0", {}), ("8:0", {"rps": 1}), ("8:0", {"rbps": 0}), ("8:0", {"wiops": -4})],
)
def test_nothing_harmful_is_formatted(device, limits):
    with pytest.raises(IoFileError):
        io_files.format_io_max(device, limits)


def test_a_weight_line_needs_a_device():
    with pytest.raises(IoFileError):
        io_files.format_io_weight("sda", 100)
    assert io_files.format_io_weight("8:0", 100) == "8:0 100"


@given(st.fixed_dictionaries({key: st.none() | st.integers(1, 2**64 - 1) for key in io_files.IO_MAX_KEYS}))
def test_io_max_round_trip(limits):
    text = io_files.format_io_max("259:300", limits)
    assert io_files.parse_io_max(text) == {"259:300": IoMaxLine("259:300", **limits)}


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("file", PARSERS)
def test_fuzz(file, count):
    parse, seeds = PARSERS[file]
    understood = survivors(parse, IoFileError, [captured(name) for name in seeds], count)
    assert 0 < understood < count
