"""Addresses that servers listen on, and the way to them past a proxy."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

__all__ = ["is_loopback", "past_proxies"]


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
