"""Which engine answers a request of the proxy: the least busy one, or the one that had the conversation so far, as
`actors.load_balancing` says.

Pure but for the clock and the waiting: the table of engines comes from the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.actors import load_balancing

__all__ = ["Backend", "BackendPool", "conversation_keys"]

REMEMBERED = 16384
"""Maximum number of conversations whose engine is remembered."""
MOST_SESSION = 100
"""Maximum length of a session's name that is remembered as it is; of a longer one its digest is."""


@dataclass(slots=True)
class Backend:
    """One life of a runner's engine, as the coordinator last told of it."""

    runner: str
    incarnation: int
    endpoint: str
    model_version: int
    serving: bool
    busy: int = 0
    """Requests that this proxy has there now."""
    answered: int = 0
    failed: int = 0


class BackendPool:
    """The engines of a system. Not thread-safe: for one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ways: dict[str, Backend] = {}
        self._shunned: dict[tuple[str, int], float] = {}
        """Lives that did not answer, and until when they are left alone: the coordinator will know soon."""
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._changed = asyncio.Event()

    def update(self, table: Iterable[Mapping[str, Any]]) -> None:
        """Take what the coordinator says now. Who is not in it does not serve, for now or for ever."""
        for way in self._ways.values():
            way.serving = False
        for row in table:
            known = self._ways.get(row["runner"])
            if known is None or known.incarnation != row["incarnation"]:
                known = self._ways[row["runner"]] = Backend(**row)
            known.endpoint, known.model_version = row["endpoint"], row["model_version"]
            known.serving = row["serving"]
        self._changed.set()
        self._changed = asyncio.Event()

    def all(self) -> list[Backend]:
        """Return every engine that is known, by name."""
        return [self._ways[name] for name in sorted(self._ways)]

    def choose(self, keys: Iterable[str] = (), avoid: Container[str] = ()) -> Backend | None:
        """Return the engine for a request; None while there is none.

        `keys`: what its conversation may be known by; `avoid`: runners that are asked only where there is no other.
        """
        now = self._clock()
        fit = [
            w for w in self._ways.values()
            if w.serving and w.endpoint and self._shunned.get((w.runner, w.incarnation), 0.0) <= now
        ]
        fit = [w for w in fit if w.runner not in avoid] or fit
        if not fit:
            return None
        home = next((self._sticky[key] for key in keys if key in self._sticky), None)
        if home is not None and load_balancing.choose(None, {w.runner: w.busy for w in fit}, home) == home:
            return self._ways[home]
        # Among equals, the one that has answered least: so that they take turns.
        return min(fit, key=lambda w: (w.busy, w.answered, w.runner))

    async def wait(self, keys: Iterable[str], seconds: float, avoid: Container[str] = ()) -> Backend | None:
        """`choose`, waiting for an engine up to `seconds`."""
        keys = list(keys)
        chosen = self.choose(keys, avoid)
        deadline = self._clock() + seconds
        while chosen is None and (left := deadline - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, 0.25))  # who is shunned comes back by itself
            chosen = self.choose(keys, avoid)
        return chosen

    def shun(self, way: Backend, seconds: float = 1.0) -> None:
        """Leave one alone for a while that did not answer."""
        self._shunned = {life: until for life, until in self._shunned.items() if until > self._clock()}
        self._shunned[way.runner, way.incarnation] = self._clock() + seconds

    def remember(self, keys: Iterable[str], way: Backend) -> None:
        """Note that this conversation is known there."""
        for key in keys:
            self._sticky[key] = way.runner
            self._sticky.move_to_end(key)
        while len(self._sticky) > REMEMBERED:
            self._sticky.popitem(last=False)


def conversation_keys(body: Mapping[str, Any], session: str | None) -> tuple[list[str], list[str]]:
    """(by what an earlier request of this conversation may be known, by what a later one will know this one).

    A conversation is a session where the client names one; else it is known by its messages: those before the last
    answer in it were a request once.
    """
    if session:
        session = session if len(session) <= MOST_SESSION else hashlib.sha256(session.encode()).hexdigest()
        return [f"session/{session}"], [f"session/{session}"]
    messages = body.get("messages")
    if not isinstance(messages, list):
        return [], []
    answered = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "assistant"]
    return [_key(messages[:i]) for i in answered[-1:]], [_key(messages)]


def _key(messages: list[Any]) -> str:
    return hashlib.sha256(orjson.dumps(messages)).hexdigest()
