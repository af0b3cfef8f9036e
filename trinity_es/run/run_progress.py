"""How far a run is, for the loops that wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from trinity_es.events.values import BatchId

__all__ = ["RunProgress"]


class RunProgress:
    """How far a run is. Changed by `note`, on one event loop."""

    def __init__(self) -> None:
        self.submitted = 0
        """The last step that was submitted."""
        self.ended = False
        """No further step will be submitted."""
        self.generated = 0
        """All steps up to this one are finalized, or were given up."""
        self.trained = 0
        """All steps up to this one were trained on."""
        self.done = 0
        """The last step of the last period that is over: its weights are in."""
        self.evals: dict[BatchId, bool] = {}
        """Evals that were submitted, and whether they ended."""
        self._changed = asyncio.Event()

    def note(self, *, evals: Mapping[BatchId, bool] | None = None, **numbers: Any) -> None:
        """Take this down, and wake whoever waits for it."""
        for name, value in numbers.items():
            setattr(self, name, value)
        self.evals.update(evals or {})
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    @property
    def all_trained(self) -> bool:
        return self.ended and self.trained >= self.submitted

    @property
    def evals_over(self) -> bool:
        return all(self.evals.values())
