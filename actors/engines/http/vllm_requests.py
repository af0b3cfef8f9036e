"""How a vLLM server is asked for tokens over HTTP, and what its answers say: by ids, both ways, with exact logprobs.

Two routes: `/inference/v1/generate` (tokens in, tokens out, and which weights made which token), where the server has
it, else `/v1/completions` with token ids. Both take the same sampling and give the same `Answer`s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.actors.engines.http.client import largest_answer
from trinity_es.actors.engines.http.vllm_api import ASKED
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.engines.sampling import SHARED, at_temperature
from trinity_es.events.errors import EngineError

__all__ = ["OTHERS", "UNREADABLE", "Answer", "TextCutter", "answers", "body", "most_bytes", "prompt_logprobs", "route"]

_FLOOR = -9999.0
"""What vLLM writes for minus infinity, and for NaN."""
_ROUNDING = 1e-3
"""Maximum of a logprob: 0, but for what floats round."""
_ENDS = frozenset({"stop", "length", "abort", "repetition"})
"""Why an answer may end."""
OTHERS = "; docs/ENGINES.md (Tried) names the versions of vLLM that tell it"
"""What is said where an answer lacks something."""
UNREADABLE = KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError
"""What reading JSON of another form than was thought raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the answers to a request, or a piece of one that is streamed."""

    ids: list[int]
    logprobs: list[float] | None
    top: list[list[tuple[int, float]]] | None
    finish_reason: str
    """Empty in all pieces but the last."""
    stop: str
    """The stop text that ended it; empty: none did."""
    labels: list[tuple[str, int, int]]
    """`(label, start, end)`: the label of the weights that made these tokens. Empty where the route does not say."""

    def completion(self, prompt: list[int], text: str, spans: tuple[tuple[int, int, int], ...] = ()) -> Completion:
        return Completion(
            prompt_token_ids=list(prompt), token_ids=self.ids, logprobs=self.logprobs, text=text,
            finish_reason=self.finish_reason, version_spans=spans, top_logprobs=self.top,
        )


def route(spans: bool) -> str:
    """Return the path to ask. `spans`: the server has the route for tokens."""
    return ASKED[0 if spans else 1]


def body(
    ids: Sequence[int], sampling: Sampling, *, spans: bool, model: str, room: int, stream: bool = False,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    """Return a request. `room`: the tokens that may still be made; `prompt_logprobs`: of the prompt's own, as vLLM's.
    """
    shared: dict[str, Any] = {name: getattr(sampling, name) for name in SHARED}
    shared |= {"top_k": max(sampling.top_k, 0), "max_tokens": min(sampling.max_tokens, room)}
    if sampling.logprobs:  # the row of a token begins with itself: one more than are wanted
        shared["logprobs"] = sampling.top_logprobs + 1 if sampling.top_logprobs else 0
    if sampling.stop:
        shared["stop"] = list(sampling.stop)
    if sampling.json_schema:
        any_object = orjson.loads(sampling.json_schema) == {}
        shared["structured_outputs"] = {"json_object": True} if any_object else {"json": sampling.json_schema}
    if prompt_logprobs is not None:
        shared["prompt_logprobs"] = prompt_logprobs
    if spans:
        return {"model": model, "token_ids": list(ids), "sampling_params": shared, "stream": stream}
    return {
        "model": model, "prompt": list(ids), "stream": stream, "return_token_ids": True,
        "return_tokens_as_token_ids": True, **shared,
    }


def most_bytes(asked: Mapping[str, Any], vocabulary: int) -> int:
    """Return the most bytes that the answer to a request, as `body` makes it, can take.

    `vocabulary`: how many token ids the model has, all of which may be asked for with each token of the prompt.
    """
    shared = asked.get("sampling_params", asked)
    return largest_answer(
        prompt=len(asked.get("token_ids") or asked["prompt"]), answers=shared["n"], tokens=shared["max_tokens"],
        entries=shared["logprobs"] + 2 if "logprobs" in shared else 0,  # its own stands beside those of the likeliest
        of_prompt={None: 0, -1: vocabulary + 1}.get(shared.get("prompt_logprobs"), 2), events=asked["stream"],
    )


def answers(
    told: Any, sampling: Sampling, *, spans: bool, vocabulary: int, whole: bool = True, server: str = "the server",
    prompt: Sequence[int] | None = None,
) -> list[Answer]:
    """Return what a response, or an event of a stream (not `whole`), holds, by index.

    `vocabulary`: how many token ids the model has; `server`: its URL, for errors; `prompt`: what was asked, where an
    answer that tells its prompt is to be to that. Raises EngineError for what can't be read, or can't be.
    """
    try:
        choices = sorted(told["choices"], key=lambda choice: _whole(choice["index"]))
        numbers = [choice["index"] for choice in choices]
        if numbers != list(range(sampling.n)) and (whole or numbers not in ([], [0])):
            raise ValueError(f"it has the choices {numbers!r:.80} where {sampling.n} were asked for, numbered from 0")
        found = [_answer(choice, sampling, spans) for choice in choices]
        for answer, choice in zip(found, choices, strict=True):
            _check(answer, sampling, vocabulary, whole)
            if prompt is not None and (to := choice.get("prompt_token_ids")) is not None and to != list(prompt):
                raise ValueError(f"it is to another prompt, of {len(to)} tokens, where {len(prompt)} were sent")
    except UNREADABLE as e:
        raise EngineError(f"{server} gave an answer that can't be read ({_odd(e, told)})") from e
    return found


def _odd(error: BaseException, told: Any) -> str:
    """Return what is missing or odd in an answer, in words."""
    if not isinstance(error, KeyError):
        return f"{type(error).__name__}: {error}"
    said = f", and says {str(told)[:200]!r}" if error.args == ("choices",) else ""
    return f"it has no {error.args[0]}{said}{'' if said else OTHERS}"


def _answer(choice: dict[str, Any], sampling: Sampling, spans: bool) -> Answer:
    given, reason = choice.get("token_ids"), choice.get("finish_reason")
    if given is None and reason is None:
        raise ValueError("it has no token_ids")
    ids = [_whole(token) for token in given or ()]
    logprobs, top = None, None
    if sampling.logprobs:
        rows = _token_rows(choice, ids) if spans else _completion_rows(choice, ids)
        logprobs = [own for own, _ in rows]
        if sampling.top_logprobs:
            ordered = (sorted(row, key=lambda item: -item[1]) for _, row in rows)
            top = [[item for item in row if item[1] > _FLOOR][: sampling.top_logprobs] for row in ordered]
    if reason is not None and reason not in _ENDS:
        raise ValueError(f"it ended for {reason!r:.80}")
    stop = choice.get("stop_reason")
    labels = [(str(s["version"]), _whole(s["start"]), _whole(s["end"])) for s in choice.get("weight_versions") or ()]
    return Answer(
        ids=ids, logprobs=logprobs, top=top, finish_reason=reason or "",
        stop=stop if isinstance(stop, str) else "", labels=labels,
    )


def _check(answer: Answer, sampling: Sampling, vocabulary: int, whole: bool) -> None:
    """Raise ValueError for an answer that no model gives."""
    if whole and not (answer.ids and answer.finish_reason) and answer.finish_reason != "abort":
        raise ValueError("it has no tokens" if answer.finish_reason else "it has no end")
    if len(answer.ids) > sampling.max_tokens:
        raise ValueError(f"it has {len(answer.ids)} tokens where {sampling.max_tokens} were asked for")
    strange = next((token for token in answer.ids if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise ValueError(f"it has token {strange:.3g}, and the model has {vocabulary} tokens, from 0")


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.80} is no integer")
    return value


def _logprob(value: Any, above: float = -math.inf) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r:.80} is no logprob") from None
    if not above < found <= _ROUNDING:
        raise ValueError(f"{found} is no logprob")
    return found


def _own(value: Any) -> float:
    """Return the logprob of a token that was sampled, which can't be minus infinity."""
    return _logprob(value, _FLOOR)


