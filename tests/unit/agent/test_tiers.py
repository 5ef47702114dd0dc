import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.tiers import access_weights, merge
from tests.unit.agent.builders import HDD, SSD, device_signals


def test_merge_by_access_share():
    """70 % of the bytes come from the SSD: 0.7 * 0.1 + 0.3 * (-0.2) = 0.01."""
    devices = {SSD: device_signals(access_share=0.7), HDD: device_signals(HDD, access_share=0.3)}
    outputs = {SSD: 0.1, HDD: -0.2}
    weights = access_weights(devices, outputs)
    assert weights == pytest.approx({SSD: 0.7, HDD: 0.3})
    assert merge(outputs, weights) == pytest.approx(0.01)


def test_devices_without_a_controller_do_not_dilute():
    devices = {SSD: device_signals(access_share=0.2), "server:/x": device_signals("server:/x", access_share=0.8)}
    assert merge({SSD: 0.1}, access_weights(devices, {SSD: 0.1})) == pytest.approx(0.1)


def test_before_the_first_byte_all_count_the_same():
    devices = {SSD: device_signals(access_share=0.0), HDD: device_signals(HDD, access_share=0.0)}
    assert access_weights(devices, {SSD: 0.0, HDD: 0.0}) == {SSD: 0.5, HDD: 0.5}


def test_nothing_merges_to_nothing():
    assert merge({}, {}) == 0.0
    assert merge({SSD: 0.2}, {}) == 0.0


@given(
    st.dictionaries(
        st.integers(),
        st.tuples(st.floats(-0.2, 0.2, allow_subnormal=False), st.floats(0, 1, allow_subnormal=False)),
        min_size=1,
    )
)
def test_a_merged_output_lies_between_its_parts(parts):
    outputs = {key: output for key, (output, _) in parts.items()}
    weights = {key: weight for key, (_, weight) in parts.items()}
    merged = merge(outputs, weights)
    low, high = min(0.0, *outputs.values(), 0.0), max(0.0, *outputs.values(), 0.0)
    assert low - 1e-12 <= merged <= high + 1e-12
