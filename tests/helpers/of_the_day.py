"""Cases that take turns: each test run plays some of them, chosen by the date. `ALL=1` plays all."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = bool(os.environ.get("ALL"))
DAY = int(os.environ.setdefault("DAY", str(datetime.datetime.now(datetime.UTC).date().toordinal())))
"""Number of the day, the same for all processes of a test run. `DAY=n` repeats another day's choice."""
EXAMPLES = ("OpenEnv and reasoning_gym", "verifiers and environments that die", "the agent on the OpenAI SDK")
"""Examples that run as users run them and take turns. The longest is not on a day with Ray or adapters."""
FAULTS = ("network and database", "kinds at random")
"""Tests of faults in a run over several hosts that take turns."""
LAUNCHERS = ("ray", "slurm", "compose")
"""Tests of launchers of a run over several hosts that take turns."""
OTHERS = ("TRL", "verifiers")
"""Tests with a real third-party package that take turns."""
REAL = ("adapters", "clients", "servers")
"""Tests around a real engine that take turns. Tests of the engine itself run every day."""


def of_the_day(cases: Sequence[T], count: int = 1, *, day: int | None = None, everything: bool = ALL) -> list[T]:
    """Return `count` of the cases, in order, chosen by the day. Each comes within as many days as there are cases."""
    if everything or count >= len(cases):
        return list(cases)
    first = (DAY if day is None else day) * count
    chosen = {(first + i) % len(cases) for i in range(count)}
    return [case for i, case in enumerate(cases) if i in chosen]


def by_turns(case: str, cases: Sequence[str]) -> pytest.MarkDecorator:
    """Return the mark of a test that takes turns with tests in other files. On other days it is skipped."""
    reason = f"it is not the day of {case!r}, one of {', '.join(cases)}: ALL=1 plays all"
    return pytest.mark.skipif(case not in of_the_day(cases), reason=reason)
