"""given / when / then for decisions: `given(events).when(decide, ...).then(*events)` or `.then_raises(Error, "text")`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trinity_es.events.vocabulary import Event
from trinity_es.projections.batch import BatchState, evolve, fold


class Given:
    def __init__(self, events: tuple[Event, ...]) -> None:
        self.state: BatchState | None = fold(events)
        self.decided: list[Event] | None = None
        self.error: BaseException | None = None

    def when(self, decide: Callable[..., list[Event]], *args: Any, **kwargs: Any) -> Given:
        try:
            self.decided = decide(self.state, *args, **kwargs)
        except Exception as e:
            self.error = e
            return self
        for event in self.decided:
            self.state = evolve(self.state, event)
        return self

    def then(self, *events: Event) -> Given:
        if self.error is not None:
            raise self.error
        assert self.decided == list(events)
        return self

    def then_types(self, *types: type[Event]) -> Given:
        if self.error is not None:
            raise self.error
        assert self.decided is not None
        assert [type(e) for e in self.decided] == list(types)
        return self

    def then_raises(self, error: type[BaseException], part: str) -> Given:
        assert self.error is not None, f"nothing was raised; decided: {self.decided}"
        with pytest.raises(error, match=part):
            raise self.error
        return self


def given(*events: Event) -> Given:
    return Given(events)
