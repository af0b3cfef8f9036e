"""What retention frees, on logs written by hand: never what somebody still needs, and all of it after a crash."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import finished, write
from tests.helpers.s3_server import BUCKET, S3Server
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payloads import PayloadStore, digest_of, open_payloads, settle_place
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify.log import verify_log
from trinity_es.testing import wait_until


def played(batch_id: BatchId, kind: Any, raw: str) -> tuple[list[ev.Event], dict[str, Any]]:
    """Events of a batch of one task that was played, and the batch's result."""
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=batch_id, batch_type=kind, repeat_times=[2], tasks=[{}]), finished(0, raw),
    ]
    state = fold(events)
    return events, batch_result(state)


def trained(batch_id: BatchId, raw: str, delivered: str, step: int | None) -> tuple[str, list[ev.Event]]:
    """A batch, and the step that it was used in."""
    events, result = played(batch_id, "train", raw)
    ref = ev.PayloadRef(digest=delivered, first=0, count=2)
    events += [ev.BatchFinalizing(), ev.BatchFinalized(result=result, experiences=[ref], selected=2)]
    return batch_stream(batch_id), events + ([] if step is None else [ev.BatchTrained(step=step)])


def collected(batch_id: BatchId, raw: str, taken: bool) -> tuple[str, list[ev.Event]]:
    """A batch of a scheduler, which has taken its results or has not."""
    events, result = played(batch_id, "collect", raw)
    end: list[ev.Event] = [ev.ResultsTaken(tasks=[0], request="a"), ev.BatchFinalized(result=result)]
    return batch_stream(batch_id), events + end * taken


class Place:
    """A log, its payloads, and retention over them as a coordinator would have it."""

    def __init__(self, folder: Path, payloads: str = "") -> None:
        """`payloads`: the place that the log records."""
        self.url = f"sqlite:///{folder / 'log.sqlite'}"
        self.path = folder / "log.sqlite"
        if payloads:
            EventLog.open(self.url, create=True, projectors=projectors()).close()
            settle_place(self.url, payloads)
        self.payloads: PayloadStore = open_payloads(self.url)
        self.log: EventLog | None = None
        self.posted = 0

    def put(self, text: str) -> str:
        return self.payloads.put(text.encode())

    def retention(self, keep: int, payloads: PayloadStore | None = None) -> Retention:
        self.log = EventLog.open(self.url, durability="process", projectors=projectors())
        live = LiveState(self.log, self.payloads)

        def post(call: Callable[[], None]) -> None:  # the loop and the writer at once
            call()
            turn = live.close_turn()
            if turn.writes:
                self.log.append(turn.writes, commit_id=f"free/{self.posted}")
            for then in turn.durable_calls:
                then()
            self.posted += 1

        return Retention(keep, live, payloads or self.payloads, post)

    def there(self, *texts: str) -> list[str]:
        return [t for t in texts if self.payloads.size(digest_of(t.encode())) is not None]

    def freed(self) -> list[BatchId]:
        with open_log(self.url) as log:
            return [b for r in log.read(types=["PayloadsFreed"]) for b in getattr(r.event, "batches", [])]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    if place.log is not None:
        place.log.close()


def test_a_payload_that_a_batch_still_refers_to_stays_whoever_else_was_freed(place: Place) -> None:
    own, shared, processed, late = (place.put(t) for t in ("own", "shared", "processed", "late"))
    outside = ev.ExperiencesProcessed(
        pipeline_metrics={}, experiences=[ev.PayloadRef(digest=processed, first=0, count=1)], selected=1, dropped=0
    )
    write(place.path, [
        trained(1, own, shared, 1), trained(2, processed, own, 2), trained(3, shared, shared, 3),
        trained(4, late, late, 4), ("experiences", [outside]),
    ])
    place.retention(2).wake()
    wait_until(lambda: place.freed() == [1, 2], "batches 1 and 2 to be freed")
    wait_until(lambda: place.there("own") == [], "what only they had to be gone")
    assert place.there("shared", "processed", "late") == ["shared", "processed", "late"]
    with open_log(place.url) as log:
        assert log.verify() == []
        [event] = [r.event for r in log.read(types=["PayloadsFreed"])]
        assert event == ev.PayloadsFreed(batches=[1, 2], payloads=1, bytes=3)


