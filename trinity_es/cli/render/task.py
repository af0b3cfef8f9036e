"""What `show BATCH --task N` shows: a task's course, a rollout with its text and the weights that made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity_es.cli.render.tables import columns, state_text
from trinity_es.events.experience import Experience
from trinity_es.projections.history.attempts import RunRow
from trinity_es.projections.history.task_history import TaskHistory, prompt_of
from trinity_es.text import clock, error_line, plain

__all__ = ["print_run", "print_task"]

_SHORT = 600
"""Characters of a text, unless all of it is asked for."""
_MOST = 100


def print_task(out: Console, course: TaskHistory, asked: dict[str, Any] | None) -> None:
    _head(out, course, asked)
    for turn in course.turns[:_MOST]:
        _line(out, f"  +{turn.at - course.submitted_at:8.2f} s  {turn.position:>7}  {error_line(turn.what, 400)}")
    if len(course.turns) > _MOST:
        _line(out, f"  and {len(course.turns) - _MOST} more: --json has all")
    if course.made:
        numbers = ("attempt", "weights", "reward", "prompt tokens", "tokens", "seconds", "position")
        table = columns("run", "runner", *numbers, right=("run", *numbers), whole=())
        for run, m in sorted(course.made.items()):
            table.add_row(
                str(run), Text(plain(f"{m.runner} #{m.incarnation}")), str(m.attempt), _span(m),
                "" if m.reward is None else f"{m.reward:.4g}", str(m.prompt_tokens), str(m.response_tokens),
                f"{m.seconds:.2f}", str(m.finish_position),
            )
        out.print(table)
        for line in _others(course):
            _line(out, line)
    for operator, uids in course.dropped_by.items():
        _line(out, f"taken out by the pipeline's {plain(operator)}: {plain(', '.join(uids), 300)}")


def _others(course: TaskHistory) -> Iterable[str]:
    """Return the tokens that are no run's own, so that the sum is what the task cost."""
    prompt, response = course.other_prompt_tokens, course.other_response_tokens
    if prompt < 0:
        yield f"beside      {-prompt} prompt tokens less were read: runs that share a prompt read it once"
    if prompt > 0 or response > 0:
        more = f"{max(prompt, 0)} prompt tokens and {max(response, 0)} tokens"
        yield f"beside      {more} that are in no run's experiences"
    if response < 0:
        yield f"beside      {-response} tokens of its experiences were not made by its model"


def print_run(
    out: Console, course: TaskHistory, asked: dict[str, Any] | None, made: RunRow, weights: Sequence[dict[str,
    Any]], found: Sequence[tuple[Experience, bool]], gone: str | None, *, every: bool,
) -> None:
    _head(out, course, asked)
    reward = "" if made.reward is None else f", reward {made.reward:.6g}"
    _line(out, f"run         {made.run}: attempt {made.attempt} on {plain(made.runner)} #{made.incarnation}, "
               f"{made.response_tokens} tokens in {made.seconds:.2f} s{reward}, position {made.finish_position}")
    for w in weights:
        if w["published_at"] is None:
            what = "the model as the engine was given it"
        else:
            what = f"published {clock(w['published_at'], date=True)}, {plain(w['method'])} {plain(w['path'], 200)}"
            if w["loaded_at"] is not None:
                what += f", in {plain(made.runner)} since {clock(w['loaded_at'], date=True)}"
        _line(out, f"weights     version {w['version']}: {what}")
    if course.trained_step is not None:
        _line(out, f"trained     in step {course.trained_step}")
    if gone is not None:
        _line(out, f"experiences not here: {plain(gone, 300)}")
    for e, delivered in found:
        _experience(out, e, delivered, course.dropped_by, every)


def _head(out: Console, course: TaskHistory, asked: dict[str, Any] | None) -> None:
    out.print(Text(f"batch {plain(course.batch_id)} task {course.task}  ", style="bold") + state_text(course.state))
    if course.reason:
        _line(out, f"because     {error_line(course.reason, 400)}")
        for line in course.reason.splitlines()[1:]:  # a traceback: the author of what raised it looks here
            _line(out, f"            {plain(line, 200)}")
    index = (asked or {}).get("index") or {}
    if index:
        taskset = f"taskset {plain(index['taskset'], 80)}, " if "taskset" in index else ""
        _line(out, f"from        {taskset}row {plain(index.get('index'), 20)}")
    prompt = prompt_of(asked)
    if prompt is not None:
        _line(out, f"prompt      {plain(prompt, _SHORT)}")
    _line(out, f"submitted   {clock(course.submitted_at, date=True)}, {course.runs} runs wanted")


def _experience(out: Console, e: Experience, delivered: bool, dropped_by: dict[str, list[str]], every: bool) -> None:
    oldest, newest = e.model_versions
    moved = "" if newest == oldest else f" to {newest}"
    versions = "" if oldest is None else f", weights {plain(oldest, 20)}{moved}"
    out.print(Text(f"experience  {plain(e.eid.uid, 300)}", style="bold"))
    masked = 0 if e.action_mask is None else int((~e.action_mask).sum())
    reward = "" if e.reward is None else f", reward {e.reward:.6g}"
    fate = "delivered" if delivered else next(
        (f"taken out by the pipeline's {plain(name, 60)}" for name, uids in dropped_by.items() if e.eid.uid in uids),
        "not delivered",
    )
    _line(out, f"  {e.prompt_length} prompt tokens, {len(e.tokens) - e.prompt_length} after them ({masked} masked)"
               f"{versions}{reward}, {fate}")
    if e.advantages is not None and len(e.advantages):
        _line(out, f"  advantages {_range(e.advantages.tolist())}")
    if e.logprobs is not None and len(e.logprobs):
        _line(out, f"  logprobs {_range(e.logprobs.tolist())}")
    for name, text in (("prompt", e.prompt_text), ("completion", e.response_text)):
        if text is None:
            _line(out, f"  {name}: no text was kept; --json has the token ids")
        else:
            _line(out, f"  {name}:")
            for line in _lines(text, None if every else _SHORT):
                _line(out, f"  | {line}")


def _lines(text: str, limit: int | None) -> Iterable[str]:
    """Return the text line by line, made harmless; cut after so many characters."""
    for line in text[:limit].split("\n"):
        yield plain(line)
    if limit is not None and len(text) > limit:
        yield f"… {len(text) - limit:,} more characters: --all shows them"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, mean {sum(values) / len(values):.4g}"


def _span(made: RunRow) -> str:
    return str(made.model_version) if made.model_version == made.model_version_end else \
        f"{made.model_version} to {made.model_version_end}"


def _line(out: Console, text: str) -> None:
    out.file.write(text + "\n")  # a text may be a megabyte, and has no colours: too much for a layout
