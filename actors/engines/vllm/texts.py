"""Texts of answers, made of their tokens when an answer is whole.

vLLM makes a text token by token, and a name for each token that has a logprob, which nobody reads here: more than half
of what a runner's process computes beside a small model (docs/PROFILES.md). Whoever waits for the whole answer is given
its text afterwards, by vLLM's own way from tokens to text. A stop string is looked for in the text while it grows, so
requests with one stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from trinity_es.actors.engines.long_texts import LARGE, off_the_loop

__all__ = ["read_at_the_end", "text_of", "with_texts"]

_DEARER = 16
"""How many times as long as a token on its way from a text a token takes on its way to one, step by step."""


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
