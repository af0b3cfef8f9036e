"""Values of single rollouts for the dashboard's templates."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from trinity_es.audit import rollout_reader
from trinity_es.audit.rollout_reader import FREED, NOT_KEPT, RunExperiences
from trinity_es.dashboard import tokens
from trinity_es.events.errors import TrinityError
from trinity_es.events.experience import Array, Experience
from trinity_es.events.store.payloads.experiences import ExperienceReader
from trinity_es.events.store.payloads.payloads import open_lazily
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import BatchTimeline, RunRow
from trinity_es.projections.reading.log_reader import Log
from trinity_es.safe_text import cut, shown

__all__ = [
    "JSON_CHARACTERS", "MESSAGE_CHARACTERS", "TEXT_CHARACTERS", "Message", "as_json", "commands", "experience_values",
    "messages", "previews", "prompt_of", "read_runs", "response_of", "whole_text",
]

TEXT_CHARACTERS = 20_000
"""Maximum number of characters of a prompt or a response that a page shows."""
MESSAGE_CHARACTERS = 8_000
CONVERSATION_CHARACTERS = 200_000
JSON_CHARACTERS = 20_000
PREVIEW_CHARACTERS = 160
PREVIEW_BYTES = 32_000_000
"""Maximum number of bytes of payloads that are read for the previews in one list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Message of a conversation, for the page of a rollout."""

    role: str
    text: str
    left_out: int = 0
    """Number of characters cut off at the end of the text."""
    more: str = ""
    """Other fields of the message (tool calls, names) as JSON."""


def read_runs(log: Log, batch: BatchTimeline, rows: Sequence[RunRow]) -> list[RunExperiences]:
    """Read the experiences of each of these runs. If a run has none, its result has a sentence that says why."""
    results = rollout_reader.read_runs(log, batch.batch_id, rows, batch.state.experiences, max(1, len(batch.tasks)))
    return [
        replace(result, missing=_why_missing(row, result), trouble=result.trouble and (
            f"The experiences that the pipeline delivered can't be read: {shown(result.trouble)}"))
        for row, result in zip(rows, results, strict=True)
    ]


def _why_missing(row: RunRow, run_experiences: RunExperiences) -> str:
    """Return a sentence that says why a run has no experiences; "" if it has some."""
    if row.payload is None and row.outcome != "finished":
        return "The run failed: it left no experience."
    if run_experiences.missing == NOT_KEPT:
        return "Experiences of evals are not kept: the log holds this run's metrics only."
    if run_experiences.missing == FREED:
        return ("The experiences of this batch were freed (store.retention keeps those of the newest "
                "steps only). Metrics, attempts and weights below are from its events, which stay.")
    return run_experiences.missing and f"The payload can't be read: {shown(run_experiences.missing)}"


def previews(log: Log, rows: Sequence[RunRow]) -> dict[tuple[BatchId, int, int], str]:
    """Return the beginning of each run's first response, by (batch, task, run).

    A response is left out if it can't be read, or if PREVIEW_BYTES of payloads were read before it.
    """
    texts: dict[tuple[BatchId, int, int], str] = {}
    stored_rows = [row for row in rows if row.payload is not None]
    with closing(open_lazily(log.payloads)) as payloads:
        reader, last_digest = ExperienceReader(payloads), ""
        bytes_left = PREVIEW_BYTES
        for row in sorted(stored_rows, key=lambda r: (r.payload.digest, r.payload.first) if r.payload else ("", 0)):
            assert row.payload is not None
            try:
                if last_digest != row.payload.digest:
                    last_digest = row.payload.digest
                    bytes_left -= payloads.size(last_digest) or 0
                    if bytes_left < 0:
                        break
                experiences = reader.read(last_digest, row.payload.first, row.payload.count)
            except TrinityError:
                continue
            for e in sorted((e for e in experiences if e.eid.run == row.run), key=lambda e: e.eid.step)[:1]:
                text = response_of(e)
                beginning, left_out = cut(" ".join(text[: 4 * PREVIEW_CHARACTERS].split()), PREVIEW_CHARACTERS)
                is_cut = left_out > 0 or len(text) > 4 * PREVIEW_CHARACTERS
                texts[row.batch_id, row.task, row.run] = beginning + ("…" if is_cut else "")
    return texts


def response_of(e: Experience) -> str:
    """Return the response as text, or as token ids if no text is recorded."""
    if e.response_text is not None:
        return e.response_text
    for message in reversed(e.messages or []):
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return str(message["content"])
    return " ".join(str(int(t)) for t in e.tokens[e.prompt_length :])


def prompt_of(e: Experience) -> str:
    """Return the prompt as text, or as token ids if no text is recorded."""
    return e.prompt_text if e.prompt_text is not None else " ".join(str(int(t)) for t in e.tokens[: e.prompt_length])


def whole_text(e: Experience) -> str:
    """Return an experience's prompt, response and messages as the unescaped text of a file."""
    parts = [f"# experience {e.eid.uid}", f"# reward {e.reward}", "", "## prompt", prompt_of(e), "", "## response",
             response_of(e)]
    for message in e.messages or []:
        parts += ["", f"## message of {message.get('role')}", _content_text(message.get("content"))]
    return "\n".join(parts) + "\n"


