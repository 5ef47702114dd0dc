"""Endpoints of object stores as people write them: `address:port`, `[address]:port` or `*:port`."""

from __future__ import annotations

import ipaddress

ANY_PEER = ("*:80", "*:443", "*:9000")


def parse_endpoint(text: str) -> tuple[bytes, int]:
    """Address as 16 bytes (IPv4 mapped, all zero for `*`) and port. ValueError quotes what is no endpoint."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        number = int(port) if port.isascii() and port.isdecimal() else 0
        address = ipaddress.ip_address(host[1:-1] if is_bracketed else host) if host != "*" else None
    except ValueError as error:
        raise ValueError(f"endpoint {text!r} is not address:port, [address]:port or *:port") from error
    if not colon or not 0 < number < 65536:
        raise ValueError(f"endpoint {text!r} has no port between 1 and 65535")
    if address is None:
        return bytes(16), number
    if address.is_unspecified:
        raise ValueError(f"endpoint {text!r} is nobody's address; write *:{number} for any")
    if address.version == 6:
        if not is_bracketed:
            raise ValueError(f"endpoint {text!r} may be read in two ways; write [address]:port")
        return address.packed, number
    return bytes(10) + b"\xff\xff" + address.packed, number


def format_endpoint(address: bytes, port: int) -> str:
    """`address:port` of an address of 16 bytes."""
    full = ipaddress.IPv6Address(address)
    return f"{full.ipv4_mapped}:{port}" if full.ipv4_mapped else f"[{full}]:{port}"
