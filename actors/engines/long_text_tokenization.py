"""Tokenization of prompts. Long texts are tokenized in a thread, or refused before that if they can't fit.

A tokenizer takes a minute for some megabytes. On the event loop that would make the runner look hung. Recent shorter
texts are cached with their ids, since all runs of a task have the same prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np

from trinity_es.actors.engines.interface import Tokenizer
from trinity_es.events.errors import EngineError

__all__ = [
    "LARGE", "decode", "decoded_prompt", "encode", "has_byte_decoder", "is_large", "off_the_loop", "prompt_ids",
    "refuse_too_long",
]

T = TypeVar("T")

LARGE = 65_536
"""Maximum number of characters or token ids to convert on the event loop: it takes some hundredths of a second."""
_WHITE = " \n\t\r"
_COMPOSED = 4
"""Maximum number of characters that a tokenizer's normalization (NFC) joins into one."""


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, and add no special tokens: the text contains them."""
    encoded = _encoded if len(text) <= LARGE else _encoded.__wrapped__
    return cast(list[int], encoded(cast(Any, tokenizer), text).tolist())


@lru_cache(maxsize=64)  # 0.4 MB each at most
def _encoded(tokenizer: Any, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    # A tokenizer of Hugging Face would add special tokens by default.
    arguments = {"add_special_tokens": False} if _is_hugging_face(tokenizer) else {}
    return np.array(tokenizer.encode(text, **arguments), dtype=np.int32)


def decode(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]) -> str:
    """Return the text of token ids, with special tokens."""
    if _backend(cast(Any, tokenizer)) is not None:  # transformers checks a list item by item, and not an array
        return tokenizer.decode(np.asarray(ids, dtype=np.int32))  # type: ignore[arg-type]
    return tokenizer.decode(ids.tolist() if isinstance(ids, np.ndarray) else ids)


def decoded_prompt(tokenizer: Tokenizer, ids: np.ndarray[Any, np.dtype[np.int32]]) -> str:
    """Return the text of a prompt's ids, with special tokens. Texts of short prompts are cached."""
    decoded = _decoded if len(ids) <= LARGE else _decoded.__wrapped__
    return decoded(cast(Any, tokenizer), ids.tobytes())


@lru_cache(maxsize=64)  # 0.6 MB each at most
def _decoded(tokenizer: Any, ids: bytes) -> str:
    return decode(tokenizer, np.frombuffer(ids, dtype=np.int32))


@lru_cache(maxsize=16)
def _is_hugging_face(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "all_special_ids")


@lru_cache(maxsize=16)
def _backend(tokenizer: Any) -> Any:
    """Return the Rust tokenizer inside a tokenizer of transformers; None if it has none."""
    return getattr(tokenizer, "backend_tokenizer", None)


@lru_cache(maxsize=16)
def has_byte_decoder(tokenizer: Any) -> bool:
    """Return True if the tokenizer decodes each token to its own bytes, whatever its neighbors are."""
    return type(getattr(_backend(tokenizer), "decoder", None)).__name__ == "ByteLevel"


async def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int], max_model_len: int, remedy: str) -> list[int]:
    """Return the token ids of a prompt. Raises EngineError if it is empty, or leaves no room for an answer.

    `remedy`: advice for the error message, beside a shorter prompt.
    """
    if isinstance(prompt, str):
        text = prompt

        def encoded() -> list[int]:
            refuse_too_long(tokenizer, text, max_model_len)
            return list(tokenizer.encode(text))

        ids = await off_the_loop(is_large(text), encoded)
    else:
        ids = list(prompt) if set(map(type, prompt)) == {int} else [int(i) for i in prompt]
    if not ids:
        raise EngineError("the prompt is empty: send at least one token", refused=True)
    if len(ids) >= max_model_len:
        raise EngineError(
            f"a prompt of {len(ids)} tokens leaves no room for an answer in the model's maximum context length of "
            f"{max_model_len}: shorten it, or {remedy}", refused=True,
        )
    return ids


def is_large(value: Any) -> bool:
    """Return True if the texts in a value, such as chat messages, have more than `LARGE` characters together."""
    size, unread_values = 0, [value]
    while unread_values and size <= LARGE:
        value = unread_values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            unread_values += value.values()
        elif isinstance(value, list | tuple):
            unread_values += value
    return size > LARGE


async def off_the_loop(large: bool, call: Callable[[], T]) -> T:
    """Run `call` in a thread if its input is `large`, else on the event loop, and return its result."""
    return await asyncio.to_thread(call) if large else call()


def refuse_too_long(tokenizer: Tokenizer, text: str, max_model_len: int | None) -> None:
    """Raise EngineError (`refused=True`) if the text is certain to have more tokens than the model's context.

    White space does not count, since one token may stand for a long run of it. Nothing is refused if the tokenizer has
    no vocabulary to read, or drops unknown characters.
    """
    if not max_model_len or len(text) <= LARGE:
        return
    longest_token = _longest_token(cast(Any, tokenizer))
    if not longest_token:
        return
    if not text.isascii():
        longest_token *= _COMPOSED
    length = len(text) - sum(text.count(white) for white in _WHITE)
    least_tokens = -(-length // longest_token)  # rounded up
    if least_tokens >= max_model_len:
        raise EngineError(
            f"a prompt of {len(text):,} characters has {least_tokens:,} tokens or more, which leaves no room for an "
            f"answer in the model's maximum context length of {max_model_len}: shorten it, or serve the model with a "
            "larger max_model_len", refused=True,
        )


@lru_cache(maxsize=16)
def _longest_token(tokenizer: Any) -> int:
    """Return the maximum number of characters that one token stands for; 0 if unknown."""
    get_vocabulary = getattr(tokenizer, "get_vocab", None)
    longest = max(map(len, get_vocabulary()), default=0) if get_vocabulary is not None else 0
    unknown = "\U000f0000" * (longest + 1)  # private use area: in no vocabulary
    # If one token stands for all of these, a text's length says nothing about its number of tokens.
    return longest if len(encode(tokenizer, unknown)) > 1 else 0
