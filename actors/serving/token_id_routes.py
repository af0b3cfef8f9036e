"""An engine's tokens over HTTP: further routes for the server that a runner has before an auxiliary model's engine.

They take and give token ids and logprobs as they are, so nothing is rendered, parsed or rounded on the way. A caller
that hangs up (a run was cancelled or timed out) ends its request in the engine. `engines/remote_engine.py` asks them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from trinity_es.actors.engines.http.remote import CALLER, DEAD_STATUS, FAILED_STATUS, GONE_STATUS, REFUSED_STATUS
from trinity_es.actors.engines.interface import Completion, Engine, Sampling
from trinity_es.actors.engines.sampling import checked_prompt, merged
from trinity_es.actors.serving.errors import ApiError
from trinity_es.actors.serving.http_server import Gone, read_body, while_listening
from trinity_es.events.errors import DataError, EngineError, TrinityError, error_to_dict

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["engine_routes"]

Handler = Callable[["Request"], Coroutine[Any, Any, "Response"]]


def engine_routes(engine: Engine, dead: Callable[[str], None]) -> dict[str, Handler]:
    """Return the handlers of `POST /engine/generate` and `/engine/logprobs` by their paths.

    Who may ask is the app's business.

    Bodies are JSON: `{"prompt": text or ids, "sampling": {...}}` gives `{"completions": [...]}`, `{"token_ids": [...],
    "temperature": t}` gives `{"logprobs": [...]}`; both with `model_version`, and `others`: requests that it is
    answering for other callers. `dead` is told the reason when the engine will never answer again.
    """
    from starlette.responses import Response

    busy: dict[str, int] = {}

    async def answered(
        request: Request, ask: Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
    ) -> Response:
        caller = request.headers.get(CALLER, "")
        busy[caller] = busy.get(caller, 0) + 1
        status = 200
        told: dict[str, Any] = {}
        try:
            given = json.loads(await read_body(request))
            told = await while_listening(request.receive, ask(given))
        except Gone:
            return Response(status_code=GONE_STATUS)
        except (Exception, asyncio.CancelledError) as e:
            current = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and current is not None and current.cancelling():
                raise
            status, told = _told(e)
            if status == DEAD_STATUS:
                dead(str(e))
        finally:
            busy[caller] -= 1
            if not busy[caller]:
                del busy[caller]
        told |= {"model_version": engine.model_version, "others": sum(busy.values()) - busy.get(caller, 0)}
        # Not orjson: a logprob may be -inf, which it would write as null.
        return Response(json.dumps(told), status_code=status, media_type="application/json")

    async def generate(request: Request) -> Response:
        async def ask(given: dict[str, Any]) -> dict[str, Any]:
            sampling = merged(Sampling(), given["sampling"], DataError, "the request")
            prompt = checked_prompt(given["prompt"], DataError)
            return {"completions": [_plain(c) for c in await engine.generate(prompt, sampling)]}

        return await answered(request, ask)

    async def logprobs(request: Request) -> Response:
        async def ask(given: dict[str, Any]) -> dict[str, Any]:
            ids = checked_prompt(given["token_ids"], DataError)
            return {"logprobs": await engine.logprobs(ids, temperature=given["temperature"])}

        return await answered(request, ask)

    return {"/engine/generate": generate, "/engine/logprobs": logprobs}


def _plain(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": None if completion.logprobs is None else [float(p) for p in completion.logprobs],
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "top_logprobs": completion.top_logprobs,
    }


def _told(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return a failure as status and body."""
    if isinstance(error, ApiError):
        error = EngineError(str(error), refused=True)
    if not isinstance(error, TrinityError):
        error = EngineError(f"the engine failed: {type(error).__name__}: {error}")
    details = error.details
    status = DEAD_STATUS if details.get("dead") else REFUSED_STATUS if details.get("refused") else FAILED_STATUS
    return status, {"error": error_to_dict(error)}
