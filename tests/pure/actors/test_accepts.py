"""Which messages an actor takes: asked once for all of them, before their handlers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_es.actors.base import BaseActor
from trinity_es.actors.coordinator.actor import Coordinator
from trinity_es.actors.messages import CancelUnits, Endpoints, OutcomeReport, Retire
from trinity_es.actors.requests import Request
from trinity_es.actors.runner.actor import Runner

REPORT, CANCEL = OutcomeReport("runner-0", 1, 1, []), CancelUnits(1, 7, "s", [])


@pytest.mark.parametrize(("message", "closed"), [
    (REPORT, False), (Request("r" * 32, "status", {}), True), (Endpoints({}), True), (Retire(), True),
])
def test_promise_6_a_coordinator_whose_live_state_is_closed_takes_nothing_that_changes_it(
    message: Any, closed: bool
) -> None:
    for running in (True, False):
        assert Coordinator.accepts(SimpleNamespace(running=running), message) == (running or closed)


def test_what_was_looked_up_meanwhile_is_not_done_by_a_coordinator_that_is_closed_by_then() -> None:
    held: list[Callable[[], None]] = []
    done: list[str] = []
    actor = SimpleNamespace(running=True, mark_checks=SimpleNamespace(admit=lambda _, by, act: held.append(act)))
    for by in ("one", "two"):
        Coordinator.admit(actor, REPORT, by, lambda by=by: done.append(by))
    held[0]()
    actor.running = False
    held[1]()
    assert done == ["one"]


def test_a_runner_takes_nothing_that_is_meant_for_another_life() -> None:
    for life, takes in ((1, True), (2, False)):
        runner = SimpleNamespace(incarnation=life)
        assert (Runner.accepts(runner, CANCEL), Runner.accepts(runner, Endpoints({}))) == (takes, True)
    assert Runner.accepts(SimpleNamespace(), CANCEL), "the message by which it begins"


@pytest.mark.parametrize("takes", [True, False])
def test_the_handler_of_a_message_that_is_not_taken_is_not_called(takes: bool) -> None:
    taken: list[Any] = []
    actor = SimpleNamespace(accepts=lambda _: takes, on_OutcomeReport=lambda message, _: taken.append(message))
    BaseActor._handle(actor, REPORT, None)
    assert taken == [REPORT] * takes
