"""Output of `show BATCH --task N`: a task's history, or one of its runs with texts and weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity_es.cli.render.batch_tables import columns, state_text
from trinity_es.events.experience import Experience
from trinity_es.projections.event_texts import counted, kept_text
from trinity_es.projections.history.attempts import Attempt, RunRow
from trinity_es.projections.history.task_history import TaskHistory, prompt_of
from trinity_es.projections.reading.journal_parts import JournalPart
from trinity_es.safe_text import clock, error_line, plain

__all__ = ["print_run", "print_task"]

_SHORT = 600
"""Number of characters of a text that are printed without --all."""
_MAX_LINES = 100
_BAR_WIDTH = 30


def print_task(
    out: Console, history: TaskHistory, sample: dict[str, Any] | None,
    attempts: Sequence[tuple[Attempt, Sequence[JournalPart]]],
) -> None:
    """Print a task's events with their times, its attempts and its runs.

    `sample`: the task as submitted, if it can be read. `attempts`: each attempt with the journal parts (answers and
    steps of a lost attempt) that it continued.
    """
    _print_head(out, history, sample)
    for turn in history.turns[:_MAX_LINES]:
        _line(out, f"  +{turn.at - history.submitted_at:8.2f} s  {turn.position:>7}  {error_line(turn.what, 400)}")
    if len(history.turns) > _MAX_LINES:
        _line(out, f"  and {len(history.turns) - _MAX_LINES} more: --json has all")
    if any(attempt.kept is not None for attempt, _ in attempts):
        _print_attempts(out, history, attempts)
    if history.made:
        numbers = ("attempt", "weights", "reward", "prompt tokens", "tokens", "seconds", "position")
        table = columns("run", "runner", *numbers, right=("run", *numbers), whole=())
        for run, row in sorted(history.made.items()):
            oldest, newest = row.model_version, row.model_version_end
            table.add_row(
                str(run), Text(plain(f"{row.runner} #{row.incarnation}")), str(row.attempt),
                str(oldest) if oldest == newest else f"{oldest} to {newest}",
                "" if row.reward is None else f"{row.reward:.4g}", str(row.prompt_tokens), str(row.response_tokens),
                f"{row.seconds:.2f}", str(row.finish_position),
            )
        out.print(table)
        for line in _other_token_lines(history):
            _line(out, line)
    for operator, uids in history.dropped_by.items():
        _line(out, f"filtered out by the pipeline's {plain(operator)}: {plain(', '.join(uids), 300)}")


def _print_attempts(
    out: Console, history: TaskHistory, attempts: Sequence[tuple[Attempt, Sequence[JournalPart]]]
) -> None:
    """Draw when each attempt ran (━), and name the kept answers and steps that its runs continued."""
    start, end = history.submitted_at, max(turn.at for turn in history.turns)
    characters_per_second = _BAR_WIDTH / max(end - start, 1e-9)
    for attempt, parts in attempts[:_MAX_LINES]:
        first = round((attempt.dispatched_at - start) * characters_per_second)
        last = round(((attempt.ended_at or end) - start) * characters_per_second)
        bar = ("·" * first + "━" * max(1, last - first)).ljust(_BAR_WIDTH, "·")[:_BAR_WIDTH]
        runs = f"runs {attempt.run_id_base}-{attempt.run_id_base + attempt.runs - 1}"
        _line(out, f"  attempt {attempt.attempt} {bar} {runs} on {plain(attempt.runner)} #{attempt.incarnation}: "
                   f"{attempt.outcome}")
        for run in sorted({part.run for part in parts}):
            texts = _part_texts([part for part in parts if part.run == run])
            more = f" → and {len(texts) - _MAX_LINES} more" if len(texts) > _MAX_LINES else ""
            _line(out, f"    run {run} goes on from {' → '.join(texts[:_MAX_LINES])}{more}")


def _part_texts(parts: Sequence[JournalPart]) -> list[str]:
    """Describe the kept steps and answers of a run. Answers to one request (`n` above 1) share a text."""
    requests = list[list[str]]()
    for part in parts:
        if part.choice and requests:
            requests[-1].append(_part_text(part))
        else:
            requests.append([_part_text(part)])
    return [texts[0] if len(texts) == 1 else
            f"{len(texts)} answers to one request ({'; '.join(text.removeprefix('answer ') for text in texts)})"
            for texts in requests]


def _part_text(part: JournalPart) -> str:
    """Describe a step, or an answer with its number of tokens, that a lost attempt left in its journal."""
    if part.step:
        return f"step {plain(part.step, 80)}{'' if part.finish else ' (unfinished)'}"
    of_most = f"/{part.max_tokens:,}" if part.max_tokens and not part.finish else ""
    spliced = f" spliced at {', '.join(map(str, part.splices))}" if part.splices else ""
    restart = f", begins again because of {part.forbids}" if part.forbids and not part.finish else ""
    return f"answer {part.tokens:,}{of_most} tokens ({plain(part.finish, 40) or 'partial'}{restart}){spliced}"


def _other_token_lines(history: TaskHistory) -> Iterable[str]:
    """Yield lines about tokens that the task cost and that are in no run's experiences, or the reverse."""
    prompt, response = history.other_prompt_tokens, history.other_response_tokens
    if prompt < 0:
        yield f"other       {-prompt} prompt tokens were not read again: runs that share a prompt read it once"
    if prompt > 0 or response > 0:
        yield (f"other       {max(prompt, 0)} prompt tokens and {max(response, 0)} tokens are in no run's "
               "experiences")
    if response < 0:
        yield f"other       {-response} tokens of its experiences were not generated by its model"


