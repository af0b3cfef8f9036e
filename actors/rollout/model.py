"""The model that a workflow talks to: `self.model`.

A runner makes one `Model` for each run, over an engine that all runs share. It turns messages and prompts into token
ids, asks the engine, and returns experiences that lack only what the workflow knows: the reward. It counts the tokens
and the weight versions that it saw (`usage`), so that the runner can record them. Ids, task and run are stamped by the
runner; rewards and retries are the workflow's.

Async workflows use the `*_async` methods on the engine's loop; a sync workflow, in a thread of its own or in a worker
process (`workers/main.py`, whose models are like this one), uses the blocking twins of the same names. Both may ask
by OpenAI clients instead, whose answers are kept as experiences until the run is over.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import orjson

from trinity_es.actors.engines.http.remote import RemoteEngine
from trinity_es.actors.engines.interface import Completion, Engine, Sampling, Tokenizer
from trinity_es.actors.engines.long_texts import is_large, off_the_loop
from trinity_es.actors.engines.sampling import MOST_PROMPTS, checked_prompt, merged
from trinity_es.actors.openai_clients import Endpoint
from trinity_es.actors.rollout.conversation.conversations import Message, experience_of, plain_messages
from trinity_es.actors.rollout.leases import RunLeases, running_loop
from trinity_es.actors.rollout.openai_access import OpenAIAccess
from trinity_es.actors.rollout.workers.graders import Graders
from trinity_es.events.errors import DataError, EngineError, NotFinite, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.json_values import NotPlain, plain

__all__ = ["Model", "OpenAIServer"]

_T = TypeVar("_T")
_P = ParamSpec("_P")

Prompt = str | list[int]

STATE_BYTES = 4096
"""Maximum of what a workflow tells of its state, as JSON: it travels in messages."""


class OpenAIServer(Protocol):
    """The engine's endpoint for OpenAI clients, as a model uses it (`serving/engine_server.py`).

    A session belongs to one run: its model keeps what its clients were answered (`keep`), until the run is over.
    """

    url: str
    name: str
    token: str

    def open(self, model: Model, /) -> str: ...
    def forget(self, session: str, /) -> None: ...


def _blocking(
    call: Callable[Concatenate[Model, _P], Coroutine[Any, Any, _T]]
) -> Callable[Concatenate[Model, _P], _T]:
    """Return the blocking twin of a model's async method."""
    name = call.__name__

    @functools.wraps(call)
    def called(self: Model, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._wait(lambda: cast(Coroutine[Any, Any, _T], getattr(self, name)(*args, **kwargs)))

    called.__name__, called.__doc__ = name.removesuffix("_async"), f"`{name}` from a thread that is not the loop's."
    return cast("Callable[Concatenate[Model, _P], _T]", called)


class Model(OpenAIAccess):
    """A model as a workflow sees it.

    `defaults` is the sampling that holds where a call says nothing: the task's `rollout_args`. Names are those of
    `Sampling`; raises DataError for another name or a value that can't be, listing the known ones. `loop` is the
    engine's, that of the caller by default; without one only the `*_async` methods work. `server` is the engine's
    endpoint; without one there are no OpenAI clients. `graders` are the
    runner's; without them each call of `grade` starts one of its own, which takes a second. `name` is an auxiliary
    model's; `task` the one whose requests share an engine of it.
    """

    def __init__(
        self, engine: Engine, *, defaults: Mapping[str, Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None, server: OpenAIServer | None = None,
        graders: Graders | None = None, name: str = "rollout", task: str | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.name, self._task = engine, name, task
        self._server, self._session, self._over = server, "", False
        self._for_task: dict[str, Any] = {"task": task} if isinstance(engine, RemoteEngine) else {}
        self.defaults = dict(defaults or {})
        self.sampling = merged(Sampling(), self.defaults, DataError, "rollout_args")
        self._loop, self._graders = loop or running_loop(), graders
        self.workflow_state: dict[str, Any] = {}
        """What the workflow told of itself: see `set_workflow_state`."""
        self.leases = RunLeases()
        """What this run holds open outside of the system."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def context(self) -> int | None:
        return getattr(self.engine, "max_model_len", None)

    @property
    def model_version(self) -> int:
        """The version that is served now."""
        return self.engine.model_version

    @property
    def model_version_async(self) -> Awaitable[int]:
        """The same, to be awaited: the name that Trinity-RFT has for it. `model_version` costs no call here."""

        async def version() -> int:
            return self.model_version

        return version()

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """`temperature`, `top_p` and `max_tokens` of the task's sampling, for a client that is not of this model."""
        return {name: getattr(self.sampling, name) for name in ("temperature", "top_p", "max_tokens")}

    # --- what a workflow tells of itself ------------------------------------------------------------------------------
    async def set_workflow_state(self, state: Mapping[str, Any]) -> None:
        """Add to what this run shows of itself in its runner's state (`get_runner_state`) while it plays.

        Raises WorkflowError for what is no JSON object, or more than `STATE_BYTES`.
        """
        try:
            told = plain({**self.workflow_state, **state})
            size = len(orjson.dumps(told))
        except (NotPlain, TypeError, ValueError) as e:
            raise WorkflowError(f"a workflow's state must be a dict of plain JSON: {getattr(e, 'what', e)}") from e
        if size > STATE_BYTES:
            raise WorkflowError(f"a workflow's state takes {size:,} bytes as JSON: {STATE_BYTES:,} are the most")
        self.workflow_state.update(told)

    async def get_workflow_state(self) -> dict[str, Any]:
        return dict(self.workflow_state)

    async def clean_workflow_state(self) -> None:
        self.workflow_state.clear()

    # --- async ------------------------------------------------------------------------------------------------------
    async def chat_async(
        self, /, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> list[Experience]:
        """Answer a conversation: `n` experiences (1 by default), as `generate_async`, with `messages` set.

        `messages` are `{"role", "content"}`, rendered by the model's chat template. When the last one is the
        assistant's, its content is the start of the answer and part of the prompt.
        """
        chosen, number = self._chosen(sampling), self.numbered()
        given = plain_messages(messages)
        prompt, text = await self.prompt_of(
            given, tools, exact=lambda text: self.exact_prompt(text, lambda: self.earlier_prompts(given, tools))
        )
        answers = await self._ask(prompt, None, chosen)
        for _, experience in answers:
            experience.messages = [*given, {"role": "assistant", "content": experience.response_text}]
            experience.tools = tools
        return self.keep(number, answers, text)

    async def generate_async(self, /, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> list[Experience]:
        """Continue each prompt (text, or token ids) as it stands, all at once; answers in the prompts' order.

        Each experience holds tokens int32 [prompt + response], prompt_length, logprobs float32 [response] (nats, of the
        distribution sampled from; None with `logprobs=False`), action_mask all true, prompt_text, response_text,
        truncate_status "response_truncated" where max_tokens cut the answer,
        `info["version_spans"] = [[model_version, start, end], ...]` over the response's tokens where the engine knows,
        `info["adapter_spans"] = [[adapter, version, start, end], ...]` where a LoRA adapter answered (`adapter=`),
        and `info["sampling"]`: what was asked for, and which of the n answers (`choice`) this is.

        Raises WorkflowError for an unknown sampling name, EngineError for what the engine refuses.
        """
        chosen, number = self._chosen(sampling), self.numbered()
        many = _prompts(prompts)
        if len(many) > MOST_PROMPTS:
            raise WorkflowError(f"{len(many):,} prompts in one call: {MOST_PROMPTS:,} are the most")
        asked = [asyncio.ensure_future(self._ask(p, p if isinstance(p, str) else None, chosen)) for p in many]
        try:
            found = [answer for answers in await asyncio.gather(*asked) for answer in answers]
        except BaseException:
            for task in asked:  # gather leaves the others running, and their requests with them
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            raise
        return self.keep(number, found)

    async def logprobs_async(
        self, tokens: Sequence[int] | None = None, temperature: float | None = None, *,
        token_ids: Sequence[int] | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """log p(tokens[i] | tokens[:i]), i >= 1: float32 [len(tokens) - 1], nats. `token_ids` is another name for them.

        `temperature` is that of the sampling by default; 1 where that is 0 (greedy).
        """
        self._must_go_on()
        given = token_ids if tokens is None else tokens
        if given is None:
            raise WorkflowError("logprobs of which tokens? Give their ids")
        ids = [int(t) for t in checked_prompt(given, WorkflowError)]
        chosen = self.sampling.temperature or 1.0 if temperature is None else temperature
        before = self.engine.model_version
        how = {"adapter": self.sampling.adapter} if self.sampling.adapter else {}
        found = await self.engine.logprobs(ids, temperature=chosen, **how, **self._for_task)
        self.usage.requests += 1
        self.usage.prompt_tokens += len(ids)
        self.usage.saw(before, self.engine.model_version)
        return np.asarray(found, dtype=np.float32)

    async def experience_from_messages_async(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, temperature: float | None = None,
        as_text: bool = False, *, logprobs: bool = True,
    ) -> Experience:
        """Return a conversation as one experience, the first assistant's turn and all after it the response.

        What `chat` answered in it is there as it was sampled, with its logprobs, up to the newest such answer, and
        nothing is asked of the engine; `tools` are by default those of the run's chats. Turns of the assistant that
        others wrote, or changed, are not learned from: `info["untrained_turns"]` names them. Where `temperature` is not
        that of the sampling, logprobs are asked for.

        A conversation that this run asked nothing in is tokenized anew (`tokenized`), with the logprobs that this model
        gives the response; one that is longer than the engine's `max_model_len` is cut, and its `truncate_status` says
        so. With `as_text` every conversation is taken so, whoever wrote what; and by an auxiliary model each that does
        not end with its own answer.

        Raises WorkflowError where this run asked for its answers and none of them is in it as it was sampled.
        """
        longest, given = self.context, plain_messages(messages)
        found = None if as_text else self._newest_sampled(given, tools)
        turn, last, tools = (None, 0, tools) if found is None else found
        others = [i for i, m in enumerate(given) if i > last and m.get("role") == "assistant"]
        judges = isinstance(self.engine, RemoteEngine)  # what others answered to a prompt that it may have had as well
        if turn is not None and not (judges and others):
            turn.given = True
            sampled = self.sampled(turn, given[: last + 1], tools)
            sampled.messages = given
            if others:
                sampled.info["untrained_turns"] = [*sampled.info.get("untrained_turns", ()), *others]
            if longest and len(turn.tokens) >= longest and turn.cut:
                sampled.truncate_status = "response_truncated"
            if not logprobs:
                sampled.logprobs = None
            elif sampled.logprobs is None or temperature not in (None, self.sampling.temperature):
                await self._asked_again(sampled, temperature, longest)
            return sampled
        if not (as_text or judges) and self._asked_in(given, tools):
            raise WorkflowError(
                "no answer of this conversation is in it as it was sampled, after the prompt that it was sampled for, "
                "or several fit that differ in the reasoning which it leaves out: keep that (reasoning_content), or "
                "return extract_experience_from_history(); as_text=True learns from the text as it stands"
            )
        limit = longest - 1 if longest else None
        experience = await off_the_loop(is_large(given), lambda: self.tokenized(given, tools=tools, limit=limit))
        if experience.truncate_status == "prompt_truncated":  # nothing in it is learned from
            experience.logprobs = np.zeros(1, dtype=np.float32)
        elif logprobs:
            scored = await self.logprobs_async(experience.tokens.tolist(), temperature)
            experience.logprobs = scored[experience.prompt_length - 1 :]
        return experience

    convert_messages_to_experience_async = experience_from_messages_async  # the name that Trinity-RFT has for it

    async def _asked_again(self, sampled: Experience, temperature: float | None, longest: int | None) -> None:
        """Give an experience the logprobs at this temperature, those of what the model only read 0 as ever."""
        tokens, first, mask = sampled.tokens, sampled.prompt_length, sampled.action_mask
        assert tokens is not None
        assert mask is not None
        if longest and len(tokens) >= longest:  # the engine has room for one less
            tokens, mask = tokens[: longest - 1], mask[: longest - 1 - first]
            sampled.tokens, sampled.action_mask = tokens, mask
        found = await self.logprobs_async(tokens.tolist(), temperature)
        sampled.logprobs = np.where(mask, found[first - 1 :], np.float32(0))

    async def get_message_token_len(self, messages: Sequence[Message]) -> int:
        """Return how many tokens a chat with these messages has as its prompt."""
        given = plain_messages(messages)
        return len(await off_the_loop(is_large(given), lambda: self.render(given, None)))

    async def grade_async(self, /, function: str, call: bytes, **limits: Any) -> Any:
        """Return what a function gives in a process of its own: `Graders.grade`, which `Workflow.grade_async` asks."""
        if self._graders is not None:
            return await self._graders.grade(function, call, **limits)
        async with Graders.alone() as graders:
            return await graders.grade(function, call, **limits)

    # --- the blocking twins -----------------------------------------------------------------------------------------
    chat = _blocking(chat_async)
    generate = _blocking(generate_async)
    logprobs = _blocking(logprobs_async)
    grade = _blocking(grade_async)
    experience_from_messages = _blocking(experience_from_messages_async)
    convert_messages_to_experience = experience_from_messages

    def _wait(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        if self._loop is None or not self._loop.is_running():
            raise WorkflowError("this model has no running event loop: use the methods that end in _async")
        self._must_not_block()
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _must_not_block(self) -> None:
        if self._loop is not None and running_loop() is self._loop:
            raise WorkflowError(
                "a blocking model call would stop the event loop that answers it: await the method that ends in "
                "_async (or use get_openai_async_client), or make the workflow sync (is_async = False)"
            )

    def openai_endpoint(self) -> Endpoint:
        """Return where OpenAI clients of this run reach the model. Raises WorkflowError where it has no endpoint.

        That of an auxiliary model is one of its engines, which keeps nothing of the run.
        """
        if isinstance(self.engine, RemoteEngine):
            return self.engine.endpoint(self._task)
        if self._server is None:
            raise WorkflowError(
                "this model has no OpenAI endpoint: the rollout model has one in a runner of the actor system, and in "
                "a WorkflowRunner that was given a `server` (trinity_es.actors.serving.engine_server.EngineServer)"
            )
        self._session = self._session or ("over" if self._over else self._server.open(self))
        return Endpoint(f"{self._server.url}/s/{self._session}/v1", self._server.token, self._server.name)

    async def aclose(self) -> None:
        await super().aclose()
        if self._server is not None and self._session:
            self._server.forget(self._session)
        self._over = True

    # --- what was answered ------------------------------------------------------------------------------------------
    def extract_experience_from_history(
        self, clear_history: bool = True, per_request: bool = False
    ) -> list[Experience]:
        """Return what this run was answered so far, an experience a conversation, in the order of their last requests.

        Answers of `chat`, `generate` and its OpenAI clients alike: they lack only the reward. Where a prompt went on
        from an earlier answer, both are in one experience, as they were sampled, with the mask true on both. What was
        sampled is learned from once: an answer that two conversations go on from is masked in the second; one that was
        given out before, or has a reward of its own, stays an experience of its own. With `per_request` each answer
        does. `eid.step` counts the requests, where nobody set it.
        """
        self._must_go_on()
        return self.given_out(clear_history, per_request)

    def _must_go_on(self) -> None:
        if self._over:
            raise WorkflowError(
                "this model answers no more, its run is over: let a workflow await all that it starts, and take "
                "self.model anew in each run (a workflow that is reset gets another one)"
            )

    # --- to and from the engine -------------------------------------------------------------------------------------
    def _chosen(self, sampling: dict[str, Any]) -> Sampling:
        return merged(self.sampling, sampling, WorkflowError, "the call") if sampling else self.sampling

    async def _ask(self, prompt: Prompt, text: str | None, sampling: Sampling) -> list[tuple[Completion, Experience]]:
        self._must_go_on()
        before = self.engine.model_version
        answers = await self.engine.generate(checked_prompt(prompt, WorkflowError), sampling, **self._for_task)
        self._must_go_on()
        return self.took(answers, before, text, sampling)

    def took(
        self, completions: list[Completion], before: int, text: str | None, sampling: Sampling
    ) -> list[tuple[Completion, Experience]]:
        """Make an experience of each answer to one prompt, and count them.

        `before` is the version that was served when the prompt was sent, `text` the prompt where it was a text,
        `sampling` what was asked for. Raises EngineError for an answer that was cut off, or whose logprobs are none.
        """
        after = self.engine.model_version
        self.usage.requests += 1
        asked = sampling.recorded()
        if text is None and completions:
            text = self.tokenizer.decode(completions[0].prompt_token_ids)  # once for all of them: it may be long
        found = []
        for i, completion in enumerate(completions):
            if completion.finish_reason in ("abort", "error"):
                raise EngineError(
                    f"the engine ended the request before its answer was complete ({completion.finish_reason})"
                )
            if sampling.adapter != (completion.adapter or [""])[0]:
                raise EngineError(f"this model's engine serves no adapter {sampling.adapter!r}", refused=True)
            spans = _spans(completion, before, after)
            self.usage.saw(*((v for v, _, _ in spans) if spans else (before, after)))
            if i == 0:
                self.usage.prompt_tokens += len(completion.prompt_token_ids)
            self.usage.response_tokens += len(completion.token_ids)
            try:
                experience = experience_of(completion, text or "", spans)
            except NotFinite as e:
                raise EngineError(f"the engine's weights or its GPU are broken: {e}") from e
            if completion.adapter:
                experience.info["adapter_spans"] = [[*completion.adapter, 0, len(completion.token_ids)]]
            experience.info["sampling"] = {**asked, "choice": i}
            found.append((completion, experience))
        return found


def _spans(completion: Completion, before: int, after: int) -> list[list[int]]:
    """`[version, start, end]` over the response's tokens; [] where nobody knows."""
    known = getattr(completion, "version_spans", ())  # an engine may give a Completion that knows
    if known:
        return [list(span) for span in known]
    return [[before, 0, len(completion.token_ids)]] if before == after else []


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int | np.integer) for p in prompts):
        return [[int(p) for p in prompts]]  # type: ignore[arg-type]  # one prompt, as token ids
    return list(prompts)  # type: ignore[arg-type]  # several
