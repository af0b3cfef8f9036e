"""Output of `show BATCH --task N`: a task's history, or a rollout with its text and weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity_es.cli.render.batch_tables import columns, state_text
from trinity_es.events.experience import Experience
from trinity_es.projections.event_texts import kept_text
from trinity_es.projections.history.attempts import Attempt, RunRow
from trinity_es.projections.history.task_history import TaskHistory, prompt_of
from trinity_es.projections.reading.journal_parts import JournalPart
from trinity_es.safe_text import clock, error_line, plain

__all__ = ["print_run", "print_task"]

_SHORT = 600
"""Maximum number of characters of a text without --all."""
_MOST = 100
_BAR = 30
"""Width of an attempt's bar."""


def print_task(
    out: Console, history: TaskHistory, sample: dict[str, Any] | None,
    attempts: Sequence[tuple[Attempt, Sequence[JournalPart]]],
) -> None:
    """Print a task's turns, attempts and runs; `sample` is the task as submitted, if it can be read.

    `attempts` have what each went on from.
    """
    _print_head(out, history, sample)
    for turn in history.turns[:_MOST]:
        _line(out, f"  +{turn.at - history.submitted_at:8.2f} s  {turn.position:>7}  {error_line(turn.what, 400)}")
    if len(history.turns) > _MOST:
        _line(out, f"  and {len(history.turns) - _MOST} more: --json has all")
    if any(attempt.kept is not None for attempt, _ in attempts):
        _print_attempts(out, history, attempts)
    if history.made:
        numbers = ("attempt", "weights", "reward", "prompt tokens", "tokens", "seconds", "position")
        table = columns("run", "runner", *numbers, right=("run", *numbers), whole=())
        for run, m in sorted(history.made.items()):
            table.add_row(
                str(run), Text(plain(f"{m.runner} #{m.incarnation}")), str(m.attempt), _versions(m),
                "" if m.reward is None else f"{m.reward:.4g}", str(m.prompt_tokens), str(m.response_tokens),
                f"{m.seconds:.2f}", str(m.finish_position),
            )
        out.print(table)
        for line in _other_tokens(history):
            _line(out, line)
    for operator, uids in history.dropped_by.items():
        _line(out, f"filtered out by the pipeline's {plain(operator)}: {plain(', '.join(uids), 300)}")


def _print_attempts(
    out: Console, history: TaskHistory, attempts: Sequence[tuple[Attempt, Sequence[JournalPart]]]
) -> None:
    """Draw when each attempt played (━), and the kept answers and steps of each run that it went on from."""
    start, end = history.submitted_at, max(turn.at for turn in history.turns)
    per_second = _BAR / max(end - start, 1e-9)
    for attempt, parts in attempts[:_MOST]:
        first, last = (round((at - start) * per_second) for at in (attempt.dispatched_at, attempt.ended_at or end))
        bar = ("·" * first + "━" * max(1, last - first)).ljust(_BAR, "·")[:_BAR]
        whose = f"runs {attempt.run_id_base}-{attempt.run_id_base + attempt.runs - 1}"
        _line(out, f"  attempt {attempt.attempt} {bar} {whose} on {plain(attempt.runner)} #{attempt.incarnation}: "
                   f"{attempt.outcome}")
        for run in sorted({part.run for part in parts}):
            of_run = [_part_text(part) for part in parts if part.run == run]
            more = f" → and {len(of_run) - _MOST} more" if len(of_run) > _MOST else ""
            _line(out, f"    run {run} goes on from {' → '.join(of_run[:_MOST])}{more}")


def _part_text(part: JournalPart) -> str:
    if part.step:
        return f"step {plain(part.step, 80)}{'' if part.finish else ' (unfinished)'}"
    most = f"/{part.max_tokens:,}" if part.max_tokens and not part.finish else ""
    spliced = f" spliced at {', '.join(map(str, part.splices))}" if part.splices else ""
    lost = f", begins again because of {part.forbids}" if part.forbids and not part.finish else ""
    return f"answer {part.tokens:,}{most} tokens ({plain(part.finish, 40) or 'partial'}{lost}){spliced}"


def _other_tokens(history: TaskHistory) -> Iterable[str]:
    """Yield the difference between the tokens of the runs and those that the task cost."""
    prompt, response = history.other_prompt_tokens, history.other_response_tokens
    if prompt < 0:
        yield f"other       {-prompt} prompt tokens were not read again: runs that share a prompt read it once"
    if prompt > 0 or response > 0:
        yield (f"other       {max(prompt, 0)} prompt tokens and {max(response, 0)} tokens are in no run's "
               "experiences")
    if response < 0:
        yield f"other       {-response} tokens of its experiences were not made by its model"


