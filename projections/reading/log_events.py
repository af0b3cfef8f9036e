"""Reads of a log's events: by stream, type, position or time, and of new events as they come."""

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
from trinity_es.events.values import BatchId, batch_stream, with_offset

__all__ = ["LogEvents"]


class LogEvents:
    """Reader of a log's events. As a context manager it closes the log."""

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
        """URL of the log, without a password."""
        return self._events.url

    def is_replaced(self) -> bool:
        """Return True if another file is now at the path of the open SQLite file. Reopen the log to read that one."""
        return self._events.is_replaced()

    def head(self) -> Head:
        return self._events.head()

    def streams(self, prefix: str = "") -> list[str]:
        return [name for name, _ in self._events.streams(prefix)]

    def events(self, batch_id: BatchId | None = None, after: int = 0) -> Iterator[Recorded]:
        """Yield the events after a position, of one batch or of all streams, in order. Raises BatchNotFound."""
        stream = None
        if batch_id is not None:
            stream = batch_stream(batch_id)
            self._require_batch(batch_id)
        return self._events.read(stream=stream, after=after)

    def read(
        self, *, stream: str | None = None, types: Sequence[str] | None = None, after: int = 0
    ) -> Iterator[Recorded]:
        """Yield the events after a position, of one stream or all and of these types or all, in order."""
        return self._events.read(stream=stream, types=types, after=after)

    def read_rare(
        self, types: Sequence[str] | None = None, *, after: int = 0, before: int | None = None,
        limit: int | None = None, descending: bool = False,
    ) -> Iterator[Recorded]:
        """Yield at most `limit` events of these rare types (all but `schema.BULK`), with `after` < position < `before`.

        An index finds them, so other events are not read. Raises ValueError for a bulk type.
        """
        return self._events.read_rare(types, after=after, before=before, limit=limit, descending=descending)

    def last(self, stream: str, type_name: str) -> Recorded | None:
        return self._events.last(stream, type_name)

    def at(self, position: int) -> Recorded | None:
        if position <= 0:
            return None
        recorded = next(self._events.read(after=position - 1, limit=1), None)
        return recorded if recorded is not None and recorded.position == position else None

    def position_of(self, at: int | float | datetime | None) -> int | None:
        """Return the position of the last event recorded by a time (0: none); return an int or None unchanged.

        A float is unix seconds. Raises DataError for a local time that is ambiguous or was skipped.
        """
        if isinstance(at, datetime):
            at = with_offset(at).timestamp()
        return self._events.position_at(at) if isinstance(at, float) else at

    def clock_note(self, at: datetime) -> str:
        """Return a note for the user if the clock was set around this time, which makes it ambiguous; else ""."""
        for step in self._events.clock_steps():
            assert isinstance(step.event, ev.ClockStepped)
            first, last = sorted((step.recorded_at, step.recorded_at - step.event.seconds))
            if first <= at.timestamp() <= last:
                return (f"the clock of this log was set by {step.event.seconds:+.0f} s at position {step.position}: "
                        "this moment may have occurred twice, or not at all; give a position to be exact")
        return ""

    def follow(
        self, after: int = 0, *, stop: Callable[[], bool], interval: float = 0.2,
        trouble: Callable[[LogUnavailable | None], None] | None = None,
    ) -> Iterator[Recorded]:
        """Yield the events after a position and new ones as they come, until `stop()` is True. Polls the log.

        If `trouble` is given, wait without a limit while the database can't be reached or the file is missing. Call
        `trouble` with the error at each try, and with None when the log is back. No event is missed or repeated. Raises
        LogRewound if the log then lacks the last yielded event, LogReplaced if another file took its place.
        """
        position, newest, is_away = after, None, False
        while True:
            is_last = stop()  # before the read, so that the last read yields all events from before the stop
            try:
                if is_away and newest is not None:
                    reread = self.at(position)
                    if reread is None or reread.hash != newest.hash:
                        raise LogRewound(
                            f"{self.url} no longer has the event read at position {position}: it was restored from an "
                            "older copy, or its server lost commits. Read the log again from its start")
                for recorded in self._events.read(after=position):
                    position, newest = recorded.position, recorded
                    yield recorded
                if is_away and trouble is not None:
                    trouble(None)
                is_away = False
            except LogUnavailable as e:
                if trouble is None or not (e.details.get("passing") or e.details.get("missing")):
                    raise
                trouble(e)
                is_away = True
            if is_last:
                return
            time.sleep(interval)

    def _require_batch(self, batch_id: BatchId) -> None:
        """Raise BatchNotFound if no batch has this id."""
        if isinstance(batch_id, str) and not batch_id.isprintable():  # a database may refuse such a parameter
            raise BatchNotFound(f"no batch {batch_id[:80]!r} in {self.url}: ids have only printable characters")
        if self._events.stream_version(batch_stream(batch_id)) == 0:
            other_id: BatchId | None = None  # 12 for "12", and the other way round
            if isinstance(batch_id, int):
                other_id = str(batch_id)
            elif batch_id.isdecimal() and len(batch_id) < 19:  # as an int it has at most 64 bits
                other_id = int(batch_id)
            exists = other_id is not None and self._events.stream_version(batch_stream(other_id))
            hint = f"; there is one with the id {other_id!r}" if exists else ""
            raise BatchNotFound(f"no batch {batch_id!r} in {self.url}{hint}")

    def payloads(self) -> PayloadStore:
        """Open the payload store of this log; the caller closes it. Raises LogNotFound."""
        return open_payloads(self._url, create=False)

    def config(self, before: int | None = None, *, serve: bool = True) -> tuple[int, dict[str, Any]]:
        """Return (position, config) of the system's last start, with secrets masked; (0, {}) if it never started.

        With `before`, return the last start before that position or, if there is none, the first start. With
        `serve=False`, skip starts in mode `serve`, which leave no run to resume.
        """
        start: tuple[int, dict[str, Any]] = (0, {})
        for recorded in self.read_rare(["SystemConfigured"], descending=True):
            config = orjson.loads(recorded.data)["config"]
            if isinstance(explorer := config.get("explorer"), dict) and "places" in explorer:  # from an earlier release
                explorer["max_concurrency"] = explorer.pop("places")
            if serve or config.get("mode") != "serve":
                start = recorded.position, config
                if before is None or recorded.position < before:
                    break
        return start

    def tasks_of(self, event: ev.BatchSubmitted | ev.TasksAdded) -> list[dict[str, Any]]:
        """Return the tasks that this event submitted. Raises LogNotFound, PayloadNotFound, CorruptPayload."""
        if event.tasks is not None or event.tasks_digest is None:
            return event.tasks or []
        with closing(self.payloads()) as payloads:
            try:
                return list(orjson.loads(payloads.get(event.tasks_digest)))
            except (orjson.JSONDecodeError, TypeError) as e:
                raise CorruptPayload(f"payload {event.tasks_digest} holds no tasks: {e}") from e

    def submission_events(self, batch_id: BatchId) -> list[ev.BatchSubmitted | ev.TasksAdded]:
        """Return the batch's last BatchSubmitted and the TasksAdded after it."""
        events: list[ev.BatchSubmitted | ev.TasksAdded] = []
        for recorded in self.read(stream=batch_stream(batch_id), types=["BatchSubmitted", "TasksAdded"]):
            match recorded.event:
                case ev.BatchSubmitted() as event:
                    events = [event]
                case ev.TasksAdded() as event:
                    events.append(event)
        return events

    def task(self, batch_id: BatchId, number: int) -> dict[str, Any]:
        """Return a task of the batch's last submission, or {}. Raises LogNotFound, PayloadNotFound, CorruptPayload."""
        for event in self.submission_events(batch_id):
            if number < len(event.repeat_times):
                tasks = self.tasks_of(event)
                return tasks[number] if number < len(tasks) and isinstance(tasks[number], dict) else {}
            number -= len(event.repeat_times)  # now relative to the next event
        return {}
