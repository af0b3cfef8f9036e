"""Addresses that servers listen on, and the proxy settings that keep requests to them direct."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

__all__ = ["checked_url", "is_loopback", "no_proxy_variables"]

_PORTS = {"http": 80, "https": 443}


def checked_url(value: str) -> str:
    """Return a server's URL in one spelling: in lower case, with its port, without a slash at its end. Raises
    ValueError, which says what a URL must be and never contains a credential."""
    if "@" in value:
        raise ValueError("contains credentials, which would be written to the log: give a key by servers.key_variable")
    shown = re.split(r"[\s?#]", value, maxsplit=1)[0]  # what follows may be a credential
    error = ValueError(f"must be like http://host:8000, not {shown if shown == value else shown + '...'!r}")
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise error from None
    if not host or port == 0 or parts.scheme not in _PORTS or re.search(r"[\s?#\x00-\x1f\x7f]", value):
        raise error
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"must be like http://host:8000: leave /v1 out of {shown!r}")
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}:{port or _PORTS[parts.scheme]}{path}"


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach this address or name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def no_proxy_variables(variables: Mapping[str, str], *addresses: str) -> dict[str, str]:
    """Return values for NO_PROXY and no_proxy: those of the environment `variables`, plus loopback and these addresses.

    Both are set, since some HTTP clients read only one of them, and the others differ in which they prefer.
    """
    settings = {}
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        setting = variables.get(name) or variables.get(other, "")
        hosts = [host.strip() for host in setting.split(",") if host.strip()]
        if "*" not in hosts:  # Python ignores a * that is not alone
            hosts += ["127.0.0.1", "localhost", *addresses]
        settings[name] = ",".join(dict.fromkeys(hosts))
    return settings
