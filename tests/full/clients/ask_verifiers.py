"""verifiers' token client against an endpoint: it renders chats to token ids itself. Arguments and answers are JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from verifiers.v1.clients import TrainClientConfig, resolve_client
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(given: Any) -> list[Any]:
    os.environ["ENDPOINT_KEY"] = given["key"]
    client = resolve_client(TrainClientConfig(
        base_url=given["base_url"], api_key_var="ENDPOINT_KEY", renderer_model_name=given["tokenizer"]))

    async def ask(i: int) -> Any:
        body = {"model": given["model"], "messages": [{"role": "user", "content": f"{i}+{i}="}]}
        sampling = SamplingConfig(temperature=1.0, max_tokens=12, seed=i)
        answer = await client.get_response(ChatDialect(), body, sampling, session_id=f"rollout-{i % 2}")
        tokens = answer.tokens
        return {"id": answer.id, "prompt": tokens.prompt_ids, "response": tokens.completion_ids,
                "logprobs": tokens.completion_logprobs, "text": answer.message.content}

    answers = await asyncio.gather(*map(ask, range(8)))
    await client.close()
    return answers


print(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))))  # noqa: T201
