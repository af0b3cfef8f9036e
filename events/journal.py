"""Records of a journal: the model answers and step results of unfinished runs, written as they arrive.

A journal is a sequence of frames, each with its length and a checksum, so readers drop a tail that a crash has torn.
The next attempt reads the records of the lost runs (`kept_runs`). Records of one answer are joined by their offsets. A
record is left out if one before it was lost. So a damaged journal yields a shorter prefix of an answer, never a wrong
one.
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
"""Identity of a run: batch, submission, task, number of the run."""

MOST_SPLICES = 8
"""Maximum number of splices in one answer. Each one shifts the distribution a little (about 1e-4 nats of KL)."""

_FRAME = struct.Struct("<II")
"""Length and CRC-32 of a frame's body. The body is the length of its JSON, the JSON, and the arrays."""
_LENGTH = struct.Struct("<I")


@dataclass(slots=True, kw_only=True)
class KeptAnswer:
    """Complete or partial answer of a model to one call."""

    prompt: list[int] = field(default_factory=list)
    """Token ids of the prompt if the call had a text as prompt; else empty."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    """Logprob of each token, float32 values; None if the call asked for none."""
    spans: list[list[int]] = field(default_factory=list)
    """`[model_version, start, end]` over the tokens."""
    splices: list[int] = field(default_factory=list)
    """Offsets in the tokens at which an attempt continued an earlier attempt's answer."""
    finish: str = ""
    """Finish reason of a complete answer; empty for a partial one."""
    text: str = ""
    """Text of a complete answer."""
    adapter: list[Any] | None = None
    """Name and version of the LoRA adapter that answered; None for the base weights."""
    forbids: str = ""
    """Name of the sampling field that prevents continuing a partial answer; empty if none does."""
    left_out: int = 0
    """Number of tokens in later records that were left out because records before them are missing."""
    model: str = ""
    max_tokens: int = 0
    """Maximum number of tokens of the complete answer; 0 if unknown."""

    @property
    def refusal(self) -> str:
        """Reason why the answer can't be continued; empty if it can be, or is complete."""
        if self.finish:
            return ""
        return self.forbids or ("" if len(self.splices) < MOST_SPLICES else f"{MOST_SPLICES} splices")


@dataclass(slots=True, kw_only=True)
class KeptStep:
    """One step of a workflow. `done` is false if the step began and the journal has no end of it."""

    done: bool = False
    value: Any = None
    error: dict[str, Any] | None = None
    """Error that the step raised (`error_to_dict`); None if it returned `value`."""


@dataclass(slots=True, kw_only=True)
class KeptRun:
    """All journal records of one run, joined."""

    calls: dict[tuple[str, int], dict[int, KeptAnswer]] = field(default_factory=dict)
    """(fingerprint of a call, occurrence) -> answers by their number among the call's `n`."""
    steps: dict[tuple[str, int], KeptStep] = field(default_factory=dict)
    """(name and digest of arguments with a blank between, occurrence) -> step."""
    seconds: float = 0.0
    """Seconds that all attempts together had taken at the last record."""
    possibly_delivered: list[str] = field(default_factory=list)
    """Names of unfinished steps. If there are any, the run has to start from the beginning."""

    def open_steps(self) -> list[str]:
        """Return the names of unfinished steps, whose side effect may have happened."""
        return [key.rpartition(" ")[0] for (key, _), step in self.steps.items() if not step.done]


def fingerprint(*parts: Any) -> str:
    """Return a hash of JSON values or bytes, as 32 hex digits."""
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
    """Return the record that begins a later attempt at a run. Earlier records of the run no longer count."""
    return _frame({"run": run, "attempt": number})


def chunk(run: Run, seconds: float, call: str, nth: int, choice: int, start: int, new: KeptAnswer) -> bytes:
    """Return the record of an answer's next tokens, from offset `start` on. `new.spans` cover the whole answer.

    `seconds`: time that the run has taken, including earlier attempts.
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
    """Return the record of a step's beginning or, if `done`, of its end with a value or an error in JSON."""
    end = {"value": value, "done": 1, **({"error": error} if error else {})} if done else {}
    return _frame({"run": run, "s": round(seconds, 3), "step": key, "nth": nth, **end})


def without_open_steps(data: bytes) -> bytes:
    """Return a journal in which one record that lists the open steps replaces all records of a run with open steps."""
    to_replace = {number: kept for number, kept in kept_runs([data]).items() if kept.open_steps()}
    other_frames, runs = [], dict[int, Run]()
    for head, _, frame in frames(data):
        run = run_of(head)
        if run[3] in to_replace:
            runs[run[3]] = run
        else:
            other_frames.append(frame)
    return b"".join(other_frames) + b"".join(
        _frame({"run": runs[number], "s": kept.seconds, "over": [*kept.possibly_delivered, *kept.open_steps()]})
        for number, kept in to_replace.items()
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
    """Join the records in these parts of a journal for each run of one task. Return them by the run's number."""
    runs: dict[int, KeptRun] = {}
    for part in parts:
        for head, arrays, _ in frames(part):
            kept = runs.setdefault(head["run"][3], KeptRun())
            kept.seconds = max(kept.seconds, head["s"])
            if "over" in head:
                kept.possibly_delivered = head["over"]
            elif "step" in head:
                step_ = kept.steps.setdefault((head["step"], head["nth"]), KeptStep())
                if "done" in head:
                    step_.done, step_.value, step_.error = True, head["value"], head.get("error")
            else:
                answers = kept.calls.setdefault((head["call"], head["nth"]), {})
                _extend_answer(answers.setdefault(head["choice"], KeptAnswer()), head, arrays)
    return runs


def _extend_answer(answer: KeptAnswer, head: dict[str, Any], arrays: bytes) -> None:
    """Add a record's tokens if they begin where the answer ends. A record at offset 0 begins the answer again."""
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
