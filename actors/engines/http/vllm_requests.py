"""Requests for tokens to a vLLM server, and its answers: both carry token ids, and answers exact logprobs.

Requests go to `/inference/v1/generate` if the server has this route, whose answers also say which weights generated
each token. Otherwise they go to `/v1/completions`. Sampling settings and `Answer`s are the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.actors.engines.http.client import largest_answer
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.engines.sampling_checks import SHARED_FIELDS, logprob_at_temperature
from trinity_es.events.errors import EngineError

__all__ = [
    "UNREADABLE", "VERSION_HINT", "Answer", "TextCutter", "is_plain", "max_answer_bytes", "parse_answers",
    "prompt_logprobs", "request_body",
]

_FLOOR = -9999.0
"""Number that vLLM writes for minus infinity and NaN."""
_ROUNDING = 1e-3
"""Maximum of a logprob: 0, with a tolerance for rounding."""
_ENDS = frozenset({"stop", "length", "abort", "repetition"})
VERSION_HINT = "; use a version of vLLM that docs/ENGINES.md lists (Tried)"
UNREADABLE = KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError
"""Exceptions that reading JSON of an unexpected form can raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a request, or a part of a streamed answer."""

    ids: list[int]
    logprobs: list[float] | None
    top: list[list[tuple[int, float]]] | None
    finish_reason: str
    """Empty in all parts but the last."""
    stop: str
    labels: list[tuple[str, int, int]]
    """`(label, start, end)`: label of the weights that generated these tokens; empty if the route reports none."""

    def completion(self, prompt: list[int], text: str, spans: tuple[tuple[int, int, int], ...] = ()) -> Completion:
        return Completion(
            prompt_token_ids=list(prompt), token_ids=self.ids, logprobs=self.logprobs, text=text,
            finish_reason=self.finish_reason, version_spans=spans, top_logprobs=self.top,
        )


def is_plain(s: Sampling) -> bool:
    """Return True if this sampling draws tokens from the model's unchanged distribution, or greedily."""
    return (
        s.temperature in (0.0, 1.0) and s.top_p == 1.0 and s.top_k <= 0 and s.min_p == 0.0
        and s.repetition_penalty == 1.0
        and not (s.presence_penalty or s.frequency_penalty or s.json_schema or s.min_tokens)
    )


