from cgroup.lines import Limit
from cgroup.stall import Progress, StallState, patience_seconds, watch_stall

MIB = 1 << 20


def run(steps, patience=5.0):
    """Feed (time, requests, waited seconds); return the times at which it was found stuck."""
    state, found = None, []
    for now, requests, waited in steps:
        state, stuck = watch_stall(state, Progress(requests, int(waited * 1e6)), now, patience)
        found += [now] if stuck else []
    return found


def test_waiting_without_progress_is_stuck_once_per_patience():
    assert run((t, 7, t) for t in range(12)) == [5, 10]


def test_progress_however_slow_is_not_stuck():
    assert run((t, t // 4, t) for t in range(40)) == []


def test_an_idle_cgroup_is_not_stuck():
    assert run((t, 7, 0.1 * t) for t in range(40)) == []


def test_tasks_that_began_to_wait_late_are_found_after_their_own_patience():
    assert run((t, 7, max(0, t - 4)) for t in range(12)) == [10]


def test_a_clock_that_jumped_back_starts_anew():
    state = StallState(Progress(7, 0), 100.0)
    state, stuck = watch_stall(state, Progress(7, 90_000_000), 3.0, 5.0)
    assert (state.since, stuck) == (3.0, False)


def test_patience_grows_with_the_slowness_of_the_cap():
    assert patience_seconds(Limit()) == 5.0
    assert patience_seconds(Limit(rbps=100 * MIB)) == 5.0
    assert patience_seconds(Limit(wbps=64 * 1024)) == 32.0
    assert patience_seconds(Limit(rbps=MIB, riops=1), least=1.0) == 2.0
