"""Answers and steps that the journal of a lost attempt had, for pictures and traces."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field

from trinity_es.events.errors import TrinityError
from trinity_es.events.journal import frames, kept_runs
from trinity_es.projections.reading.log_reader import Log

__all__ = ["JournalPart", "journal_parts", "kept_parts"]


@dataclass(slots=True, kw_only=True)
class JournalPart:
    """One answer of a model, or one step."""

    run: int
    step: str = ""
    """Name of the step; empty for an answer."""
    choice: int = 0
    """Number of the answer among those to one request, from 0."""
    began: float
    """Seconds of play at its first record, counted over all attempts; `ended`: at its last."""
    ended: float
    finish: str = ""
    """Finish reason of a whole answer, `done` for a step with its result; else empty."""
    tokens: int = 0
    max_tokens: int = 0
    """Maximum number of tokens of the answer; 0 if it is unknown."""
    model: str = ""
    versions: list[int] = field(default_factory=list)
    """Weights versions of its tokens."""
    splices: list[int] = field(default_factory=list)
    """Offsets at which an attempt went on with what an earlier one had."""
    forbids: str = ""
    """The sampling field with which a partial answer can't go on; empty if it can."""


def journal_parts(data: bytes) -> list[JournalPart]:
    """Return the parts of a payload of `AttemptKept`, in the order of their first records."""
    runs = kept_runs([data])
    seconds_by_part: dict[tuple[int, str, int, int], list[float]] = {}  # by run, name, nth, choice (-1: it is a step)
    for head, _, _ in frames(data):
        if "step" in head or "call" in head:
            key = head["run"][3], head.get("step") or head["call"], head["nth"], head.get("choice", -1)
            seconds_by_part.setdefault(key, []).append(head["s"])
    parts = []
    for (run, name, nth, choice), seconds in seconds_by_part.items():
        part = JournalPart(run=run, began=seconds[0], ended=seconds[-1])
        if choice < 0:
            part.step = name.rpartition(" ")[0]
            part.finish = "done" if runs[run].steps[name, nth].done else ""
        else:
            part.choice, answer = choice, runs[run].calls[name, nth][choice]
            part.finish, part.tokens, part.max_tokens = answer.finish, len(answer.tokens), answer.max_tokens
            part.model, part.versions = answer.model, [version for version, _, _ in answer.spans]
            part.splices, part.forbids = answer.splices, answer.forbids
        parts.append(part)
    return parts


def kept_parts(log: Log, digests: Collection[str]) -> dict[str, list[JournalPart]]:
    """Return the parts of payloads of `AttemptKept`, by digest; those that were freed or lost are left out."""
    parts: dict[str, list[JournalPart]] = {}
    if digests:
        with closing(log.payloads()) as payloads:
            for digest in digests:
                with contextlib.suppress(TrinityError):
                    parts[digest] = journal_parts(payloads.get(digest))
    return parts