def request_body(
    ids: Sequence[int], sampling: Sampling, *, spans: bool, model: str, room: int, stream: bool = False,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    """Return the JSON of a request. `spans`: it goes to the route that takes token ids and labels tokens.

    `room`: number of tokens left in the context; `prompt_logprobs`: vLLM's field of this name.
    """
    params: dict[str, Any] = {name: getattr(sampling, name) for name in SHARED_FIELDS}
    params |= {"top_k": max(sampling.top_k, 0), "max_tokens": min(sampling.max_tokens, room)}
    if sampling.logprobs:
        params["logprobs"] = sampling.top_logprobs + 1 if sampling.top_logprobs else 0
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.json_schema:
        any_object = orjson.loads(sampling.json_schema) == {}
        params["structured_outputs"] = {"json_object": True} if any_object else {"json": sampling.json_schema}
    if prompt_logprobs is not None:
        params["prompt_logprobs"] = prompt_logprobs
    if spans:
        return {"model": model, "token_ids": list(ids), "sampling_params": params, "stream": stream}
    return {
        "model": model, "prompt": list(ids), "stream": stream, "return_token_ids": True,
        "return_tokens_as_token_ids": True, **params,
    }


def max_answer_bytes(request: Mapping[str, Any], vocabulary: int) -> int:
    """Return the maximum bytes of the answer to a request made by `request_body`. `vocabulary`: number of token ids."""
    params = request.get("sampling_params", request)
    return largest_answer(
        prompt_tokens=len(request.get("token_ids") or request["prompt"]), answers=params["n"],
        max_tokens=params["max_tokens"], streamed=request["stream"],
        # the sampled token's own logprob comes beside those of the likeliest
        logprobs_per_token=params["logprobs"] + 2 if "logprobs" in params else 0,
        logprobs_per_prompt_token={None: 0, -1: vocabulary + 1}.get(params.get("prompt_logprobs"), 2),
    )


def parse_answers(
    response: Any, sampling: Sampling, *, spans: bool, vocabulary: int, whole: bool = True, server: str = "the server",
    prompt: Sequence[int] | None = None,
) -> list[Answer]:
    """Return the answers in a response, in the order of their index. `whole`: it is no event of a stream.

    `spans`: it comes from the route for token ids; `vocabulary`: number of the model's token ids; `server`: its URL,
    for errors; `prompt`: the ids that were sent, to compare if the response repeats them. Raises EngineError for a
    response that can't be read or is impossible.
    """
    try:
        choices = sorted(response["choices"], key=lambda choice: _integer(choice["index"]))
        indexes = [choice["index"] for choice in choices]
        is_part = not whole and indexes in ([], [0])  # a stream has one answer, and some of its events have none
        if not is_part and indexes != list(range(sampling.n)):
            raise ValueError(f"the answer has choices {indexes!r:.80}, expected {sampling.n} numbered from 0")
        parsed = [_parse_choice(choice, sampling, spans) for choice in choices]
        for answer, choice in zip(parsed, choices, strict=True):
            _check_possible(answer, sampling, vocabulary, whole)
            repeated = choice.get("prompt_token_ids")
            if prompt is not None and repeated is not None and repeated != list(prompt):
                raise ValueError(f"the answer repeats a prompt of {len(repeated)} tokens, not the {len(prompt)} sent")
    except UNREADABLE as e:
        raise EngineError(f"{server} gave an answer that can't be read ({_defect(e, response)})") from e
    return parsed


def _defect(error: BaseException, response: Any) -> str:
    """Return a message about a response that raised `error`, one of UNREADABLE, when it was read."""
    if not isinstance(error, KeyError):
        return f"{type(error).__name__}: {error}"
    if error.args == ("choices",):  # it is no answer at all, so its own text says most
        return f"the answer has no choices, and says {str(response)[:200]!r}"
    return f"the answer has no {error.args[0]}{VERSION_HINT}"


def _parse_choice(choice: dict[str, Any], sampling: Sampling, spans: bool) -> Answer:
    """Return one choice of a response as an `Answer`. Raises one of UNREADABLE if its form is wrong."""
    tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
    if tokens is None and reason is None:
        raise ValueError("the answer has neither token_ids nor a finish_reason")
    ids = [_integer(token) for token in tokens or ()]
    logprobs, top = None, None
    if sampling.logprobs:
        rows = _token_rows(choice, ids) if spans else _completion_rows(choice, ids)
        logprobs = [logprob for logprob, _ in rows]
        if sampling.top_logprobs:
            ranked_rows = (sorted(row, key=lambda item: -item[1]) for _, row in rows)
            top = [[item for item in row if item[1] > _FLOOR][: sampling.top_logprobs] for row in ranked_rows]
    if reason is not None and reason not in _ENDS:
        raise ValueError(f"the answer has the unknown finish_reason {reason!r:.80}")
    stop = choice.get("stop_reason")
    versions = choice.get("weight_versions") or ()
    labels = [(str(span["version"]), _integer(span["start"]), _integer(span["end"])) for span in versions]
    return Answer(
        ids=ids, logprobs=logprobs, top=top, finish_reason=reason or "",
        stop=stop if isinstance(stop, str) else "", labels=labels,
    )


def _check_possible(answer: Answer, sampling: Sampling, vocabulary: int, whole: bool) -> None:
    """Raise ValueError for an answer that the model can't have given. `whole`: it is no part of a stream."""
    if whole and not (answer.ids and answer.finish_reason) and answer.finish_reason != "abort":
        raise ValueError(f"the answer has no {'tokens' if answer.finish_reason else 'finish_reason'}")
    if len(answer.ids) > sampling.max_tokens:
        raise ValueError(f"the answer has {len(answer.ids)} tokens, but max_tokens is {sampling.max_tokens}")
    strange = next((token for token in answer.ids if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise ValueError(f"the answer has token id {strange:.3g}, but the model's ids end at {vocabulary - 1}")


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"the answer has {value!r:.80} instead of an integer")
    return value


def _logprob(value: Any, above: float = -math.inf) -> float:
    """Return a logprob from a response as a float. Raises ValueError unless it is above `above`, and at most 0."""
    try:
        logprob = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"the answer has the logprob {value!r:.80}, expected a number") from None
    if not above < logprob <= _ROUNDING:
        raise ValueError(f"the answer has the logprob {logprob}, expected a finite number up to 0")
    return logprob


Rows = list[tuple[float, list[tuple[int, float]]]]
"""For each token its own logprob, and the likeliest tokens with their logprobs."""


def _token_rows(choice: dict[str, Any], ids: list[int]) -> Rows:
    """Return the logprobs in a choice of the route for token ids. Raises ValueError if they do not belong to `ids`."""
    content = (choice.get("logprobs") or {}).get("content") or []
    rows: Rows = []
    _require_one_each("logprobs.content", content, choice, ids)
    for token, row in zip(ids, content, strict=True):
        if int(row["token_id"]) != token:
            raise ValueError(f"the answer has a logprob of token {row['token_id']} for the token {token}")
        top = {int(item["token_id"]): _logprob(item["logprob"]) for item in row.get("top_logprobs") or ()}
        rows.append((_logprob(row["logprob"], above=_FLOOR), list(top.items())))
    return rows


def _completion_rows(choice: dict[str, Any], ids: list[int]) -> Rows:
    """Return the logprobs in a choice of `/v1/completions`. Raises ValueError if they do not belong to `ids`."""
    logprobs = choice.get("logprobs") or {}
    rows: Rows = []
    columns = [logprobs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs")]
    for name, column in zip(("tokens", "token_logprobs", "top_logprobs"), columns, strict=True):
        _require_one_each(f"logprobs.{name}", column, choice, ids)
    for token, name, logprob, top in zip(ids, *columns, strict=True):
        if _token_id(name) != token:
            raise ValueError(f"the answer has a logprob of {name} for the token {token}")
        likeliest = [(_token_id(n), _logprob(v)) for n, v in (top or {}).items()]
        rows.append((_logprob(logprob, above=_FLOOR), likeliest))
    return rows


def _require_one_each(field: str, entries: Sequence[Any], choice: dict[str, Any], ids: list[int]) -> None:
    """Raise ValueError unless `entries`, this field of a choice, has one entry for each token id."""
    if entries and not choice.get("token_ids"):
        raise ValueError(f"the answer has no token_ids{VERSION_HINT}")
    if len(entries) != len(ids):
        raise ValueError(f"the answer has {len(entries)} entries in {field}, but {len(ids)} token_ids{VERSION_HINT}")


def _token_id(name: str) -> int:
    """Return the token id in a name such as `token_id:7`, which vLLM writes instead of the token's text."""
    try:
        return int(name.removeprefix("token_id:"))
    except ValueError:
        raise ValueError(
            f"the answer's logprobs name a token by text, {name!r:.80}, not as token_id:NUMBER{VERSION_HINT}"
        ) from None


def prompt_logprobs(
    response: Any, ids: Sequence[int], temperature: float, *, spans: bool, server: str = "the server"
) -> list[float]:
    """Return the logprob of each prompt token but the first. If temperature != 1, the response must have whole rows."""
    try:
        entries = response["prompt_logprobs"] if spans else response["choices"][0]["prompt_logprobs"]
        rows = [{int(token): _logprob(item["logprob"]) for token, item in row.items()} for row in entries[1:]]
        logprobs = [row[token] for row, token in zip(rows, ids[1:], strict=True)]
    except UNREADABLE as e:
        raise EngineError(f"{server} gave no logprobs of the prompt ({_defect(e, response)})") from e
    if temperature == 1.0:
        return logprobs
    return [logprob_at_temperature(value, row.values(), temperature) for row, value in zip(rows, logprobs, strict=True)]


class TextCutter:
    """Decoder of an answer's ids, at once or in parts. Like vLLM, it drops special tokens and the final stop text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._decode = tokenizer.decode
        self._held_length = max((len(s) for s in stops), default=1) - 1
        """Number of last characters to hold back, since a stop text may begin there."""
        self._ids: list[int] = []
        self._returned_length = 0

    def add(self, ids: Sequence[int], stop: str = "", *, last: bool) -> str:
        """Add further ids and return the new text. Text that may still change, or become a stop text, is held back."""
        self._ids += ids
        text = self._text(self._ids)
        if stop:  # with min_tokens the text may have it earlier too, so find the one that the last token completed
            position = text.find(stop, max(0, len(self._text(self._ids[:-1])) - len(stop) + 1))
            text = text if position < 0 else text[:position]
        begin = self._returned_length
        end = len(text) if last else max(begin, len(text.rstrip("\ufffd")) - self._held_length)
        self._returned_length = max(begin, end)
        return text[begin:end]

    def _text(self, ids: list[int]) -> str:
        return str(self._decode(ids, skip_special_tokens=True))
