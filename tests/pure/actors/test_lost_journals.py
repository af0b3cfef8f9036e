"""What the coordinator keeps of a lost attempt (`AttemptKept` and its payload), and when a runner frees a journal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trinity_es.actors.coordinator.fleet.lost_journals import LostJournals, _LostUnit
from trinity_es.actors.messages import UnitOutcome
from trinity_es.actors.runner.actor import Runner
from trinity_es.actors.runner.engine_thread import EngineThread
from trinity_es.actors.runner.outbox import key_of
from trinity_es.events.journal import KeptAnswer, attempt, chunk, kept_runs, step
from trinity_es.events.store.payloads.payloads import digest_of
from trinity_es.events.vocabulary import AttemptKept, Unit
from trinity_es.projections.event_texts import kept_text

UNIT = Unit(task=4, run_id_base=2, runs=2, attempt=2)


def answer(
    run: int, call: str, tokens: int, *, finish: str = "", forbids: str = "", batch: int = 7, s: float = 1.0
) -> bytes:
    new = KeptAnswer(tokens=[9] * tokens, spans=[[0, 0, tokens]], finish=finish, forbids=forbids)
    return chunk((batch, "s", 4, run), s, call, 0, 0, 0, new)


def kept(segments: list[bytes], earlier: bytes = b"") -> tuple[AttemptKept | None, bytes]:
    stored = {"d": earlier}

    def put(data: bytes) -> str:
        stored[digest_of(data)] = data
        return digest_of(data)

    live: Any = SimpleNamespace(payloads=SimpleNamespace(get=stored.__getitem__, put=put))
    journals: Any = SimpleNamespace(read=lambda life: segments)
    reader = LostJournals(live, lambda: journals, set)
    [event] = reader._store_records(("runner-0", 3), [_LostUnit(7, "s", UNIT, "d" if earlier else "")])
    return event, b"" if event is None else stored[event.payload]


def test_the_event_counts_what_is_used_and_names_what_is_not() -> None:
    segments = [
        answer(2, "a", 10, finish="stop") + answer(2, "b", 20, s=5.5),
        answer(3, "a", 40, forbids="json_schema") + answer(3, "c", 7, finish="stop", forbids="json_schema"),
        answer(5, "a", 100) + answer(2, "a", 100, batch=8),  # of another unit and another batch
        step((7, "s", 4, 3), 6.25, "pay", 0, done=True, value=1),
    ]
    event, data = kept(segments)
    assert (event.calls, event.open_calls, event.tokens, event.steps) == (2, 1, 37, 1)
    assert event.not_kept == {"json_schema": 40}
    assert (event.attempt, event.runs, event.seconds, event.runner, event.incarnation) == (1, 2, 6.25, "runner-0", 3)
    assert sorted(kept_runs([data])) == [2, 3]


def test_a_later_attempt_in_the_same_life_leaves_out_what_failed_before_it_and_adds_to_what_was_kept() -> None:
    run = (7, "s", 4, 2)
    more = chunk(run, 2.0, "b", 0, 0, 20, KeptAnswer(tokens=[9] * 5, spans=[[0, 0, 25]]))
    event, data = kept([answer(2, "x", 50), attempt(run, 2), more], earlier=answer(2, "b", 20))
    assert (event.open_calls, event.tokens) == (1, 25)
    assert [len(a.tokens) for answers in kept_runs([data])[2].calls.values() for a in answers.values()] == [25]


def test_a_journal_without_the_unit_gives_no_event() -> None:
    assert kept([answer(9, "a", 5)]) == (None, b"")
    assert kept([]) == (None, b"")


def test_whatever_can_not_go_on_is_named_with_its_tokens() -> None:
    run = (7, "s", 4, 2)
    spliced = chunk(run, 1.0, "a", 0, 0, 0, KeptAnswer(tokens=[9] * 30, spans=[[0, 0, 30]], splices=[*range(1, 9)]))
    begin = chunk(run, 1.0, "b", 0, 0, 0, KeptAnswer(tokens=[9] * 10, spans=[[0, 0, 10]], max_tokens=64))
    after = chunk(run, 2.0, "b", 0, 0, 14, KeptAnswer(tokens=[9] * 5, spans=[[0, 0, 19]], max_tokens=64))
    event, _ = kept([spliced + begin + after])
    assert event.not_kept == {"8 splices": 30, "a gap in the journal": 5}
    assert (event.open_calls, event.tokens, event.max_tokens) == (1, 10, 64)
    assert kept_text(event) == ("token 10 of 64, kept by runner-0 #3; 30 tokens can't go on because of 8 splices; "
                                "5 tokens can't go on because of a gap in the journal")


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
        outbox=SimpleNamespace(acknowledge=lambda acks: outcomes), engine_thread=side, units={}, final_report=None,
        state="ended", accept_log_end=lambda end: True,
    )
    Runner.on_RunUnits(runner, SimpleNamespace(acks=(1,), items=[], end=None), None)  # type: ignore[arg-type]  # as above
    assert freed == [key_of(outcomes[0]), key_of(outcomes[2])]
    [(seconds, free, keys)] = later
    assert seconds > 60
    free(keys)
    assert freed == [key_of(o) for o in (outcomes[0], outcomes[2], outcomes[1])]
