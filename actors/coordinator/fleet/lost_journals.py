"""Journals of attempts that ended early, since their runner was lost or their task was cut; the next attempts go on.

Each process of a runner writes the tokens that its engine generates into a journal. When the runner is lost, its units
wait until a thread has read the journal and stored their records as payloads; an event `AttemptKept` refers to each. A
payload never changes, even if the runner was only frozen and writes on. If a journal can't be read or is empty, the
answers are generated from their beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.journal import frames, kept_runs, run_of, without_open_steps
from trinity_es.events.store.journal_store import Journals, Life
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState

__all__ = ["LostJournals"]

_GAP = "a gap in the journal"
"""Reason why tokens can't be used: records before them are damaged, or were dropped (`explorer.progress.max_bytes`)."""
_LOG = logging.getLogger("trinity_es.journal")


@dataclass(frozen=True, slots=True)
class _LostUnit:
    """Pending unit whose last attempt was lost."""

    batch_id: BatchId
    submission: str
    unit: ev.Unit
    earlier_payload: str
    """Digest of the payload with the records of earlier attempts; "" without any."""


class LostJournals:
    def __init__(
        self, live: LiveState, open_store: Callable[[], Journals] | None, living: Callable[[], Collection[Life]],
    ) -> None:
        """`open_store` opens the journals; None if runners write none. `living` returns the runners' live processes."""
        self._live, self._open_store, self._living = live, open_store, living
        self._store: Journals | None = None
        self._requested_units: set[_LostUnit] = set()
        """Lost units whose journal a thread reads or has read."""
        self._empty_units: set[_LostUnit] = set()
        """Lost units without records in the journal."""
        self._cut_submissions: set[str] = set()
        """Submissions of batches whose cut units are being read from journals."""

    def forget(self) -> None:
        """Drop all state, so that lost units are read again. Their events may not be in the log."""
        self._requested_units, self._empty_units, self._cut_submissions = set(), set(), set()

    def is_unread(self, batch: BatchState, key: tuple[int, int]) -> bool:
        """Return True while a lost unit waits for its journal to be read."""
        return self._open_store is not None and _lost_unit(batch, key) not in self._empty_units

    def begin(self, incarnation_by_runner: Mapping[str, int]) -> None:
        """Read the journals of units that were lost under an earlier coordinator, and delete journals that no open
        batch needs. `incarnation_by_runner` has the living runners."""
        if self._open_store is None:
            return
        self.read_lost(self._live.batches)
        needed_lives = {*incarnation_by_runner.items()}
        for batch in self._live.batches.values():
            needed_lives |= {*batch.lost.values(), *((f.runner, f.incarnation) for f in batch.flights.values())}

        def delete() -> None:
            for life in self._journals().lives():
                if life not in needed_lives:
                    self._journals().drop(life)

        self._live.when_durable(lambda: self._live.run_in_thread(delete, lambda _: None))

    def read_lost(self, batch_ids: Iterable[BatchId]) -> None:
        """Have threads read the journals of these batches' lost units, unless that was requested before."""
        if self._open_store is None:
            return
        units_by_life: dict[Life, list[_LostUnit]] = {}
        for batch in (self._live.batches[batch_id] for batch_id in batch_ids if batch_id in self._live.batches):
            for key, life in batch.lost.items():
                lost = _lost_unit(batch, key)
                if lost not in self._requested_units:
                    self._requested_units.add(lost)
                    units_by_life.setdefault(life, []).append(lost)
        for life, units in units_by_life.items():
            self._live.when_durable(partial(self._read_journal, life, units))

    def store_cut_units(self, batch: BatchState, record: Callable[[list[ev.AttemptKept]], None]) -> None:
        """For a batch that cuts its open tasks, store the journals' records of its open units as payloads. Then call
        `record` with the events that name them, unless the batch ended or was submitted again meanwhile."""
        if batch.submission in self._cut_submissions:
            return
        batch_id, submission = batch.batch_id, batch.submission
        self._cut_submissions.add(submission)
        units_by_life = _open_units(batch)

        def done(events: list[ev.AttemptKept] | Exception) -> None:
            self._cut_submissions.discard(submission)
            if isinstance(events, Exception):
                _LOG.warning("journals can't be read, so the cut tasks of batch %r begin again: %s", batch_id, events)
                events = []
            batch = self._live.batches.get(batch_id)
            if batch is not None and batch.submission == submission:
                record([event for event in events if _is_open(batch, event)])

        def read() -> list[ev.AttemptKept]:
            events = [event for life, units in units_by_life.items() for event in self._store_records(life, units)]
            return [event for event in events if event is not None]

        self._live.run_in_thread(read, done)

    def _read_journal(self, life: Life, units: list[_LostUnit]) -> None:
        """Have a thread store the records of these units from a journal, and record the events that name them. Then
        delete the journal if its process has ended. If it can't be read, the runs begin again."""

        def done(events: list[ev.AttemptKept | None] | Exception) -> None:
            if isinstance(events, Exception):
                _LOG.warning("the journal of %s #%d can't be read, so its runs begin again: %s", *life, events)
                events = [None] * len(units)
            for lost, event in zip(units, events, strict=True):
                self._record_kept(lost, event)
            if life not in self._living():
                delete = lambda: self._journals().drop(life)  # noqa: E731
                self._live.when_durable(lambda: self._live.run_in_thread(delete, lambda _: None))

        self._live.run_in_thread(lambda: self._store_records(life, units), done)

    def _record_kept(self, lost: _LostUnit, event: ev.AttemptKept | None) -> None:
        """Record the event of a lost unit's kept records (None: it has none), unless the unit changed meanwhile."""
        batch = self._live.batches.get(lost.batch_id)
        key = lost.unit.task, lost.unit.run_id_base
        if batch is None or key not in batch.lost or _lost_unit(batch, key) != lost:
            return
        if event is None:
            self._empty_units.add(lost)
        else:
            self._live.record_batch(lost.batch_id, [event])

    # --- in a thread ------------------------------------------------------------------------------------------------
    def _journals(self) -> Journals:
        if self._store is None:
            assert self._open_store is not None
            self._store = self._open_store()
        return self._store

    def _store_records(self, life: Life, units: list[_LostUnit]) -> list[ev.AttemptKept | None]:
        """Store each unit's records in a journal as a payload. Returns the events; None for a unit without records."""
        records: dict[tuple[BatchId, str, int, int], list[bytes]] = {}
        for segment in self._journals().read(life):
            for head, _, frame in frames(segment):
                run_records = records.setdefault(run_of(head), [])
                if "attempt" in head:  # what came before is in `earlier`, or is of an attempt that failed
                    run_records.clear()
                else:
                    run_records.append(frame)
        return [self._store_unit(life, lost, records) for lost in units]

    def _store_unit(
        self, life: Life, lost: _LostUnit, records: dict[tuple[BatchId, str, int, int], list[bytes]]
    ) -> ev.AttemptKept | None:
        """Store a unit's records, after those of its earlier attempts, and return the event; None without records."""
        unit, earlier_data = lost.unit, b""
        run_ids = range(unit.run_id_base, unit.run_id_base + unit.runs)
        own_records = [f for run in run_ids for f in records.get((lost.batch_id, lost.submission, unit.task, run), ())]
        if lost.earlier_payload:
            try:
                earlier_data = self._live.payloads.get(lost.earlier_payload)
            except TrinityError as e:
                _LOG.warning("the records of earlier attempts are lost: %s", e)
        data = earlier_data + b"".join(own_records)
        if not data:
            return None
        runs = kept_runs([data])
        open_steps = {run_id: run.open_steps() for run_id, run in runs.items() if run_id in run_ids}
        for run_id, names in open_steps.items():
            for name in names:
                _LOG.warning("run %s/%s/%s starts over: step %r began and has no end, and may have had its effect",
                             lost.batch_id, unit.task, run_id, name)
        if any(open_steps.values()):
            data = without_open_steps(data)
            runs = kept_runs([data])
        own_runs = [run for run_id, run in runs.items() if run_id in run_ids]
        answers = [answer for run in own_runs for call in run.calls.values() for answer in call.values()]
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
            possibly_delivered=sorted({name for names in open_steps.values() for name in names}),
        )