def messages(e: Experience) -> list[Message]:
    """Return the messages of an experience's conversation; [] if none are recorded.

    After CONVERSATION_CHARACTERS in total, the rest of the texts is cut.
    """
    out, characters_left = [], CONVERSATION_CHARACTERS
    for message in e.messages or []:
        text, left_out = cut(_content_text(message.get("content")), min(MESSAGE_CHARACTERS, characters_left))
        characters_left -= len(text)
        other_fields = {k: v for k, v in message.items() if k not in ("role", "content") and v not in (None, [], {})}
        out.append(Message(role=shown(message.get("role", "?"))[:40], text=text, left_out=left_out,
                           more=cut(as_json(other_fields), MESSAGE_CHARACTERS)[0] if other_fields else ""))
    return out


def _content_text(content: Any) -> str:
    """Return a chat message's content as text: a string as it is, a list as a line per part, anything else as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else as_json(part)
            for part in content)
    return "" if content is None else as_json(content)


def as_json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str).decode()


def commands(url: str, row: RunRow) -> list[tuple[str, str]]:
    """Return commands that show this run, as (purpose, command line)."""
    batch, log_option = shlex.quote(str(row.batch_id)), f"--log {shlex.quote(url)}"
    pairs = [
        ("generate it again from its weights, prompt and seed",
         f"trinity-es regenerate {batch} {row.task} {row.run} {log_option}"),
        ("its batch, task by task", f"trinity-es show {batch} {log_option}"),
        ("the batch when this run ended", f"trinity-es replay {batch} --at {row.finish_position} {log_option}"),
    ]
    if row.dispatch_position is not None:
        after = row.dispatch_position - 1
        pairs.append(("events since its dispatch", f"trinity-es events {batch} --after {after} {log_option}"))
    return [(purpose, shown(line)) for purpose, line in pairs]


def experience_values(
    e: Experience, decode: tokens.Decode | None, source: str, *, max_characters: int = TEXT_CHARACTERS,
    max_tokens: int = tokens.MAX_TOKENS,
) -> dict[str, Any]:
    """Return the values of one experience for templates. `decode`, `source`: see `tokens.decoder`.

    `max_characters` limits the prompt and the response each. `max_tokens` limits the list of tokens.
    """
    prompt, prompt_more = cut(prompt_of(e), max_characters)
    response, response_more = cut(response_of(e), max_characters)
    info = {k: v for k, v in e.info.items() if k != "version_spans"}
    return {
        "eid": e.eid, "reward": e.reward, "truncated": e.truncate_status,
        "advantage": _statistics(e.advantages), "returns": _statistics(e.returns), "logprob": _statistics(e.logprobs),
        "token_reward": _statistics(e.token_level_reward),
        "prompt": prompt, "prompt_more": prompt_more, "response": response, "response_more": response_more,
        "messages": messages(e), "overlay": tokens.overlay(e, decode, source, max_tokens),
        "info": cut(as_json(info), JSON_CHARACTERS)[0] if info else "",
        "tools": cut(as_json(e.tools), JSON_CHARACTERS)[0] if e.tools else "",
        "trained_tokens": 0 if e.action_mask is None else int(e.action_mask.sum()),
    }


def _statistics(values: Array | None) -> dict[str, float] | None:
    """Return mean, minimum and maximum of the finite values; None if no value is finite."""
    finite = [] if values is None else values[np.isfinite(values)]
    if not len(finite):
        return None
    return {"mean": float(np.mean(finite)), "low": float(np.min(finite)), "high": float(np.max(finite))}
