"""Parsers of requests to an engine's HTTP API (`small_api.py`): sampling, prompts, messages. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import orjson

from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.sampling_checks import SHARED_FIELDS, excerpt, with_options
from trinity_es.actors.serving.errors import ApiError, invalid_field
from trinity_es.events.errors import DataError

__all__ = [
    "check_fields", "parse_ids", "parse_messages", "parse_prompts", "parse_sampling", "parse_tools",
    "template_variables", "with_values",
]

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "allowed_token_ids": ([],), "bad_words": ([],), "best_of": (1,),
    "chat_template": (), "continue_final_message": (False,), "echo": (False,), "include_stop_str_in_output": (False,),
    "logit_bias": ({},), "prompt_logprobs": (), "stop_token_ids": ([],), "structured_outputs": (), "suffix": ("",),
    "tool_choice": ("auto", "none"),
}
"""Unsupported fields, each with the values that change no answer and so are accepted."""
_TEMPLATES_OWN = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})
"""Arguments of `apply_chat_template` that the server sets."""


def check_fields(body: Any) -> None:
    """Raise ApiError if a field of a request is not supported and would change the answer."""
    if not isinstance(body, dict):
        raise invalid_field("sampling_params", body, "an object")
    for name, neutral_values in _NEUTRAL_VALUES.items():
        if body.get(name) is not None and body[name] not in neutral_values:
            raise ApiError(f"{name}: {excerpt(body[name])} is not supported by this engine: leave it out", param=name,
                           code="unsupported_value")


def parse_sampling(body: Mapping[str, Any], sampling: Sampling, *lengths: str) -> Sampling:
    """Return `sampling` with the request's values. Raises ApiError for an invalid one.

    `lengths`: names of the request's fields for the maximum number of tokens; the first that is set counts.
    """
    for name in (*SHARED_FIELDS, "top_k", "stop"):
        if body.get(name) is not None:
            sampling = with_values(sampling, {name: body[name]}, name)
    for name in reversed(lengths):
        if body.get(name) is not None:
            sampling = with_values(sampling, {"max_tokens": body[name]}, name)
    if body.get("response_format") is not None:
        sampling = with_values(sampling, {"json_schema": _schema(body["response_format"])}, "response_format")
    return sampling


def with_values(base: Sampling, values: dict[str, Any], name: str) -> Sampling:
    """Return `base` with these values of the request's field `name`. Raises ApiError for an invalid value."""
    try:
        return with_options(base, values, DataError, "the request")
    except DataError as e:
        raise ApiError(str(e) if name in values else f"{name}: {e}", param=name, code="invalid_value") from e


def _schema(response_format: Any) -> str:
    """Return the `Sampling.json_schema` for a `response_format`: "" for text, "{}" for any JSON, else its schema."""
    format_type = response_format.get("type") if isinstance(response_format, dict) else None
    if format_type == "text":
        return ""
    if format_type == "json_object":
        return "{}"
    schema: Any = response_format.get("json_schema") if format_type == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not schema:
        wanted = "type text, json_object, or json_schema with json_schema.schema"
        raise invalid_field("response_format", response_format, wanted)
    return orjson.dumps(schema).decode()


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's variables for the chat template; {} if it has none. Raises ApiError for invalid ones."""
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or _TEMPLATES_OWN & set(variables):
        raise invalid_field("chat_template_kwargs", variables, "an object of the chat template's own variables")
    return variables


def parse_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the request's tools; None if it has none or `tool_choice` is "none". Raises ApiError."""
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise invalid_field("tools", tools, "a list of tools")
    return None if body.get("tool_choice") == "none" else tools or None


def parse_prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts in a value: a text, token ids, or a list of texts and lists of ids. Raises ApiError."""
    is_list_of_prompts = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if is_list_of_prompts else [value]
    return [prompt if isinstance(prompt, str) and prompt else parse_ids("prompt", prompt) for prompt in prompts]


def parse_ids(name: str, value: Any) -> list[int]:
    """Return `value`, of the field `name`, as token ids. Raises ApiError if it is anything else."""
    if not isinstance(value, list) or not value or not all(type(t) is int and 0 <= t < 2**31 for t in value):
        wanted = "a text or a list of token ids, or several of them" if name == "prompt" else "a list of token ids"
        raise invalid_field(name, value, wanted)
    return value


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return a request's messages in the form that chat templates take. Raises ApiError."""
    if not isinstance(value, list) or not value:
        raise invalid_field("messages", value, "a list of one message or more")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(source: Any, where: str) -> dict[str, Any]:
    """Return a message with its content as text and the arguments of tool calls as objects, for chat templates."""
    if not isinstance(source, dict) or not isinstance(source.get("role"), str):
        raise invalid_field(where, source, "an object with a role and a content", param="messages")
    message = {name: value for name, value in source.items() if value is not None}
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise invalid_field(f"{where}.content", content, "parts of type text only", param="messages")
        content = "\n".join(part["text"] for part in content)  # as vLLM's server does
    if not isinstance(content, str):
        raise invalid_field(f"{where}.content", content, "a text", param="messages")
    message["content"] = content
    if "tool_calls" in message:
        try:
            message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        except (AttributeError, KeyError, TypeError) as e:
            calls = message["tool_calls"]
            raise invalid_field(f"{where}.tool_calls", calls, "a list of calls", param="messages") from e
    return message


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(orjson.JSONDecodeError):  # a model may write other text, which stays as it is
            function["arguments"] = orjson.loads(function["arguments"] or "{}")
    return {**call, "function": function}
