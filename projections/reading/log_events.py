"""The events of a log, as one reads them: all or some, one at a moment, new ones as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Self

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, CorruptPayload, LogRewound, LogUnavailable
from trinity_es.events.store.log import EventLog, Head, Recorded
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads
from trinity_es.events.store.records.positions_by_time import clock_note
from trinity_es.events.values import BatchId, batch_stream, with_offset

__all__ = ["LogEvents"]


class LogEvents:
    """A log, as far as it is events. A context manager."""

    def __init__(self, events: EventLog, url: str) -> None:
        self._events, self._url = events, url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._events.close()

    @property
    def url(self) -> str:
        """Its URL, without a password."""
        return self._events.url

    def is_replaced(self) -> bool:
        """Return True if another SQLite file lies under this log's name: open it again to read that one."""
        return self._events.is_replaced()

    def head(self) -> Head:
        return self._events.head()

    def streams(self, prefix: str = "") -> list[str]:
        return [name for name, _ in self._events.streams(prefix)]

    def events(self, batch_id: BatchId | None = None, after: int = 0) -> Iterator[Recorded]:
        """Yield events with a position greater than `after`, of one batch or of all streams, in order.

        Raises BatchNotFound for a batch that isn't there.
        """
        stream = None
        if batch_id is not None:
            stream = batch_stream(batch_id)
            self._require(batch_id)
        return self._events.read(stream=stream, after=after)

    def read(
        self, *, stream: str | None = None, types: Sequence[str] | None = None, after: int = 0
    ) -> Iterator[Recorded]:
        return self._events.read(stream=stream, types=types, after=after)

    def rare(
        self, types: Sequence[str] | None = None, *, after: int = 0, before: int | None = None,
        limit: int | None = None, descending: bool = False,
    ) -> Iterator[Recorded]:
        """Yield events that are not bulk (`schema.BULK`), of these types or all: `after` < position < `before`.

        In order, or the newest first. Costs what is asked for, however long the log. Raises ValueError for a bulk type.
        """
        return self._events.rare(types, after=after, before=before, limit=limit, descending=descending)

    def last(self, stream: str, type_name: str) -> Recorded | None:
        return self._events.last(stream, type_name)

    def at(self, position: int) -> Recorded | None:
        found = next(self._events.read(after=max(0, position - 1), limit=1), None) if position > 0 else None
        return None if found is None or found.position != position else found

    def position_of(self, at: int | float | datetime | None) -> int | None:
        """Return the position that a moment means: itself, or that of the last event recorded at or before it (0:
        none). Raises DataError for a local time that came twice or never.
        """
        if isinstance(at, datetime):
            at = with_offset(at).timestamp()
        return self._events.position_at(at) if isinstance(at, float) else at

    def clock_note(self, at: datetime) -> str:
        """Say why this moment may not be the one that is meant: the clock was set then; empty where it was not."""
        return clock_note(at.timestamp(), self._events.clock_steps())

    def follow(
        self, after: int = 0, *, stop: Callable[[], bool], interval: float = 0.2,
        trouble: Callable[[LogUnavailable | None], None] | None = None,
    ) -> Iterator[Recorded]:
        """Yield events as they come, until `stop()`. Looks for new ones every `interval` seconds.

        With `trouble`, a database that is away for longer than this log is patient, and a file that is gone from its
        place, are waited for, however long: it is called with the error each time, and with None when it is back.
        Nothing is missed and nothing comes twice; raises LogRewound where what came back is without the last event that
        was given out, LogReplaced where another file took the place.
        """
        position, newest, away = after, None, False
        while True:
            last = stop()  # asked before the look, so that what came before the end is seen
            try:
                if away and newest is not None:
                    self._require_still_there(newest)
                for recorded in self._events.read(after=position):
                    position, newest = recorded.position, recorded
                    yield recorded
                if away and trouble is not None:
                    trouble(None)
                away = False
            except LogUnavailable as e:
                if trouble is None or not (e.details.get("passing") or e.details.get("missing")):
                    raise
                trouble(e)
                away = True
            if last:
                return
            time.sleep(interval)

    def _require_still_there(self, seen: Recorded) -> None:
        now = self.at(seen.position)
        if now is None or now.hash != seen.hash:
            raise LogRewound(f"{self.url} came back without position {seen.position} as it was read before: it was "
                             "restored from an older copy, or its server lost commits; read it again from its start")

    def _require(self, batch_id: BatchId) -> None:
        if isinstance(batch_id, str) and not batch_id.isprintable():  # not even a database may be asked for it
            raise BatchNotFound(f"no batch {batch_id[:80]!r} in {self.url}: no batch is called so")
        if self._events.stream_version(batch_stream(batch_id)) == 0:
            other = str(batch_id) if isinstance(batch_id, int) else int(batch_id) if batch_id.isdecimal() else None
            hint = ""
            if other is not None and self._events.stream_version(batch_stream(other)):
                hint = f"; there is one with the id {other!r}"
            raise BatchNotFound(f"no batch {batch_id!r} in {self.url}{hint}")

    def payloads(self) -> PayloadStore:
        """Return the payload store of this log; the caller closes it. Raises LogNotFound."""
        return open_payloads(self._url, create=False)

    def config(self, before: int | None = None, *, serve: bool = True) -> tuple[int, dict[str, Any]]:
        """Return (position, config) with which the system was last started, passwords masked; (0, {}): it never was.

        `before` a position, or, where that is not known, the first one. Without `serve` only for a run: mode `serve`
        runs nothing that could be gone on with.
        """
        found: tuple[int, dict[str, Any]] = (0, {})
        for recorded in self.rare(["SystemConfigured"], descending=True):
            config = orjson.loads(recorded.data)["config"]
            if isinstance(explorer := config.get("explorer"), dict) and "places" in explorer:  # an earlier release's
                explorer["max_concurrency"] = explorer.pop("places")
            if serve or config.get("mode") != "serve":
                found = recorded.position, config
                if before is None or recorded.position < before:
                    break
        return found

    def tasks_of(self, event: ev.BatchSubmitted | ev.TasksAdded) -> list[dict[str, Any]]:
        """Return the tasks that this event handed in; [] where it holds none.

        Raises LogNotFound, PayloadNotFound, CorruptPayload where they are in a payload that can't be read.
        """
        if event.tasks is not None or event.tasks_digest is None:
            return event.tasks or []
        with closing(self.payloads()) as payloads:
            try:
                return list(orjson.loads(payloads.get(event.tasks_digest)))
            except (orjson.JSONDecodeError, TypeError) as e:
                raise CorruptPayload(f"payload {event.tasks_digest} holds no tasks: {e}") from e

    def handed_in(self, batch_id: BatchId) -> list[ev.BatchSubmitted | ev.TasksAdded]:
        """Return the events that handed in a batch's tasks, since it was last submitted."""
        handed: list[ev.BatchSubmitted | ev.TasksAdded] = []
        for recorded in self.read(stream=batch_stream(batch_id), types=["BatchSubmitted", "TasksAdded"]):
            if isinstance(recorded.event, ev.BatchSubmitted):
                handed = [recorded.event]
            elif isinstance(recorded.event, ev.TasksAdded):
                handed.append(recorded.event)
        return handed

    def task(self, batch_id: BatchId, number: int) -> dict[str, Any]:
        """Return a task as it was handed in with the batch's last submission; {} where the log does not hold it.

        Raises LogNotFound, PayloadNotFound, CorruptPayload as `tasks_of`.
        """
        for event in self.handed_in(batch_id):
            if number < len(event.repeat_times):
                tasks = self.tasks_of(event)
                return tasks[number] if number < len(tasks) and isinstance(tasks[number], dict) else {}
            number -= len(event.repeat_times)
        return {}
