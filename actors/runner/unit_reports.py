"""Reports of a runner about its units: their experiences in the payload store, and an outcome for each.

Finished units are written and reported in groups; the next group gathers while one is written. A fault in a unit's
experiences or numbers fails that unit, not its group.
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
from trinity_es.events.store.database.retry import Backoff, once, patiently
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads, patient
from trinity_es.events.values import FailureKind
from trinity_es.events.vocabulary import PayloadRef, Unit

__all__ = ["Reporter", "failed", "runs_of", "write_group"]

STORE_SECONDS = 2.0
"""Time limit of one attempt at the payload store."""
FULL_SECONDS = 0.5, 5.0
"""Pause before a payload store that can't be written is tried again: the first, and the longest."""


class Reporter:
    """Writer of finished units into the payload store; `report` gets their outcomes. Used on the engine's loop."""

    _quick: PayloadStore
    """Store whose calls fail after `STORE_SECONDS`, so that heartbeats soon say what the runner waits for."""
    payloads: PayloadStore
    """Store whose calls wait while it is away."""

    def __init__(
        self, store: StoreConfig, report: Callable[[list[UnitOutcome]], None], log: logging.Logger,
        place: str | None = None,
    ) -> None:
        """`place`: place of the payloads (`open_payloads`)."""
        self.store, self.report, self.log, self.place = store, report, log, place
        self.trouble = ""
        """Reason why finished units can't be stored now."""
        self.finished: asyncio.Queue[tuple[UnitAssignment, UnitResult]] = asyncio.Queue()
        self._group: list[tuple[UnitAssignment, UnitResult]] = []
        """Units that are being written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")  # works even while every workflow hangs

    def open(self) -> None:
        """Open the payload store.

        This and the other methods wait while the database is away, because finished work is expensive to do again.
        """
        store = self.store
        opened = patiently(
            lambda: open_payloads(store.url, place=self.place, durability=store.durability, patience=STORE_SECONDS),
            seconds=store.retry_for,
            tell=once(lambda e: self.log.warning("waiting for the payload store: %s", e)),
        )
        self._quick, self.payloads = opened, patient(opened, store.retry_for)

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a call that uses the payload store, made in the store's own thread."""
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
                outcomes = [failed(item, "infra", message) for item, _ in group]
            self._group.clear()
            for part in split_by_size(outcomes, outcome_size):
                self.report(part)

    async def _write_patiently(self, group: list[tuple[UnitAssignment, UnitResult]]) -> list[UnitOutcome]:
        """Write finished units and return their outcomes. While the store can't be written, for instance because its
        disk is full, retry without limit.

        That is no unit's failure, and generating again costs more than keeping. Meanwhile the runner takes no more
        units than it has places, and every heartbeat says what it waits for.
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
    """Write one payload for all experiences of the group, and one for the results of a unit with many of them; return
    an outcome for each unit.
    """
    experiences = [result.experiences if item.keep_experiences else [] for item, result in group]
    errors: dict[int, str] = {}
    try:
        data = Experience.serialize_many([e for part in experiences for e in part])
    except TrinityError:  # one unit's experiences can't be written: find it, and write the others
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
            outcomes.append(failed(item, "data", errors[index]))
            continue
        count = len(experiences[index])
        outcome = UnitOutcome(
            batch_id=item.batch_id, submission=item.submission, unit=item.unit, results=result.results,
            failures=_brief(result.failures),
            payload=PayloadRef(digest=digest, first=first, count=count) if count else None,
            model_version=result.model_version, model_version_end=result.model_version_end, seconds=result.seconds,
            other_tokens=result.other_tokens, lacks=result.lacks,
        )
        first += count
        try:
            if (size := outcome_size(outcome)) > LARGEST_RESULTS:
                outcome = failed(item, "data", f"the metrics of its runs take {size:,} bytes: the limit is "
                                 f"{LARGEST_RESULTS:,}. Give each run fewer, or set "
                                 "explorer.max_repeat_times_per_runner")
        except TypeError as e:
            outcome = failed(item, "data", f"its metrics can't be recorded: {e}")
        outcomes.append(outcome)
    return [pack_results(outcome, payloads) for outcome in outcomes]


def failed(item: UnitAssignment, kind: FailureKind, message: str) -> UnitOutcome:
    """Return the outcome of a unit all of whose runs failed."""
    failures = _brief([(run, kind, message) for run in runs_of(item.unit)])
    return UnitOutcome(batch_id=item.batch_id, submission=item.submission, unit=item.unit, failures=failures)


def runs_of(unit: Unit) -> range:
    """Return the numbers of a unit's runs."""
    return range(unit.run_id_base, unit.run_id_base + unit.runs)


def _brief(failures: list[tuple[int, FailureKind, str]]) -> list[tuple[int, FailureKind, str]]:
    """Return the failures with only the first message of each kind, which alone is recorded, fit for the log."""
    kinds: set[FailureKind] = set()
    brief = []
    for run, kind, message in failures:
        brief.append((run, kind, "" if kind in kinds else shorten_error(message)))
        kinds.add(kind)
    return brief
