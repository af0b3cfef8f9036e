"""Progress of a run. Its loops (submit, generate, train, evals) wait for each other through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from trinity_es.events.values import BatchId

__all__ = ["RunProgress"]


class RunProgress:
    """Progress of a run. `note` changes it, and `until` waits for a change; both run on one event loop."""

    def __init__(self) -> None:
        self.submitted = 0
        """Last step that was submitted."""
        self.ended = False
        """True if no further step will be submitted."""
        self.generated = 0
        """Last step before the first one that is neither finalized nor aborted."""
        self.trained = 0
        """Last step that was trained on; steps are trained in order."""
        self.done = 0
        """Last step whose weights are published, or would be if the run had a trainer."""
        self.evals: dict[BatchId, bool] = {}
        """Submitted evals; the value is True once an eval has ended."""
        self._changed = asyncio.Event()

    def note(self, *, evals: Mapping[BatchId, bool] | None = None, **attributes: Any) -> None:
        """Set these attributes, add or update these evals, and wake every call of `until`."""
        for name, value in attributes.items():
            setattr(self, name, value)
        self.evals.update(evals or {})
        self._changed.set()
        self._changed = asyncio.Event()  # each change wakes those that wait at that moment

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this condition holds; it is checked again after each `note`."""
        while not condition():
            await self._changed.wait()

    @property
    def all_trained(self) -> bool:
        return self.ended and self.trained >= self.submitted

    @property
    def evals_over(self) -> bool:
        return all(self.evals.values())
