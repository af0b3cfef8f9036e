"""Requests and answers as vLLM has them: how we say sampling to it, and what we take of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.engines.vllm_weights import short
from trinity_es.events.errors import EngineError

__all__ = ["VersionedCompletion", "completion_of", "output_kind", "sampling_params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedCompletion(Completion):
    """A completion that knows which weights made which of its tokens."""

    version_spans: tuple[tuple[int, int, int], ...] = ()
    """`(model_version, start, end)`: tokens `[start, end)` of `token_ids`. Empty where vLLM does not say."""


def output_kind(name: str) -> Any:
    """Return vLLM's `RequestOutputKind` of this name."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def sampling_params(s: Sampling) -> Any:
    """Return vLLM's `SamplingParams`. Raises EngineError (`refused=True`) for what vLLM refuses of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    try:
        structured = None
        if s.json_schema:
            any_object = orjson.loads(s.json_schema) == {}
            structured = StructuredOutputsParams(**{"json_object": True} if any_object else {"json": s.json_schema})
        return SamplingParams(
            n=s.n, temperature=s.temperature, top_p=s.top_p, top_k=max(s.top_k, 0), max_tokens=s.max_tokens,
            logprobs=s.top_logprobs if s.logprobs else None, seed=s.seed, stop=list(s.stop) or None,
            ignore_eos=s.ignore_eos, min_tokens=s.min_tokens, min_p=s.min_p, presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty, repetition_penalty=s.repetition_penalty,
            structured_outputs=structured,
            output_kind=output_kind("FINAL_ONLY"),
        )
    except Exception as e:  # it only checks its arguments here; its own errors have no stable base
        raise EngineError(f"vLLM refused the sampling {s}: {short(e)}", refused=True) from e


def _top(output: Any, count: int) -> list[list[tuple[int, float]]] | None:
    """Return the likeliest tokens at each place; vLLM's rows have the sampled one too."""
    if not count or output.logprobs is None:
        return None
    rows = (sorted(row.items(), key=lambda item: -item[1].logprob)[:count] for row in output.logprobs)
    return [[(int(token), float(found.logprob)) for token, found in row] for row in rows]


def completion_of(prompt: list[int], output: Any, top: int = 0, adapter: tuple[str, int] | None = None) -> Completion:
    """Return one of vLLM's outputs, which `adapter` made, with the `top` likeliest tokens at each place."""
    ids = [int(t) for t in output.token_ids]
    logprobs = None
    if output.logprobs is not None:
        logprobs = [float(row[token].logprob) for row, token in zip(output.logprobs, ids, strict=True)]
    spans = tuple((int(s.version), int(s.start), int(s.end)) for s in getattr(output, "weight_versions", None) or ())
    return VersionedCompletion(
        prompt_token_ids=list(prompt), token_ids=ids, logprobs=logprobs, text=output.text,
        finish_reason=output.finish_reason or "abort", version_spans=spans, top_logprobs=_top(output, top),
        adapter=adapter,
    )
