"""Whether a message is a sampled answer as its client gave it back: plain, with its reasoning apart, as tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from trinity_es.actors.rollout.conversation.answer_comparison import Fit, fit

PARIS = {"city": "Paris"}
TO = {"city": "Paris", "to": "Rome"}


def calling(*calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **more, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in calls
    ]}


def as_json(text: str) -> Callable[[str, Any], str]:
    """Return what writes a call as its name and its arguments in JSON."""
    return lambda name, arguments: text.replace("NAME", name).replace("ARGUMENTS", json.dumps(arguments))


hermes = as_json('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>')
mistral = as_json('[TOOL_CALLS] [{"name": "NAME", "arguments": ARGUMENTS, "id": "abcdefghi"}]')
llama = as_json('<|python_tag|>{"name": "NAME", "parameters": ARGUMENTS}')
deepseek = as_json("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```")
kimi = as_json("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>")


def coder(name: str, arguments: Any) -> str:
    given = "".join(f"<parameter={n}>\n{v}\n</parameter>\n" for n, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def glm(name: str, arguments: Any) -> str:
    given = "".join(f"<arg_key>{n}</arg_key>\n<arg_value>{v}</arg_value>\n" for n, v in arguments.items())
    return f"<tool_call>{name}\n{given}</tool_call>"


def pythonic(name: str, arguments: Any) -> str:
    return f"[{name}({', '.join(f'{n}={v!r}' for n, v in arguments.items())})]"


FORMS = pytest.mark.parametrize("form", [hermes, mistral, llama, deepseek, kimi, coder, glm, pythonic], ids=[
    "hermes", "mistral", "llama", "deepseek", "kimi", "coder", "glm", "pythonic"])


@FORMS
@pytest.mark.parametrize("arguments", [{}, PARIS, TO, {"n": 12, "s": "a b, c"}, {"s": "-5"}])
def test_a_call_fits_the_answer_that_it_was_found_in(form: Any, arguments: Any) -> None:
    assert fit(calling(("weather", arguments)), [form("weather", arguments)]) is Fit.WHOLE
    thinking = f"<think>\nParis or Rome?\n</think>\n\n{form('weather', arguments)}"
    assert fit(calling(("weather", arguments)), [thinking]) is Fit.PART
    assert fit(calling(("weather", arguments), reasoning="Paris or Rome?"), [thinking]) is Fit.WHOLE
    assert fit(calling(("weather", arguments), reasoning="Rome"), [thinking]) is Fit.NONE


@FORMS
@pytest.mark.parametrize(("sampled", "given"), [
    (TO, PARIS), (TO, {}), (PARIS, TO), (TO, {"city": "Rome", "to": "Paris"}), (PARIS, {"city": "Pari"}),
    ({"n": 12}, {"n": 1}), ({"n": -5}, {"n": 5}), ({"s": "delete -r x"}, {"s": "delete"}), ({"s": "no!"}, {"s": "no"}),
    (PARIS, {"Paris": "city"}),
])
def test_a_call_that_somebody_changed_fits_none(form: Any, sampled: Any, given: Any) -> None:
    assert fit(calling(("weather", given)), [form("weather", sampled)]) is Fit.NONE


@FORMS
def test_calls_that_are_dropped_added_or_renamed_fit_none(form: Any) -> None:
    two = form("weather", PARIS) + "\n" + form("time", TO)
    assert fit(calling(("weather", PARIS)), [two]) is Fit.NONE
    assert fit(calling(("time", TO)), [two]) is Fit.NONE
    assert fit(calling(("time", TO), ("weather", PARIS)), [two]) is Fit.NONE
    assert fit(calling(("weather", PARIS), ("time", TO)), [form("weather", PARIS)]) is Fit.NONE
    assert fit(calling(("time", PARIS)), [form("weather", PARIS)]) is Fit.NONE
    assert fit(calling(("city", {"weather": "Paris"})), [form("weather", PARIS)]) is Fit.NONE


@pytest.mark.parametrize("form", [hermes, coder])
def test_what_stands_before_a_call_is_the_message_s_content(form: Any) -> None:
    text = f"Let me see.\n{form('weather', PARIS)}"
    assert fit(calling(("weather", PARIS), content="Let me see."), [text]) is Fit.WHOLE
    assert fit(calling(("weather", PARIS), content="Let me look."), [text]) is Fit.NONE
    assert fit(calling(("weather", PARIS)), [text]) is not Fit.WHOLE


def test_several_calls_fit_in_order() -> None:
    calls = ("weather", PARIS), ("time", TO)
    for form in (hermes, deepseek, kimi, coder):
        assert fit(calling(*calls), ["\n".join(form(*call) for call in calls)]) is Fit.WHOLE


@pytest.mark.parametrize(("content", "found"), [
    ("<think>so</think>\n\n42\n", Fit.VERBATIM), ("<think>so</think>\n\n42", Fit.WHOLE), ("42", Fit.PART),
    ("so", Fit.NONE), ("4", Fit.NONE), (None, Fit.NONE), ([{"type": "text"}], Fit.NONE),
])
def test_a_plain_answer_fits_by_its_text(content: Any, found: Fit) -> None:
    assert fit({"role": "assistant", "content": content}, ["<think>so</think>\n\n42\n"]) is found


@pytest.mark.parametrize("calls", ["{}", [None], [{"function": {"name": 1}}], [{"name": "w", "arguments": "{"}], [3]])
def test_calls_of_a_client_s_own_form_fit_none(calls: Any) -> None:
    assert fit({"role": "assistant", "tool_calls": calls}, ['{"name": "w", "arguments": {}}']) is Fit.NONE


def test_arguments_in_another_order_are_the_same_where_the_answer_is_json() -> None:
    turned = dict(reversed(TO.items()))
    for form in (hermes, mistral, llama, deepseek, kimi):
        assert fit(calling(("weather", turned)), [form("weather", TO)]) is Fit.WHOLE


@pytest.mark.parametrize("text", [
    '{"a":' * 20_000, "{" * 200_000, '{"a", ' * 50_000, "<" * 200_000, '{"name": "w", "arguments": {}}' * 2000,
])
def test_an_answer_of_many_braces_is_read_soon(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, read = 0, json.JSONDecoder.raw_decode

    def counted(decoder: json.JSONDecoder, text: str, idx: int = 0) -> Any:
        nonlocal failed
        failed += 1
        found = read(decoder, text, idx)
        failed -= 1
        return found

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    assert fit(calling(("w", {})), [text]) is Fit.NONE
    assert failed <= 1000