def test_payloads_in_s3_are_freed_and_equal_ones_of_another_log_stay(tmp_path: Path, s3: S3Server) -> None:
    bucket_url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    for name in "ab":
        (tmp_path / name).mkdir()
    place, other = Place(tmp_path / "a", bucket_url), Place(tmp_path / "b", bucket_url)
    texts = ["old", "new"]
    old, new = (place.put(t) for t in texts)
    other.put("old")
    write(place.path, [trained(1, old, old, 1), trained(2, new, new, 2)])
    place.retention(1).wake()
    wait_until(lambda: place.there(*texts) == ["new"], "the payload of batch 1 to be gone", 30)
    assert (place.freed(), other.there("old"), verify_log(place.url).problems) == ([1], ["old"], [])
    place.log.close()


def test_what_was_never_acknowledged_and_what_is_new_enough_stays(place: Place) -> None:
    texts = ["a", "b", "c", "d"]
    a, b, c, d = (place.put(t) for t in texts)
    write(place.path, [trained(1, a, a, 1), trained(2, b, b, None), trained(3, c, c, 2), trained(4, d, d, 2)])
    place.retention(1).wake()
    wait_until(lambda: place.freed() == [1], "batch 1 to be freed")
    wait_until(lambda: place.there(*texts) == ["b", "c", "d"], "its payload to be gone")
    place.retention(2).wake()
    wait_until(lambda: place.there(*texts) == ["b", "c", "d"], "nothing else")
    assert place.freed() == [1]


def test_what_a_scheduler_collected_goes_when_later_steps_are_acknowledged_and_the_rest_stays(place: Place) -> None:
    texts = ["a", "b", "c", "d", "e"]
    a, b, c, d, e = (place.put(t) for t in texts)
    write(place.path, [
        collected("old", a, taken=True), collected("open", b, taken=False), trained(1, c, c, 1), trained(2, d, d, 2),
        collected("new", e, taken=True),
    ])
    place.retention(1).wake()
    wait_until(lambda: place.freed() == ["old", 1], "the old ones to be freed")
    wait_until(lambda: place.there(*texts) == ["b", "d", "e"], "their payloads to be gone")


class Dying:
    """A store whose process ends when it is to delete."""

    def __init__(self, store: PayloadStore) -> None:
        self.store, self.asked = store, 0

    def size(self, digest: str) -> int | None:
        return self.store.size(digest)

    def delete(self, digest: str) -> None:
        self.asked += 1
        raise RuntimeError("killed")


def test_what_was_recorded_as_freed_and_not_deleted_is_deleted_by_the_next_coordinator(place: Place) -> None:
    a, b = place.put("a"), place.put("b")
    write(place.path, [trained(1, a, a, 1), trained(2, b, b, 2)])
    dying = Dying(place.payloads)
    place.retention(1, dying).wake()  # type: ignore[arg-type]
    wait_until(lambda: dying.asked, "the death")
    assert place.freed() == [1]
    assert place.there("a", "b") == ["a", "b"]
    with open_log(place.url) as log:
        assert log.verify() == []
    place.retention(1).wake()
    wait_until(lambda: place.there("a", "b") == ["b"], "the payload to be gone")
    assert place.freed() == [1]


def test_without_a_bound_nothing_is_freed(place: Place) -> None:
    a, b = place.put("a"), place.put("b")
    write(place.path, [trained(1, a, a, 1), trained(2, b, b, 2)])
    log = EventLog.open(place.url, projectors=projectors())
    Retention(None, LiveState(log, place.payloads), place.payloads, lambda call: call()).wake()
    log.close()
    assert place.there("a", "b") == ["a", "b"]
