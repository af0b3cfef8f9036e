"""Lease providers: a user's classes ("module:Class") that create and release outside resources, such as sandboxes.

The run that takes a lease builds its provider. If that run can't release it, another process builds the provider again
from the log alone. `create(key, ttl)` returns the handle of the lease. `release(key, handle)` ends it; the handle is
None if it is unknown, and a lease that does not exist must be no error. Optional: `renew(key, handle, ttl)`, and
`attach(key, handle, ttl)`, by which a task's next attempt takes over the resource of a lost one. All may be async.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from trinity_es.actors.plugin_lookup import build
from trinity_es.events.errors import ConfigError
from trinity_es.events.json_values import NotPlain, plain
from trinity_es.events.secrets import replaced

__all__ = ["build_provider", "recordable_json"]

MOST_BYTES = 8192
"""Maximum size of a provider's arguments, and of a handle, as JSON: they travel in messages."""
_SHAPE = "a class with create(key, ttl) and release(key, handle)"


def build_provider(path: str, args: Mapping[str, Any]) -> Any:
    """Return a provider of the class at `path`, built with `args`. Raises ConfigError, which names the class."""
    provider = build("lease provider", path, args, {}, _SHAPE)
    missing = [name for name in ("create", "release") if not callable(getattr(provider, name, None))]
    if missing:
        raise ConfigError(f"lease provider {path} has no {' and no '.join(missing)}: give {_SHAPE}", provider=path)
    return provider


def recordable_json(what: str, value: Any) -> Any:
    """Return a value as plain JSON for the log. `what` names it in errors. Raises ValueError if JSON can't hold it, it
    takes more than `MOST_BYTES`, or a text in it looks like a secret."""
    secrets: list[str] = []
    replaced(value, secrets.append)  # type: ignore[arg-type]  # called with each secret; its result is not used
    try:
        data = plain(value)
        size = len(orjson.dumps(data))
    except (NotPlain, TypeError) as e:
        raise ValueError(f"{what} must be plain JSON: a value in it {e}") from e
    if size > MOST_BYTES:
        raise ValueError(f"{what} takes {size:,} bytes as JSON: the maximum is {MOST_BYTES:,}")
    if secrets:
        raise ValueError(f"{what} contains what looks like a secret, which would be written to the log: let the "
                         "provider read it from the environment")
    return data
