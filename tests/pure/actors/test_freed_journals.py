"""When a runner frees the journal of a unit whose outcome is in the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trinity_es.actors.messages import UnitOutcome
from trinity_es.actors.runner.actor import Runner
from trinity_es.actors.runner.engine_thread import EngineThread
from trinity_es.actors.runner.outbox import key_of
from trinity_es.events.vocabulary import Unit


def outcome(task: int, kind: Any = None) -> UnitOutcome:
    unit = Unit(task=task, run_id_base=0, runs=1, attempt=1)
    return UnitOutcome(batch_id=1, submission="s", unit=unit, failures=[(0, kind, "it failed")] if kind else [])


def test_promise_12_the_journal_of_a_unit_whose_engine_failed_outlives_its_acknowledgement() -> None:
    outcomes = [outcome(0), outcome(1, "infra"), outcome(2, "workflow"), outcome(3, "infra")]
    freed: list[Any] = []
    later: list[Any] = []
    side = SimpleNamespace(
        journal=SimpleNamespace(release=freed.append), units={key_of(outcomes[3]): "a further attempt here"},
        loop=SimpleNamespace(call_later=lambda seconds, call, keys: later.append((seconds, call, keys))),
    )
    side._free_journal = lambda keys: EngineThread._free_journal(side, keys)  # type: ignore[arg-type]  # it has what is used
    side.free_journals = lambda keys, lost: EngineThread.free_journals.__wrapped__(side, keys, lost)  # type: ignore[attr-defined]  # the undecorated method
    runner = SimpleNamespace(
        outbox=SimpleNamespace(acknowledge=lambda acks: outcomes), engine_side=side, units={}, final_report=None,
        state="ended", accept_log_end=lambda end: True,
    )
    Runner.on_RunUnits(runner, SimpleNamespace(acks=(1,), items=[], end=None), None)  # type: ignore[arg-type]  # as above
    assert freed == [key_of(outcomes[0]), key_of(outcomes[2])]
    [(seconds, free, keys)] = later
    assert seconds > 60
    free(keys)
    assert freed == [key_of(o) for o in (outcomes[0], outcomes[2], outcomes[1])]
