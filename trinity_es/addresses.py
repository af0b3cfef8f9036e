"""Addresses that servers listen on."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback"]


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address or a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
