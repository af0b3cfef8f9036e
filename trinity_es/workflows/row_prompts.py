"""Conversion of a row's prompt to chat messages or to plain text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from trinity_es.events.errors import DataError

__all__ = ["chat_of", "plain_text", "require_prompt_form", "with_question"]

_SYSTEM = ("system", "developer")


def require_prompt_form(prompt: Any, prefix: str | None = None) -> None:
    """Raise DataError unless a prompt is a text or a list of chat messages.

    If a `prefix` begins the answer, the last message may not be the assistant's.
    """
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise DataError(f"the prompt is {_quoted(prompt)}: a text or a list of chat messages is expected")
    if not prompt:
        raise DataError("the prompt is an empty list: give a text, or at least one chat message")
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {i} of the prompt is {_quoted(message)}: an object with `role` and `content` is "
                            "expected")
        content = message.get("content")
        if not isinstance(content, str | list | None) or (content is None and "tool_calls" not in message):
            raise DataError(f"the content of message {i} of the prompt is {_quoted(content)}: a text or a list of "
                            "parts is expected")
        for part in content if isinstance(content, list) else ():
            if not _is_text(part):
                raise DataError(f"message {i} of the prompt has the part {_quoted(part)}: only text parts are "
                                f"supported, as {{'type': 'text', 'text': ...}}")
    if prefix and prompt[-1]["role"] == "assistant":
        raise DataError("the prompt ends with an assistant message, but format.reply_prefix begins the assistant's "
                        "answer, too: leave out one of them")


def chat_of(prompt: Any, system: str | None = None, prefix: str | None = None) -> list[dict[str, Any]]:
    """Return a prompt as a new list of chat messages, with the system prompt and the beginning of the answer added.

    Text parts are joined by newlines, and a missing content becomes "". A system message of the row is appended to
    `system`. Raises DataError as `require_prompt_form` does.
    """
    require_prompt_form(prompt, prefix)
    messages: list[dict[str, Any]] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else copy.deepcopy(prompt))
    for message in messages:  # templates take no parts, and vLLM's server joins them in the same way
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if _is_text(part))
        message["content"] = content or ""
    if system and messages[0]["role"] in _SYSTEM:
        messages[0]["content"] = f"{system}\n\n{messages[0]['content']}" if messages[0]["content"] else system
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    if prefix:
        messages.append({"role": "assistant", "content": prefix})
    return messages


def with_question(messages: list[dict[str, Any]], question: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the messages with the text of the last user message replaced by `question(text)`. Raises DataError."""
    index = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
    if index is None:
        raise DataError("no message of the prompt is the user's, so there is no question in it: add a message with "
                        "role user")
    message = {**messages[index], "content": question(messages[index]["content"])}
    return [*messages[:index], message, *messages[index + 1 :]]


def plain_text(messages: list[dict[str, Any]]) -> str:
    """Return a conversation as text for a base model to continue. Each turn follows the name of its role."""
    turns = [f"System:{m['content']}\n" if m["role"] in _SYSTEM
             else f"{m['role'].title()}:\n{m['content']}\n" for m in messages]
    return "".join([*turns, "Assistant:\n"])


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _quoted(value: Any) -> str:
    return "null" if value is None else f"{value!r:.60}"
