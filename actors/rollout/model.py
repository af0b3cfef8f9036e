"""The model that a workflow calls: `self.model`.

A runner makes one `Model` per run, over an engine that all runs share. Its answers are experiences. They lack only the
reward, which the workflow sets, and the ids, which the runner sets. `usage` counts tokens and weight versions.

Async workflows await the `*_async` methods. Sync workflows, in a thread or a worker process (`workers/main.py`), call
the blocking variants. Both may use OpenAI clients instead, whose answers are kept as experiences until the run ends.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import orjson

from trinity_es.actors.engines.http.auxiliary_engine import RemoteEngine
from trinity_es.actors.engines.interface import REQUEST_NAME, Completion, Engine, Sampling, Tokenizer
from trinity_es.actors.engines.long_text_tokenization import is_large, off_the_loop
from trinity_es.actors.engines.sampling_checks import MOST_PROMPTS, checked_prompt, with_options
from trinity_es.actors.openai_clients import Endpoint
from trinity_es.actors.rollout.conversation.conversation_tokens import Message, experience_of, plain_messages
from trinity_es.actors.rollout.leases import RunLeases, running_loop
from trinity_es.actors.rollout.openai_access import OpenAIAccess
from trinity_es.actors.rollout.recorded_steps import RunSteps
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.actors.rollout.workers.graders import Graders
from trinity_es.events.errors import DataError, EngineError, NotFinite, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.json_values import NotPlain, plain

__all__ = ["Model", "OpenAIServer"]

_T = TypeVar("_T")
_P = ParamSpec("_P")

Prompt = str | list[int]

STATE_BYTES = 4096
"""Maximum size of a workflow's state as JSON, since it is sent in messages."""


class OpenAIServer(Protocol):
    """The engine's endpoint for OpenAI clients (`serving/engine_server.py`). Each run has a session there."""

    url: str
    name: str
    token: str

    def open(self, model: Model, /) -> str: ...
    def forget(self, session: str, /) -> None: ...


