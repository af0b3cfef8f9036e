"""Routes of an auxiliary model's runner beside vLLM's API: exact token ids and logprobs, for `RemoteEngine`.

Bodies are JSON. `POST /engine/generate` with `{"prompt": text or ids, "sampling": {...}}` returns
`{"completions": [...]}`; `POST /engine/logprobs` with `{"token_ids": [...], "temperature": t}` returns
`{"logprobs": [...]}`. docs/DECISIONS.md, 105, says why `/inference/v1/generate` won't do.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from trinity_es.actors.engines.interface import Engine, Sampling
from trinity_es.actors.engines.sampling_checks import checked_prompt, with_options
from trinity_es.events.errors import DataError

__all__ = ["JsonHandler", "token_id_routes"]

JsonHandler = Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]


def token_id_routes(engine: Engine) -> dict[str, JsonHandler]:
    """Return, by path, a function that takes the JSON body of a request on this route and returns the answer's."""

    async def generate(body: dict[str, Any]) -> dict[str, Any]:
        sampling = with_options(Sampling(), body["sampling"], DataError, "the request")
        completions = await engine.generate(checked_prompt(body["prompt"], DataError), sampling)
        return {"completions": [{
            "prompt_token_ids": list(c.prompt_token_ids), "token_ids": list(c.token_ids), "text": c.text,
            "logprobs": None if c.logprobs is None else [float(p) for p in c.logprobs],
            "finish_reason": c.finish_reason, "top_logprobs": c.top_logprobs,
        } for c in completions]}

    async def logprobs(body: dict[str, Any]) -> dict[str, Any]:
        ids = checked_prompt(body["token_ids"], DataError)
        return {"logprobs": await engine.logprobs(ids, temperature=body["temperature"])}

    return {"/engine/generate": generate, "/engine/logprobs": logprobs}
