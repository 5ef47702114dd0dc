import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgroup.lines import KEYS, Limit, Line
from cgroup.plan import LineState, PlanState, Rules, plan, raise_window_seconds, round_limit

MIB = 1 << 20
A = Line(1, "/a", "8:0", "io.max")
B = Line(2, "/b", "8:0", "io.max")
A2 = Line(1, "/a", "8:16", "io.max")
FREE = Limit().values()


def limit(**limits):
    return {**FREE, **limits}


def state(lines=(), raises=None):
    return PlanState(dict(lines), raises or {})


def managed(wrote, prior=FREE):
    return LineState(prior, wrote)


def one(desired, actual, known=None, *, now=10.0, raises=None, rules=None):
    lines = {A: known} if known else {}
    writes = plan({A: (desired, "why")} if desired else {}, {A: actual}, state(lines, raises), now, rules)
    assert len(writes) == 1
    return writes[0]


def test_nothing_wanted_and_nothing_there_is_nothing():
    assert plan({}, {}, state(), 0.0) == []
    assert plan({}, {A: limit(rbps=5 * MIB)}, state(), 0.0) == []


def test_a_first_cap():
    write = one(limit(rbps=4 * MIB), FREE)
    assert (write.verdict, write.after, write.before, write.why, write.raises) == (
        "write", {"rbps": 4 * MIB}, FREE, "why", False,
    )  # fmt: skip


def test_only_keys_that_change_are_written():
    before = limit(rbps=4 * MIB, wbps=4 * MIB)
    assert one(limit(rbps=2 * MIB, wbps=4 * MIB), before, managed(before)).after == {"rbps": 2 * MIB}


def test_unwanted_lines_are_released_key_by_key():
    before = limit(rbps=4 * MIB, wbps=9 * MIB)
    write = one(None, before, managed(before, limit(wbps=9 * MIB)))
    assert (write.verdict, write.after, write.raises) == ("release", {"rbps": None}, True)


def test_a_line_that_needs_no_write_to_be_released_is_released_all_the_same():
    before = limit(rbps=4 * MIB)
    write = one(None, before, managed(before, before), raises={1: (9.9, 10.0)})
    assert (write.verdict, write.after) == ("release", {})


def test_limits_only_tighten_what_was_there_before():
    prior = limit(rbps=4 * MIB)
    assert one(limit(rbps=8 * MIB), prior).verdict == "unchanged"
    assert one(limit(), prior).verdict == "unchanged"
    assert one(limit(rbps=MIB), prior).after == {"rbps": MIB}
    assert one(limit(rbps=8 * MIB), limit(rbps=MIB), managed(limit(rbps=MIB), prior)).after == {"rbps": 4 * MIB}


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.029, "unchanged"), (0.98, "unchanged"), (1.04, "write"), (0.96, "write")]
)
def test_small_changes_are_left_out(ratio, verdict):
    before = limit(rbps=128 * MIB)
    assert one(limit(rbps=int(128 * MIB * ratio)), before, managed(before)).verdict == verdict


def test_a_slow_drift_is_followed_in_steps():
    wrote = limit(rbps=128 * MIB)
    writes = 0
    for step in range(200):
        write = one(limit(rbps=int(128 * MIB * 0.995**step)), wrote, managed(wrote), now=float(step))
        if write.verdict == "write":
            writes += 1
            wrote = {**wrote, **write.after}
        assert abs(wrote["rbps"] / (128 * MIB * 0.995**step) - 1) < 0.04
    assert 20 < writes < 45


def test_raises_are_rationed_per_cgroup_over_its_devices():
    before = limit(rbps=4 * MIB)
    lines = {A: managed(before), A2: managed(before), B: managed(before)}
    desired = {line: (limit(rbps=8 * MIB), "") for line in lines}
    actual = dict.fromkeys(lines, before)
    verdicts = {w.line: w.verdict for w in plan(desired, actual, state(lines, {1: (9.2, 9.6)}), 10.0)}
    assert verdicts == {A: "rate_limited", A2: "rate_limited", B: "write"}
    assert {w.verdict for w in plan(desired, actual, state(lines, {1: (9.0, 9.6)}), 10.0)} == {"write"}
    assert {w.verdict for w in plan(desired, actual, state(lines, {1: (9.6, 9.6)}), 10.0)} == {"write"}, "one reconcile"


def test_cuts_in_the_same_line_do_not_wait_for_raises():
    before = limit(rbps=4 * MIB, wbps=4 * MIB)
    write = one(limit(rbps=8 * MIB, wbps=2 * MIB), before, managed(before), raises={1: (9.8, 9.9)})
    assert (write.verdict, write.after, write.raises) == ("write", {"wbps": 2 * MIB}, False)
    assert (
        one(limit(rbps=8 * MIB, wbps=4 * MIB), before, managed(before), raises={1: (9.8, 9.9)}).verdict
        == "rate_limited"
    )


