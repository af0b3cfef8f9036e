"""Prompts of rows, texts and messages, with all that the task and its workflow say around them."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_es.events.errors import DataError
from trinity_es.events.values import Task
from trinity_es.workflows.registry import WORKFLOWS
from trinity_es.workflows.row_prompts import chat_of
from trinity_es.workflows.workflow import Workflow

USER = {"role": "user", "content": "2+3?"}
ASKED: list[Any] = ["2+3?", [USER]]
FORMAT = {"system_prompt": "Be brief.", "reply_prefix": "Sure:"}


def messages(workflow: str, prompt: Any, format_args: dict[str, Any] | None = None, **row: Any) -> list[dict[str, Any]]:
    raw = {"prompt": prompt, "question": prompt, "answer": "A", "choices": ["5", "6"], **row}
    task = Task(workflow=workflow, raw_task=raw, format_args=format_args or {}, reward_fn="math_reward")
    made: Any = WORKFLOWS.get(workflow)(task=task, model=None)
    return made.format_messages() if hasattr(made, "format_messages") else made.prompt_messages()


NAMES = [name for name in WORKFLOWS.names() if name not in ("verifiers", "openenv")]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_messages_is_asked_as_its_text_is(name: str) -> None:
    text, chat = (messages(name, prompt) for prompt in ASKED)
    assert text == chat
    assert not any("{'role'" in m["content"] for m in chat)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2+3?"}]
    assert messages(name, [{"role": "user", "content": parts}]) == messages(name, "What is\n2+3?")
    text, chat = (messages(name, prompt, FORMAT) for prompt in ASKED)
    assert text == chat
    assert chat[0]["role"] == "system"
    assert chat[0]["content"].startswith("Be brief.")
    assert chat[-1] == {"role": "assistant", "content": "Sure:"}


@pytest.mark.parametrize("name", NAMES)
def test_a_system_message_of_the_row_follows_that_of_the_task_or_the_workflow(name: str) -> None:
    own = [{"role": "system", "content": "You are a pirate."}, USER]
    [alone, *_] = messages(name, [USER])
    system = f"{alone['content']}\n\n" if alone["role"] == "system" else ""
    [first, *rest] = messages(name, own)
    assert first == {"role": "system", "content": f"{system}You are a pirate."}
    assert not any(m["role"] == "system" for m in rest)
    assert messages(name, own, FORMAT)[0]["content"] == "Be brief.\n\nYou are a pirate."


def test_of_a_conversation_the_last_question_is_the_one_with_choices() -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}, USER]
    first, second, last = messages("multiple_choice_workflow", talk)
    assert [first, second] == talk[:2]
    assert "2+3?" in last["content"]
    assert "A) 5\nB) 6" in last["content"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    assert messages("multiple_choice_workflow", parts) == [last]
    with pytest.raises(DataError, match="no message of the prompt is the user's"):
        messages("multiple_choice_workflow", [{"role": "system", "content": "a"}])


def test_a_base_model_gets_each_turn_of_a_conversation_as_text() -> None:
    talk = [USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "And 6?"}]
    task = Task(raw_task={"prompt": talk}, reward_fn="math_reward", format_args={"system_prompt": "Be brief."})
    made: Any = WORKFLOWS.get("math_boxed_workflow")(task=task, model=None)
    assert made.format_prompt() == "System:Be brief.\nUser:\n2+3?\nAssistant:\n5\nUser:\nAnd 6?\nAssistant:\n"


def test_messages_are_the_runs_own() -> None:
    task = Task(raw_task={"prompt": [dict(USER)]})
    asked = Workflow(task=task, model=None).prompt_messages()
    asked[0]["content"] += " Think."
    assert task.task_desc == [USER]


def test_a_message_of_tool_calls_alone_has_an_empty_content() -> None:
    calls = {"role": "assistant", "tool_calls": [{"type": "function"}]}
    assert chat_of([USER, calls, {"role": "tool", "content": "5"}])[1] == {**calls, "content": ""}


@pytest.mark.parametrize("prompt", [5, {"text": "a"}, [], ["a"], [{"content": "a"}]])
def test_what_is_no_prompt_is_no_text_of_python(prompt: Any) -> None:
    with pytest.raises(DataError, match="prompt"):
        Workflow(task=Task(raw_task={"prompt": prompt}), model=None).prompt_messages()
