"""Check of a log's payloads: each matches its digest, and every payload that an event needs exists.

The needed digests are in a temporary database. Needed and stored digests are read in the same order, so memory does not
hold either list.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import CorruptPayload, LogNotFound, PayloadNotFound
from trinity_es.events.store.checks.verify import Problems
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.store.payloads.payload_store import is_inline
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.freed_payloads import EXPERIENCES, experience_digests, freed_positions

__all__ = ["Needs", "Payloads"]

MOST_NAMED = 5
"""Maximum number of items that a note names. Others are only counted."""


class Needs:
    """Payloads that the events so far need, and the owner of each in words. Batches may free theirs later."""

    def __init__(self, scratch: sqlite3.Connection) -> None:
        self._scratch = scratch
        self._submitted: dict[str, int] = {}  # batch stream -> position of the last submission
        self.last_position = 0
        """Position of the last noted event."""
        columns = "digest TEXT, owner TEXT, stream TEXT, position INTEGER, task INTEGER"
        scratch.execute(f"CREATE TEMP TABLE needed ({columns})")
        self._open: dict[str, BatchId] = {}  # stream -> id of each open batch
        scratch.execute("CREATE TEMP TABLE freed (stream TEXT PRIMARY KEY, position INTEGER) WITHOUT ROWID")

    def note_events(self, recorded: Iterable[Recorded]) -> None:
        """Add the payloads that these events need. Remove those of tasks that were reopened."""
        rows: list[tuple[str, str, str | None, int, int | None]] = []
        for item in recorded:
            if isinstance(item.event, ev.TaskReopened):  # the task's earlier payloads are no longer needed
                self._insert(rows)
                rows = []
                task = item.stream, item.event.task
                self._scratch.execute("DELETE FROM needed WHERE stream = ? AND task = ?", task)
            rows += ((*row, getattr(item.event, "task", None)) for row in self._needed_by(item))
            self.last_position = item.position
        self._insert(rows)

    def _insert(self, rows: Sequence[tuple[str, str, str | None, int, int | None]]) -> None:
        """Add rows (digest, owner, stream, position, task) to the needed payloads, except for inline payloads."""
        stored = [row for row in rows if not is_inline(row[0])]
        self._scratch.executemany("INSERT INTO needed VALUES (?, ?, ?, ?, ?)", stored)

    def redo_advice(self, digest: str) -> str:
        """Return advice to generate a lost payload again, as the end of a sentence; "" if that is impossible."""
        rows = self._scratch.execute(
            "SELECT DISTINCT stream, task, position FROM needed WHERE digest = ? AND task IS NOT NULL "
            "ORDER BY stream, task", (digest,),
        )
        tasks_by_batch: dict[BatchId, list[str]] = {}
        for stream, task, submission_position in rows:  # tasks of an earlier submission can't be run again
            if stream in self._open and submission_position == self._submitted[stream]:
                tasks_by_batch.setdefault(self._open[stream], []).append(str(task))
        commands = [f"`trinity-es redo {batch_id} {' '.join(tasks)}`" for batch_id, tasks in tasks_by_batch.items()]
        return f"; run its tasks again with {' and '.join(commands)}" if commands else ""

    def _needed_by(self, item: Recorded) -> Iterator[tuple[str, str, str | None, int]]:
        """Yield (digest, owner, stream, position) of each payload that an event needs.

        `owner`: text that names what needs it. If the payload may be freed with its batch, `stream` is the batch's and
        `position` that of its submission; otherwise `stream` is None and `position` the event's. Also note submissions,
        ends and frees of batches.
        """
        event, stream = item.event, item.stream
        owner = stream.replace("/", " ", 1)
        if isinstance(event, ev.BatchSubmitted):
            self._submitted[stream], self._open[stream] = item.position, event.batch_id
        elif isinstance(event, ev.BatchFinalized | ev.BatchAborted):
            self._open.pop(stream, None)
        match event:
            case ev.BatchSubmitted() | ev.TasksAdded():
                if event.tasks_digest is not None:
                    yield event.tasks_digest, f"{owner} (its tasks)", None, item.position
            case ev.RunsFinished() | ev.AttemptKept() | ev.BatchFinalized():
                submission_position = self._submitted.get(stream, 0)
                yield from ((digest, owner, stream, submission_position) for digest in experience_digests([item]))
            case ev.ExperiencesProcessed():
                owner = f"position {item.position} (experiences handed in)"
                yield from ((digest, owner, None, item.position) for digest in experience_digests([item]))
            case ev.AnswersRecorded():
                for answer in event.answers:
                    if answer.payload is not None:
                        yield answer.payload.digest, f"answer {answer.message}", None, item.position
            case ev.PayloadsFreed():
                self.free({batch_stream(batch_id): item.position for batch_id in event.batches})

    def free(self, freed: Mapping[str, int]) -> None:
        """Record batches whose payloads were freed, as {batch stream: position of the PayloadsFreed}."""
        self._scratch.executemany("INSERT OR REPLACE INTO freed VALUES (?, ?)", list(freed.items()))

    def remaining(self) -> Iterator[tuple[str, str]]:
        """Remove the payloads of freed batches. Return (digest, owner as text) of each needed payload, by digest."""
        self._scratch.execute(
            "DELETE FROM needed WHERE position < (SELECT position FROM freed WHERE freed.stream = needed.stream)"
        )
        return iter(self._scratch.execute("SELECT digest, min(owner) FROM needed GROUP BY digest ORDER BY digest"))

    def __len__(self) -> int:
        (count,) = self._scratch.execute("SELECT count(DISTINCT digest) FROM needed").fetchone()
        return int(count)


class Payloads:
    """Comparison of the payloads in a store with the needed payloads, in one pass over both."""

    def __init__(self, log: EventLog, url: str, needs: Needs) -> None:
        self._log, self._url, self._needs = log, url, needs
        self.problems, self.notes = Problems(), list[str]()
        self.read_count = 0

    def check(self, progress: Callable[[int, int], None] | None) -> None:
        """Read all payloads, and fill `problems` and `notes`. `progress(done, total)` counts payloads."""
        needed = self._needs.remaining()
        try:
            store = open_payloads(self._url, create=False)
        except LogNotFound as e:
            if (first := next(needed, None)) is not None:
                self.problems.add(f"{e.message}: {len(self._needs)} payloads are needed, among them {first[0]} by "
                                  f"{first[1]}")
        else:
            with closing(store):
                self._compare(store, needed, progress)

    def _compare(
        self, store: PayloadStore, needed: Iterator[tuple[str, str]], progress: Callable[[int, int], None] | None
    ) -> None:
        """Merge the stored and the needed digests, both in order, check each payload, and report differences."""
        needed_count = len(self._needs)
        missing_payloads: list[tuple[str, str]] = []
        unneeded_digests: list[str] = []
        next_needed = next(needed, None)
        for digest, error in store.check_all():
            while next_needed is not None and next_needed[0] < digest:
                missing_payloads.append(next_needed)
                next_needed = next(needed, None)
            self.read_count += 1
            if next_needed is None or next_needed[0] != digest:
                unneeded_digests.append(digest)
                owner = ""
            else:
                if isinstance(error, PayloadNotFound):
                    missing_payloads.append(next_needed)
                owner = next_needed[1]
                next_needed = next(needed, None)
            if isinstance(error, CorruptPayload):
                advice = self._needs.redo_advice(digest)
                self.problems.add(f"{owner}: {error.message}{advice}" if owner else error.message)
            if progress and self.read_count % 100 == 0:
                progress(self.read_count, max(self.read_count, needed_count))
        missing_payloads += [*([] if next_needed is None else [next_needed]), *needed]
        for digest, owner in self._still_needed(missing_payloads):
            self.problems.add(f"{owner}: payload {digest} is missing{self._needs.redo_advice(digest)}")
        if progress:
            progress(self.read_count, self.read_count)
        self._add_note(unneeded_digests, "payloads are named by no event: their runner ended before its result was "
                       "recorded, or the result is not recorded yet")
        self._add_note(store.strays(), "files in the payload store are not payloads")

    def _add_note(self, names: Sequence[str], text: str) -> None:
        """Add a note with the number of these names and the first few, unless there are none."""
        if names:
            more = ", ..." if len(names) > MOST_NAMED else ""
            self.notes.append(f"{len(names)} {text}: {', '.join(names[:MOST_NAMED])}{more}")

    def _still_needed(self, missing_payloads: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the missing payloads that were not freed since the events were read."""
        if not missing_payloads:
            return []
        events = self._log.read(stream=EXPERIENCES, types=["PayloadsFreed"], after=self._needs.last_position)
        self._needs.free(freed_positions(events))
        owners = dict(self._needs.remaining())
        return [(digest, owners[digest]) for digest, _ in missing_payloads if digest in owners]
