"""An engine of another runner, asked over HTTP: how workflows reach auxiliary models.

A `RemoteEngine` is an `Engine` over all engines of one model, which it asks by the routes of
`serving/token_id_routes.py`. They take and give token ids and logprobs as they are. Which of the engines gets a request
decides `actors.load_balancing`. They may come and go at any time (`update`): a request whose engine died, or that finds
none, is asked again of another until its caller gives up, so a workflow sees a pause. What the engine refuses is an
EngineError, as from the engine itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trinity_es.actors import load_balancing
from trinity_es.actors.config.schema import RolloutModelConfig
from trinity_es.actors.engines.http.client import http_client, largest_answer, up_to
from trinity_es.actors.engines.interface import Completion, Sampling, Tokenizer
from trinity_es.actors.openai_clients import Endpoint
from trinity_es.actors.plugins import resolve
from trinity_es.events.errors import ConfigError, EngineError, SyncError, WorkflowError, error_from_dict

if TYPE_CHECKING:
    import httpx

__all__ = ["RemoteEngine", "remote_models"]

CONNECT_SECONDS = 5.0
"""How long a connection to an engine's runner may take."""
AGAIN_SECONDS = 0.5
"""How long an unreachable engine is left alone before it is tried again; a new URL for it resets this."""
REMEMBERED_TASKS = 4096
"""Maximum number of tasks whose home is known; an older one finds a home again."""
CALLER = "x-trinity-caller"
"""Header that tells whose request it is: an engine tells a caller what it has to do for others."""

GONE_STATUS, DEAD_STATUS, REFUSED_STATUS, FAILED_STATUS = 499, 503, 422, 500


@dataclass(slots=True)
class _Place:
    """One of the engines."""

    url: str
    mine: int = 0
    """Requests of this caller that it has."""
    others: int = 0
    """Requests of others, as it told last, and when."""
    told: float = float("-inf")
    away_until: float = float("-inf")
    """It could not be reached: not before then."""


class RemoteEngine:
    """All engines of one model, as one `Engine` (see the module). Use it on one event loop.

    Requests of one `task` share an engine's prefix cache. `defaults`: the model's own sampling, under the names of
    `Sampling`. `token` is the one that its runners' HTTP
    servers ask for. `model_version` is that of the last answer. `transport` is httpx's, for tests.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        *,
        token: str,
        defaults: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name, self.tokenizer, self.token = name, tokenizer, token
        self.defaults, self.max_model_len = dict(defaults or {}), max_model_len
        self.model_version = 0
        self._clock, self._transport = clock, transport
        self._caller = uuid.uuid4().hex
        self._places: dict[str, _Place] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._changed = asyncio.Event()
        self._http: httpx.AsyncClient | None = None

    def update(self, endpoints: Mapping[str, str]) -> None:
        """Replace the engines: runner -> URL. One under a new URL is a new one."""
        kept = {n: p for n, p in self._places.items() if endpoints.get(n) == p.url}
        new = {n: _Place(url) for n, url in endpoints.items() if n not in kept}
        self._places = kept | new
        if new:
            self._changed.set()

    def choose(self, task: str | None) -> str | None:
        """Return the engine for the task's next request, which becomes its home; None while none can be reached."""
        now = self._clock()
        loads = {
            name: place.mine + load_balancing.reported(place.others, place.told, now)
            for name, place in self._places.items()
            if place.away_until <= now
        }
        chosen = load_balancing.choose(task, loads, self._homes.get(task) if task is not None else None)
        if task is not None and chosen is not None:
            self._homes[task] = chosen
            self._homes.move_to_end(task)
            while len(self._homes) > REMEMBERED_TASKS:
                self._homes.popitem(last=False)
        return chosen

    def endpoint(self, task: str | None) -> Endpoint:
        """Return where an OpenAI client reaches the task's engine. Raises WorkflowError while there is none."""
        name = self.choose(task)
        if name is None:
            raise WorkflowError(
                f"no engine of the auxiliary model {self.name!r} serves now: its methods (chat, generate) wait "
                "for one, an OpenAI client can't"
            )
        return Endpoint(f"{self._places[name].url}/v1", self.token, self.name)

    async def start(self) -> None:
        """Nothing to start: its runners do."""

    async def stop(self) -> None:
        """Let go of the connections."""
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
        import httpx

        data = json.dumps(body).encode()
        ended = 0
        while True:
            if ended > 1:  # it may be this request that ends them: the attempt fails, and attempts are counted
                raise EngineError(f"{ended} engines of auxiliary model {self.name!r} ended while they answered this")
            name = self.choose(task)
            if name is None:
                await self._any()
                continue
            place = self._places[name]
            place.mine += 1
            try:
                answer = await self._client().post(
                    f"{place.url}/engine/{what}", content=data, extensions=up_to(most)
                )
            except (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError) as e:  # it is gone, or going
                place.away_until = self._clock() + AGAIN_SECONDS
                ended += not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout)
                continue
            except httpx.HTTPError as e:
                raise EngineError(f"{name} of the auxiliary model {self.name!r} can't be asked: {e}") from e
            finally:
                place.mine -= 1
            told = _answered(answer, self.name, name)
            if told is None:
                place.away_until = self._clock() + AGAIN_SECONDS
                ended += 1
                continue
            place.others, place.told = told["others"], self._clock()
            self.model_version = told["model_version"]
            if "error" in told:
                raise error_from_dict(told["error"])
            return told

    async def _any(self) -> None:
        """Wait until there may be an engine to ask."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), AGAIN_SECONDS)

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = http_client(
                headers={"authorization": f"Bearer {self.token}", CALLER: self._caller},
                connect=CONNECT_SECONDS, transport=self._transport,
            )
        return self._http


def _answered(answer: httpx.Response, model: str, name: str) -> dict[str, Any] | None:
    """Return what an engine's runner said; None where another has to be asked. Raises EngineError."""
    if answer.status_code == DEAD_STATUS:
        return None
    try:
        told: dict[str, Any] = json.loads(answer.content)
        if "model_version" in told:
            return told
    except (ValueError, TypeError):
        pass
    raise EngineError(f"{name} of the auxiliary model {model!r} answered {answer.status_code}: {answer.text[:200]}")


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
