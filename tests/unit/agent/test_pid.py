import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.pid import DEAD_ZONE, GAINS_BY_MEDIUM, OUTPUT_LIMIT, PidGains, PidState, pid_step, restart
from agent.types import Medium

PLAIN = PidGains(kp=0.005, ki=0.001, kd=0.002, filter_seconds=0.0)


def run(errors, gains=PLAIN, dt=0.1, state=None):
    state, result = state or PidState(), []
    for error in errors:
        state, terms = pid_step(gains, state, error, dt)
        result.append(terms)
    return state, result


def test_terms_by_hand():
    """Error 10 then 12, dt 0.1: P = 0.06, I = 0.001*(10+12)*0.1 = 0.0022, D = 0.002*(2/0.1) = 0.04."""
    _, (first, second) = run([10.0, 12.0])
    assert (first.proportional, first.integral, first.derivative) == pytest.approx((0.05, 0.001, 0.0))
    assert first.output == pytest.approx(0.051)
    assert (second.proportional, second.integral, second.derivative) == pytest.approx((0.06, 0.0022, 0.04))
    assert second.output == pytest.approx(0.1022)


def test_the_dead_zone_is_silent_and_freezes_the_integrator():
    state, terms = run([20.0] * 5 + [4.9, -4.9, 0.0])
    assert [one.output for one in terms[5:]] == [0.0, 0.0, 0.0]
    assert state.integral == pytest.approx(0.01)
    assert run([5.0])[1][0].output > 0.0


def test_output_is_limited_both_ways():
    assert run([75.0])[1][0].output == OUTPUT_LIMIT
    assert run([-60.0])[1][0].output == -OUTPUT_LIMIT


def test_saturation_does_not_wind_up():
    """After a long time at full output the controller turns round at once when the error changes sign."""
    state, terms = run([75.0] * 1000)
    assert terms[-1].output == OUTPUT_LIMIT
    assert state.integral < OUTPUT_LIMIT / 2
    quick = PidGains(kp=0.005, ki=0.001, kd=0.0)
    state, _ = run([75.0] * 1000, quick)
    assert run([-10.0], quick, state=state)[1][0].output < 0.0


def test_the_integrator_removes_a_steady_error():
    _, terms = run([8.0] * 300)
    assert terms[-1].integral > terms[10].integral > 0.0
    assert terms[-1].output > terms[0].output


def test_the_derivative_is_filtered():
    filtered = PidGains(kp=0.0, ki=0.0, kd=0.002, filter_seconds=0.3)
    _, sharp = run([10.0, 30.0, 30.0], PidGains(0.0, 0.0, 0.002, 0.0))
    _, soft = run([10.0, 30.0, 30.0], filtered)
    assert soft[1].derivative < sharp[1].derivative
    assert sharp[2].derivative == 0.0
    assert 0.0 < soft[2].derivative < soft[1].derivative


def test_the_derivative_damps_a_recovery():
    """While the score climbs (the error shrinks) less is asked for than at the same error standing still."""
    _, climbing = run([30.0, 25.0, 20.0])
    _, standing = run([20.0, 20.0, 20.0])
    assert climbing[-1].output < standing[-1].output


def test_the_first_step_and_a_restart_have_no_derivative():
    state, _ = run([10.0, 40.0])
    resumed, terms = pid_step(PLAIN, restart(state), 10.0, 0.1)
    assert terms.derivative == 0.0
    assert terms.integral == pytest.approx(state.integral + 0.001)
    assert resumed.error == 10.0


def test_after_a_long_gap_the_past_says_nothing():
    state, _ = run([30.0] * 50)
    _, terms = pid_step(PLAIN, state, 10.0, 60.0)
    assert terms.derivative == 0.0
    assert terms.integral <= OUTPUT_LIMIT
    assert terms.integral == pytest.approx(min(OUTPUT_LIMIT, 0.001 * 10.0 * 60.0), abs=0.2)


def test_no_time_no_slope():
    state, _ = run([10.0, 12.0])
    again, terms = pid_step(PLAIN, state, 40.0, 0.0)
    assert (again.slope, again.error) == (state.slope, 12.0)
    assert terms.integral == pytest.approx(state.integral)


def test_time_that_runs_backwards_is_refused():
    with pytest.raises(ValueError, match="negative"):
        pid_step(PLAIN, PidState(), 10.0, -0.1)


def test_gains_have_the_tendency_of_the_paper():
    ssd, hdd = GAINS_BY_MEDIUM[Medium.SSD], GAINS_BY_MEDIUM[Medium.HDD]
    assert ssd.ki < hdd.ki
    assert ssd.kd > hdd.kd


@given(st.lists(st.tuples(st.floats(-25, 75), st.floats(0, 100)), min_size=1, max_size=60))
def test_never_beyond_the_limit_and_silent_in_the_dead_zone(steps):
    for gains in GAINS_BY_MEDIUM.values():
        state = PidState()
        for error, dt in steps:
            state, terms = pid_step(gains, state, error, dt)
            assert abs(terms.output) <= OUTPUT_LIMIT
            assert abs(state.integral) <= OUTPUT_LIMIT
            if abs(error) < DEAD_ZONE:
                assert terms.output == 0.0


class Plant:
    """A job whose score follows its quota: 100 * (1 - exp(-1.4 * quota / need)), with a first-order lag."""

    def __init__(self, need, quota, lag):
        self.need, self.quota, self.lag, self.score = need, quota, lag, 0.0

    def step(self, gains, state, dt):
        reached = 100.0 * (1.0 - math.exp(-1.4 * self.quota / self.need))
        self.score += (1.0 - math.exp(-dt / self.lag)) * (reached - self.score)
        state, terms = pid_step(gains, state, 75.0 - self.score, dt)
        self.quota *= 1.0 + terms.output
        return state


@pytest.mark.parametrize(("medium", "lag"), [(Medium.SSD, 0.3), (Medium.HDD, 1.0)])
@pytest.mark.parametrize("dt", [0.1, 0.5])
def test_step_response(medium, lag, dt):
    """From 30 % of the need: within 6 s and three lags in the dead zone, little overshoot, then still."""
    plant, state = Plant(1.0, 0.3, lag), PidState()
    scores = []
    for _ in range(int(60 / dt)):
        state = plant.step(GAINS_BY_MEDIUM[medium], state, dt)
        scores.append(plant.score)
    settled = next(i for i, value in enumerate(scores) if abs(value - 75.0) <= DEAD_ZONE)
    assert settled * dt <= 6.0 + 3.0 * lag
    assert max(scores) <= 92.0
    assert all(abs(value - 75.0) <= DEAD_ZONE + 0.5 for value in scores[-int(20 / dt) :])
