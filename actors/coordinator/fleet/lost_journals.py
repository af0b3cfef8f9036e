"""Journals of lost attempts, read when a runner is lost, and of cut ones; the next attempts go on from them.

A unit that was lost waits until a thread has read the journal of its runner's life. What it has is stored as a payload,
and `AttemptKept` names it. So the payload never changes, whatever a runner that was only frozen writes later. A journal
that can't be read, or has nothing, costs the beginning of the answers and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.journal import frames, kept_runs, run_of, without_open_steps
from trinity_es.events.store.journal_store import Journals, Life
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState

__all__ = ["LostJournals"]

_GAP = "a gap in the journal"
"""Reason why tokens can't go on: records before them were damaged, or dropped by `explorer.progress.max_bytes`."""
_LOG = logging.getLogger("trinity_es.journal")


@dataclass(frozen=True, slots=True)
class _LostUnit:
    """A pending unit whose last attempt was lost."""

    batch_id: BatchId
    submission: str
    unit: ev.Unit
    earlier: str
    """Digest of the records that earlier attempts left; empty without any."""


class LostJournals:
    """Reader of the journals of lost attempts, for one coordinator."""

    def __init__(
        self, live: LiveState, opens: Callable[[], Journals] | None, living: Callable[[], Collection[Life]],
    ) -> None:
        """Take `opens`, None if runners write no journals, and `living`, the lives that may still write theirs."""
        self._live, self._opens, self._living = live, opens, living
        self._store: Journals | None = None
        self._asked: set[_LostUnit] = set()
        self._empty: set[_LostUnit] = set()
        """Units of which the journal has nothing."""
        self._cutting: set[str] = set()
        """Submissions whose open units are being read."""

    def forget(self) -> None:
        """Read again whatever is lost, because what was recorded may not be in the log."""
        self._asked, self._empty, self._cutting = set(), set(), set()

    def holds(self, batch: BatchState, key: tuple[int, int]) -> bool:
        """Return True while a lost unit's journal is not read."""
        return self._opens is not None and _lost_unit(batch, key) not in self._empty

    def begin(self, alive: Mapping[str, int]) -> None:
        """Read what was lost before this coordinator, and delete journals that nothing open needs.

        `alive` has the incarnation of each living runner.
        """
        if self._opens is None:
            return
        self.look(self._live.batches)
        needed = {*alive.items()}
        for batch in self._live.batches.values():
            needed |= {*batch.lost.values(), *((f.runner, f.incarnation) for f in batch.flights.values())}
        self._live.then(lambda: self._live.ask(lambda: self._sweep(needed), lambda _: None))

    def look(self, changed: Iterable[BatchId]) -> None:
        """Have the journals of the units read that were lost in this turn."""
        if self._opens is None:
            return
        by_life: dict[Life, list[_LostUnit]] = {}
        for batch in (self._live.batches[batch_id] for batch_id in changed if batch_id in self._live.batches):
            for key, life in batch.lost.items():
                if (lost := _lost_unit(batch, key)) not in self._asked:
                    self._asked.add(lost)
                    by_life.setdefault(life, []).append(lost)
        for life, units in by_life.items():
            self._live.then(lambda life=life, units=units: self._read(life, units))  # type: ignore[misc]  # binds both

    def cut(self, batch: BatchState, then: Callable[[list[ev.AttemptKept]], None]) -> None:
        """Store what the open units of a batch have; call `then` with the events that name it, to be recorded."""
        if batch.submission in self._cutting:
            return
        self._cutting.add(batch.submission)
        by_life, batch_id, submission = _open_units(batch), batch.batch_id, batch.submission

        def done(kept: list[ev.AttemptKept] | Exception) -> None:
            self._cutting.discard(submission)
            if isinstance(kept, Exception):
                _LOG.warning("journals can't be read, so the cut tasks of batch %r begin again: %s", batch_id, kept)
                kept = []
            batch = self._live.batches.get(batch_id)
            if batch is not None and batch.submission == submission:
                then([event for event in kept if _is_open(batch, event)])

        def read() -> list[ev.AttemptKept]:
            events = [event for life, units in by_life.items() for event in self._stored(life, units)]
            return [event for event in events if event is not None]

        self._live.ask(read, done)

    def _read(self, life: Life, units: list[_LostUnit]) -> None:
        def done(kept: list[ev.AttemptKept | None] | Exception) -> None:
            if isinstance(kept, Exception):
                _LOG.warning("the journal of %s #%d can't be read, so its runs begin again: %s", *life, kept)
                kept = [None] * len(units)
            for lost, event in zip(units, kept, strict=True):
                self._record(lost, event)
            if life not in self._living():
                self._live.then(lambda: self._live.ask(lambda: self._journals().drop(life), lambda _: None))

        self._live.ask(lambda: self._stored(life, units), done)

    def _record(self, lost: _LostUnit, event: ev.AttemptKept | None) -> None:
        batch = self._live.batches.get(lost.batch_id)
        key = lost.unit.task, lost.unit.run_id_base
        if batch is None or key not in batch.lost or _lost_unit(batch, key) != lost:
            return
        if event is None:
            self._empty.add(lost)
        else:
            self._live.record_batch(lost.batch_id, [event])

    # --- in a thread ------------------------------------------------------------------------------------------------
    def _journals(self) -> Journals:
        if self._store is None:
            assert self._opens is not None
            self._store = self._opens()
        return self._store

    def _stored(self, life: Life, units: list[_LostUnit]) -> list[ev.AttemptKept | None]:
        """Store the records that the journal of a life has of each unit; None for a unit without records."""
        records: dict[tuple[BatchId, str, int, int], list[bytes]] = {}
        for segment in self._journals().read(life):
            for head, _, frame in frames(segment):
                of_run = records.setdefault(run_of(head), [])
                if "attempt" in head:  # what came before is in `earlier`, or is of an attempt that failed
                    of_run.clear()
                else:
                    of_run.append(frame)
        return [self._kept(life, lost, records) for lost in units]

    def _kept(
        self, life: Life, lost: _LostUnit, records: dict[tuple[BatchId, str, int, int], list[bytes]]
    ) -> ev.AttemptKept | None:
        unit, earlier = lost.unit, b""
        runs = range(unit.run_id_base, unit.run_id_base + unit.runs)
        own = [f for run in runs for f in records.get((lost.batch_id, lost.submission, unit.task, run), ())]
        if lost.earlier:
            try:
                earlier = self._live.payloads.get(lost.earlier)
            except TrinityError as e:
                _LOG.warning("what earlier attempts had is lost: %s", e)
        data = earlier + b"".join(own)
        if not data:
            return None
        kept = kept_runs([data])
        opened = {number: run.open_steps() for number, run in kept.items() if number in runs}
        for number, names in opened.items():
            for name in names:
                _LOG.warning("run %s/%s/%s starts over: step %r began and has no end, and may have had its effect",
                             lost.batch_id, unit.task, number, name)
        if any(opened.values()):
            data = without_open_steps(data)
            kept = kept_runs([data])
        own_runs = [run for number, run in kept.items() if number in runs]
        answers = [answer for run in own_runs for of_call in run.calls.values() for answer in of_call.values()]
        not_kept: dict[str, int] = {}
        for answer in answers:
            for reason, tokens in ((answer.refusal, len(answer.tokens)), (_GAP, answer.left_out)):
                if reason and tokens and not answer.finish:
                    not_kept[reason] = not_kept.get(reason, 0) + tokens
        usable = [answer for answer in answers if not answer.refusal and (answer.tokens or answer.finish)]
        limits = [answer.max_tokens for answer in usable if not answer.finish]
        return ev.AttemptKept(
            task=unit.task, run_id_base=unit.run_id_base, runs=unit.runs, attempt=unit.attempt - 1,
            runner=life[0], incarnation=life[1], payload=self._live.payloads.put(data),
            calls=sum(bool(a.finish) for a in usable), open_calls=sum(not a.finish for a in usable),
            tokens=sum(len(a.tokens) for a in usable), max_tokens=sum(limits) if all(limits) else 0,
            steps=sum(s.done for r in own_runs for s in r.steps.values()),
            seconds=max((run.seconds for run in own_runs), default=0.0), not_kept=not_kept,
            possibly_delivered=sorted({name for names in opened.values() for name in names}),
        )

    def _sweep(self, needed: set[Life]) -> None:
        for life in self._journals().lives():
            if life not in needed:
                self._journals().drop(life)


def _lost_unit(batch: BatchState, key: tuple[int, int]) -> _LostUnit:
    kept = batch.kept.get(key)
    return _LostUnit(batch.batch_id, batch.submission, batch.pending[key], "" if kept is None else kept.payload)


def _open_units(batch: BatchState) -> dict[Life, list[_LostUnit]]:
    """Return the units of a batch that run, and those that were lost and are not read, by the life that had them."""
    by_life: dict[Life, list[_LostUnit]] = {}
    for flight in batch.flights.values():
        unit = replace(flight.unit, attempt=flight.unit.attempt + 1)
        earlier = "" if flight.kept is None else flight.kept.payload
        lost = _LostUnit(batch.batch_id, batch.submission, unit, earlier)
        by_life.setdefault((flight.runner, flight.incarnation), []).append(lost)
    for key, life in batch.lost.items():
        by_life.setdefault(life, []).append(_lost_unit(batch, key))
    return by_life


def _is_open(batch: BatchState, event: ev.AttemptKept) -> bool:
    """Return True if the attempt did not end while its journal was read."""
    key = event.task, event.run_id_base
    flight = batch.flights.get(key)
    return key in batch.lost or (flight is not None and flight.unit.attempt == event.attempt)
