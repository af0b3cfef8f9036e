"""The live view of a run, read from its log: the overview of `watch` on a terminal, else a line per event."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from trinity_es.cli.render.batch_tables import reward_text
from trinity_es.cli.render.watch import PAUSE_FACTOR, read_overview, render_overview
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import batch_stream
from trinity_es.projections.event_texts import counted
from trinity_es.projections.metric_aggregation import mean_reward, missing_runs
from trinity_es.projections.reading.log_reader import Log, read_repeatedly
from trinity_es.projections.reading.short_steps import short_text
from trinity_es.projections.tables.batch_queries import BatchRow
from trinity_es.projections.why.system_state import Followed
from trinity_es.safe_text import batch_named, error_line, plain

__all__ = ["RunView", "kept_tokens", "last_failure", "open_seconds", "step_reward"]

REDRAWS_PER_SECOND = 4
READ_SECONDS = 0.2
MAX_LINES = 24
"""Maximum height of the overview, so that earlier output stays visible."""
PRINTED_TYPES = (
    "RunnerStarted", "RunnerReady", "RunnerFailed", "RunnerLost", "WeightsFailed", "AdapterFailed", "TaskReopened",
    "FinalizeFailed", "BatchFinalized", "BatchAborted", "BatchTrained",
)
"""Types of events for which a line is printed when stdout is no terminal."""


class RunView:
    """Context manager that shows the progress of the run whose log is, or will be, at `url`.

    It reads the log in its own thread and never delays the run. Lines are printed for events after position `after`.
    """

    def __init__(self, url: str, out: Console, *, total_steps: int | None = None, after: int = 0) -> None:
        self.position = after
        self._out = out
        self._total_steps = total_steps
        self._ended_streams = set[str]()
        """Streams of the batches for whose end a line was printed."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=read_repeatedly, name="progress", daemon=True,
                                        args=(url, self._show_new_events, self._stopping, READ_SECONDS, lambda e: None))
        self._overview: RenderableType | None = None
        """Newest overview for a terminal; None until a runner has started."""
        self._next_overview_at = 0.0
        """Monotonic time."""
        self._followed = Followed()
        self._started_at = time.time()
        self._live = Live(get_renderable=self._render, console=out, refresh_per_second=REDRAWS_PER_SECOND,
                          transient=False) if out.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(timeout=30.0)
        if self._live is not None:
            self._live.stop()

    def _show_new_events(self, log: Log) -> None:
        """Print a line for each new event; on a terminal, draw a new overview when it is due."""
        begun_at = time.monotonic()
        if self._live is None:
            if (head := log.head().position) > self.position:
                for recorded in log.read_rare(PRINTED_TYPES, after=self.position, before=head + 1):
                    self.position = recorded.position
                    if line := self._line(log, recorded):
                        self._out.print(Text(line), soft_wrap=True)
                self.position = head
        elif self._stopping.is_set() or begun_at >= self._next_overview_at:
            self._overview = self._draw(log)
            took = time.monotonic() - begun_at
            self._next_overview_at = time.monotonic() + max(READ_SECONDS, PAUSE_FACTOR * took)

    # --- lines ------------------------------------------------------------------------------------------------------
    def _line(self, log: Log, recorded: Recorded) -> str:
        """Return the line for an event; "" for a BatchTrained if a line was printed for the batch's end."""
        event, stream = recorded.event, recorded.stream
        match event:
            case ev.RunnerStarted():
                return f"{plain(event.runner)}: loading engine {plain(event.engine)} (pid {event.pid})"
            case ev.RunnerReady():
                return f"{plain(event.runner)}: ready after {event.load_seconds:.1f} s"
            case ev.RunnerFailed() | ev.RunnerLost():
                how = type(event).__name__.removeprefix("Runner").lower()
                return f"{plain(event.runner)}: {how}: {error_line(event.reason, 300)}"
            case ev.WeightsFailed():
                return f"{plain(event.runner)}: version {event.version} not loaded: {error_line(event.error, 300)}"
            case ev.AdapterFailed():
                return (f"{plain(event.runner)}: version {event.version} of adapter {event.adapter} not loaded: "
                        f"{error_line(event.error, 300)}")
            case ev.TaskReopened():
                return f"{stream}: task {event.task} is run again: {error_line(event.reason, 300)}"
            case ev.FinalizeFailed():
                return f"{stream}: finalize failed: {error_line(event.error, 300)}"
        if (batch_id := batch_named(log, stream.removeprefix("batch/"))) is None:
            return ""
        row = log.batch_row(batch_id)
        if isinstance(event, ev.BatchFinalized | ev.BatchAborted):
            self._ended_streams.add(stream)
            return self._ended_line(log, row, recorded, event)
        if stream in self._ended_streams:
            return ""
        return f"{self._name(row)}  trained on the experiences that the log had"

    def _name(self, row: BatchRow) -> str:
        """Return the name of a batch: its step for a train batch, else `eval` or `batch` and its id."""
        if row.batch_type == "train":
            return f"step {row.batch_id}" + (f"/{self._total_steps}" if self._total_steps is not None else "")
        return f"{'eval' if row.batch_type == 'eval' else 'batch'} {plain(row.batch_id)}"

    def _ended_line(
        self, log: Log, row: BatchRow, recorded: Recorded, event: ev.BatchFinalized | ev.BatchAborted
    ) -> str:
        aborted = "  ABORTED" if isinstance(event, ev.BatchAborted) else ""
        if row.first_position > recorded.position:
            return f"{self._name(row)}{aborted}  and submitted again"
        reward, metrics = mean_reward(event.result), event.result["metrics"]
        mean = "" if reward is None or isinstance(event, ev.BatchAborted) else "  reward " + step_reward(
            reward, missing_runs(row.batch_id, row.batch_type, metrics), event.dropped)
        seconds, tokens = open_seconds(log, row, recorded), row.response_tokens
        kept = kept_tokens(log, row)
        rate = (tokens - kept) / seconds if seconds > 0 else None
        throughput = "" if rate is None else f"  {rate:,.{0 if rate >= 10 else 1}f} tokens/s"
        before = f" ({kept:,} of them before the whole system ended)" if kept else ""
        version = "" if row.model_version is None else f"  version {row.model_version}"
        counts = ", ".join(f"{n} {reason}" for (what, reason), n in sorted(log.losses(row.batch_id).items())
                           if what == "attempt")
        failed = f"  failed attempts: {counts}; the last: {last_failure(log, row, 160)}" if counts else ""
        missing_groups = "" if aborted else short_text(log, row)
        short = f"  short: {missing_groups}" if missing_groups else ""
        return (f"{self._name(row)}  {row.finished}/{row.tasks} tasks{mean}  {tokens:,} tokens{before}{throughput}"
                f"{version}  {seconds:.2f} s{short}{failed}{aborted}")

    # --- the terminal -----------------------------------------------------------------------------------------------
    def _render(self) -> RenderableType:
        starting = Text(f"starting the actor system… {time.time() - self._started_at:.0f} s", style="cyan")
        return self._overview or starting

    def _draw(self, log: Log) -> RenderableType | None:
        """Return the run's figures, its last evals and the overview of `watch`; None before the first runner starts."""
        overview, first_event = read_overview(log, followed=self._followed), log.at(1)
        if not overview.runners or first_event is None:
            return None
        rows = [*overview.open_batches, *overview.ended]
        failed_attempts = sum(n for (what, _), n in log.losses().items() if what == "attempt")
        tokens = sum(total.response_tokens for total in log.totals())
        figures = [
            *(self._name(row) for row in rows[:1]), f"version {log.model_version()}", f"{tokens:,} tokens",
            f"{overview.now - first_event.recorded_at:.0f} s"]
        if failed_attempts:
            figures.append(f"{failed_attempts} failed attempts")
        lines = [Text("   ".join(figures), style="bold green")]
        evals = log.batches(batch_type="eval", sort="ended", descending=True, limit=4)
        if evals := [row for row in evals if row.ended_at is not None]:
            lines.append(Text("eval   " + "  ".join(
                f"{plain(row.batch_id)} {reward_text(row) or 'none'}" for row in reversed(evals))))
        return Group(*lines, render_overview(overview, min(MAX_LINES, self._out.height) - len(lines)))


