"""Records of a run's journal: the answers and step results that an attempt got from outside, as they come.

A journal is bytes: frames, each with its length and a checksum, so a tail that a crash has torn is cut off. The next
attempt reads the records of the lost runs (`kept_runs`). Records of one call are joined by their offsets. A record that
does not continue what is there, because another was lost, is left out. So a damaged journal gives a shorter prefix,
never another one.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from trinity_es.events.values import BatchId

__all__ = [
    "MOST_SPLICES", "KeptAnswer", "KeptRun", "KeptStep", "Run", "attempt", "chunk", "fingerprint", "frames",
    "kept_runs", "run_of", "step", "without_open_steps",
]

Run = tuple[BatchId, str, int, int]
"""Identity of a run: batch, submission, task, run."""

MOST_SPLICES = 8
"""Maximum number of splices in one answer, since each shifts the distribution a little (about 1e-4 nats of KL)."""

_FRAME = struct.Struct("<II")
"""Length and CRC-32 of the body, which is the length of its JSON, the JSON and the arrays."""
_LENGTH = struct.Struct("<I")


@dataclass(slots=True, kw_only=True)
class KeptAnswer:
    """One answer to one call, or its beginning."""

    prompt: list[int] = field(default_factory=list)
    """Token ids of the prompt, if the call was made with a text; else empty."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    """Logprob of each token, float32 values; None if the call asked for none."""
    spans: list[list[int]] = field(default_factory=list)
    """`[model_version, start, end]` over the tokens."""
    splices: list[int] = field(default_factory=list)
    """Offsets at which an attempt went on with what an earlier one had."""
    finish: str = ""
    """Finish reason of a complete answer; empty while it is not."""
    text: str = ""
    """Text of a complete answer."""
    adapter: list[Any] | None = None
    """Name and version of the LoRA adapter that answers."""
    forbids: str = ""
    """The sampling field with which a partial answer can't go on; empty if it can."""
    left_out: int = 0
    """Tokens of later records that can't be joined, because records before them are missing."""
    model: str = ""
    max_tokens: int = 0
    """Maximum number of tokens of the whole; 0 if it is unknown."""

    @property
    def refusal(self) -> str:
        """The reason why the answer can't go on; empty if it can, or is whole."""
        if self.finish:
            return ""
        return self.forbids or ("" if len(self.splices) < MOST_SPLICES else f"{MOST_SPLICES} splices")


@dataclass(slots=True, kw_only=True)
class KeptStep:
    """One step of a workflow. `done` is false if it began and its end is unknown."""

    done: bool = False
    value: Any = None
    error: dict[str, Any] | None = None
    """The error that it raised (`error_to_dict`); None if it returned the value."""


@dataclass(slots=True, kw_only=True)
class KeptRun:
    """Everything that the journal has of one run."""

    calls: dict[tuple[str, int], dict[int, KeptAnswer]] = field(default_factory=dict)
    """Answers by the call's fingerprint and occurrence, then by their number among the call's `n`."""
    steps: dict[tuple[str, int], KeptStep] = field(default_factory=dict)
    """Steps by name, blank and digest of the arguments, and by occurrence."""
    seconds: float = 0.0
    """How long the attempts had played at the last record."""
    possibly_delivered: list[str] = field(default_factory=list)
    """Names of the steps that made the run start over."""

    def open_steps(self) -> list[str]:
        """Return the names of unfinished steps, whose effect may have happened."""
        return [key.rpartition(" ")[0] for (key, _), step in self.steps.items() if not step.done]