def _blocking(call: Callable[Concatenate[Model, _P], Coroutine[Any, Any, _T]]) -> Callable[Concatenate[Model, _P], _T]:
    """Return the blocking variant of an `*_async` method, which it calls by name, so subclasses may override it."""
    name = call.__name__

    @functools.wraps(call)
    def called(self: Model, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._wait(lambda: cast(Coroutine[Any, Any, _T], getattr(self, name)(*args, **kwargs)))

    called.__name__, called.__doc__ = name.removesuffix("_async"), f"`{name}` from a thread that is not the loop's."
    return cast("Callable[Concatenate[Model, _P], _T]", called)


class Model(OpenAIAccess):
    """A model for the workflow of one run.

    `defaults`: the task's `rollout_args`; the constructor raises DataError for an unknown name or an invalid value.
    `loop`: the engine's event loop, by default the one that runs in the caller; without one only the `*_async` methods
    work. `graders`: without them each `grade` starts a new interpreter, which takes a second. `name`: that of an
    auxiliary model. `task`: id of the task; all its requests to an auxiliary model go to one engine. `journal`: has
    answers of earlier attempts at this run, and records those of this one.
    """

    def __init__(
        self, engine: Engine, *, defaults: Mapping[str, Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None, server: OpenAIServer | None = None,
        graders: Graders | None = None, name: str = "rollout", task: str | None = None,
        journal: RunJournal | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.name, self._task, self.journal = engine, name, task, journal
        self._server, self._session, self._is_over = server, "", False
        self._task_argument: dict[str, Any] = {"task": task} if isinstance(engine, RemoteEngine) else {}
        self.defaults = dict(defaults or {})
        self.sampling = with_options(Sampling(), self.defaults, DataError, "rollout_args")
        self._loop, self._graders = loop or running_loop(), graders
        self.workflow_state: dict[str, Any] = {}
        self.leases = RunLeases()
        self.steps = RunSteps(journal, self._loop)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def context(self) -> int | None:
        return getattr(self.engine, "max_model_len", None)

    @property
    def model_version(self) -> int:
        return self.engine.model_version

    @property
    def model_version_async(self) -> Awaitable[int]:
        """Awaitable of `model_version`, as in Trinity-RFT."""

        async def version() -> int:
            return self.model_version

        return version()

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """`temperature`, `top_p` and `max_tokens` of the task's sampling, for a client of another model."""
        return {name: getattr(self.sampling, name) for name in ("temperature", "top_p", "max_tokens")}

    # --- the workflow's state -----------------------------------------------------------------------------------------
    async def set_workflow_state(self, state: Mapping[str, Any]) -> None:
        """Add fields to this run's state in `get_runner_state`. Raises WorkflowError if it is no JSON or too large."""
        try:
            merged_state = plain({**self.workflow_state, **state})
            size = len(orjson.dumps(merged_state))
        except (NotPlain, TypeError, ValueError) as e:
            raise WorkflowError(f"a workflow's state must be a dict of plain JSON: {e}") from e
        if size > STATE_BYTES:
            raise WorkflowError(f"a workflow's state takes {size:,} bytes as JSON: keep it within {STATE_BYTES:,}")
        self.workflow_state.update(merged_state)

    async def get_workflow_state(self) -> dict[str, Any]:
        return dict(self.workflow_state)

    async def clean_workflow_state(self) -> None:
        self.workflow_state.clear()

    # --- async ------------------------------------------------------------------------------------------------------
    async def chat_async(
        self, /, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> list[Experience]:
        """Return `n` answers (1 by default) to a conversation: experiences as of `generate_async`, with `messages` set.

        `messages` are `{"role", "content"}`, rendered by the model's chat template. If the last message is the
        assistant's, the answer continues its content, which is part of the prompt.
        """
        settings, number = self._sampling_for_call(sampling), self.next_number()
        chat = plain_messages(messages)
        prompt, text = await self.prompt_of(
            chat, tools, exact=lambda text: self.exact_prompt(text, lambda: self.earlier_prompts(chat, tools))
        )
        answers = await self._ask(prompt, None, settings)
        for _, experience in answers:
            experience.messages = [*chat, {"role": "assistant", "content": experience.response_text}]
            experience.tools = tools
        return self.keep(number, answers, text)

    async def generate_async(self, /, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> list[Experience]:
        """Return `n` answers to each prompt (text or token ids, sent unchanged), in the prompts' order.

        All prompts are sent at once. Each experience has
        - tokens int32 [prompt + response], prompt_length, prompt_text, response_text, action_mask all true;
        - logprobs float32 [response] (nats, of the sampled distribution; None with `logprobs=False`);
        - truncate_status "response_truncated" if max_tokens cut the answer;
        - `info["version_spans"] = [[model_version, start, end], ...]` over the response's tokens, unless unknown;
        - `info["adapter_spans"] = [[adapter, version, start, end], ...]` if a LoRA adapter answered (`adapter=`);
        - `info["splices"]`: offsets at which a new attempt continued the tokens of a lost one, if there are any;
        - `info["sampling"]`: the request's sampling, and this answer's number among n (`choice`).

        Raises WorkflowError for an unknown sampling name, EngineError if the engine refuses.
        """
        settings, number = self._sampling_for_call(sampling), self.next_number()
        prompt_list = _prompt_list(prompts)
        if len(prompt_list) > MOST_PROMPTS:
            raise WorkflowError(f"{len(prompt_list):,} prompts in one call: send at most {MOST_PROMPTS:,} at a time")
        requests = [
            asyncio.ensure_future(self._ask(p, p if isinstance(p, str) else None, settings)) for p in prompt_list
        ]
        try:
            answers = [answer for group in await asyncio.gather(*requests) for answer in group]
        except BaseException:
            for task in requests:  # gather does not cancel the others
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            raise
        return self.keep(number, answers)

    async def logprobs_async(
        self, tokens: Sequence[int] | None = None, temperature: float | None = None, *,
        token_ids: Sequence[int] | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return log p(tokens[i] | tokens[:i]) for i >= 1: float32 [len(tokens) - 1], nats.

        `temperature` defaults to the sampling's, or 1 if that is 0 (greedy). `token_ids` is another name of `tokens`.
        """
        self._require_open()
        tokens = token_ids if tokens is None else tokens
        if tokens is None:
            raise WorkflowError("logprobs was called without token ids: give `tokens` or `token_ids`")
        ids = [int(t) for t in checked_prompt(tokens, WorkflowError)]
        if temperature is None:
            temperature = self.sampling.temperature or 1.0
        version_before = self.engine.model_version
        adapter = {"adapter": self.sampling.adapter} if self.sampling.adapter else {}
        values = await self.engine.logprobs(ids, temperature=temperature, **adapter, **self._task_argument)
        self.usage.requests += 1
        self.usage.prompt_tokens += len(ids)
        self.usage.add_versions(version_before, self.engine.model_version)
        return np.asarray(values, dtype=np.float32)

    async def experience_from_messages_async(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, temperature: float | None = None,
        as_text: bool = False, *, logprobs: bool = True,
    ) -> Experience:
        """Return a conversation as one experience; the response begins with the first assistant turn.

        Answers of this run's `chat`, up to the newest one in the conversation, keep their sampled ids and logprobs. So
        the engine is called only if `temperature` differs from the sampling's. `tools` default to those of the run's
        chats. Assistant turns that the model did not write, or that were changed, are masked and listed in
        `info["untrained_turns"]`.

        A conversation without answers of this run is tokenized from its text (`tokenized`), with this model's logprobs
        of the response. It is cut to the engine's `max_model_len`, which `truncate_status` shows. The same is done with
        every conversation if `as_text`, and by an auxiliary model if the conversation does not end with its own answer.

        Raises WorkflowError if this run answered in the conversation, but no answer in it is as it was sampled.
        """
        context_length, chat = self.context, plain_messages(messages)
        newest = None if as_text else self._newest_sampled_answer(chat, tools)
        turn, last, tools = (None, 0, tools) if newest is None else newest
        later_answers = [i for i, m in enumerate(chat) if i > last and m.get("role") == "assistant"]
        is_auxiliary = isinstance(self.engine, RemoteEngine)  # it may score another model's answers to its own prompts
        if turn is not None and not (is_auxiliary and later_answers):
            turn.has_experience = True
            sampled = self.sampled(turn, chat[: last + 1], tools)
            sampled.messages = chat
            if later_answers:
                sampled.info["untrained_turns"] = [*sampled.info.get("untrained_turns", ()), *later_answers]
            if context_length and len(turn.tokens) >= context_length and turn.is_cut:
                sampled.truncate_status = "response_truncated"
            if not logprobs:
                sampled.logprobs = None
            elif sampled.logprobs is None or temperature not in (None, self.sampling.temperature):
                await self._set_logprobs(sampled, temperature, context_length)
            return sampled
        if not (as_text or is_auxiliary) and self._has_answer_in(chat, tools):
            raise WorkflowError(
                "no answer in these messages can be traced to the tokens that this run sampled: it was changed, or "
                "lacks the reasoning by which two answers differ. Keep answers and reasoning_content unchanged, return "
                "extract_experience_from_history(), or train on the text with as_text=True"
            )
        limit = context_length - 1 if context_length else None
        experience = await off_the_loop(is_large(chat), lambda: self.tokenized(chat, tools=tools, limit=limit))
        if experience.truncate_status == "prompt_truncated":  # all of it is masked
            experience.logprobs = np.zeros(1, dtype=np.float32)
        elif logprobs:
            scored = await self.logprobs_async(experience.tokens.tolist(), temperature)
            experience.logprobs = scored[experience.prompt_length - 1 :]
        return experience

    convert_messages_to_experience_async = experience_from_messages_async  # Trinity-RFT's name

    async def _set_logprobs(self, sampled: Experience, temperature: float | None, context_length: int | None) -> None:
        """Set an experience's logprobs to those at this temperature, with 0 for masked tokens.

        `context_length`: maximum number of tokens of prompt and answer in the engine.
        """
        tokens, mask, prompt_length = sampled.tokens, sampled.action_mask, sampled.prompt_length
        assert tokens is not None
        assert mask is not None
        if context_length and len(tokens) >= context_length:  # the engine must have room for one more token
            tokens, mask = tokens[: context_length - 1], mask[: context_length - 1 - prompt_length]
            sampled.tokens, sampled.action_mask = tokens, mask
        logprobs = await self.logprobs_async(tokens.tolist(), temperature)
        sampled.logprobs = np.where(mask, logprobs[prompt_length - 1 :], np.float32(0))

    async def get_message_token_len(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of the prompt for a chat with these messages."""
        chat = plain_messages(messages)
        return len(await off_the_loop(is_large(chat), lambda: self.render(chat, None)))

    async def grade_async(self, /, function: str, call: bytes, **limits: Any) -> Any:
        """Call a function in a process of its own (`Graders.grade`), for `Workflow.grade_async`."""
        if self._graders is not None:
            return await self._graders.grade(function, call, **limits)
        async with Graders.alone() as graders:
            return await graders.grade(function, call, **limits)

    # --- blocking variants ------------------------------------------------------------------------------------------
    chat = _blocking(chat_async)
    generate = _blocking(generate_async)
    logprobs = _blocking(logprobs_async)
    grade = _blocking(grade_async)
    experience_from_messages = _blocking(experience_from_messages_async)
    convert_messages_to_experience = experience_from_messages

    def _wait(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run `call` on the engine's loop and return its result. Raises WorkflowError if called on that loop."""
        if self._loop is None or not self._loop.is_running():
            raise WorkflowError("blocking methods need an event loop in another thread, which this model lacks: use "
                                "those that end in _async")
        self._must_not_block()
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _must_not_block(self) -> None:
        """Raise WorkflowError on the engine's event loop, where a blocking call would never end."""
        if self._loop is not None and running_loop() is self._loop:
            raise WorkflowError(
                "a blocking model call would stop the event loop that answers it: await the method that ends in "
                "_async (or use get_openai_async_client), or make the workflow sync (is_async = False)"
            )

    def openai_endpoint(self) -> Endpoint:
        """Return the endpoint for OpenAI clients of this run. An auxiliary model's endpoint keeps no answers."""
        if isinstance(self.engine, RemoteEngine):
            return self.engine.endpoint(self._task)
        if self._server is None:
            raise WorkflowError(
                "this model has no OpenAI endpoint: the rollout model has one in a runner of the actor system, and in "
                "a WorkflowRunner that was given a `server` (trinity_es.actors.serving.engine_server.EngineServer)"
            )
        self._session = self._session or ("over" if self._is_over else self._server.open(self))
        return Endpoint(f"{self._server.url}/s/{self._session}/v1", self._server.token, self._server.name)

    async def aclose(self) -> None:
        """End the run: close its clients and its session; later calls raise WorkflowError."""
        await super().aclose()
        if self._server is not None and self._session:
            self._server.forget(self._session)
        self._is_over = True

    # --- answers ----------------------------------------------------------------------------------------------------
    def extract_experience_from_history(
        self, clear_history: bool = True, per_request: bool = False
    ) -> list[Experience]:
        """Return this run's answers so far, one experience per conversation, in the order of their last requests.

        They are answers of `chat`, `generate` and OpenAI clients, and lack only the reward. If a prompt continued an
        earlier answer, one experience has both as they were sampled, with the mask true on both. Each answer is trained
        on once: if two conversations continue it, it is masked in the second. An answer that was extracted before, or
        has its own reward, stays a separate experience; with `per_request` every answer does. `eid.step` is the
        request's number unless the workflow set it. `clear_history` drops the answers from this history.
        """
        self._require_open()
        return self.extracted(clear_history, per_request)

    def _require_open(self) -> None:
        if self._is_over:
            raise WorkflowError(
                "this model can't answer, since its run is over: let the workflow await all that it starts, and read "
                "self.model again in each run (a workflow that is reset gets another one)"
            )

    # --- to and from the engine -------------------------------------------------------------------------------------
    def _sampling_for_call(self, sampling: dict[str, Any]) -> Sampling:
        """Return the task's sampling with a call's own options. Raises WorkflowError for an invalid option."""
        return with_options(self.sampling, sampling, WorkflowError, "the call") if sampling else self.sampling

    async def _ask(self, prompt: Prompt, text: str | None, sampling: Sampling) -> list[tuple[Completion, Experience]]:
        """Send a prompt to the engine, and return its answers with their experiences.

        `text`: the prompt as text; if None, it is decoded from its ids.
        """
        self._require_open()
        version_before = self.engine.model_version
        answers = await self.completions(checked_prompt(prompt, WorkflowError), sampling)
        self._require_open()
        return self.with_experiences(answers, version_before, text, sampling)

    async def completions(self, prompt: Prompt, sampling: Sampling) -> list[Completion]:
        """Return the completions of a prompt, from the run's journal as far as it has them, else from the engine."""

        async def ask(prompt: Prompt, sampling: Sampling, request: str) -> list[Completion]:
            """Return the engine's completions. The engine reads the id `request` from the context variable."""
            token = REQUEST_NAME.set(request)
            try:
                return await self.engine.generate(prompt, sampling, **self._task_argument)
            finally:
                REQUEST_NAME.reset(token)

        if self.journal is None:
            return await self.engine.generate(prompt, sampling, **self._task_argument)
        return await self.journal.call(self.engine, self.name, prompt, sampling).answers(ask)

    def with_experiences(
        self, completions: list[Completion], version_before: int, text: str | None, sampling: Sampling
    ) -> list[tuple[Completion, Experience]]:
        """Return each answer to one prompt with its experience, and count the tokens in `usage`.

        `version_before`: model version served when the prompt was sent. `text`: the prompt as text; if None, it is
        decoded from the ids. Raises EngineError for an aborted answer, or logprobs that are not finite.
        """
        version_after = self.engine.model_version
        self.usage.requests += 1
        recorded = sampling.recorded()
        prompt, answers = np.zeros(0, dtype=np.int32), []
        for i, completion in enumerate(completions):
            if i == 0 or completion.prompt_token_ids is not completions[0].prompt_token_ids:
                prompt = np.array(completion.prompt_token_ids, dtype=np.int32)
            text = self.prompt_text(prompt) if text is None else text  # once for all answers, since it may be long
            _require_whole(completion, sampling.adapter)
            spans = _version_spans(completion, version_before, version_after)
            self.usage.add_versions(*((v for v, _, _ in spans) if spans else (version_before, version_after)))
            if i == 0:
                self.usage.prompt_tokens += len(completion.prompt_token_ids)
            self.usage.response_tokens += len(completion.token_ids)
            try:
                experience = experience_of(completion, prompt, text, spans)
            except NotFinite as e:
                raise EngineError(f"the engine's weights or its GPU are broken: {e}") from e
            if completion.adapter:
                experience.info["adapter_spans"] = [[*completion.adapter, 0, len(completion.token_ids)]]
            if completion.splices:
                experience.info["splices"] = list(completion.splices)
            experience.info["sampling"] = {**recorded, "choice": i}
            answers.append((completion, experience))
        return answers


def _require_whole(completion: Completion, adapter: str) -> None:
    """Raise EngineError for an answer that was cut off, or that `adapter` did not generate."""
    if completion.finish_reason in ("abort", "error"):
        raise EngineError(f"the engine ended the request before its answer was complete ({completion.finish_reason})")
    if adapter != (completion.adapter or [""])[0]:
        raise EngineError(f"this model's engine serves no adapter {adapter!r}: leave out the option", refused=True)


def _version_spans(completion: Completion, version_before: int, version_after: int) -> list[list[int]]:
    """Return `[version, start, end]` over the response's tokens; [] if weights changed and tokens have no labels.

    `version_before`, `version_after`: versions served when the request began and when it ended.
    """
    if spans := getattr(completion, "version_spans", ()):
        return [list(span) for span in spans]
    return [[version_before, 0, len(completion.token_ids)]] if version_before == version_after else []


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of a call as a list; a single prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int | np.integer) for p in prompts):
        return [[int(p) for p in prompts]]  # type: ignore[arg-type]  # one prompt, as token ids
    return list(prompts)  # type: ignore[arg-type]  # several prompts
