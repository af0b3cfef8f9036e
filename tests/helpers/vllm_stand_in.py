"""Stand-in for `vllm serve` with the part of its API that HTTP engines use. It starts in a second.

`python -m tests.helpers.vllm_stand_in --port 0 --model FOLDER`: options below. It is as strict as vLLM 0.32: it answers
with the same 400, 401, 403, 404 and 500, requires the key only under /v1 and /inference, has no routes of the
development mode without it, keeps requests during a pause, and loses the label of the weights when the process ends.
Answers are random tokens that depend on prompt, seed and weights. With `--account FILE` it writes a line of JSON for
each answer: the number of tokens, and the folder of the weights that made them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

FIRST, LAST = 64, 90
"""Range of token ids in answers."""


class Refused(Exception):
    """Error answer in vLLM's form."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class StandIn:
    """State of a server, and its routes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.weights, self.label = args, args.model, "default"
        self.going = asyncio.Event()
        self.going.set()
        self.rejects = False
        """True while it is paused and accepts no new requests."""
        self.fails_with = 0
        """HTTP status with which requests for tokens fail; 0 to answer them."""
        self.started = time.time()
        self.running = 0
        """Number of answers in progress."""

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health), Route("/version", self.version), Route("/metrics", self.metrics),
            Route("/v1/models", self.models), Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/fail_with", self.fail_with, methods=["POST"]),
        ]
        if self.args.dev:
            routes += [
                Route("/weight_info", self.weight_info), Route("/is_paused", self.is_paused),
                Route("/server_info", self.server_info), Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
                Route("/update_weight_version", self.set_label, methods=["POST"]),
                Route("/collective_rpc", self.in_workers, methods=["POST"]),
            ]
        app = Starlette(routes=routes, exception_handlers={Refused: _refused})
        app.add_middleware(_Key, key=self.args.api_key)
        return app

    # --- what it is -------------------------------------------------------------------------------------------------
    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def metrics(self, request: Request) -> Response:
        name = "process_start_time_seconds"
        text = f"# TYPE {name} gauge\n{name} {self.started}\n"
        if getattr(self.args, "kv_share", None) is not None:
            values = {"num_requests_running": self.running, "num_requests_waiting": 0,
                      "kv_cache_usage_perc": self.args.kv_share}
            text += "".join(f'vllm:{gauge}{{engine="0"}} {value}\n' for gauge, value in values.items())
        return PlainTextResponse(text)

    async def models(self, request: Request) -> Response:
        told = {"id": self.args.model, "object": "model", "root": self.args.model, "parent": None,
                "max_model_len": self.args.max_model_len}
        return JSONResponse({"object": "list", "data": [told]})

    async def server_info(self, request: Request) -> Response:
        config = {"parallel_config": {"worker_extension_cls": ""}, "device_config": {"device": "cuda"}}
        return JSONResponse({"vllm_config": config})

    async def fail_with(self, request: Request) -> Response:
        """Fail requests for tokens with this status from now on, as a proxy in front of a server may."""
        self.fails_with = int((await _json(request))["status"])
        return Response(status_code=200)

    # --- weights ----------------------------------------------------------------------------------------------------
    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": not self.going.is_set()})

    async def pause(self, request: Request) -> Response:
        self.rejects = request.query_params.get("mode", "abort") != "keep"
        self.going.clear()
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.rejects = False
        self.going.set()
        return JSONResponse({"status": "resumed"})

    async def set_label(self, request: Request) -> Response:
        label = (await _json(request)).get("new_version")
        if not isinstance(label, str):
            raise Refused(400, "new_version: Input should be a valid string")
        self.label = label
        return JSONResponse({"success": True, "new_version": label})

    async def in_workers(self, request: Request) -> Response:
        told = await _json(request)
        path = told.get("kwargs", {}).get("weights_path", "")
        if told.get("method") != "reload_weights":
            raise Refused(500, f"Call to collective_rpc method failed: no attribute {told.get('method')!r}")
        if self.going.is_set():
            raise Refused(500, "this stand-in loads no weights while it makes tokens")
        await asyncio.sleep(self.args.load_seconds)
        if not (Path(path) / "config.json").is_file():
            raise Refused(500, f"Call to collective_rpc method failed: no weights at {path!r}")
        self.weights = path
        return JSONResponse({"results": [None]})

    # --- tokens -----------------------------------------------------------------------------------------------------
    async def generate(self, request: Request) -> Response:
        if not self.args.scale_out:
            raise Refused(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out")
        told = await _json(request)
        if missing := [name for name in ("token_ids", "sampling_params") if name not in told]:
            raise Refused(400, f"{len(missing)} validation errors: {missing}")
        return await self._answer(request, told, told["token_ids"], told["sampling_params"], tokens=True)

    async def completions(self, request: Request) -> Response:
        told = await _json(request)
        prompt = told.get("prompt")
        if not isinstance(prompt, list) or not told.get("return_token_ids"):
            raise Refused(400, "this stand-in wants token ids, and gives them")
        if len(prompt) + told.get("max_tokens", 16) > self.args.max_model_len:
            raise Refused(400, f"max_tokens is too large: this model's maximum context length is "
                               f"{self.args.max_model_len} tokens")
        return await self._answer(request, told, prompt, told, tokens=False)

    async def _answer(
        self, request: Request, told: dict[str, Any], prompt: list[int], s: dict[str, Any], *, tokens: bool
    ) -> Response:
        if self.fails_with:
            raise Refused(self.fails_with, "nothing is answered here")
        if self.rejects:
            raise Refused(503, "Generation is paused. Please retry after it resumes.")
        if told.get("model") not in (None, self.args.model):
            raise Refused(404, f"The model `{told['model']}` does not exist.")
        if not prompt or not all(isinstance(t, int) and t >= 0 for t in prompt):
            raise Refused(400, "token_ids must hold at least one token, and no negative values")
        if len(prompt) >= self.args.max_model_len:
            raise Refused(400, f"The prompt is longer than the maximum model length of {self.args.max_model_len}.")
        n, temperature = s.get("n", 1), s.get("temperature", 1.0)
        if temperature == 0.0 and n > 1:
            raise Refused(400, f"n must be 1 when using greedy sampling, got {n}.")
        if not 0.0 < s.get("top_p", 1.0) <= 1.0 or temperature < 0.0 or s.get("max_tokens", 16) < 1:
            raise Refused(400, "a sampling parameter is out of its range")
        if told.get("stream"):
            return StreamingResponse(self._stream(prompt, s, tokens), media_type="text/event-stream")
        making = asyncio.ensure_future(asyncio.gather(*(self._make(prompt, s, index) for index in range(n))))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({making, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not making.done():  # vLLM aborts a request whose client is gone
            making.cancel()
            return Response(status_code=499)
        made = making.result()
        choices = [self._choice(i, ids, spans, s, tokens) for i, (ids, spans) in enumerate(made)]
        answer: dict[str, Any] = {"choices": choices}
        rows = [None, *({str(t): {"logprob": -_share(prompt[: i + 1])}} for i, t in enumerate(prompt) if i)]
        if s.get("prompt_logprobs") is not None:
            (answer if tokens else answer["choices"][0])["prompt_logprobs"] = rows
        for ids, spans in made:
            self._account(ids, spans)
        return JSONResponse(answer)

    async def _stream(self, prompt: list[int], s: dict[str, Any], tokens: bool) -> AsyncIterator[str]:
        ids, spans = await self._make(prompt, s, 0)
        for at in range(len(ids)):
            choice = self._choice(0, ids[at : at + 1], spans, s, tokens)
            if at + 1 < len(ids):
                choice |= {"finish_reason": None, "weight_versions": None}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        self._account(ids, spans)
        yield "data: [DONE]\n\n"

    async def _make(self, prompt: list[int], s: dict[str, Any], index: int) -> tuple[list[int], list[list[Any]]]:
        """Return tokens, and spans `[label, weights, start, end]` of the weights that made them."""
        self.running += 1
        try:
            return await self._tokens(prompt, s, index)
        finally:
            self.running -= 1

    async def _tokens(self, prompt: list[int], s: dict[str, Any], index: int) -> tuple[list[int], list[list[Any]]]:
        ids: list[int] = []
        spans: list[list[Any]] = []
        await asyncio.sleep(self.args.latency)
        for at in range(min(s.get("max_tokens", 16), self.args.max_model_len - len(prompt))):
            await asyncio.sleep(self.args.token_seconds)
            await self.going.wait()
            seed = os.urandom(8) if s.get("seed") is None else s["seed"]
            chance = random.Random(f"{prompt}/{at}/{index}/{self.weights}/{seed!r}")
            ids.append(chance.randint(FIRST, LAST) if s.get("top_k") != 1 else FIRST)
            if not spans or spans[-1][0] != self.label:
                spans.append([self.label, self.weights, at, at])
            spans[-1][3] = at + 1
        return ids, spans

    def _choice(
        self, index: int, ids: list[int], spans: list[list[Any]], s: dict[str, Any], tokens: bool
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        only = s.get("top_k") == 1 and self.args.logprobs_mode == "processed_logprobs"
        own = [0.0 if only else -_share([*ids[: i + 1]]) for i in range(len(ids))]
        if s.get("logprobs") is not None and tokens:
            logprobs = {"content": [{"token_id": t, "logprob": p, "top_logprobs": [{"token_id": t, "logprob": p}]}
                                    for t, p in zip(ids, own, strict=True)]}
        elif s.get("logprobs") is not None:
            names = [f"token_id:{t}" for t in ids]
            logprobs = {"tokens": names, "token_logprobs": own,
                        "top_logprobs": [{name: p} for name, p in zip(names, own, strict=True)]}
        told = {"index": index, "token_ids": ids, "finish_reason": "length", "stop_reason": None, "logprobs": logprobs}
        if tokens:
            told["weight_versions"] = [{"version": label, "start": a, "end": b} for label, _, a, b in spans]
        return told

    def _account(self, ids: list[int], spans: list[list[Any]]) -> None:
        if self.args.account:
            weights = [folder for _, folder, *_ in spans]
            line = {"server": self.args.port, "pid": os.getpid(), "tokens": len(ids), "weights": weights}
            with open(self.args.account, "a") as f:
                f.write(json.dumps(line) + "\n")


class _Key:
    """Middleware that requires the key on some paths only, like vLLM's own."""

    def __init__(self, app: Any, key: str) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(("/v1", "/inference"))
        if guarded and self.key and Request(scope).headers.get("authorization") != f"Bearer {self.key}":
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self.app(scope, receive, send)


