"""Addresses that servers listen on, and the way to them past a proxy."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

__all__ = ["checked_url", "is_loopback", "past_proxies"]

_PORTS = {"http": 80, "https": 443}


def checked_url(value: str) -> str:
    """Return the URL of a server, however it is spelled: in lower case, with its port, without a slash at its end.

    Raises ValueError, which says what a URL must be, and holds nothing that may be a secret.
    """
    if "@" in value:
        raise ValueError("has credentials in it, which would stand in the log: give a key by servers.key_variable")
    shown = re.split(r"[\s?#]", value, maxsplit=1)[0]
    strange = ValueError(f"must be like http://host:8000, not {shown if shown == value else shown + '...'!r}")
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise strange from None
    if not host or port == 0 or parts.scheme not in _PORTS or re.search(r"[\s?#\x00-\x1f\x7f]", value):
        raise strange
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"must be like http://host:8000: leave /v1 out of {shown!r}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or _PORTS[parts.scheme]}{path}"


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address or a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def past_proxies(variables: Mapping[str, str], *addresses: str) -> dict[str, str]:
    """Return NO_PROXY and no_proxy with loopback and these addresses added to what `variables` have there.

    Both are needed: some clients read only one of them, and of those that read both some prefer one, some the other.
    """
    found = {}
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        kept = [part.strip() for part in (variables.get(name) or variables.get(other, "")).split(",") if part.strip()]
        wanted = [] if "*" in kept else ["127.0.0.1", "localhost", *addresses]  # with more than "*" Python reads none
        found[name] = ",".join(dict.fromkeys([*kept, *wanted]))
    return found