def test_releases_are_raises():
    before = limit(rbps=4 * MIB)
    assert one(None, before, managed(before), raises={1: (9.8, 9.9)}).verdict == "rate_limited"


def test_a_clock_that_jumped_back_holds_nothing_up():
    before = limit(rbps=4 * MIB)
    assert one(None, before, managed(before), now=10.0, raises={1: (500.0, 501.0)}).verdict == "release"


def test_less_than_one_raise_a_second():
    rules = Rules(raises_per_second=0.5)
    before = limit(rbps=4 * MIB)
    assert raise_window_seconds(rules) == 2.0
    assert one(None, before, managed(before), raises={1: (8.5,)}, rules=rules).verdict == "rate_limited"
    assert one(None, before, managed(before), raises={1: (8.0,)}, rules=rules).verdict == "release"


def test_cuts_come_first():
    lines = {A: managed(limit(rbps=4 * MIB)), B: managed(limit(rbps=8 * MIB))}
    desired = {A: (limit(rbps=8 * MIB), ""), B: (limit(rbps=4 * MIB), "")}
    writes = plan(desired, {line: known.wrote for line, known in lines.items()}, state(lines), 10.0)
    assert [write.line for write in writes] == [B, A]


def test_a_foreign_change_is_a_conflict_that_gives_back_what_is_ours():
    wrote = limit(rbps=4 * MIB, wbps=4 * MIB)
    write = one(limit(rbps=2 * MIB), limit(rbps=MIB, wbps=4 * MIB), managed(wrote))
    assert (write.verdict, write.after) == ("conflict", {"wbps": None})


def test_lines_that_could_not_be_read_are_left_out():
    assert plan({A: (limit(rbps=MIB), "")}, {}, state({A: managed(limit(rbps=MIB))}), 0.0) == []


def test_weights():
    line = Line(1, "/a", "8:0", "io.weight")

    def verdict(wanted, actual, known=None, raises=None):
        lines = {line: known} if known else {}
        desired = {line: ({"weight": wanted}, "")}
        (write,) = plan(desired, {line: {"weight": actual}}, state(lines, raises), 10.0)
        return write.verdict, dict(write.after)

    assert verdict(300, None) == ("write", {"weight": 300})
    assert verdict(300, None, raises={1: (9.8, 9.9)}) == ("rate_limited", {}), "100 is the default"
    assert verdict(50, None, raises={1: (9.8, 9.9)}) == ("write", {"weight": 50})
    assert verdict(None, 300, LineState({"weight": 200}, {"weight": 300})) == ("write", {"weight": 200})


@pytest.mark.parametrize(
    ("key", "value", "rounded"),
    [
        ("rbps", 10_485_760, 10_485_760),
        ("rbps", 10_485_761, 10_485_760),
        ("wbps", 1, 64 * 1024),
        ("riops", 1, 4),
        ("riops", 4001, 4000),
        ("wiops", 255, 255),
        ("wiops", 2**32 - 1, 4278190080),
        ("riops", 2**33, None),
        ("rbps", 2**64, None),
        ("rbps", None, None),
    ],
)
def test_rounding(key, value, rounded):
    assert round_limit(key, value, Rules()) == rounded


numbers = st.none() | st.integers(1, 2**40)
some_values = st.fixed_dictionaries(dict.fromkeys(KEYS["io.max"], numbers))
lines_of = st.sampled_from([A, A2, B])


@settings(max_examples=300)
@given(
    st.dictionaries(lines_of, some_values),
    st.dictionaries(lines_of, st.tuples(some_values, some_values)),
    st.dictionaries(st.sampled_from([1, 2]), st.lists(st.floats(8, 10), max_size=3).map(tuple)),
)
def test_what_holds_for_every_plan(desired, known, raises):
    lines = {line: LineState(prior, wrote) for line, (prior, wrote) in known.items()}
    actual = {line: (lines[line].wrote if line in lines else FREE) for line in {**desired, **lines}}
    writes = plan({line: (v, "") for line, v in desired.items()}, actual, state(lines, raises), 10.0)
    assert {write.line for write in writes} == set(actual), "every line that could be read is accounted for, once"
    assert len(writes) == len(actual)
    for write in writes:
        before = actual[write.line]
        assert all(before[key] != value for key, value in write.after.items()), "no write without a change"
        raised = [k for k, v in write.after.items() if before[k] is not None and (v is None or v > before[k])]
        busy = len({time for time in raises.get(write.line.cgroup_id, ()) if 9.0 < time <= 10.0}) >= 2
        assert not (raised and busy), "raises wait"
        prior = lines[write.line].prior if write.line in lines else FREE
        if write.verdict == "write":
            assert all(prior[k] is None or (v is not None and v <= prior[k]) for k, v in write.after.items())
        if write.verdict in ("unchanged", "rate_limited"):
            assert not write.after
