"""Endpoints as people write them."""

import pytest

from bpf.endpoints import format_endpoint, parse_endpoint


@pytest.mark.parametrize("text", ["10.0.0.1:9000", "[2001:db8::1]:443", "127.0.0.1:65535"])
def test_endpoints_survive_the_round_trip(text):
    assert format_endpoint(*parse_endpoint(text)) == text


def test_a_star_is_any_address():
    assert parse_endpoint("*:80") == (bytes(16), 80)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("[::ffff:192.0.2.1]:443", "192.0.2.1:443"), ("[2001:DB8:0::1]:0443", "[2001:db8::1]:443")],
)
def test_one_endpoint_written_in_another_way(text, meant):
    assert format_endpoint(*parse_endpoint(text)) == meant


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "80", "host:80", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "*:x", "*:-1", "**:80"),
        *(
            "10.0.0.1: 80",
            "10.0.0.1:4_43",
            "10.0.0.1:\uff18\uff10",
            "10.0.0.1:1:80",
            "[10.0.0.1:80",
            "[[::1]]:80",
            "[]:80",
        ),
        *("2001:db8::5:443", "[::]:443", "0.0.0.0:443", "[::1]:\udcff", "\u00e9:80", "[::1]:" + "9" * 4000),
    ],
)
def test_what_is_no_endpoint_is_quoted(text):
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_endpoint(text)
    assert repr(text) in str(caught.value)