async def _json(request: Request) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        told = json.loads(await request.body())
        if isinstance(told, dict):
            return told
    raise Refused(400, "Invalid JSON")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    told = {"message": error.message, "type": "Bad Request", "code": error.status}
    return JSONResponse({"error": told}, error.status)


def _share(ids: list[int]) -> float:
    """Return a number between 0 and 1 that depends on these ids."""
    return int.from_bytes(hashlib.blake2b(str(ids).encode(), digest_size=4).digest()) / 2**32


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-len", type=int, default=64)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--no-dev", dest="dev", action="store_false")
    parser.add_argument("--no-scale-out", dest="scale_out", action="store_false")
    parser.add_argument("--logprobs-mode", default="processed_logprobs")
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--kv-share", type=float, help="tell the load in /metrics, with the cache so full")
    parser.add_argument("--account", default="")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--servers", type=int, help="be so many at once, each on a port of its own")
    parser.add_argument("--urls", help="the file where these are told, a line each")
    args = parser.parse_args()
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(args.servers or 0)]
    if args.urls:
        Path(args.urls).write_text("".join(f"http://127.0.0.1:{s.getsockname()[1]}\n" for s in listening))

    async def serve() -> None:
        await asyncio.gather(*(
            uvicorn.Server(uvicorn.Config(
                StandIn(args).app(), host="127.0.0.1", port=args.port, log_level="error", access_log=False,
                ssl_certfile=args.ssl_certfile, ssl_keyfile=args.ssl_keyfile,
            )).serve(None if one is None else [one])
            for one in listening or [None]
        ))

    asyncio.run(serve())


if __name__ == "__main__":
    main()
