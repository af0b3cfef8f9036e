"""vLLM's own HTTP server over a `VLLMEngine`: chat, completions, responses, messages, tokenize, token ids in and out.

vLLM's application calls the engine's AsyncLLM through a `_RecordingClient`. It records exact ids, logprobs and weight
versions of each request (`Recording`), whatever API the client uses. vLLM 0.32 and 0.33 have the application in
`vllm.entrypoints.launchers`, older versions (0.23) in `vllm.entrypoints.openai.api_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from trinity_es.actors.engines.interface import CallJournal, Completion, Generation, Recording, Sampling
from trinity_es.actors.engines.sampling_checks import MOST_ANSWERS, SHARED_FIELDS
from trinity_es.actors.engines.vllm.values import (
    add_texts,
    completion_of,
    missing_fields,
    output_kind,
    request_output,
    text_of,
    whole_answer_fields,
    with_changes,
)
from trinity_es.events.errors import ConfigError, EngineError
from trinity_es.events.json_values import NotPlain, plain

__all__ = ["application", "with_template"]

_OURS = frozenset({"host", "port", "uds", "api_key", "ssl_keyfile", "ssl_certfile", "root_path", "middleware",
                   "served_model_name", "enable_log_requests", "api_server_count", "headless"})
"""Options of `vllm serve` that the runner sets, so users can't."""

_UNUSED_MIDDLEWARE = frozenset({"CORSMiddleware", "PrometheusInstrumentatorMiddleware"})
"""vLLM's middleware for browsers and for its own `/metrics`; runners get neither kind of request."""
_GENERATE = "/inference/v1/generate"
_FREQUENT = frozenset({"/v1/chat/completions", "/v1/completions", _GENERATE})
"""Routes that are matched first, since they are most frequent: vLLM has them among the last of its thirty-six."""


async def application(
    engine: Any, llm: Any, model: str, name: str, options: Mapping[str, Any], recording: Callable[[], Recording | None]
) -> Any:
    """Return vLLM's ASGI application for a `VLLMEngine` and its AsyncLLM. Clients call the model at `model` `name`.

    `options` are those of `vllm serve` (`tool_call_parser`, `reasoning_parser`, `chat_template`, ...). Raises
    ConfigError for an option that vLLM does not know or that the runner sets.
    """
    build_app, init_app_state, args = await asyncio.to_thread(_server_parts, model, name, dict(options))
    tasks = await llm.get_supported_tasks()
    app = await asyncio.to_thread(build_app, args, tasks, llm.model_config)
    app.user_middleware = [m for m in app.user_middleware if getattr(m.cls, "__name__", "") not in _UNUSED_MIDDLEWARE]
    app.middleware_stack = None  # built again at the first request
    app.router.routes.sort(key=lambda route: getattr(route, "path", "") not in _FREQUENT)
    await init_app_state(_RecordingClient(engine, llm, recording), app.state, args, tasks)
    _list_adapters(app.state.openai_serving_models, engine)
    return _with_token_names(app)


_ENTRY = re.compile(rb'\{"token_id":(\d+)(?=[,}])')
"""Beginning of a logprob's entry in JSON. It can't match inside a text, where quotes have backslashes."""


