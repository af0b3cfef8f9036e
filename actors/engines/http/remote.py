"""An engine of another runner, asked over HTTP: how workflows reach auxiliary models.

A `RemoteEngine` is an `Engine` over all engines of one model, which it asks by the routes of
`serving/token_id_routes.py`: token ids and logprobs as they are. Engines may come and go at any time (`update`): a
request whose engine died, or that finds none, is asked again of another until its caller gives up, so a workflow sees a
pause. What the engine refuses is an EngineError, as from the engine itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trinity_es.actors.config.schema import RolloutModelConfig
from trinity_es.actors.engines.http.client import http_client, largest_answer, up_to
from trinity_es.actors.engines.http.pool import Backend, EngineFailed, EnginePool, NoEngine
from trinity_es.actors.engines.interface import Completion, Sampling, Tokenizer
from trinity_es.actors.openai_clients import Endpoint
from trinity_es.actors.plugins import resolve
from trinity_es.events.errors import ConfigError, EngineError, SyncError, WorkflowError

if TYPE_CHECKING:
    import httpx

__all__ = ["RemoteEngine", "remote_models"]

CONNECT_SECONDS = 5.0
"""How long a connection to an engine's runner may take."""


class RemoteEngine:
    """All engines of one model, as one `Engine` (see the module). Use it on one event loop.

    Requests of one `task` share an engine's prefix cache. `defaults`: the model's own sampling, under the names of
    `Sampling`. `token` is the one that its runners' HTTP servers ask for. `model_version` is that of the last answer.
    `transport` is httpx's, for tests.
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
        """Replace the engines: runner -> URL. One under a new URL is a new one."""
        self.pool.update({"runner": name, "incarnation": 0, "endpoint": url} for name, url in endpoints.items())

    def endpoint(self, task: str | None) -> Endpoint:
        """Return where an OpenAI client reaches the task's engine. Raises WorkflowError while there is none."""
        engine = self.pool.choose(_keys(task))
        if engine is None:
            raise WorkflowError(
                f"no engine of the auxiliary model {self.name!r} serves now: its methods (chat, generate) wait "
                "for one, an OpenAI client can't"
            )
        self.pool.remember(_keys(task), engine)
        return Endpoint(f"{engine.endpoint}/v1", self.token, self.name)

    async def start(self) -> None:
        """Nothing to start: its runners do."""

    async def stop(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def load_weights(self, version: int, path: str) -> None:
        """Raise SyncError: an auxiliary model serves the weights that it was started with."""
        raise SyncError(f"the auxiliary model {self.name!r} keeps the weights that it was started with")

    async def generate(
        self, prompt: str | list[int], sampling: Sampling, task: str | None = None
    ) -> list[Completion]:
        """Generate as `Engine.generate` does; waits while no engine can be reached."""
        tokens = min(sampling.max_tokens, self.max_model_len or sampling.max_tokens)
        entries = 1 + sampling.top_logprobs if sampling.logprobs else 0
        most = largest_answer(prompt=len(prompt), answers=sampling.n, tokens=tokens, entries=entries)
        told = await self._ask("generate", {"prompt": prompt, "sampling": asdict(sampling)}, task, most)
        return [Completion(**c) for c in told["completions"]]

    async def stream(
        self, prompt: str | list[int], sampling: Sampling, task: str | None = None
    ) -> AsyncGenerator[Completion, None]:
        """Generate as `Engine.stream` does, in one piece: what is asked from afar is answered whole."""
        [whole] = await self.generate(prompt, replace(sampling, n=1), task)
        yield whole

    async def logprobs(
        self, token_ids: list[int], temperature: float = 1.0, task: str | None = None
    ) -> list[float]:
        """Compute as `Engine.logprobs` does; waits while no engine can be reached."""
        most = largest_answer(prompt=len(token_ids), of_prompt=1)
        told = await self._ask("logprobs", {"token_ids": list(token_ids), "temperature": temperature}, task, most)
        return list(told["logprobs"])

    async def _ask(self, what: str, body: dict[str, Any], task: str | None, most: int) -> dict[str, Any]:
        data = json.dumps(body).encode()
        if self._http is None:
            self._http = http_client(
                headers={"authorization": f"Bearer {self.token}"}, connect=CONNECT_SECONDS, transport=self._transport
            )
        http = self._http

        async def ask(engine: Backend) -> dict[str, Any]:
            self.pool.remember(_keys(task), engine)
            answer = await http.post(f"{engine.endpoint}/engine/{what}", content=data, extensions=up_to(most))
            told = self._read(answer, engine.runner)
            engine.others, engine.told = max(0, told["load"] - engine.busy), self._clock()
            self.model_version = told["model_version"]
            engine.answered += 1
            return told

        try:
            return await self.pool.ask(ask, _keys(task))
        except NoEngine as e:  # it may be this request that ends them: the attempt fails, and attempts are counted
            raise EngineError(
                f"{e.lost} engines of auxiliary model {self.name!r} ended while they answered this ({e})"
            ) from e

    def _read(self, answer: httpx.Response, runner: str) -> dict[str, Any]:
        """Return what an engine's runner answered. Raises EngineFailed for a dead engine, EngineError for an error."""
        status = answer.status_code
        try:
            told: dict[str, Any] = json.loads(answer.content)
            if "load" in told:
                return told
            message = str(told["error"]["message"])
        except (ValueError, TypeError, LookupError):
            message = answer.text[:200]
        if status == 503:
            raise EngineFailed(message, lost=True)
        if status in (400, 413, 422, 500):
            raise EngineError(message, **({} if status == 500 else {"refused": True}))
        raise EngineError(f"{runner} of the auxiliary model {self.name!r} answered {status}: {message}")


def _keys(task: str | None) -> list[str]:
    return [] if task is None else [task]


def remote_models(auxiliary: Mapping[str, RolloutModelConfig], token: str) -> dict[str, RemoteEngine]:
    """Return a RemoteEngine for each auxiliary model of a config, in its order.

    Loads their tokenizers, which may take a while. Raises what that raises, and ConfigError for an engine class that
    has no `load_tokenizer`.
    """
    found = {}
    for name, how in auxiliary.items():
        cls = resolve(how.engine_class, {}, "engine")
        if not hasattr(cls, "load_tokenizer"):
            raise ConfigError(
                f"{how.engine_class} can't be the engine of an auxiliary model: it needs a static method "
                "load_tokenizer(config), for the processes that ask it"
            )
        found[name] = RemoteEngine(
            name, cls.load_tokenizer(how.engine_config()), token=token, defaults=how.rollout_args(),
            max_model_len=how.max_model_len,
        )
    return found
