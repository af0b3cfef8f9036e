"""Requests and answers as vLLM has them: how we say sampling to it, and what we take of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.engines.vllm.weights import short
from trinity_es.events.errors import EngineError

__all__ = [
    "VersionedCompletion", "changed", "completion_of", "output_kind", "prompt_of_ids", "said_for", "sampling_params",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedCompletion(Completion):
    """A completion that knows which weights made which of its tokens."""

    version_spans: tuple[tuple[int, int, int], ...] = ()
    """`(model_version, start, end)`: tokens `[start, end)` of `token_ids`. Empty where vLLM does not say."""


def output_kind(name: str) -> Any:
    """Return vLLM's `RequestOutputKind` of this name."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def prompt_of_ids(ids: list[int]) -> Any:
    """Return a prompt in vLLM's form in which there is nothing left to do in a thread: it asks one for each other."""
    try:
        from vllm.inputs.engine import tokens_input
    except ImportError:
        return {"prompt_token_ids": ids}
    return tokens_input(ids)


def sampling_params(s: Sampling, more: Mapping[str, Any] | None = None) -> Any:
    """Return vLLM's `SamplingParams`, with `more` of their fields.

    Raises EngineError (`refused=True`) for what vLLM refuses of them.
    """
    from vllm import SamplingParams

    try:
        structured = _structured(s.json_schema) if s.json_schema else None
        return SamplingParams(
            n=s.n, temperature=s.temperature, top_p=s.top_p, top_k=max(s.top_k, 0), max_tokens=s.max_tokens,
            logprobs=s.top_logprobs if s.logprobs else None, seed=s.seed, stop=list(s.stop) or None,
            ignore_eos=s.ignore_eos, min_tokens=s.min_tokens, min_p=s.min_p, presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty, repetition_penalty=s.repetition_penalty,
            structured_outputs=structured, output_kind=output_kind("FINAL_ONLY"), **(more or {}),
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
    return VersionedCompletion(
        prompt_token_ids=list(prompt), token_ids=ids, logprobs=_sampled(output.logprobs, ids), text=output.text,
        finish_reason=output.finish_reason or "abort", version_spans=spans, top_logprobs=_top(output, top),
        adapter=adapter,
    )