def _lost_unit(batch: BatchState, key: tuple[int, int]) -> _LostUnit:
    """Return the pending unit with this key (task, first run), with the digest of its earlier attempts' records."""
    kept = batch.kept.get(key)
    return _LostUnit(batch.batch_id, batch.submission, batch.pending[key], "" if kept is None else kept.payload)


def _open_units(batch: BatchState) -> dict[Life, list[_LostUnit]]:
    """Return the units of a batch that run or were lost, by the runner and incarnation that has or had them."""
    units_by_life: dict[Life, list[_LostUnit]] = {}
    for flight in batch.flights.values():
        next_attempt = replace(flight.unit, attempt=flight.unit.attempt + 1)
        earlier_payload = "" if flight.kept is None else flight.kept.payload
        lost = _LostUnit(batch.batch_id, batch.submission, next_attempt, earlier_payload)
        units_by_life.setdefault((flight.runner, flight.incarnation), []).append(lost)
    for key, life in batch.lost.items():
        units_by_life.setdefault(life, []).append(_lost_unit(batch, key))
    return units_by_life


def _is_open(batch: BatchState, event: ev.AttemptKept) -> bool:
    """Return True if the attempt did not end while its journal was read."""
    key = event.task, event.run_id_base
    flight = batch.flights.get(key)
    return key in batch.lost or (flight is not None and flight.unit.attempt == event.attempt)
