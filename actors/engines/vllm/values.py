"""Requests, answers and figures as vLLM has them: how we say sampling to it, and what we take of what it tells.

vLLM makes a text token by token, and a name for each token that has a logprob, which nobody reads here: more than half
of what a runner's process computes beside a small model (docs/PROFILES.md). Whoever waits for the whole answer is given
its text afterwards, by vLLM's own way from tokens to text. A stop string is looked for in the text while it grows, so
requests with one stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import orjson

from trinity_es.actors.engines.interface import Completion, EngineLoad, Sampling
from trinity_es.actors.engines.long_texts import LARGE, off_the_loop
from trinity_es.actors.engines.sampling import SHARED
from trinity_es.actors.engines.vllm.weights import short
from trinity_es.events.errors import EngineError

__all__ = [
    "changed", "completion_of", "output_kind", "prompt_of_ids", "read_at_the_end", "said_for", "sampling_params",
    "text_of", "with_load", "with_texts",
]

_DEARER = 16
"""How many times as long as a token on its way from a text a token takes on its way to one, step by step."""


def output_kind(name: str) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def prompt_of_ids(ids: list[int]) -> Any:
    """Return a prompt in vLLM's form in which there is nothing left to do in a thread: it asks one for each other."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(ids)


def sampling_params(s: Sampling, more: Mapping[str, Any] | None = None) -> Any:
    """Return vLLM's `SamplingParams`, with `more` of their fields.

    Raises EngineError (`refused=True`) for what vLLM refuses of them.
    """
    from vllm import SamplingParams

    try:
        structured = _structured(s.json_schema) if s.json_schema else None
        return SamplingParams(
            **{name: getattr(s, name) for name in SHARED}, top_k=max(s.top_k, 0), max_tokens=s.max_tokens,
            logprobs=s.top_logprobs if s.logprobs else None, stop=list(s.stop) or None, structured_outputs=structured,
            output_kind=output_kind("FINAL_ONLY"), **(more or {}),
        )
    except Exception as e:  # it only checks its arguments here; its own errors have no stable base
        raise EngineError(f"vLLM refused the sampling {s}: {short(e)}", refused=True) from e


def _structured(schema: str | Mapping[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    given = orjson.loads(schema) if isinstance(schema, str) else schema
    return StructuredOutputsParams(**{"json": given} if given else {"json_object": True})


def said_for(unsaid: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Return a run's sampling as fields of vLLM's SamplingParams, where these have none of their own."""
    said = {name: value for name, value in unsaid.items() if name != "json_schema"}
    if unsaid.get("json_schema") and params.structured_outputs is None:
        said["structured_outputs"] = _structured(unsaid["json_schema"])
    return said


def changed(params: Any, changes: Mapping[str, Any]) -> Any:
    """Return vLLM's SamplingParams with these fields changed, checked again.

    vLLM's engine checks them where it reads them, in a thread that ends with what it refuses: then it answers nobody
    any more. Raises what vLLM raises of sampling that can't be.
    """
    from msgspec.structs import replace

    return replace(params, **changes) if changes else params


def _top(output: Any, count: int) -> list[list[tuple[int, float]]] | None:
    """Return the likeliest tokens at each place; vLLM's rows have the sampled one too."""
    if not count or output.logprobs is None:
        return None
    rows = (sorted(row.items(), key=lambda item: -item[1].logprob)[:count] for row in output.logprobs)
    return [[(int(token), float(found.logprob)) for token, found in row] for row in rows]


def _sampled(found: Any, ids: list[int]) -> list[float] | None:
    """Return the logprob of each token that was sampled: it is the first one of vLLM's at its place."""
    if found is None:
        return None
    if (starts := getattr(found, "start_indices", None)) is None:
        return [float(row[token].logprob) for row, token in zip(found, ids, strict=True)]
    assert [found.token_ids[i] for i in starts] == ids
    return [float(found.logprobs[i]) for i in starts]


def completion_of(prompt: list[int], output: Any, top: int = 0, adapter: tuple[str, int] | None = None) -> Completion:
    """Return one of vLLM's outputs, which `adapter` made, with the `top` likeliest tokens at each place."""
    ids = [int(t) for t in output.token_ids]
    spans = tuple((int(s.version), int(s.start), int(s.end)) for s in getattr(output, "weight_versions", None) or ())
    return Completion(
        prompt_token_ids=list(prompt), token_ids=ids, logprobs=_sampled(output.logprobs, ids), text=output.text,
        finish_reason=output.finish_reason or "abort", version_spans=spans, top_logprobs=_top(output, top),
        adapter=adapter,
    )


def read_at_the_end(stop: Any, top_logprobs: int) -> dict[str, Any]:
    """Return fields of vLLM's SamplingParams for an answer that is read when it is whole.

    It makes no text, where it does not look for stop strings in it; and no object for each token that has a logprob,
    where no others are asked for at its place.
    """
    return {"detokenize": bool(stop), "flat_logprobs": top_logprobs == 0}


async def with_texts(tokenizer: Any, prompt: list[int], params: Any, outputs: list[Any]) -> None:
    """Give vLLM's finished outputs of a request their texts, where `read_at_the_end` had it make none.

    `tokenizer` is vLLM's, `prompt` the token ids that were read. Long answers are worked on off the event loop.
    """
    if params.detokenize:
        return

    def give() -> None:
        for output in outputs:
            output.text = text_of(tokenizer, prompt, params, output.token_ids, output.finish_reason)

    await off_the_loop(sum(len(o.token_ids) for o in outputs) * _DEARER > LARGE, give)


def text_of(tokenizer: Any, prompt: list[int], params: Any, ids: Sequence[int], finish_reason: str | None) -> str:
    """Return the text that vLLM makes of a whole answer, which leaves out the token that ended it."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request: Any = SimpleNamespace(request_id="", sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None)
    text = IncrementalDetokenizer.from_new_request(tokenizer, request)
    text.update(list(ids), finish_reason == "stop")
    return str(text.get_next_output_text(finished=True, delta=False))


def with_load(llm_class: Any, arguments: Any, tell: Callable[[EngineLoad], None]) -> Any:
    """Return an AsyncLLM of these AsyncEngineArgs that tells its load after each step.

    vLLM gathers the scheduler's figures only together with many of its own, of each token and request, and sets all of
    them up for Prometheus. Where nobody asked for those (`disable_log_stats`), the scheduler's alone are kept.
    """
    llm = llm_class.from_engine_args(arguments, stat_loggers=[lambda config, index: _LoadTeller(config, tell)])
    if arguments.disable_log_stats:
        llm.log_stats = llm.output_processor.log_stats = False  # read when the first request comes
        llm.logger_manager.stat_loggers = llm.logger_manager.stat_loggers[:1]
    return llm


class _LoadTeller:
    """A stat logger of vLLM that hands on the scheduler's figures."""

    def __init__(self, config: Any, tell: Callable[[EngineLoad], None]) -> None:
        self._tell, self._most_running = tell, config.scheduler_config.max_num_seqs

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Take the figures of one step; None: what came is of no step."""
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            self._tell(EngineLoad(
                running=scheduler_stats.num_running_reqs, waiting=scheduler_stats.num_waiting_reqs,
                again=cache.preempted_queries - cache.preempted_hits,
                kv_share=scheduler_stats.kv_cache_usage, most_running=self._most_running,
            ))

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        pass
