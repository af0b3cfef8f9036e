"""Conversion of requests, answers and load figures between trinity_es and vLLM.

vLLM decodes text token by token, and a name for each token with a logprob, which nothing here reads. With a small model
that is more than half of a runner's own computing (docs/PROFILES.md). So if the caller waits for the whole answer, its
text is decoded at the end, by vLLM's own detokenizer. Requests with stop strings need text step by step, and get it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import orjson

from trinity_es.actors.engines.interface import Completion, EngineLoad, Sampling
from trinity_es.actors.engines.long_text_tokenization import LARGE, has_byte_decoder, off_the_loop
from trinity_es.actors.engines.sampling_checks import SHARED_FIELDS
from trinity_es.actors.engines.vllm.weights import short_error
from trinity_es.events.errors import EngineError

__all__ = [
    "add_texts", "completion_of", "load_reporting_llm", "missing_fields", "output_kind", "partial_answers",
    "prompt_of_ids", "request_output", "sampling_params", "text_of", "whole_answer_fields", "whole_answer_params",
    "with_changes",
]

_EDGE = 8
"""Number of last tokens of a prompt to decode, to see if it ends within a character."""
_DETOKENIZING_COST = 16
"""Cost of detokenizing a token step by step, relative to tokenizing one."""


def output_kind(name: str) -> Any:
    """Return vLLM's RequestOutputKind of this name: DELTA (parts), CUMULATIVE or FINAL_ONLY (the whole answer)."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def prompt_of_ids(ids: list[int]) -> Any:
    """Return token ids as a prompt in vLLM's preprocessed form, for which vLLM needs no extra thread."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(ids)


def sampling_params(s: Sampling, more: Mapping[str, Any] | None = None) -> Any:
    """Return `s` and the fields `more` as SamplingParams. Raises EngineError (`refused=True`) if vLLM refuses them."""
    from vllm import SamplingParams

    try:
        structured = _structured_outputs(s.json_schema) if s.json_schema else None
        return SamplingParams(
            **{name: getattr(s, name) for name in SHARED_FIELDS}, top_k=max(s.top_k, 0), max_tokens=s.max_tokens,
            logprobs=s.top_logprobs if s.logprobs else None, stop=list(s.stop) or None, structured_outputs=structured,
            output_kind=output_kind("FINAL_ONLY"), **(more or {}),
        )
    except Exception as e:  # vLLM's errors for wrong arguments share no stable base class
        raise EngineError(f"vLLM refused the sampling {s}: {short_error(e)}", refused=True) from e


def whole_answer_params(s: Sampling) -> Any:
    """Return cached SamplingParams for a request whose answer is read only when whole; don't change them."""
    return (_whole_answer_params.__wrapped__ if s.json_schema else _whole_answer_params)(s)


@lru_cache(maxsize=256)  # vLLM changes only a copy, except of those with a schema, which are not cached
def _whole_answer_params(s: Sampling) -> Any:
    return sampling_params(s, whole_answer_fields(s.stop, s.top_logprobs))


def _structured_outputs(schema: str | Mapping[str, Any]) -> Any:
    """Return vLLM's StructuredOutputsParams for a JSON schema (text or mapping); {} allows any object."""
    from vllm.sampling_params import StructuredOutputsParams

    value = orjson.loads(schema) if isinstance(schema, str) else schema
    return StructuredOutputsParams(**{"json": value} if value else {"json_object": True})


