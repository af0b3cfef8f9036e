"""Engines of auxiliary models, which run in other runners and which workflows call over HTTP.

A `RemoteEngine` is an `Engine` over all engines of one model. It calls the routes of `serving/token_id_routes.py`. The
engines may come and go (`update`). A request whose engine died is retried on another, and waits if there is none, so a
workflow sees only a pause.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trinity_es.actors.config.models import RolloutModelConfig
from trinity_es.actors.engines.http.client import http_client, largest_answer, size_limit
from trinity_es.actors.engines.http.pool import Backend, EngineFailed, EnginePool, NoEngine
from trinity_es.actors.engines.interface import Completion, Sampling, Tokenizer
from trinity_es.actors.openai_clients import Endpoint
from trinity_es.actors.plugin_lookup import resolve
from trinity_es.events.errors import ConfigError, EngineError, SyncError, WorkflowError

if TYPE_CHECKING:
    import httpx

__all__ = ["RemoteEngine", "remote_models"]

CONNECT_SECONDS = 5.0


class RemoteEngine:
    """All engines of an auxiliary model as one `Engine`, for one event loop.

    Requests of one `task` go to one engine, to share its prefix cache. `token`: bearer token of the runners' servers;
    `defaults`: the model's own sampling, by the names of `Sampling`. `model_version` is that of the last answer.
    """

    def __init__(
        self, name: str, tokenizer: Tokenizer, *, token: str, defaults: Mapping[str, Any] | None = None,
        max_model_len: int | None = None, clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name, self.tokenizer, self.token = name, tokenizer, token
        self.defaults, self.max_model_len = dict(defaults or {}), max_model_len
        self.model_version = 0
        self.pool = EnginePool(clock)
        self._clock, self._transport = clock, transport
        self._http: httpx.AsyncClient | None = None

    def update(self, endpoints: Mapping[str, str]) -> None:
        """Replace the engines by those of `endpoints`: a URL for each runner. A runner's new URL means a new engine."""
        self.pool.update({"runner": name, "incarnation": 0, "endpoint": url} for name, url in endpoints.items())

    def endpoint(self, task: str | None) -> Endpoint:
        """Return the OpenAI endpoint of the task's engine. Raises WorkflowError while no engine is ready."""
        keys = [] if task is None else [task]
        engine = self.pool.choose(keys)
        if engine is None:
            raise WorkflowError(
                f"no engine of the auxiliary model {self.name!r} is ready, and an OpenAI client can't wait for "
                "one: try again later, or use the model's chat or generate, which wait"
            )
        self.pool.remember(keys, engine)
        return Endpoint(f"{engine.endpoint}/v1", self.token, self.name)

    async def start(self) -> None:
        """Do nothing, since runners start the engines."""

    async def stop(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def load_weights(self, version: int, path: str) -> None:
        """Raise SyncError, since an auxiliary model keeps its weights."""
        raise SyncError(f"the auxiliary model {self.name!r} keeps its weights: load new ones into the rollout model")

    async def generate(self, prompt: str | list[int], sampling: Sampling, task: str | None = None) -> list[Completion]:
        """Generate like `Engine.generate`, and wait while no engine can be reached."""
        max_bytes = largest_answer(
            prompt_tokens=len(prompt), answers=sampling.n,
            max_tokens=min(sampling.max_tokens, self.max_model_len or sampling.max_tokens),
            logprobs_per_token=1 + sampling.top_logprobs if sampling.logprobs else 0,
        )
        answer = await self._ask("generate", {"prompt": prompt, "sampling": asdict(sampling)}, task, max_bytes)
        return [Completion(**c) for c in answer["completions"]]

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yield the whole answer of `generate` as one part."""
        [whole] = await self.generate(prompt, replace(sampling, n=1))
        yield whole

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0, task: str | None = None) -> list[float]:
        """Compute like `Engine.logprobs`, and wait while no engine can be reached."""
        body = {"token_ids": list(token_ids), "temperature": temperature}
        max_bytes = largest_answer(prompt_tokens=len(token_ids), logprobs_per_prompt_token=1)
        return list((await self._ask("logprobs", body, task, max_bytes))["logprobs"])

    async def _ask(self, route: str, body: dict[str, Any], task: str | None, max_bytes: int) -> dict[str, Any]:
        """Send a request to an engine of the pool, with retries on others, and return its JSON. Raises EngineError."""
        data = json.dumps(body).encode()
        if self._http is None:
            self._http = http_client(
                headers={"authorization": f"Bearer {self.token}"}, connect=CONNECT_SECONDS, transport=self._transport
            )
        http, keys = self._http, [] if task is None else [task]  # without a task any engine may get it

        async def ask(engine: Backend) -> dict[str, Any]:
            self.pool.remember(keys, engine)
            url = f"{engine.endpoint}/engine/{route}"
            answer = await http.post(url, content=data, extensions=size_limit(max_bytes))
            result = self._read_result(answer, engine.runner)
            engine.other_count, engine.reported_at = max(0, result["load"] - engine.open_count), self._clock()
            self.model_version = result["model_version"]
            engine.answer_count += 1
            return result

        try:
            return await self.pool.ask(ask, keys)
        except NoEngine as e:  # this request may have killed them: fail its attempt, since attempts are limited
            raise EngineError(
                f"{e.lost} engines of auxiliary model {self.name!r} ended while they answered this request ({e})"
            ) from e

    def _read_result(self, answer: httpx.Response, runner: str) -> dict[str, Any]:
        """Return the JSON of a successful answer. Raises EngineFailed if the engine ended, EngineError for an error."""
        status = answer.status_code
        try:
            result: dict[str, Any] = json.loads(answer.content)
            if "load" in result:  # every successful answer has it, and no error
                return result
            message = str(result["error"]["message"])
        except (ValueError, TypeError, LookupError):
            message = answer.text[:200]
        if status == 503:
            raise EngineFailed(message, lost=True)
        if status in (400, 413, 422, 500):
            details = {} if status == 500 else {"refused": True}
            raise EngineError(message, **details)
        raise EngineError(f"{runner} of the auxiliary model {self.name!r} answered {status}: {message}")


def remote_models(auxiliary: Mapping[str, RolloutModelConfig], token: str) -> dict[str, RemoteEngine]:
    """Return a RemoteEngine with a tokenizer for each auxiliary model.

    Raises ConfigError for an engine class without the method `load_tokenizer`.
    """
    engines = {}
    for name, model in auxiliary.items():
        cls = resolve(model.engine_class, {}, "engine")
        if not hasattr(cls, "load_tokenizer"):
            raise ConfigError(
                f"{model.engine_class} can't be the engine of an auxiliary model: it lacks the static method "
                "load_tokenizer(config), which its clients need to tokenize prompts"
            )
        engines[name] = RemoteEngine(
            name, cls.load_tokenizer(model.engine_config()), token=token, defaults=model.rollout_args(),
            max_model_len=model.max_model_len,
        )
    return engines