def _with_token_names(application: Any) -> Any:
    """Return an ASGI application that adds token names to the logprobs of `/inference/v1/generate`.

    vLLM 0.32 writes `{"token_id": 7, "logprob": ...}`, older versions `{"token": "token_id:7", "logprob": ...}`, which
    current clients still read (verifiers' of renderers 0.1.12, TRL 1.16's). This application writes both fields.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != _GENERATE:
            await application(scope, receive, send)
            return

        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":  # its content-length would be too small
                headers = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"content-length"]
                await send({**message, "headers": headers})
            else:
                body = _ENTRY.sub(rb'{"token":"token_id:\1","token_id":\1', message.get("body", b""))
                await send({**message, "body": body})

        await application(scope, receive, send_named)

    return answer


class _TemplatedTokenizer:
    """Wrapper that gives a tokenizer another chat template. A copy won't do, since vLLM's tokenizer holds copies."""

    def __init__(self, tokenizer: Any, chat_template: str | None, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        self._template_arguments = {**variables, **({"chat_template": chat_template} if chat_template else {})}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **{**self._template_arguments, **kwargs})


def with_template(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    """Return a tokenizer that renders chats with the template and variables in these options of `vllm serve`.

    The options are `chat_template` (a file or a template) and `default_chat_template_kwargs`. Raises ConfigError.
    """
    template, variables = options.get("chat_template"), options.get("default_chat_template_kwargs") or {}
    if not template and not variables:
        return tokenizer
    try:
        from vllm.renderers.chat_utils import load_chat_template
    except ImportError:  # before 0.30
        from vllm.entrypoints.chat_utils import load_chat_template
    try:
        template = load_chat_template(template)
    except Exception as e:
        raise ConfigError(f"rollout_model.server_args.chat_template can't be read: {e}") from e
    return _TemplatedTokenizer(tokenizer, template, variables)


def _list_adapters(models: Any, engine: Any) -> None:
    """Make vLLM's handler of `/v1/models` also list the engine's adapters, with the model as their parent."""
    list_models = models.show_available_models

    async def list_with_adapters() -> Any:
        listing = await list_models()
        base = listing.data[0]
        listing.data += [
            base.model_copy(update={"id": name, "root": name, "parent": base.id}) for name in sorted(engine.adapters)
        ]
        return listing

    models.show_available_models = list_with_adapters


def _server_parts(model: str, name: str, options: dict[str, Any]) -> tuple[Any, Any, Namespace]:
    """Return vLLM's `build_app` and `init_app_state`, and their arguments. The imports take a second."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # before 0.30
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before 0.33
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:  # before 0.30
            from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([])
    reserved = sorted(set(options) & _OURS)
    if reserved:
        raise ConfigError(f"rollout_model.server_args.{reserved[0]} is set by the runner: leave it out")
    unknown = sorted(set(options) - set(vars(args)))
    if unknown:
        raise ConfigError(f"vllm serve knows no {', '.join(unknown)}: correct explorer.rollout_model.server_args")
    defaults = {
        "model": model, "served_model_name": [name], "enable_scale_out": True, "disable_fastapi_docs": True,
        "enable_auto_tool_choice": "tool_call_parser" in options,
    }
    defaults = {name: value for name, value in defaults.items() if hasattr(args, name)}  # older versions lack some
    for option, value in {**defaults, **options}.items():
        setattr(args, option, value)
    reasoning = options.get("reasoning_parser")
    if reasoning and getattr(args, "structured_outputs_config", None) is not None:
        args.structured_outputs_config = replace(args.structured_outputs_config, reasoning_parser=reasoning)
    return build_app, init_app_state, args


