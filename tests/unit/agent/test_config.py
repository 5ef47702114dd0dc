"""The configuration: the shipped default equals the built-in one, and every refusal names its key."""

import re
from pathlib import Path

import pytest

from agent import config

DEFAULT = Path(__file__).parents[3] / "packaging" / "prefetchd.toml"


def test_shipped_default_is_the_built_in_default():
    assert config.load(DEFAULT) == config.Config()


def test_shipped_examples_are_valid_when_uncommented():
    text = DEFAULT.read_text()
    uncommented = re.sub(r"(?m)^# (\[\[|[a-z_]+ = )", r"\1", text)
    parsed = config.parse(uncommented)
    assert len(parsed.jobs) == 4
    assert parsed.devices[0].read_bytes_per_second == 6.5e9
    assert parsed.pid.ssd.kp == 0.005


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mode = "x"', ["'mode'", "'x'"]),
        ("foo = 1", ["'foo'", "unknown"]),
        ('[[jobs]]\ncgroup = "/a"\nfoo = 1', ["'jobs[0].foo'", "cgroup, label, name, weight"]),
        ("[[jobs]]\nweight = 1", ["'cgroup'", "missing"]),
        ('[[jobs]]\ncgroup = "a/b"', ["'a/b'", "start with '/'"]),
        ('[[best_effort]]\ncgroup = "/a/../b"', ["'/a/../b'"]),
        ('[[devices]]\ndevice = "8:0"\nread_bytes_per_second = "fast"', ["read_bytes_per_second", "'fast'"]),
        ('[[devices]]\ndevice = "8:0"\nread_bytes_per_second = -4', ["read_bytes_per_second", "-4"]),
        ('[[devices]]\ndevice = "8:0"\nread_requests_per_second = 0', ["read_requests_per_second", "0"]),
        ('[metrics]\nlisten = "abc"', ["metrics.listen", "'abc'"]),
        ('[metrics]\ncertificate = "a.pem"', ["metrics.key"]),
        ("[loop]\ninterval_seconds = 9", ["loop.interval_seconds", "9"]),
        ("[enforcement]\nsmall_change_ratio = 0.9", ["enforcement.small_change_ratio", "0.9", "<= 0.5"]),
        ("[loop]\ninterval_seconds = 2", ["loop.interval_seconds 2", "half of loop.stale_seconds 3"]),
        ("[loop]\nheartbeat_seconds = 0.1", ["loop.interval_seconds 0.1", "half of loop.heartbeat_seconds 0.1"]),
        ("[loop]\ntimer_seconds = 1e-10", ["loop.timer_seconds", "1e-10", "0.01"]),
        ("[pid.ssd]\nkq = 1", ["pid.ssd.kq", "kp, ki, kd"]),
        ("[enforcement]\nfloor_ratio = 1.0", ["floor_ratio", "1.0"]),
        ("[health]\nqueue_weight=0\nlatency_weight=0\nvariation_weight=0\ndemand_weight=0", ["weights", "zero"]),
        ("mode =", ["not valid TOML"]),
        ("[metrics]\nmax_jobs = " + "9" * 5000, ["not valid TOML", "digits"]),
        ("a = " + "[" * 5000 + "]" * 5000, ["not valid TOML"]),
        (f'[[devices]]\ndevice = "8:0"\nread_bytes_per_second = {"9" * 400}', ["read_bytes_per_second", "finite"]),
        ('[[devices]]\ndevice = "8:0"\nread_bytes_per_second = inf', ["read_bytes_per_second", "inf", "finite"]),
        ("[loop]\nscan_seconds = inf", ["loop.scan_seconds", "inf"]),
        ("[loop]\nscan_seconds = nan", ["loop.scan_seconds", "nan"]),
        ("[pid.ssd]\nkp = inf", ["pid.ssd.kp", "inf"]),
        ('mode = "' + "x" * 100_000 + '"', ["'mode'", "…"]),
        ("x" * 100_000 + " = 1", ["unknown", "…"]),
        ('"" = 1', ["key ''", "unknown"]),
        ('[[jobs]]\ncgroup = "/a"\nname = "a\\nb"', ["'jobs[0].name'", "control character"]),
        ('[enforcement]\nstate_directory = "/run/\\u0000"', ["enforcement.state_directory", "control character"]),
        ('[enforcement]\nstate_directory = ""', ["enforcement.state_directory", "''", "begins with '/'"]),
        ('[enforcement]\nkill_switch_file = "off"', ["enforcement.kill_switch_file", "'off'"]),
        ('cgroup_root = "unified"', ["'cgroup_root'", "'unified'"]),
        ('[rearrange]\ncgroup = "/"', ["'rearrange.cgroup'", "'/'", "'/prefetchd-rearrange'"]),
        ('[enforcement]\nguardian_cgroup = "/../../tmp/x"', ["guardian_cgroup", "'/../../tmp/x'", "below the cgroup"]),
        ('[enforcement]\nguardian_cgroup = "/"', ["'enforcement.guardian_cgroup'", "'/'", "'/prefetchd-guardian'"]),
        ('[hint]\nsocket = "/' + "x" * 100 + '"', ["hint.socket", "96 bytes"]),
        ('[[jobs]]\ncgroup = "/a"\nlabel = "=true"', ["'=true'", "no key"]),
        ("jobs = 3", ["'jobs'", "3"]),
        ("[jobs]", ["'jobs'", "{}", "which [[jobs]] makes"]),
        ('mode = "enforced"', ["'mode'", "'enforced'", "one of observe, dry-run, enforce"]),
        ('[[devices]]\ndevice = "sda"\nmedium = "tape"', ["'devices[0].medium'", "'tape'", "one of ssd, hdd"]),
        ("[pid.ssd]\nkp = true", ["'pid.ssd.kp'", "true", "expected a number"]),
        ("[probes]\nobject_endpoints = ['host:9000']", ["'probes.object_endpoints[0]'", "'host:9000'", "address:port"]),
        ("[probes]\nobject_endpoints = ['*:80', '::1:9000']", ["object_endpoints[1]", "'::1:9000'", "[address]:port"]),
    ],
)
def test_refusal_is_one_sentence_naming_key_and_value(text, words):
    with pytest.raises(config.ConfigError) as caught:
        config.parse(text, "node.toml")
    message = str(caught.value)
    assert message.startswith("node.toml")
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 500
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "rate"), [("120 MiB", 120 * 2**20), ("6.5GB", 6.5e9), ("1 kB/s", 1000), (42, 42), ("7", 7)]
)
def test_byte_rates(text, rate):
    assert config.ByteRate.parse(text) == rate


