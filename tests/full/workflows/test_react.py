"""P57: a loop of reasoning and tools, token by token."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from tests.helpers.ready_made import Answers, played
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.events.errors import DataError, EngineError, UnknownWorkflow
from trinity_es.workflows.react import MOST_CHARACTERS, tool_of

HERE = __name__


def multiply(a: int, b: Annotated[int, Field(description="the second")] = 2) -> int:
    """Multiply two numbers."""
    return a * b


def weather(city: Literal["Rome", "Bern"], days: list[int]) -> dict[str, Any]:
    return {"city": city, "days": days}


def breaks(why: str) -> str:
    raise RuntimeError(why)


def floods() -> str:
    return "x" * 100_000


async def looked_up(word: str) -> dict[Any, Any]:
    return {1: word, 2: 2**70}


def no_form(what: WorkerPool) -> str:
    return "?"


def right(response: str, truth: str, **kwargs: Any) -> dict[str, float]:
    return {"accuracy": float(truth in response)}


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def asked(
    pool: WorkerPool, engine: Answers, *, answer: str = "42", tools: tuple[str, ...] = ("multiply",),
    max_tokens: int = 4000, **args: Any,
) -> Any:
    return await played(
        pool, "react_workflow", engine, raw_task={"prompt": "6 * 7?", "answer": answer}, reward_fn=f"{HERE}:right",
        workflow_args={"tools": [f"{HERE}:{name}" for name in tools], **args}, rollout_args={"max_tokens": max_tokens},
    )


async def react(pool: WorkerPool, *answers: str, **how: Any) -> Any:
    engine = Answers(*answers)
    done = await asked(pool, engine, **how)
    assert not done.failures, done.failures
    [experience] = done.experiences
    return experience, engine


async def test_a_tool_is_called_and_its_result_told(pool: WorkerPool) -> None:
    first, last = "I multiply. " + call("multiply", a=6, b=7), "It is 42."
    experience, engine = await react(pool, first, last)
    assert engine.prompts == ["6 * 7?\n", f"6 * 7?\n{first}\n42\n"]
    assert experience.reward == 1.0
    assert experience.metrics == {
        "accuracy": 1.0, "turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0, "unfinished": 0.0, "reward": 1.0
    }
    response = bytes(experience.tokens[experience.prompt_length :].tolist()).decode()
    written = np.asarray(list(response.encode()), dtype=np.uint8)[experience.action_mask].tobytes().decode()
    assert written == first + last, "what the model wrote, as it was sampled, and nothing else is trained on"
    assert [t["function"]["name"] for t in experience.tools] == ["multiply"]


@pytest.mark.parametrize(("called", "says"), [
    (call("divide", a=1), "error: there is no tool 'divide', but multiply, breaks, floods, weather"),
    ("<tool_call>multiply(1, 2)</tool_call>", "error: JSONDecodeError"),
    ("<tool_call>[1]</tool_call>", "error: TypeError"),
    ('<tool_call>{"name": "multiply", "arguments": [1, 2]}</tool_call>', "error: TypeError: arguments must be an obj"),
    (call("multiply", a="six"), "error: ValidationError: 1 validation error"),
    (call("multiply"), "error: ValidationError"), (call("breaks", why="no luck"), "error: RuntimeError: no luck"),
    (call("weather", city="Paris", days=[]), "error: ValidationError"),
])
async def test_a_failed_call_is_told_to_the_model_which_may_try_again(pool: WorkerPool, called: str, says: str) -> None:
    experience, engine = await react(pool, called, "42", tools=("multiply", "breaks", "floods", "weather"))
    assert says in engine.prompts[1]
    assert (experience.reward, experience.metrics["tool_errors"]) == (1.0, 1.0)


async def test_several_calls_of_one_answer_are_told_in_their_order(pool: WorkerPool) -> None:
    calls = call("multiply", a=2, b=3) + call("weather", city="Rome", days=[1]) + call("floods")
    _, engine = await react(pool, calls, "42", tools=("multiply", "weather", "floods"))
    told = engine.prompts[1].removeprefix(f"6 * 7?\n{calls}\n")
    assert told == '6\n{"city":"Rome","days":[1]}\n' + "x" * MOST_CHARACTERS + "... (cut)\n"


async def test_a_tool_may_be_async_and_gives_what_json_can_say(pool: WorkerPool) -> None:
    experience, engine = await react(pool, call("looked_up", word="é"), "42", tools=("looked_up",))
    assert f'{{"1":"é","2":{2**70}}}' in engine.prompts[1]
    assert experience.metrics["tool_errors"] == 0.0


async def test_it_ends_after_its_last_turn_an_answer_that_was_cut_off_or_one_without_a_call(pool: WorkerPool) -> None:
    experience, engine = await react(pool, "It is 41.")
    assert (experience.reward, len(engine.prompts)) == (0.0, 1)
    experience, engine = await react(pool, call("multiply", a=2), max_turns=3)
    assert len(engine.prompts) == 3
    assert (experience.metrics["unfinished"], experience.metrics["tool_calls"]) == (1.0, 2.0)
    experience, engine = await react(pool, call("multiply", a=2) + "42", answer="multiply", max_tokens=30)
    assert (len(engine.prompts), experience.metrics["unfinished"]) == (1, 1.0)


class Filled(Answers):
    """Has no room for more than one turn."""

    async def generate(self, prompt: Any, sampling: Any) -> Any:
        if len(self.prompts) == 1:
            raise EngineError("a prompt of 64 tokens leaves no room for an answer", refused=True)
        return await super().generate(prompt, sampling)


async def test_it_ends_where_what_a_tool_told_leaves_no_room_for_an_answer(pool: WorkerPool) -> None:
    """A run that failed there would leave out the long conversations alone of what is learned."""
    first = "42? " + call("multiply", a=6, b=7)
    done = await asked(pool, Filled(first, "never"))
    assert not done.failures
    [experience] = done.experiences
    assert experience.response_text == first
    assert (experience.metrics["unfinished"], experience.metrics["turns"], experience.reward) == (1.0, 1.0, 1.0)
    refusing = Filled("never")
    refusing.prompts.append("")
    done = await asked(pool, refusing)
    assert [(kind, "no room" in why) for _, kind, why in done.failures] == [("data", True)], "the task is too long"


def test_a_tools_schema_is_that_of_its_signature() -> None:
    function = tool_of(f"{HERE}:multiply").schema["function"]
    assert (function["name"], function["description"]) == ("multiply", "Multiply two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["b"] == {
        "default": 2, "description": "the second", "title": "B", "type": "integer"
    }
    assert tool_of(f"{HERE}:weather").schema["function"]["parameters"]["properties"]["city"]["enum"] == ["Rome", "Bern"]
    with pytest.raises(DataError, match="can't be described by a JSON schema"):
        tool_of(f"{HERE}:no_form")
    with pytest.raises(UnknownWorkflow, match="tool 'no_such:tool' can't be imported"):
        tool_of("no_such:tool")
