"""What makes and releases the things that runs hold open: a class of the user's, as "module:Class".

It is built by the run that takes a lease, and again, from the log alone, by the process that releases it for a run that
can't. `create(key, ttl)` returns its handle; `release(key, handle)` ends it, with None where nobody knows the handle,
and is content where there is nothing; `renew(key, handle, ttl)` may be missing. Each may be async.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from trinity_es.actors.plugins import build
from trinity_es.events.errors import ConfigError
from trinity_es.events.json_values import NotPlain, plain
from trinity_es.events.secrets import replaced

__all__ = ["build_provider", "recordable"]

MOST_BYTES = 8192
"""Maximum of the arguments of a provider, and of a handle, as JSON: they travel in messages."""
_SHAPE = "a class with create(key, ttl) and release(key, handle)"


def build_provider(path: str, args: Mapping[str, Any]) -> Any:
    """Return the provider, built with `args`. Raises ConfigError, which names it."""
    provider = build("lease provider", path, args, {}, _SHAPE)
    missing = [name for name in ("create", "release") if not callable(getattr(provider, name, None))]
    if missing:
        raise ConfigError(f"lease provider {path} has no {' and no '.join(missing)}: give {_SHAPE}", provider=path)
    return provider


def recordable(what: str, value: Any) -> Any:
    """Return a value that is to be recorded, as plain JSON.

    Raises ValueError for what JSON can't hold, for more than `MOST_BYTES`, and for what looks like a secret.
    """
    secrets: list[str] = []

    def found_one(secret: str) -> str:
        secrets.append(secret)
        return ""

    replaced(value, found_one)
    try:
        found = plain(value)
        size = len(orjson.dumps(found))
    except (NotPlain, TypeError) as e:
        raise ValueError(f"{what} must be plain JSON: it {getattr(e, 'what', e)}") from e
    if size > MOST_BYTES:
        raise ValueError(f"{what} takes {size:,} bytes as JSON: {MOST_BYTES:,} are the most")
    if secrets:
        raise ValueError(f"{what} holds what looks like a secret, and would stand in the log: let the provider read it "
                         "from the environment")
    return found
