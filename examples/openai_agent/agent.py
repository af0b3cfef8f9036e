"""An agent on the OpenAI SDK, with a tool: it looks at a card, and says the letter on it eight times.

Nothing in this file knows of trinity_es. It asks whatever OPENAI_BASE_URL and OPENAI_API_KEY name:

    python agent.py c
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look", "description": "Look at a side of the card. The letter is on both.",
        "parameters": {
            "type": "object", "required": ["side"],
            "properties": {"side": {"type": "string", "enum": ["front", "back"]}},
        },
    },
}


class Agent:
    """Holds a card, which the model sees by the tool `look` alone."""

    def __init__(self, card: str) -> None:
        self.card = card
        self.looks = 0
        self.client = OpenAI()
        self.model = self.client.models.list().data[0].id

    def look(self, side: str) -> str:
        self.looks += 1
        return f"{self.card}="

    def answer(self, question: str) -> str:
        """Have the model look first, then answer."""
        messages: list[Any] = [{"role": "user", "content": question}]
        first: Any = {"type": "function", "function": {"name": "look"}}
        asked = self.client.chat.completions.create(
            model=self.model, messages=messages, tools=[LOOK], tool_choice=first, max_tokens=80
        ).choices[0].message
        messages.append(asked)
        for call in asked.tool_calls or []:
            seen = getattr(self, call.function.name)(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
        said = self.client.chat.completions.create(model=self.model, messages=messages, tools=[LOOK])
        return said.choices[0].message.content or ""


if __name__ == "__main__":
    print(Agent(sys.argv[1]).answer("Which letter?"))