def print_run(
    out: Console, history: TaskHistory, sample: dict[str, Any] | None, row: RunRow,
    weights: Sequence[dict[str, Any]], experiences: Sequence[tuple[Experience, bool]], missing: str | None, *,
    whole: bool,
) -> None:
    """Print a run with its experiences.

    `weights`: the versions that generated its tokens. `experiences`: each with True if it was delivered. `missing`: why
    they can't be read. `whole`: print texts to their end.
    """
    _print_head(out, history, sample)
    reward = "" if row.reward is None else f", reward {row.reward:.6g}"
    _line(out, f"run         {row.run}: attempt {row.attempt} on {plain(row.runner)} #{row.incarnation}, "
               f"{row.response_tokens} tokens in {row.seconds:.2f} s{reward}, position {row.finish_position}")
    if row.kept is not None:
        unit_runs = f" (all {row.kept.runs} runs of its unit)" if row.kept.runs > 1 else ""
        _line(out, f"went on     from {plain(kept_text(row.kept), 300)}{unit_runs}")
    for version in weights:
        if version["published_at"] is None:
            origin = "the model that the engine started with"
        else:
            published_at = clock(version["published_at"], date=True)
            origin = f"published {published_at}, {plain(version['method'])} {plain(version['path'], 200)}"
            if version["loaded_at"] is not None:
                origin += f", in {plain(row.runner)} since {clock(version['loaded_at'], date=True)}"
        _line(out, f"weights     version {version['version']}: {origin}")
    if history.trained_step is not None:
        _line(out, f"trained     in step {history.trained_step}")
    if missing is not None:
        _line(out, f"experiences not here: {plain(missing, 300)}")
    for e, delivered in experiences:
        _print_experience(out, e, delivered, history.dropped_by, whole=whole)


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
    _line(out, f"submitted   {clock(history.submitted_at, date=True)}, {counted(history.runs, 'run')} wanted")


def _print_experience(
    out: Console, e: Experience, delivered: bool, dropped_by: dict[str, list[str]], *, whole: bool
) -> None:
    oldest, newest = e.model_versions
    to_newest = "" if newest == oldest else f" to {newest}"
    versions = "" if oldest is None else f", weights {plain(oldest, 20)}{to_newest}"
    out.print(Text(f"experience  {plain(e.eid.uid, 300)}", style="bold"))
    masked_count = 0 if e.action_mask is None else int((~e.action_mask).sum())
    reward = "" if e.reward is None else f", reward {e.reward:.6g}"
    fate = "delivered" if delivered else next(
        (f"filtered out by the pipeline's {plain(name, 60)}" for name, uids in dropped_by.items() if e.eid.uid in uids),
        "not delivered",
    )
    _line(out, f"  {e.prompt_length} prompt tokens, {len(e.tokens) - e.prompt_length} after them "
               f"({masked_count} masked)"
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
            limit = len(text) if whole else _SHORT
            for line in text[:limit].split("\n"):
                _line(out, f"  | {plain(line)}")
            if len(text) > limit:
                _line(out, f"  | … {len(text) - limit:,} more characters: --all shows them")


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, mean {sum(values) / len(values):.4g}"


def _line(out: Console, text: str) -> None:
    """Print a line, which may be wider than the terminal."""
    out.file.write(text + "\n")  # not out.print: laying out a text of a megabyte is slow