Rows = list[tuple[float, list[tuple[int, float]]]]
"""Of each token its own logprob, and those of the likeliest ones."""


def _token_rows(choice: dict[str, Any], ids: list[int]) -> Rows:
    content = (choice.get("logprobs") or {}).get("content") or []
    rows: Rows = []
    _require_one_each("logprobs.content", content, choice, ids)
    for token, row in zip(ids, content, strict=True):
        if int(row["token_id"]) != token:
            raise ValueError(f"a logprob of token {row['token_id']} where {token} was made")
        top = {int(item["token_id"]): _logprob(item["logprob"]) for item in row.get("top_logprobs") or ()}
        rows.append((_own(row["logprob"]), list(top.items())))
    return rows


def _completion_rows(choice: dict[str, Any], ids: list[int]) -> Rows:
    told = choice.get("logprobs") or {}
    rows: Rows = []
    columns = [told.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs")]
    for name, column in zip(("tokens", "token_logprobs", "top_logprobs"), columns, strict=True):
        _require_one_each(f"logprobs.{name}", column, choice, ids)
    for token, name, logprob, top in zip(ids, *columns, strict=True):
        if _token(name) != token:
            raise ValueError(f"a logprob of {name} where token {token} was made")
        rows.append((_own(logprob), [(_token(n), _logprob(v)) for n, v in (top or {}).items()]))
    return rows


def _require_one_each(field: str, entries: Sequence[Any], choice: dict[str, Any], ids: list[int]) -> None:
    if entries and not choice.get("token_ids"):
        raise ValueError(f"it has no token_ids{OTHERS}")
    if len(entries) != len(ids):
        raise ValueError(f"it has {len(entries)} entries in {field}, and {len(ids)} token_ids{OTHERS}")


def _token(name: str) -> int:
    try:
        return int(name.removeprefix("token_id:"))
    except ValueError:
        raise ValueError(f"its logprobs name a token by text, {name!r:.80}, not as token_id:NUMBER{OTHERS}") from None


def prompt_logprobs(
    told: Any, ids: Sequence[int], temperature: float, *, spans: bool, server: str = "the server"
) -> list[float]:
    """Return the logprob of each token of the prompt but the first; `told` holds all tokens' where temperature != 1.

    `server`: as in `answers`. Raises EngineError for what can't be read, or can't be.
    """
    try:
        told = told["prompt_logprobs"] if spans else told["choices"][0]["prompt_logprobs"]
        rows = [{int(token): _logprob(item["logprob"]) for token, item in row.items()} for row in told[1:]]
        own = [row[token] for row, token in zip(rows, ids[1:], strict=True)]
    except UNREADABLE as e:
        raise EngineError(f"{server} told no logprobs of the prompt ({_odd(e, told)})") from e
    if temperature == 1.0:
        return own
    return [at_temperature(value, row.values(), temperature) for row, value in zip(rows, own, strict=True)]


class TextCutter:
    """Makes the text of an answer from its ids, whole or piece by piece, as vLLM does: without special tokens, and
    without the stop text that ended it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._decode = tokenizer.decode
        self._held = max((len(s) for s in stops), default=1) - 1
        self._ids: list[int] = []
        self._given = 0

    def add(self, ids: Sequence[int], stop: str = "", *, last: bool) -> str:
        """Return what these further ids add to the text. What may yet change, or be a stop text, is kept back."""
        self._ids += ids
        text = self._text(self._ids)
        if stop:  # an earlier one may have been allowed, by min_tokens: it is the last token that completed this one
            at = text.find(stop, max(0, len(self._text(self._ids[:-1])) - len(stop) + 1))
            text = text if at < 0 else text[:at]
        end = len(text) if last else max(self._given, len(text.rstrip("\ufffd")) - self._held)
        new, self._given = text[self._given : end], max(self._given, end)
        return new

    def _text(self, ids: list[int]) -> str:
        return str(self._decode(ids, skip_special_tokens=True))
