"""A run's journal (promise 12): what is kept of answers, how they go on, and what forbids it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.journals import RUN, Steady, Written, ask, cut_off, whole
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.run_journal import RunJournal, unresumable_option
from trinity_es.actors.rollout.workflow_runner import GRACE_SECONDS, WorkflowRunner
from trinity_es.events.errors import EngineError
from trinity_es.events.experience import Experience
from trinity_es.events.journal import KeptAnswer, KeptRun, chunk, kept_runs, step
from trinity_es.events.values import Task
from trinity_es.testing import ManualClock, SleepWorkflow
from trinity_es.workflows.workflow import Workflow

pytestmark = pytest.mark.timeout(60)
PROMPT = [1, 2, 3]


async def undisturbed(sampling: Sampling, prompt: str | list[int] = PROMPT, **engine: Any) -> list[Completion]:
    return await whole(Steady(**engine), RunJournal(RUN, Written()), prompt, sampling)


def bare(completion: Completion) -> Completion:
    """Without the marks of where it went on."""
    return replace(completion, splices=())


@pytest.mark.parametrize("cut", [1, 2, 9, 39, 40])
@pytest.mark.parametrize("prompt", [PROMPT, "text"])
@pytest.mark.parametrize("logprobs", [True, False])
async def test_promise_12_an_answer_goes_on_from_its_last_recorded_token(
    cut: int, prompt: str | list[int], logprobs: bool
) -> None:
    sampling = Sampling(max_tokens=40, logprobs=logprobs)
    [expected] = await undisturbed(sampling, prompt)
    engine, writer = Steady(), Written()
    await cut_off(engine, RunJournal(RUN, writer), writer, prompt, sampling, cut)
    assert engine.generated == cut
    again = Written()
    [answer] = await whole(engine, RunJournal(RUN, again, writer.kept()), prompt, sampling)
    assert engine.generated == 40, "a token was generated twice"
    assert bare(answer) == expected
    assert answer.splices == ((cut,) if cut < 40 else ())
    kept = kept_runs([writer.data + again.data])[0]
    [[whole_answer]] = [list(answers.values()) for answers in kept.calls.values()]
    assert whole_answer.tokens == expected.token_ids
    assert whole_answer.logprobs == expected.logprobs
    assert bool(whole_answer.finish)


def test_promise_12_calls_with_other_options_are_other_calls() -> None:
    journal, shared = RunJournal(RUN, Written()), Sampling(max_tokens=5)
    asked: list[tuple[Sampling, dict[str, Any]]] = [
        (shared, {}), (shared, {"logit_bias": {"7": 1.0}}), (shared, {"logit_bias": {"8": 1.0}}),
        (replace(shared, seed=1), {}), (replace(shared, top_logprobs=1), {}),
    ]
    keys = [journal.call(Steady(), "m", PROMPT, sampling, further).key for sampling, further in asked]
    assert len({fingerprint for fingerprint, _ in keys}) == len(asked)
    again = [journal.call(Steady(), "m", PROMPT, sampling, further).key for sampling, further in asked]
    assert again == [(fingerprint, 1) for fingerprint, _ in keys], "the second call of each"


async def test_promise_12_a_whole_answer_is_not_asked_again() -> None:
    sampling = Sampling(max_tokens=5)
    engine, writer = Steady(), Written()
    first = await whole(engine, RunJournal(RUN, writer), PROMPT, sampling)
    assert await ask(engine, RunJournal(RUN, Written(), writer.kept()), PROMPT, sampling) == first
    assert len(engine.asked) == 1


async def test_promise_12_an_answer_that_is_lost_again_and_again_is_generated_once() -> None:
    sampling, chance = Sampling(max_tokens=200), random.Random(5)
    [expected] = await undisturbed(sampling)
    engine, data, kept = Steady(), b"", None
    for _ in range(5):
        writer = Written()
        await cut_off(engine, RunJournal(RUN, writer, kept), writer, PROMPT, sampling, chance.randrange(1, 30))
        data += writer.data
        kept = kept_runs([data])[0]
    [answer] = await whole(engine, RunJournal(RUN, Written(), kept), PROMPT, sampling)
    assert bare(answer) == expected
    assert len(answer.splices) == 5
    assert engine.generated == 200


async def test_equal_calls_side_by_side_find_their_answers_and_other_calls_are_new() -> None:
    engine, writer = Steady(), Written()
    journal = RunJournal(RUN, writer)
    for prompt in (PROMPT, PROMPT, [9]):
        await whole(engine, journal, prompt, Sampling(max_tokens=3))
    again = RunJournal(RUN, Written(), writer.kept())
    await asyncio.gather(*(ask(engine, again, p, Sampling(max_tokens=3)) for p in (PROMPT, [9], PROMPT)))
    assert len(engine.asked) == 3
    for more in ({"max_tokens": 4}, {"temperature": 0.5}, {"n": 2}):
        await whole(engine, again, PROMPT, replace(Sampling(max_tokens=3), **more))
    await whole(engine, again, PROMPT, Sampling(max_tokens=3))  # a third time
    assert len(engine.asked) == 7


@pytest.mark.parametrize("seed", [None, 11])
async def test_each_of_several_answers_goes_on_by_itself(seed: int | None) -> None:
    sampling = Sampling(max_tokens=12, n=3, seed=seed)
    expected = await undisturbed(sampling)
    engine, writer = Steady(), Written()
    await cut_off(engine, RunJournal(RUN, writer), writer, PROMPT, sampling, 5)
    answers = await whole(engine, RunJournal(RUN, Written(), writer.kept()), PROMPT, sampling)
    assert [a.token_ids[:5] for a in answers] == [e.token_ids[:5] for e in expected]
    assert [len(a.token_ids) for a in answers] == [12, 12, 12]
    assert [s.max_tokens for _, s in engine.asked] == [12, 7, 7, 7]
    seeds = [s.seed for _, s in engine.asked[1:]]
    assert seeds == [None] * 3 if seed is None else len({seed, *seeds}) == 4


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "json_schema", "top_logprobs"])
async def test_what_the_engine_would_forget_begins_again_and_is_named(field: str) -> None:
    value = {"json_schema": "{}", "top_logprobs": 2}.get(field, 0.5)
    sampling = replace(Sampling(max_tokens=8), **{field: value})
    assert unresumable_option(sampling) == field
    engine, writer = Steady(), Written()
    await cut_off(engine, RunJournal(RUN, writer), writer, PROMPT, sampling, 4)
    [answer] = await whole(engine, RunJournal(RUN, Written(), writer.kept()), PROMPT, sampling)
    assert engine.asked[1][0] == PROMPT
    assert answer.splices == ()
    kept = writer.kept()
    assert [a.forbids for answers in kept.calls.values() for a in answers.values()] == [field]


async def test_the_rest_of_the_budget_is_asked_for() -> None:
    engine, writer = Steady(), Written()
    sampling = Sampling(max_tokens=20, min_tokens=9)
    await cut_off(engine, RunJournal(RUN, writer), writer, PROMPT, sampling, 7)
    await whole(engine, RunJournal(RUN, Written(), writer.kept()), PROMPT, sampling)
    assert (engine.asked[1][1].max_tokens, engine.asked[1][1].min_tokens) == (13, 2)


async def test_a_stop_text_over_the_splice_ends_the_answer_where_it_does_undisturbed() -> None:
    sampling, seen = Sampling(max_tokens=60, stop=("ab",)), set[str]()
    for start in range(40):
        [expected] = await undisturbed(sampling, [start], alphabet=b"abc")
        if len(expected.token_ids) < 3 or expected.finish_reason != "stop":
            continue
        for cut in range(1, len(expected.token_ids)):
            engine, writer = Steady(alphabet=b"abc"), Written()
            await cut_off(engine, RunJournal(RUN, writer), writer, [start], sampling, cut)
            [answer] = await whole(engine, RunJournal(RUN, Written(), writer.kept()), [start], sampling)
            assert bare(answer) == expected, (start, cut)
            seen.add("over" if cut == len(expected.token_ids) - 1 else "after")
    assert seen == {"over", "after"}


async def test_a_character_that_was_cut_in_the_middle_is_whole() -> None:
    sampling = Sampling(max_tokens=30)
    [expected] = await undisturbed(sampling, alphabet="☕".encode())
    assert "�" in expected.text
    for cut in range(1, 30):
        engine, writer = Steady(alphabet="☕".encode()), Written()
        await cut_off(engine, RunJournal(RUN, writer), writer, PROMPT, sampling, cut)
        [answer] = await whole(engine, RunJournal(RUN, Written(), writer.kept()), PROMPT, sampling)
        assert answer.text == expected.text


async def test_spans_say_which_weights_made_which_part() -> None:
    engine, writer, sampling = Steady(version=4), Written(), Sampling(max_tokens=10)
    asking = asyncio.ensure_future(ask(engine, RunJournal(RUN, writer), PROMPT, sampling))
    await engine.tick(3)
    engine.model_version = 5
    await engine.tick(2)
    writer.look()
    asking.cancel()
    engine.model_version = 6
    [answer] = await whole(engine, RunJournal(RUN, Written(), writer.kept()), PROMPT, sampling)
    assert answer.version_spans == ((4, 0, 3), (5, 3, 5), (6, 5, 10))


async def test_tokens_without_known_weights_or_with_broken_logprobs_are_not_kept() -> None:
    engine, writer = Steady(), Written()
    engine.next = lambda ids, choice, seed: (97, float("nan"))  # type: ignore[method-assign]
    await whole(engine, RunJournal(RUN, writer), PROMPT, Sampling(max_tokens=3))
    assert writer.data == b""


@pytest.mark.parametrize(("spent", "left"), [(0.0, 60.0), (20.0, 40.0), (59.5, 1.0), (900.0, 1.0)])
def test_the_lives_of_an_attempt_count_together_in_its_time_limit(spent: float, left: float) -> None:
    class Limit(Workflow):
        is_async = True

        async def run_async(self) -> list[Experience]:
            [deadline] = limits
            raise RuntimeError(f"until {deadline:g}")

    clock, kept = ManualClock(100.0), KeptRun(seconds=spent)
    player = WorkflowRunner(Steady(), clock=clock, timeout=60.0)  # type: ignore[arg-type]  # it has what is used
    limits: list[float] = []
    player.limits.begin = lambda deadline: limits.append(deadline) or 0  # type: ignore[func-returns-value,method-assign,assignment]  # noted
    journal = RunJournal(RUN, Written(), kept)
    done = asyncio.run(player.execute(Task(workflow=Limit), 1, range(1), journal=lambda run: journal))
    assert limits == [100.0 + left + GRACE_SECONDS]
    assert f"until {limits[0]:g}" in done.failures[0][2]


def test_an_attempt_that_runs_out_of_time_in_its_second_life_names_the_limit_of_both() -> None:
    journal = RunJournal(RUN, Written(), KeptRun(seconds=900.0))
    player = WorkflowRunner(Steady(), timeout=60.0)  # type: ignore[arg-type]  # it has what is used
    task = Task(workflow=SleepWorkflow, workflow_args={"seconds": 100})
    done = asyncio.run(player.execute(task, 1, range(1), journal=lambda run: journal))
    assert done.failures == [(0, "timeout", "no end after 60.0 s (max_timeout)")]


async def test_an_engine_that_can_t_show_its_tokens_costs_the_journal_alone() -> None:
    class Changed(Steady):
        def partial(self, request: str, start: Mapping[int, int]) -> dict[int, Completion]:
            raise AttributeError("'RequestState' object has no attribute 'detokenizer'")
    engine, writer, sampling = Changed(), Written(), Sampling(max_tokens=5)
    await cut_off(engine, RunJournal(RUN, writer), writer, PROMPT, sampling, 3)
    assert writer.data == b""
    [answer] = await whole(engine, RunJournal(RUN, writer), PROMPT, sampling)
    kept = writer.kept()
    [[complete]] = [list(answers.values()) for answers in kept.calls.values()]
    assert complete.tokens == answer.token_ids


@pytest.mark.parametrize("prompt", ["a lone \ud800", [2**40, -1], [2**70]])
async def test_a_prompt_that_no_engine_takes_gets_the_engine_s_own_error(prompt: str | list[int]) -> None:
    class Refuses(Steady):
        async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
            raise EngineError("this engine takes no such prompt", refused=True)
    with pytest.raises(EngineError, match="no such prompt"):
        await ask(Refuses(), RunJournal(RUN, Written()), prompt, Sampling())


def answer_of(tokens: list[int], finish: str = "") -> KeptAnswer:
    return KeptAnswer(tokens=tokens, logprobs=[-t / 7 for t in tokens], spans=[[1, 0, 9]], finish=finish)


def test_promise_12_a_damaged_journal_gives_a_shorter_prefix_and_never_another() -> None:
    parts = [chunk(RUN, 1.0, "c", 0, 0, at, answer_of([at, at + 1])) for at in range(0, 8, 2)]
    parts.append(step(RUN, 2.0, "fetch", 0, done=True, value={"rows": 3}))
    data, full = b"".join(parts), list(range(8))
    for size in range(len(data) + 1):
        kept = kept_runs([data[:size]]).get(0)
        got = [] if kept is None or not kept.calls else kept.calls["c", 0][0].tokens
        assert got == full[: len(got)]
    for place in range(0, len(data), 3):
        broken = bytearray(data)
        broken[place] ^= 0x41
        kept = kept_runs([bytes(broken)]).get(0)
        got = [] if kept is None or not kept.calls else kept.calls["c", 0][0].tokens
        assert got == full[: len(got)]
    lost = kept_runs([b"".join([parts[0], *parts[2:]])])[0].calls["c", 0][0]  # the second record is missing
    assert lost.tokens == [0, 1]
    float32 = np.asarray(answer_of(full).logprobs, dtype=np.float32).tolist()
    assert kept_runs([data])[0].calls["c", 0][0].logprobs == float32
    assert kept_runs([data])[0].steps["fetch", 0].value == {"rows": 3}


def test_an_answer_that_began_again_replaces_its_earlier_beginning() -> None:
    first, second = answer_of([1, 2, 3]), answer_of([7], "stop")
    kept = kept_runs([chunk(RUN, 1.0, "c", 0, 0, 0, first) + chunk(RUN, 2.0, "c", 0, 0, 0, second)])[0]
    assert (kept.calls["c", 0][0].tokens, kept.calls["c", 0][0].finish) == ([7], "stop")
    assert kept.seconds == 2.0


async def test_an_engine_that_asks_twice_and_takes_the_other_answer_is_recorded_as_it_answered() -> None:
    class Best(Steady):
        async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
            await super().generate(prompt, sampling)
            return await super().generate([*prompt, 9], sampling)  # type: ignore[list-item]  # it is asked with ids
    engine, writer = Best(), Written()
    asking = asyncio.ensure_future(ask(engine, RunJournal(RUN, writer), PROMPT, Sampling(max_tokens=4)))
    while not asking.done():
        await engine.tick(1)
        writer.look()
    kept = writer.kept()
    [[answer]] = [list(answers.values()) for answers in kept.calls.values()]
    assert answer.tokens == asking.result()[0].token_ids