class _RecordingClient:
    """Wrapper of AsyncLLM for vLLM's server that records generated tokens in the `Recording` of each request."""

    def __init__(self, engine: Any, llm: Any, recording: Callable[[], Recording | None]) -> None:
        self._engine, self._llm, self._recording = engine, llm, recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncGenerator[Any]:
        """Generate like AsyncLLM. The call itself begins the record, not the first output, so prompts keep their order.

        Raises ValueError, or vLLM's own error for impossible sampling. vLLM's server answers both with status 400.
        """
        record = self._recording()
        if sampling_params.n > MOST_ANSWERS:
            raise ValueError(f"n is {sampling_params.n}: the limit is {MOST_ANSWERS}")
        if record is None:
            return self._llm.generate(prompt, sampling_params, request_id, **more)  # type: ignore[no-any-return]
        ids: list[int] = (prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None) or []
        has_only_text = bool(ids) and not prompt.get("mm_placeholders")
        if has_only_text:
            rendered_ids, text, engine = ids, prompt.get("prompt"), self._engine
            ids = record.exact_prompt(
                lambda: text or engine.tokenizer.decode(rendered_ids, skip_special_tokens=False), rendered_ids
            )
            prompt = {**prompt, "prompt_token_ids": ids}
        changes: dict[str, Any] = missing_fields(record.engine_only, sampling_params)
        max_tokens, room = sampling_params.max_tokens, (self._engine.max_model_len or 0) - len(ids)
        if room < 1:  # vLLM checked its own rendering of the prompt, which may have fewer tokens
            raise ValueError(f"This model's maximum context length is {self._engine.max_model_len} tokens. However, "
                             f"your prompt contains {len(ids)} input tokens: please reduce its length.")
        if record.default_length is not None:
            max_tokens = changes["max_tokens"] = min(record.default_length, room)
        if "min_tokens" in record.engine_only and max_tokens is not None:
            changes["min_tokens"] = min(changes["min_tokens"], max_tokens)
        if record.records_tokens:
            logprobs = sampling_params.logprobs
            if not getattr(sampling_params, "logprob_token_ids", None):  # if set, vLLM adds the sampled token's itself
                changes["logprobs"] = max(logprobs or 0, 0) if logprobs != -1 else -1
            if _wants_text_only(sampling_params):
                changes |= whole_answer_fields(sampling_params.stop, 0)
        params = with_changes(sampling_params, changes)
        generation = call = None
        if record.records_tokens:
            sampling, further = _as_sampling(params, record.adapter)
            generation = record.begin(sampling, further, record.text)
            if has_only_text:
                stateful = next((name for name in _STATEFUL if getattr(params, name, None)), "")
                call = record.begin_journaled_call(ids, sampling, further, forbids=stateful)
        if generation is not None and call is not None and call.is_kept and _is_answerable(sampling_params):
            return self._answer_from_journal(
                record, generation, call, prompt, sampling_params, params, request_id, more
            )
        outputs = self._engine.outputs(prompt, params, record.adapter, request_id, **more)
        answers = self._record_outputs(record, generation, outputs, sampling_params, params)
        if generation is None or call is None:
            return answers
        return self._record_in_journal(generation, call, answers, request_id)

    async def _answer_from_journal(
        self, record: Recording, generation: Generation, call: CallJournal, prompt: Any, raw_params: Any, params: Any,
        request_id: str, more: dict[str, Any],
    ) -> AsyncGenerator[Any]:
        """Yield the whole answer to a call that the journal has in part. `raw_params`: params that the client sent."""
        tokenizer = self._llm.get_tokenizer()

        async def ask(ids: list[int], sampling: Sampling, request: str) -> list[Completion]:
            own_params = with_changes(params, {
                "n": sampling.n, "seed": sampling.seed, "max_tokens": sampling.max_tokens,
                "min_tokens": sampling.min_tokens, "output_kind": output_kind("FINAL_ONLY"),
                **whole_answer_fields(params.stop, 0),
            })
            own_prompt = {**prompt, "prompt_token_ids": ids}
            source = self._engine.outputs(own_prompt, own_params, record.adapter, request, **more)
            async with contextlib.aclosing(source) as outputs:
                *_, (output, adapter) = [output async for output in outputs]
            await add_texts(tokenizer, ids, own_params, output.outputs)
            return [completion_of(ids, answer, adapter=adapter) for answer in output.outputs]

        try:
            generation.completions = await call.answers(ask)
        except EngineError as e:
            record.fail(e)
            raise
        names_tokens = raw_params.logprobs == 0
        yield request_output(request_id, prompt, generation.completions, tokenizer if names_tokens else None)

    async def _record_in_journal(
        self, generation: Generation, call: CallJournal, answers: AsyncGenerator[Any], request_id: str
    ) -> AsyncGenerator[Any]:
        """Yield these outputs while the run's journal records them. Their end is recorded before it is yielded."""
        with call.recording(request_id) as recorded:
            try:
                async with contextlib.aclosing(answers):
                    async for output in answers:
                        if generation.completions is not None:
                            await call.record_end(recorded, generation.completions)
                        yield output
            except EngineError:
                await call.record_end(recorded, None)
                raise

    async def _record_outputs(
        self, record: Recording, generation: Generation | None, outputs: AsyncGenerator[Any], raw_params: Any,
        params: Any,
    ) -> AsyncGenerator[Any]:
        """Yield vLLM's outputs; before the last one, set `generation.completions` to the whole answers.

        `raw_params`: params that the client sent; `params`: those that vLLM got, perhaps without decoding.
        Then the text that the client wants is added here.
        """
        is_delta = params.output_kind == output_kind("DELTA")
        tokenizer = self._llm.get_tokenizer()
        answers: dict[int, list[Completion]] = {}
        ids: list[int] = []
        try:
            async with contextlib.aclosing(outputs):
                async for output, adapter in outputs:
                    if generation is not None:
                        ids = ids or list(output.prompt_token_ids or ())
                        if raw_params.detokenize:
                            await add_texts(tokenizer, ids, params, output.outputs)
                        for part in output.outputs:
                            parts = answers.setdefault(int(part.index), [])
                            if not is_delta:  # this output has all of the answer so far
                                parts.clear()
                            parts.append(completion_of([], part, adapter=adapter))
                        if output.finished:
                            whole = [Completion.joined(answers[i]) for i in sorted(answers)]
                            texts = [
                                c.text if raw_params.detokenize
                                else text_of(tokenizer, ids, params, c.token_ids, c.finish_reason) for c in whole
                            ]
                            generation.completions = [
                                replace(c, prompt_token_ids=ids, logprobs=c.logprobs or [], text=text)
                                for c, text in zip(whole, texts, strict=True)
                            ]
                    yield output
        except EngineError as e:
            record.fail(e)
            if e.details.get("refused") and isinstance(e.__cause__, Exception):  # vLLM's own, which it answers with 400
                raise e.__cause__ from None
            raise


