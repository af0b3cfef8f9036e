"""The tokens of an `Experience` as plain values for a page: text, mask, logprob and weights version of each.

The number of tokens is limited, so that a page with a rollout of a million tokens opens. A token's text is its byte
(scripted engine) or comes from the `tokenizer.json` in the model's folder. Without either, its id is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_es.events.experience import Experience
from trinity_es.safe_text import shown

__all__ = [
    "LEVELS", "MAX_TOKENS", "Decode", "Overlay", "Token", "byte_decode", "decoder", "level", "overlay", "token_texts",
]

MAX_TOKENS = 1500
LEVELS = 8
"""Number of levels of a token's likelihood, each with its own colour."""
_LEVEL_LIMITS = (0.01, 0.1, 0.35, 0.7, 1.4, 2.3, 4.6)
"""Largest -logprob of each level but the last, for probabilities above 99 %, 90 %, 70 %, 50 %, 25 %, 10 %, 1 %."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    index: int
    """Index in the whole sequence (prompt and response), from 0."""
    id: int
    text: str
    """Text with control characters escaped (`shown`), or the id in brackets if the text is unknown."""
    prompt: bool
    trained: bool
    """Value of the action mask."""
    logprob: float | None = None
    """Logprob in nats; None for the prompt, and if it is not finite."""
    level: int | None = None
    """Level of likelihood, from 0 (above 99 %) to LEVELS - 1 (below 1 %)."""
    version: int | None = None
    advantage: float | None = None
    reward: float | None = None
    spliced: bool = False
    """True if an attempt continued here from the tokens of a lost attempt."""

    @property
    def probability(self) -> float:
        """Return exp(logprob), or 0 without a logprob."""
        return 0.0 if self.logprob is None else math.exp(min(0.0, self.logprob))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """Tokens of one experience for a page, and how many are left out."""

    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: int = 0
    response_tokens: int = 0
    left_out: int = 0
    """Number of tokens that are not shown."""
    skipped: int = 0
    """Number of tokens that are not shown at the beginning of the prompt."""
    texts: str = ""
    """Source of the texts: `bytes` or `tokenizer`; empty if ids are shown."""
    logprobs: bool = False
    versions: list[int] = field(default_factory=list)
    splices: list[int] = field(default_factory=list)
    """Indexes in the whole sequence of the tokens that are `spliced`."""


def level(logprob: float) -> int:
    """Return the level of likelihood of a token with this logprob, from 0 (likeliest) to LEVELS - 1."""
    return next((i for i, limit in enumerate(_LEVEL_LIMITS) if -logprob <= limit), LEVELS - 1)


def byte_decode(ids: Sequence[int]) -> str:
    """Decode token ids that are UTF-8 bytes, as those of the scripted engine are."""
    return bytes(t for t in ids if 0 <= t < 256).decode(errors="replace")


def decoder(config: Mapping[str, Any]) -> tuple[Decode | None, str]:
    """Return the decoder of token ids for runs with this config, and its name (`bytes`, `tokenizer`).

    Returns (None, "") if the model has no `tokenizer.json` in a folder here, or without the package tokenizers.
    """
    rollout = (config.get("explorer") or {}).get("rollout_model") or {}
    if rollout.get("engine_type") == "scripted":
        return byte_decode, "bytes"
    model = rollout.get("model_path") or (config.get("model") or {}).get("model_path")
    file = Path(str(model or "")) / "tokenizer.json"
    if not model or not file.is_file():
        return None, ""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the package is not installed, or can't read the file
        return None, ""
    return (lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))), "tokenizer"


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token. The last token of a character that has several tokens gets the character."""
    texts: list[str] = []
    context_start = done_count = 0
    for i in range(len(ids)):
        # A token is decoded together with its predecessor, because its text may depend on that (a leading space).
        before, after = decode(ids[context_start:done_count]), decode(ids[context_start : i + 1])
        # The character is still incomplete. It has at most 4 bytes, so at most 4 tokens.
        if after.endswith("\ufffd") and i + 1 < len(ids) and i - done_count < 4:
            texts.append("")
            continue
        texts.append(after[len(before):])
        context_start, done_count = done_count, i + 1
    return texts


def overlay(e: Experience, decode: Decode | None = None, source: str = "", max_tokens: int = MAX_TOKENS) -> Overlay:
    """Return at most `max_tokens` tokens of an experience: the end of the prompt and the beginning of the response.

    `decode`, `source`: see `decoder`.
    """
    prompt_tokens, total = e.prompt_length, len(e.tokens)
    response_tokens = total - prompt_tokens
    prompt_room = max(max_tokens - response_tokens, max_tokens // 4)
    first = max(0, prompt_tokens - prompt_room)
    last = min(total, first + max_tokens)
    ids = [int(t) for t in e.tokens[first:last]]
    if decode is None and _is_bytes(e):
        decode, source = byte_decode, "bytes"
    texts = None
    if decode is not None:
        try:
            texts = token_texts(ids, decode)
        except Exception:  # the tokenizer does not know all ids
            texts, source = None, ""
    spans = _version_spans(e, response_tokens)
    tokens = [
        _token(e, first + i, token, None if texts is None else texts[i], spans) for i, token in enumerate(ids)
    ]
    return Overlay(
        tokens=tokens, prompt_tokens=prompt_tokens, response_tokens=response_tokens, left_out=total - len(ids),
        skipped=first, texts=source if texts is not None else "", logprobs=e.logprobs is not None,
        versions=sorted({v for v, _, _ in spans}), splices=[prompt_tokens + at for at in e.splices],
    )


def _is_bytes(e: Experience) -> bool:
    """Return True if the first tokens of the response (up to 256) are the bytes of its text."""
    text = (e.response_text or "")[:256].encode(errors="replace")[:256]
    return bool(text) and e.tokens[e.prompt_length : e.prompt_length + len(text)].tolist() == list(text)


def _version_spans(e: Experience, response_tokens: int) -> list[tuple[int, int, int]]:
    """Return (weights version, start, end) for each span of the response that one version generated."""
    spans = e.version_spans
    version = e.info.get("model_version")
    if not spans and isinstance(version, int) and not e.info.get("model_version_drift"):
        spans.append((version, 0, response_tokens))
    return spans


def _token(e: Experience, index: int, token: int, text: str | None, spans: list[tuple[int, int, int]]) -> Token:
    """Return the token at this index of the whole sequence. Values that are missing or not finite become None."""
    at = index - e.prompt_length
    if at < 0:
        return Token(index=index, id=token, text=_text(token, text), prompt=True, trained=False)

    def number(values: Any) -> float | None:
        value = None if values is None or at >= len(values) else float(values[at])
        return value if value is not None and math.isfinite(value) else None

    logprob = number(e.logprobs)
    return Token(
        index=index, id=token, text=_text(token, text), prompt=False,
        trained=e.action_mask is not None and bool(e.action_mask[at]),
        logprob=logprob, level=None if logprob is None else level(logprob),
        version=next((v for v, start, end in spans if start <= at < end), None),
        advantage=number(e.advantages), reward=number(e.token_level_reward), spliced=at in e.splices,
    )


def _text(token: int, text: str | None) -> str:
    """Return the text to show for a token: its text, or its id in brackets if that is unknown, or empty for no byte."""
    return f"[{token}]" if text is None or (not text and token > 255) else shown(text)