def print_run(
    out: Console, history: TaskHistory, sample: dict[str, Any] | None, made: RunRow,
    weights: Sequence[dict[str, Any]], experiences: Sequence[tuple[Experience, bool]], gone: str | None, *, every: bool,
) -> None:
    """Print a run with its experiences, each with whether it was delivered; `gone` says why they can't be read."""
    _print_head(out, history, sample)
    reward = "" if made.reward is None else f", reward {made.reward:.6g}"
    _line(out, f"run         {made.run}: attempt {made.attempt} on {plain(made.runner)} #{made.incarnation}, "
               f"{made.response_tokens} tokens in {made.seconds:.2f} s{reward}, position {made.finish_position}")
    if made.kept is not None:
        whose = f" (all {made.kept.runs} runs of its unit)" if made.kept.runs > 1 else ""
        _line(out, f"went on     from {plain(kept_text(made.kept), 300)}{whose}")
    for w in weights:
        if w["published_at"] is None:
            origin = "the model that the engine started with"
        else:
            origin = f"published {clock(w['published_at'], date=True)}, {plain(w['method'])} {plain(w['path'], 200)}"
            if w["loaded_at"] is not None:
                origin += f", in {plain(made.runner)} since {clock(w['loaded_at'], date=True)}"
        _line(out, f"weights     version {w['version']}: {origin}")
    if history.trained_step is not None:
        _line(out, f"trained     in step {history.trained_step}")
    if gone is not None:
        _line(out, f"experiences not here: {plain(gone, 300)}")
    for e, delivered in experiences:
        _print_experience(out, e, delivered, history.dropped_by, every)


def _print_head(out: Console, history: TaskHistory, sample: dict[str, Any] | None) -> None:
    out.print(Text(f"batch {plain(history.batch_id)} task {history.task}  ", style="bold") + state_text(history.state))
    if history.reason:
        _line(out, f"because     {error_line(history.reason, 400)}")
        for line in history.reason.splitlines()[1:]:  # the traceback
            _line(out, f"            {plain(line, 200)}")
    index = (sample or {}).get("index") or {}
    if index:
        taskset = f"taskset {plain(index['taskset'], 80)}, " if "taskset" in index else ""
        _line(out, f"from        {taskset}row {plain(index.get('index'), 20)}")
    prompt = prompt_of(sample)
    if prompt is not None:
        _line(out, f"prompt      {plain(prompt, _SHORT)}")
    _line(out, f"submitted   {clock(history.submitted_at, date=True)}, {history.runs} runs wanted")


def _print_experience(
    out: Console, e: Experience, delivered: bool, dropped_by: dict[str, list[str]], every: bool
) -> None:
    oldest, newest = e.model_versions
    to_newest = "" if newest == oldest else f" to {newest}"
    versions = "" if oldest is None else f", weights {plain(oldest, 20)}{to_newest}"
    out.print(Text(f"experience  {plain(e.eid.uid, 300)}", style="bold"))
    masked = 0 if e.action_mask is None else int((~e.action_mask).sum())
    reward = "" if e.reward is None else f", reward {e.reward:.6g}"
    fate = "delivered" if delivered else next(
        (f"filtered out by the pipeline's {plain(name, 60)}" for name, uids in dropped_by.items() if e.eid.uid in uids),
        "not delivered",
    )
    _line(out, f"  {e.prompt_length} prompt tokens, {len(e.tokens) - e.prompt_length} after them ({masked} masked)"
               f"{versions}{reward}, {fate}")
    if e.advantages is not None and len(e.advantages):
        _line(out, f"  advantages {_range(e.advantages.tolist())}")
    if e.logprobs is not None and len(e.logprobs):
        _line(out, f"  logprobs {_range(e.logprobs.tolist())}")
    if e.splices:
        _line(out, f"  spliced before response token {', '.join(map(str, e.splices))}: there another attempt went on")
    for name, text in (("prompt", e.prompt_text), ("completion", e.response_text)):
        if text is None:
            _line(out, f"  {name}: no text was kept; --json has the token ids")
        else:
            _line(out, f"  {name}:")
            for line in _lines(text, None if every else _SHORT):
                _line(out, f"  | {line}")


def _lines(text: str, limit: int | None) -> Iterable[str]:
    for line in text[:limit].split("\n"):
        yield plain(line)
    if limit is not None and len(text) > limit:
        yield f"… {len(text) - limit:,} more characters: --all shows them"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, mean {sum(values) / len(values):.4g}"


def _versions(made: RunRow) -> str:
    return str(made.model_version) if made.model_version == made.model_version_end else \
        f"{made.model_version} to {made.model_version_end}"


def _line(out: Console, text: str) -> None:
    out.file.write(text + "\n")  # not out.print: laying out a text of a megabyte is slow