def missing_fields(engine_only: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Return `engine_only` (names of `Sampling`) as fields of SamplingParams; its schema only if `params` have none."""
    missing = {name: value for name, value in engine_only.items() if name != "json_schema"}
    if engine_only.get("json_schema") and params.structured_outputs is None:
        missing["structured_outputs"] = _structured_outputs(engine_only["json_schema"])
    return missing


def with_changes(params: Any, changes: Mapping[str, Any]) -> Any:
    """Return vLLM's SamplingParams with these fields changed, and checked again. Raises vLLM's own errors.

    Unchecked, an error would be raised in the input thread of vLLM's engine, which then ends, and the engine hangs.
    """
    from msgspec.structs import replace

    return replace(params, **changes) if changes else params


def _top_logprobs(output: Any, count: int) -> list[list[tuple[int, float]]] | None:
    """Return the `count` likeliest tokens at each position with their logprobs; None if `count` is 0."""
    if not count or output.logprobs is None:
        return None
    rows = (sorted(row.items(), key=lambda item: -item[1].logprob)[:count] for row in output.logprobs)
    return [[(int(token), float(entry.logprob)) for token, entry in row] for row in rows]


def _sampled_logprobs(logprobs: Any, ids: list[int]) -> list[float] | None:
    """Return the logprob of each sampled token, from vLLM's list of dicts or from its flat form."""
    if logprobs is None:
        return None
    starts = getattr(logprobs, "start_indices", None)
    if starts is None:
        return [float(row[token].logprob) for row, token in zip(logprobs, ids, strict=True)]
    assert [logprobs.token_ids[i] for i in starts] == ids
    return [float(logprobs.logprobs[i]) for i in starts]


def completion_of(prompt: list[int], output: Any, top: int = 0, adapter: tuple[str, int] | None = None) -> Completion:
    """Return vLLM's output as a `Completion`. `top`: number of top logprobs; `adapter`: its name and version."""
    ids = [int(t) for t in output.token_ids]
    spans = tuple((int(s.version), int(s.start), int(s.end)) for s in getattr(output, "weight_versions", None) or ())
    return Completion(
        prompt_token_ids=prompt, token_ids=ids, logprobs=_sampled_logprobs(output.logprobs, ids),
        text=output.text, finish_reason=output.finish_reason or "abort", version_spans=spans,
        top_logprobs=_top_logprobs(output, top), adapter=adapter,
    )


def request_output(request: str, prompt: Mapping[str, Any], answers: Sequence[Completion], tokenizer: Any) -> Any:
    """Return whole answers as vLLM's RequestOutput. They have logprobs unless `tokenizer` is None."""
    from vllm.outputs import CompletionOutput, RequestOutput

    def logprobs(answer: Completion) -> list[dict[int, Any]] | None:
        if tokenizer is None or answer.logprobs is None:
            return None
        rows = zip(answer.token_ids, answer.logprobs, strict=True)
        entry = SimpleNamespace
        return [{t: entry(logprob=v, rank=None, decoded_token=tokenizer.decode([t]))} for t, v in rows]

    outputs = [
        CompletionOutput(
            index=i, text=answer.text, token_ids=answer.token_ids, cumulative_logprob=None, logprobs=logprobs(answer),
            finish_reason=answer.finish_reason,
        ) for i, answer in enumerate(answers)
    ]
    return RequestOutput(
        request_id=request, prompt=prompt.get("prompt"), prompt_token_ids=list(prompt["prompt_token_ids"]),
        prompt_logprobs=None, outputs=outputs, finished=True,
    )


def partial_answers(
    llm: Any, request: str, known_counts: Mapping[int, int], adapter: tuple[str, int] | None
) -> dict[int, Completion]:
    """Return the new part of each answer to a request in flight, by its index, from the state of vLLM's AsyncLLM.

    `known_counts`: number of tokens that the caller has already, by index. `token_ids` and `logprobs` hold only the new
    tokens, `version_spans` all of the answer's. vLLM collects all tokens in this process, so this adds no cost per
    token. Versions of vLLM before 0.32 do not label tokens with their weights; for these it returns {}.
    """
    processor, parts = llm.output_processor, {}
    for answer_id in getattr(processor, "external_req_ids", {}).get(request, ()):
        state = processor.request_states.get(answer_id)
        version_starts = getattr(state, "weight_version_starts", None)  # (version, index of its first token)
        if state is None or not version_starts:
            continue
        ids, first = state.detokenizer.output_token_ids, known_counts.get(state.request_index, 0)
        logprobs, flat_logprobs = None, state.logprobs_processor.logprobs
        if flat_logprobs is not None:
            logprobs = _sampled_logprobs(flat_logprobs[first : len(ids)], ids[first:])
        ends = [*(start for _, start in version_starts[1:]), len(ids)]
        parts[state.request_index] = Completion(
            prompt_token_ids=list(state.prompt_token_ids or ()), token_ids=list(ids[first:]), logprobs=logprobs,
            text="", finish_reason="", adapter=adapter,
            version_spans=tuple((int(v), start, end) for (v, start), end in zip(version_starts, ends, strict=True)),
        )
    return parts


def whole_answer_fields(stop: Any, top_logprobs: int) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams that save work if an answer is read only when whole.

    vLLM then decodes text only to find stop strings, and makes an object per logprob only for top logprobs.
    """
    return {"detokenize": bool(stop), "flat_logprobs": top_logprobs == 0}


async def add_texts(tokenizer: Any, prompt: list[int], params: Any, outputs: list[Any]) -> None:
    """Set the texts of finished outputs that vLLM did not decode (`whole_answer_fields`). Long ones use a thread."""
    if params.detokenize:
        return

    def set_texts() -> None:
        for output in outputs:
            output.text = text_of(tokenizer, prompt, params, output.token_ids, output.finish_reason)

    await off_the_loop(sum(len(o.token_ids) for o in outputs) * _DETOKENIZING_COST > LARGE, set_texts)


def text_of(tokenizer: Any, prompt: list[int], params: Any, ids: Sequence[int], finish_reason: str | None) -> str:
    """Return the text of a whole answer as vLLM decodes it, without the token that ended it."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    if has_byte_decoder(tokenizer) and params.skip_special_tokens and not params.stop:
        is_ended = finish_reason == "stop" and not params.include_stop_str_in_output
        text = _text_at_once(tokenizer.backend_tokenizer, prompt, list(ids[:-1] if is_ended else ids))
        if text is not None:
            return text
    request: Any = SimpleNamespace(request_id="", sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None)
    growing = IncrementalDetokenizer.from_new_request(tokenizer, request)
    growing.update(list(ids), finish_reason == "stop")
    return str(growing.get_next_output_text(finished=True, delta=False))


def _text_at_once(backend: Any, prompt: list[int], ids: list[int]) -> str | None:
    """Return the text of an answer, decoded in one step; None if it may begin or end within a character.

    Then vLLM's text differs: it leaves out a cut character at the end, and repeats a prompt that ends in one.
    """
    before = backend.decode(prompt[-_EDGE:], skip_special_tokens=True) or backend.decode(prompt)
    text = str(backend.decode(ids, skip_special_tokens=True))
    return None if "\ufffd" in text or before.endswith("\ufffd") else text


def load_reporting_llm(llm_class: Any, arguments: Any, report: Callable[[EngineLoad], None]) -> Any:
    """Return an AsyncLLM that calls `report` with its load after each step.

    vLLM gathers its scheduler's figures only together with Prometheus metrics of each token and request. If the user
    disabled those metrics (`disable_log_stats`), only the scheduler's figures are gathered.
    """
    llm = llm_class.from_engine_args(arguments, stat_loggers=[lambda config, index: _LoadReporter(config, report)])
    if arguments.disable_log_stats:
        llm.log_stats = llm.output_processor.log_stats = False  # vLLM reads them at the first request
        llm.logger_manager.stat_loggers = llm.logger_manager.stat_loggers[:1]
    return llm


class _LoadReporter:
    """Logger of statistics that vLLM calls after each step."""

    def __init__(self, config: Any, report: Callable[[EngineLoad], None]) -> None:
        self._report, self._most_running = report, config.scheduler_config.max_num_seqs

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Report the load of one step. vLLM also calls this without `scheduler_stats`; then there is no load."""
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            self._report(EngineLoad(
                running=scheduler_stats.num_running_reqs, waiting=scheduler_stats.num_waiting_reqs,
                recomputed=cache.preempted_queries - cache.preempted_hits,
                kv_share=scheduler_stats.kv_cache_usage, most_running=self._most_running,
            ))

    def log(self, *_: Any, **__: Any) -> None:
        pass

    log_engine_initialized = record_sleep_state = log
