"""TRL's client of a vLLM server against an endpoint. Arguments and answers are JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from trl.generation.vllm_client import VLLMClient


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


def main(given: Any) -> Any:
    client = VLLMClient(base_url=given["root"], connection_timeout=30)
    chats = [[{"role": "user", "content": f"{i}+{i}="}] for i in range(4)]
    return {
        "ids": client.generate([[5, 6, 7], [8, 9], [10]], n=2, max_tokens=8),
        "texts": client.generate(
            ["c=", "d="], max_tokens=6, temperature=0.7, top_k=5, min_p=0.01, repetition_penalty=1.1, logprobs=2,
            generation_kwargs={"seed": 3}),
        "chats": client.chat(chats, n=2, max_tokens=7, tools=[add]),
        "bound": client.chat(chats[:1], max_tokens=8, structured_outputs_regex="[0-9]{4}", logprobs=None),
    }


print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