def _wants_text_only(params: Any) -> bool:
    """Return True if the client wants only the whole text, without logprobs."""
    logprobs = (getattr(params, name, None) for name in ("logprobs", "prompt_logprobs", "logprob_token_ids"))
    whole = params.output_kind == output_kind("FINAL_ONLY")
    return bool(whole and params.detokenize) and all(value is None for value in logprobs)


_FURTHER = ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "include_stop_str_in_output",
            "thinking_token_budget", "extra_args", "repetition_detection")

_STATEFUL = ("bad_words", "thinking_token_budget", "extra_args", "repetition_detection", "structured_outputs",
             "include_stop_str_in_output", "prompt_logprobs")
"""Options with which vLLM would treat the kept part of an answer differently if it was part of the prompt."""


def _is_answerable(raw_params: Any) -> bool:
    """Return True if the journal can answer the client: it keeps tokens and their own logprobs, and no others."""
    further = (getattr(raw_params, name, None) for name in ("prompt_logprobs", "logprob_token_ids"))
    return raw_params.logprobs in (None, 0) and not any(further)


def _as_sampling(params: Any, adapter: str) -> tuple[Sampling, dict[str, Any]]:
    """Return vLLM's SamplingParams as a `Sampling`, and a dict of the fields that a `Sampling` does not have."""
    stop = params.stop or ()
    schema, further = "", {}
    structured = getattr(params, "structured_outputs", None)
    if structured is not None:
        if structured.json is not None:
            value = structured.json
            schema = value if isinstance(value, str) else orjson.dumps(value).decode()
        elif structured.json_object:
            schema = "{}"
        else:
            further["structured_outputs"] = str(structured)
    for name in _FURTHER:
        value = getattr(params, name, None)
        if value:
            try:
                further[name] = plain(value)
            except NotPlain:
                further[name] = str(value)
    return Sampling(
        **{name: getattr(params, name) for name in SHARED_FIELDS}, top_k=params.top_k or -1,
        max_tokens=params.max_tokens or 1, stop=(stop,) if isinstance(stop, str) else tuple(stop), json_schema=schema,
        adapter=adapter,
    ), further
