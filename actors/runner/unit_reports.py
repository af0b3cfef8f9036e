"""Reports of finished units (runs of one task): experiences go to the payload store, an outcome to the coordinator.

Units are written and reported in groups; the next group gathers while one is written. If the experiences or metrics of
a unit can't be recorded, that unit fails and its group does not.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trinity_es.actors.config.run_sections import StoreConfig
from trinity_es.actors.message_sizes import LARGEST_RESULTS, outcome_size, pack_results, shorten_error, split_by_size
from trinity_es.actors.messages import UnitAssignment, UnitOutcome
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.events.errors import LogUnavailable, TrinityError
from trinity_es.events.experience import Experience
from trinity_es.events.store.database.retry import Backoff, patiently, without_repeats
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads, patient
from trinity_es.events.values import FailureKind
from trinity_es.events.vocabulary import PayloadRef, Unit

__all__ = ["Reporter", "failed_outcome", "run_numbers", "write_group"]

STORE_SECONDS = 2.0
"""Timeout of one attempt to use the payload store."""
FULL_SECONDS = 0.5, 5.0
"""First and longest pause between attempts while the payload store can't be written."""


class Reporter:
    """Writer of finished units (runs of one task) into the payload store; passes their outcomes to `report`."""

    _quick: PayloadStore
    """The payload store, with calls that fail after `STORE_SECONDS`, so that heartbeats soon report the trouble."""
    payloads: PayloadStore
    """The payload store, with calls that wait while the database is away."""

    def __init__(
        self, store: StoreConfig, report: Callable[[list[UnitOutcome]], None], log: logging.Logger,
        place: str | None = None,
    ) -> None:
        """`place`: where the payloads are, as for `open_payloads`."""
        self.store, self.report, self.log, self.place = store, report, log, place
        self.trouble = ""
        """Why finished units can't be stored now; empty if they can."""
        self.finished: asyncio.Queue[tuple[UnitAssignment, UnitResult]] = asyncio.Queue()
        self._group: list[tuple[UnitAssignment, UnitResult]] = []
        """Units that are being written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")  # hanging workflows can't occupy it

    def open(self) -> None:
        """Open the payload store. Wait while the database is away, because it is expensive to repeat finished runs."""
        store = self.store
        opened = patiently(
            lambda: open_payloads(store.url, place=self.place, durability=store.durability, patience=STORE_SECONDS),
            seconds=store.retry_for,
            tell=without_repeats(lambda e: self.log.warning("waiting for the payload store: %s", e)),
        )
        self._quick, self.payloads = opened, patient(opened, store.retry_for)

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    async def run(self) -> None:
        """Write and report finished units until cancelled. A further call continues where the earlier one stopped."""
        while True:
            if not self._group:
                self._group.append(await self.finished.get())
            while not self.finished.empty():
                self._group.append(self.finished.get_nowait())
            group = list(self._group)
            try:
                outcomes = await self._write_patiently(group)
            except Exception as e:
                self.log.error("payloads not written", exc_info=e)
                message = f"payload not written: {type(e).__name__}: {e}"
                outcomes = [failed_outcome(item, "infra", message) for item, _ in group]
            self._group.clear()
            for part in split_by_size(outcomes, outcome_size):
                self.report(part)

    async def _write_patiently(self, group: list[tuple[UnitAssignment, UnitResult]]) -> list[UnitOutcome]:
        """Write finished units and return their outcomes. Retry without limit while the store can't be written.

        A full disk, say, is no failure of a unit, and generating again costs more than waiting. Meanwhile the runner
        takes no more units than it may run at once, and its heartbeats say what it waits for.
        """
        pauses = Backoff(*FULL_SECONDS)
        while True:
            try:
                outcomes: list[UnitOutcome] = await self.in_thread(write_group, group, self._quick)
            except LogUnavailable as e:
                if not self.trouble:
                    self.log.error("payloads not written, trying again: %s", e)
                self.trouble = str(e)
                await asyncio.sleep(pauses.next(random.random()))
                continue
            if self.trouble:
                self.log.warning("payloads are written again")
                self.trouble = ""
            return outcomes


def write_group(group: list[tuple[UnitAssignment, UnitResult]], payloads: PayloadStore) -> list[UnitOutcome]:
    """Write the experiences of all units as one payload, and return an outcome for each unit.

    Results that are too large for a message become a payload of their own.
    """
    experiences = [result.experiences if item.keep_experiences else [] for item, result in group]
    errors: dict[int, str] = {}
    try:
        data = Experience.serialize_many([e for part in experiences for e in part])
    except TrinityError:  # experiences of some unit can't be written: find that unit, and write the others
        for index, part in enumerate(experiences):
            try:
                Experience.serialize_many(part)
            except TrinityError as e:
                errors[index], experiences[index] = str(e), []
        data = Experience.serialize_many([e for part in experiences for e in part])
    digest = payloads.put(data) if any(experiences) else ""
    first = 0
    outcomes = []
    for index, (item, result) in enumerate(group):
        if index in errors:
            outcomes.append(failed_outcome(item, "data", errors[index]))
            continue
        count = len(experiences[index])
        outcome = UnitOutcome(
            batch_id=item.batch_id, submission=item.submission, unit=item.unit, results=result.results,
            failures=_with_first_messages(result.failures),
            payload=PayloadRef(digest=digest, first=first, count=count) if count else None,
            model_version=result.model_version, model_version_end=result.model_version_end, seconds=result.seconds,
            other_tokens=result.other_tokens, lacks=result.lacks,
        )
        first += count
        try:
            if (size := outcome_size(outcome)) > LARGEST_RESULTS:
                outcome = failed_outcome(item, "data", f"the metrics of its runs take {size:,} bytes: the limit is "
                                 f"{LARGEST_RESULTS:,}. Give each run fewer, or set "
                                 "explorer.max_repeat_times_per_runner")
        except TypeError as e:
            outcome = failed_outcome(item, "data", f"its metrics can't be recorded: {e}")
        outcomes.append(outcome)
    return [pack_results(outcome, payloads) for outcome in outcomes]


def failed_outcome(item: UnitAssignment, kind: FailureKind, message: str) -> UnitOutcome:
    """Return the outcome of a unit (runs of one task) whose runs all failed with this kind and message."""
    failures = _with_first_messages([(run, kind, message) for run in run_numbers(item.unit)])
    return UnitOutcome(batch_id=item.batch_id, submission=item.submission, unit=item.unit, failures=failures)


def run_numbers(unit: Unit) -> range:
    return range(unit.run_id_base, unit.run_id_base + unit.runs)


def _with_first_messages(failures: list[tuple[int, FailureKind, str]]) -> list[tuple[int, FailureKind, str]]:
    """Return the failures with the first message of each kind, shortened, and empty messages for the others."""
    kinds: set[FailureKind] = set()
    reduced = []
    for run, kind, message in failures:
        reduced.append((run, kind, "" if kind in kinds else shorten_error(message)))
        kinds.add(kind)
    return reduced