@pytest.mark.parametrize(
    "listen", ["", "1.2.3.4", "1.2.3.4:", "1.2.3.4:99999", "a:b", "a:٣", "a b:1", "a\0:1", "\udcff:1"]
)
def test_bad_addresses(listen):
    with pytest.raises(config.ConfigError, match=re.escape(repr(listen))):
        config.split_address(listen)


def test_an_endless_port_is_a_sentence():
    with pytest.raises(config.ConfigError, match="is not ADDR:PORT"):
        config.split_address("a:" + "9" * 5000)


def test_good_addresses():
    assert config.split_address("127.0.0.1:9753") == ("127.0.0.1", 9753)
    assert config.split_address("[::1]:80") == ("::1", 80)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    file = tmp_path / "node.toml"
    file.write_text("\ufeffmode = 'dry-run'\n", encoding="utf-8")
    assert config.load(file).mode == "dry-run"


def test_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(config.ConfigError, match="cannot be read"):
        config.load(tmp_path / "none.toml")


def test_a_file_without_an_end_is_not_read_to_it():
    with pytest.raises(config.ConfigError, match="'/dev/zero' has more than 4 MiB; give the path of a TOML file"):
        config.load(Path("/dev/zero"))


def test_bytes_that_are_no_text_are_told_as_such(tmp_path):
    (tmp_path / "node.toml").write_bytes(b'mode = "\xff"')
    with pytest.raises(config.ConfigError, match=r"is no UTF-8 text \(byte 0xff at 8\)"):
        config.load(tmp_path / "node.toml")
