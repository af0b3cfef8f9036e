"""An agent on the OpenAI SDK that answers how many of an item there are, and may call a tool to count them first.

This file does not depend on trinity_es: it uses the server in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

__all__ = ["answer"]

COUNT: Any = {
    "type": "function",
    "function": {
        "name": "count", "description": "Count what is on the shelf.",
        "parameters": {"type": "object", "required": ["item"], "properties": {"item": {"type": "string"}}},
    },
}


def count(shelf: Mapping[str, str], arguments: str) -> str:
    """Return the number of the item that the arguments (JSON text) name, or an error message."""
    try:
        return shelf[json.loads(arguments)["item"]]
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def answer(question: str, shelf: Mapping[str, str], model: str = "gpt-5-mini", turns: int = 4) -> str:
    """Return the model's answer; the model may call `count` first. Return "" if it still calls after `turns` turns."""
    client = OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns):
        message = client.chat.completions.create(model=model, messages=messages, tools=[COUNT]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = count(shelf, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
