"""RolloutCoordinator is RolloutClient, async: nothing is missing, and nothing is spelt in another way."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trinity_es import RolloutClient, RolloutCoordinator

NO_TWIN = {
    "close": "`shutdown` lets go of a system that the coordinator did not start",
    "request": "a command by its name, for parts of this package: `coordinator.client.request`",
    "pack": "what Scheduler builds its requests of",
    "read": "what Scheduler reads payloads by",
    "facts": "what `why` is told by",
}
"""Public methods of RolloutClient that have no async twin, and why."""


def public(cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", [name for name in public(RolloutClient) if name not in NO_TWIN])
def test_each_method_of_the_client_has_its_async_twin(name: str) -> None:
    ours, theirs = getattr(RolloutClient, name), public(RolloutCoordinator)[name]
    assert inspect.iscoroutinefunction(theirs)
    assert parameters(theirs) == parameters(ours)
    assert theirs.__doc__
    assert theirs.__qualname__ == f"RolloutCoordinator.{name}"


def test_what_has_no_twin_is_there_and_has_none() -> None:
    assert NO_TWIN.keys() <= public(RolloutClient).keys()
    assert not NO_TWIN.keys() & public(RolloutCoordinator).keys()
