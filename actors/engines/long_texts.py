"""Long texts on their way to token ids: tokenized off the event loop, refused unread where they can't fit.

Some megabytes take a tokenizer a minute: on an engine's loop no other request is answered so long, and its runner is
taken for hung.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

from trinity_es.actors.engines.interface import Tokenizer
from trinity_es.events.errors import EngineError

__all__ = ["LARGE", "encode", "is_large", "off_the_loop", "prompt_ids", "refuse_too_long"]

T = TypeVar("T")

LARGE = 65_536
"""Maximum of characters, or token ids, that are worked on where they are: some hundredths of a second."""
_WHITE = " \n\t\r"
_COMPOSED = 4
"""Maximum of characters that a tokenizer's normal form (NFC) makes one."""


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that has its special tokens written out."""
    if hasattr(tokenizer, "all_special_ids"):  # one of Hugging Face's, which would add some
        return [int(t) for t in tokenizer.encode(text, add_special_tokens=False)]  # type: ignore[call-arg]
    return list(tokenizer.encode(text))


async def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int], max_model_len: int, remedy: str) -> list[int]:
    """Return the ids of a prompt. Raises EngineError for one that is empty, or leaves no room for an answer."""
    if isinstance(prompt, str):
        text = prompt

        def encoded() -> list[int]:
            refuse_too_long(tokenizer, text, max_model_len)
            return list(tokenizer.encode(text))

        ids = await off_the_loop(is_large(text), encoded)
    else:
        ids = [int(i) for i in prompt]
    if not ids:
        raise EngineError("an empty prompt can't be continued", refused=True)
    if len(ids) >= max_model_len:
        raise EngineError(
            f"a prompt of {len(ids)} tokens leaves no room for an answer in the model's maximum context length of "
            f"{max_model_len}: shorten it, or {remedy}", refused=True,
        )
    return ids


def is_large(value: Any) -> bool:
    """Return True if the texts in a value, a text or messages, have more than `LARGE` characters together."""
    found, rest = 0, [value]
    while rest and found <= LARGE:
        value = rest.pop()
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, Mapping):
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
    return found > LARGE


async def off_the_loop(large: bool, call: Callable[[], T]) -> T:
    """Return what `call` gives; in a thread where it works on something large."""
    return await asyncio.to_thread(call) if large else call()


def refuse_too_long(tokenizer: Tokenizer, text: str, max_model_len: int | None) -> None:
    """Raise EngineError, details `refused=True`, for a text that has more tokens than the context, however it is cut.

    White space does not count, since one token may be any run of it. Nothing is refused where a tokenizer does not
    tell its vocabulary, or leaves out what it does not know.
    """
    if not max_model_len or len(text) <= LARGE:
        return
    longest = _longest_token(cast(Any, tokenizer))
    if not longest:
        return
    most = longest if text.isascii() else longest * _COMPOSED
    least = -(-(len(text) - sum(text.count(white) for white in _WHITE)) // most)
    if least >= max_model_len:
        raise EngineError(
            f"a prompt of {len(text):,} characters has {least:,} tokens or more, which leaves no room for an answer in "
            f"the model's maximum context length of {max_model_len}: shorten it, or serve the model with a larger "
            "max_model_len", refused=True,
        )


@lru_cache(maxsize=16)
def _longest_token(tokenizer: Any) -> int:
    """Return the maximum of characters that one token stands for; 0 where nobody knows."""
    vocabulary = getattr(tokenizer, "get_vocab", None)
    longest = max(map(len, vocabulary()), default=0) if vocabulary is not None else 0
    unknown = "\U000f0000" * (longest + 1)  # of private use: in no vocabulary
    return longest if len(encode(tokenizer, unknown)) > 1 else 0