def step_reward(mean: float, missing: int, dropped: int) -> str:
    """Return a batch's mean reward, with the number of missing runs and of experiences that were filtered out."""
    parts = [f"{counted(missing, 'run')} missing"] if missing else []
    parts += [f"{dropped} filtered out"] if dropped else []
    remark = ", ".join(parts)
    return f"{mean:z.3f}" + (f" ({remark})" if remark else "")


def last_failure(log: Log, row: BatchRow, width: int) -> str:
    """Return the error of a batch's last failed attempt; "" if no attempt failed."""
    last = log.last(batch_stream(row.batch_id), "AttemptFailed")
    return error_line(last.event.message, width) if last and isinstance(last.event, ev.AttemptFailed) else ""


def kept_tokens(log: Log, row: BatchRow) -> int:
    """Return the number of a batch's tokens that a start kept from before the whole system ended.

    They were generated after the log's last event, so their time is not part of `open_seconds`.
    """
    tokens_by_unit = dict[tuple[int, int], tuple[int, str, int]]()  # a later record includes the earlier ones
    for recorded in log.read_rare(["AttemptKept"], after=row.first_position - 1):
        if isinstance(event := recorded.event, ev.AttemptKept) and recorded.stream == batch_stream(row.batch_id):
            tokens_by_unit[event.task, event.run_id_base] = event.tokens, event.runner, event.incarnation
    if not tokens_by_unit:
        return 0
    ended_with_system = {(life.runner, life.incarnation) for life in log.runner_lives() if life.how == "replaced"}
    kept = sum(tokens for tokens, *life in tokens_by_unit.values() if tuple(life) in ended_with_system)
    return min(row.response_tokens, kept)


def open_seconds(log: Log, row: BatchRow, end: Recorded) -> float:
    """Return the seconds from a batch's submission to this event, without clock steps and coordinator outages."""
    outages = [(begin, stop) for begin, stop in log.without_coordinator(row.first_position) if stop <= end.recorded_at]
    clock_steps = [(recorded.recorded_at, recorded.event.seconds)
                   for recorded in log.read_rare(["ClockStepped"], after=row.first_position, before=end.position)
                   if isinstance(recorded.event, ev.ClockStepped)]
    # Clock steps during an outage are part of the outage's seconds.
    stepped_seconds = sum(seconds for at, seconds in clock_steps
                          if not any(begin <= at <= stop for begin, stop in outages))
    return end.recorded_at - row.submitted_at - stepped_seconds - sum(stop - begin for begin, stop in outages)
