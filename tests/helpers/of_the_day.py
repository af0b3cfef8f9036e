"""Cases that take turns: each run plays some of them, chosen by the date, and `ALL=1` plays them all."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = bool(os.environ.get("ALL"))
DAY = int(os.environ.setdefault("DAY", str(datetime.datetime.now(datetime.UTC).date().toordinal())))
"""Number of the day, for all processes of a run; `DAY=n` plays what another day played."""
EXAMPLES = ("OpenEnv and reasoning_gym", "verifiers and environments that die", "the agent on the OpenAI SDK")
"""Examples that are played as users play them, which take turns: the dearest not on a day with Ray or adapters."""
FAULTS = ("network and database", "kinds at random")
"""Tests of faults in a run over several hosts, which take turns."""
LAUNCHERS = ("ray", "slurm", "compose")
"""Tests of what starts a run over several hosts, which take turns."""
OTHERS = ("TRL", "verifiers")
"""Tests with the real package of others, which take turns."""
REAL = ("adapters", "clients", "servers")
"""Tests of what is around a real engine, which take turns; the engine itself is played every day."""


def of_the_day(cases: Sequence[T], count: int = 1, *, day: int | None = None, everything: bool = ALL) -> list[T]:
    """Return `count` of the cases in their order, and others tomorrow; as many days as there are cases play each."""
    if everything or count >= len(cases):
        return list(cases)
    first = (DAY if day is None else day) * count
    chosen = {(first + i) % len(cases) for i in range(count)}
    return [case for i, case in enumerate(cases) if i in chosen]


def by_turns(case: str, cases: Sequence[str]) -> pytest.MarkDecorator:
    """Return the mark of a test that takes turns with tests in other files: it is skipped by name on other days."""
    reason = f"it is not the day of {case!r}, one of {', '.join(cases)}: ALL=1 plays all"
    return pytest.mark.skipif(case not in of_the_day(cases), reason=reason)
