"""The part of `eventsourcing_library` that runs in that library's environment, without trinity_es.

Each line of its input is a command, a JSON object, and gets a line as its answer. The first line names a file with the
events of a run; each line there has the stream, the type and the data of an event. The library is used as its
documentation shows: an aggregate for each stream, an event class with the type and the data, `Application.save` of all
aggregates of a group (one transaction), `repository.get` to replay. Its defaults are unchanged: JSON, no snapshots, no
cache, on SQLite WAL with `synchronous=FULL`, on PostgreSQL `synchronous_commit=on`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

from eventsourcing.application import Application  # type: ignore[import-not-found]  # of the other environment
from eventsourcing.domain import Aggregate, AggregateEvent, event  # type: ignore[import-not-found]  # as above


def id_of(name: str) -> UUID:
    return uuid5(NAMESPACE_URL, name)


class Stream(Aggregate):  # type: ignore[misc]  # as above
    """A stream that keeps only its last event and the number of events by type."""

    def __init__(self, name: str, kind: str, data: dict[str, Any]) -> None:
        self.name, self.last, self.counts = name, data, {kind: 1}

    @staticmethod
    def create_id(name: str, kind: str, data: dict[str, Any]) -> UUID:
        return id_of(name)

    @event("Happened")  # type: ignore[untyped-decorator]  # as above
    def happen(self, kind: str, data: dict[str, Any]) -> None:
        self.last = data
        self.counts[kind] = self.counts.get(kind, 0) + 1


class Child:
    def __init__(self, file: str) -> None:
        with open(file, encoding="utf-8") as lines:
            self.run: list[tuple[str, str, dict[str, Any]]] = [tuple(json.loads(line)) for line in lines]
        self.environment: dict[str, str] = {}

    def append(self, environment: dict[str, str], size: int, events: int) -> dict[str, float]:
        """Write the first `events` events into a new store, `size` per transaction, and return the seconds."""
        self.environment = environment
        application, streams = Application(env=environment), dict[str, Stream]()
        started = time.perf_counter()
        for first in range(0, events, size):
            changed = {}
            for name, kind, data in self.run[first : min(first + size, events)]:
                if (stream := streams.get(name)) is None:
                    stream = streams[name] = Stream(name=name, kind=kind, data=data)
                else:
                    stream.happen(kind=kind, data=data)
                changed[name] = stream
            application.save(*changed.values())
        seconds = time.perf_counter() - started
        application.close()
        return {"seconds": seconds}

    def replay(self, events: int) -> dict[str, float]:
        """Rebuild every batch's aggregate from its events, and return the seconds and the number of events."""
        names = list(dict.fromkeys(name for name, _, _ in self.run[:events] if name.startswith("batch/")))
        with closing(Application(env=self.environment)) as application:
            started = time.perf_counter()
            folded = sum(application.repository.get(id_of(name)).version for name in names)
            return {"seconds": time.perf_counter() - started, "events": folded}

    def check(self, events: int) -> dict[str, int]:
        """Return the number of events in streams whose stored types and data are all right."""
        streams: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for name, kind, data in self.run[:events]:
            streams.setdefault(name, []).append((kind, data))
        with closing(Application(env=self.environment)) as application:
            stored = {name: [(one.kind, one.data) for one in application.events.get(id_of(name))] for name in streams}
        return {"right": sum(len(wanted) for name, wanted in streams.items() if stored[name] == wanted)}


def main() -> int:
    assert issubclass(Stream.Happened, AggregateEvent)
    child = Child(json.loads(input())["file"])
    print(json.dumps({"ready": len(child.run)}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(child, order.pop("do"))(**order)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