def fingerprint(*parts: Any) -> str:
    """Return 32 hex digits that are equal for equal JSON values or bytes."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else orjson.dumps(part, option=orjson.OPT_SORT_KEYS)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def _frame(head: dict[str, Any], arrays: bytes = b"") -> bytes:
    text = orjson.dumps(head)
    body = b"".join((_LENGTH.pack(len(text)), text, arrays))
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def attempt(run: Run, number: int) -> bytes:
    """Return the record with which a later attempt at a run begins: what a life has of earlier ones is over."""
    return _frame({"run": run, "attempt": number})


def chunk(run: Run, seconds: float, call: str, nth: int, choice: int, start: int, new: KeptAnswer) -> bytes:
    """Return the record of further tokens of an answer, from offset `start` on; `new.spans` are those of the whole.

    `seconds`: how long the run has played, with its earlier attempts.
    """
    head: dict[str, Any] = {"run": run, "s": round(seconds, 3), "call": call, "nth": nth, "choice": choice,
                            "at": start, "n": len(new.tokens)}
    optional = {"spans": new.spans, "splices": new.splices, "end": new.finish, "text": new.text, "by": new.adapter,
                "prompt": new.prompt, "forbids": new.forbids, "model": new.model, "most": new.max_tokens}
    head |= {name: value for name, value in optional.items() if value}
    tokens = array("i", new.tokens).tobytes()
    if new.logprobs is None:
        return _frame(head, tokens)
    return _frame({**head, "lp": 1}, tokens + array("f", new.logprobs).tobytes())


def step(
    run: Run, seconds: float, key: str, nth: int, *, done: bool, value: Any = None, error: dict[str, Any] | None = None
) -> bytes:
    """Return the record of a step's beginning, or of its end with the value or the error, which must be JSON."""
    ended = {"value": value, "done": 1, **({"error": error} if error else {})} if done else {}
    return _frame({"run": run, "s": round(seconds, 3), "step": key, "nth": nth, **ended})


def without_open_steps(data: bytes) -> bytes:
    """Replace all records of each run with an open step by a single record that lists its open steps."""
    opened = {number: kept for number, kept in kept_runs([data]).items() if kept.open_steps()}
    rest, runs = [], dict[int, Run]()
    for head, _, frame in frames(data):
        run = run_of(head)
        if run[3] in opened:
            runs[run[3]] = run
        else:
            rest.append(frame)
    return b"".join(rest) + b"".join(
        _frame({"run": runs[number], "s": kept.seconds, "over": [*kept.possibly_delivered, *kept.open_steps()]})
        for number, kept in opened.items()
    )


def frames(data: bytes) -> Iterator[tuple[dict[str, Any], bytes, bytes]]:
    """Yield the header, the arrays' bytes and the whole frame of each record, up to the first damaged one."""
    at = 0
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < max(length, _LENGTH.size) or zlib.crc32(body) != checksum:
            return
        head = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        yield orjson.loads(body[_LENGTH.size : head]), body[head:], data[at : at + _FRAME.size + length]
        at += _FRAME.size + length


def run_of(head: dict[str, Any]) -> Run:
    batch_id, submission, task, run = head["run"]
    return batch_id, submission, task, run


def kept_runs(parts: Iterable[bytes]) -> dict[int, KeptRun]:
    """Return what the parts of a journal have of each run of one task, by the run's number."""
    runs: dict[int, KeptRun] = {}
    for part in parts:
        for head, arrays, _ in frames(part):
            kept = runs.setdefault(head["run"][3], KeptRun())
            kept.seconds = max(kept.seconds, head["s"])
            if "over" in head:
                kept.possibly_delivered = head["over"]
            elif "step" in head:
                known = kept.steps.setdefault((head["step"], head["nth"]), KeptStep())
                if "done" in head:
                    known.done, known.value, known.error = True, head["value"], head.get("error")
            else:
                answers = kept.calls.setdefault((head["call"], head["nth"]), {})
                _continue(answers.setdefault(head["choice"], KeptAnswer()), head, arrays)
    return runs


def _continue(answer: KeptAnswer, head: dict[str, Any], arrays: bytes) -> None:
    """Add the tokens of a record that begins where the answer ends, or that begins it again from its start."""
    if answer.finish:
        return
    if head["at"] == 0:
        answer.tokens, answer.logprobs, answer.left_out = [], None, 0
    if head["at"] != len(answer.tokens):
        answer.left_out += head["n"] if head["at"] > len(answer.tokens) else 0
        return
    count = head["n"]
    if "lp" in head:
        answer.logprobs = [*(answer.logprobs or []), *np.frombuffer(arrays, np.float32, count, 4 * count).tolist()]
    answer.tokens += np.frombuffer(arrays, np.int32, count).tolist()
    answer.spans, answer.splices, answer.prompt = head.get("spans", []), head.get("splices", []), head.get("prompt", [])
    answer.finish, answer.text, answer.adapter = head.get("end", ""), head.get("text", ""), head.get("by")
    answer.forbids, answer.model = head.get("forbids", ""), head.get("model", "")
    answer.max_tokens = head.get("most", 0)
