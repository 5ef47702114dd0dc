"""Endpoints as people write them."""

import pytest

from bpf.object_store import format_endpoint, parse_endpoint


@pytest.mark.parametrize("text", ["10.0.0.1:9000", "[2001:db8::1]:443", "127.0.0.1:65535"])
def test_endpoints_survive_the_round_trip(text):
    assert format_endpoint(*parse_endpoint(text)) == text


def test_a_star_is_any_address():
    assert parse_endpoint("*:80") == (bytes(16), 80)


@pytest.mark.parametrize("text", ["", "80", "host:80", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "*:x"])
def test_what_is_no_endpoint_is_quoted(text):
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_endpoint(text)
    assert repr(text) in str(caught.value)
