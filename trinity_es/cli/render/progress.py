"""The live view of a run: it follows the log, so it shows what is durable and nothing else.

On a terminal the picture that `watch` draws; elsewhere a line a step. `RunView` is a context manager around a run; it
reads the log in a thread of its own and never delays what it watches. When it ends, `state` is the fold of all of it.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from trinity_es.cli.render.watch import PAUSES, Picture, look, picture_view
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.projections.reading.follow import look_again
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.run import BatchProgress, RunState, evolve_run
from trinity_es.projections.why.situation import Followed
from trinity_es.text import error_line, plain

__all__ = ["RunView"]

REDRAWN_A_SECOND = 4
LOOK_SECONDS = 0.2
LINES = 24
"""Maximum height of the picture, so that what was said before it stays in view."""


def rewarded(batch: BatchProgress) -> str:
    """Return the mean reward of a batch that ended, how many runs are missing in it, and what is not trained on."""
    counts = {"runs missing": batch.missing, "filtered out": batch.dropped}
    but = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return "none" if batch.reward is None else f"{batch.reward:z.3f}" + (f" ({but})" if but else "")


class RunView:
    """Shows the run whose log is (or will be) at `url`, until the `with` block ends.

    `after`: events up to this position are counted, but not told. `total_steps` only for display.
    """

    def __init__(self, url: str, out: Console, *, total_steps: int | None = None, after: int = 0) -> None:
        self.state = RunState()
        self.error: str | None = None
        """What kept the view from the log; the run itself goes on."""
        self._out, self._total, self._after = out, total_steps, after
        self._told = set[str]()
        """Streams of the batches that ended while this view was there."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=look_again, name="progress", daemon=True,
                                        args=(url, self._look, self._stopping, LOOK_SECONDS, self._complain))
        self._picture: Picture | None = None
        self._followed, self._next_picture = Followed(), 0.0
        self._started = time.time()
        self._live = Live(get_renderable=self._render, console=out, refresh_per_second=REDRAWN_A_SECOND,
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

    # --- following --------------------------------------------------------------------------------------------------
    def _look(self, log: Log) -> None:
        for recorded in log.read(after=self.state.position):
            with self._lock:
                evolve_run(self.state, recorded)
            lines = self._take(recorded)
            if self._live is None and recorded.position > self._after:
                for line in lines:
                    self._out.print(Text(line), soft_wrap=True)
        begun = time.monotonic()
        if self._live is not None and (self._stopping.is_set() or begun >= self._next_picture):
            self._picture = look(log, followed=self._followed)
            self._next_picture = time.monotonic() + max(LOOK_SECONDS, PAUSES * (time.monotonic() - begun))

    def _complain(self, error: Exception) -> None:
        self.error = str(error)

    def _take(self, recorded: Recorded) -> list[str]:
        """Note what a view needs beyond the fold; returns the lines that a pipe gets."""
        event = recorded.event
        match event:
            case ev.RunnerStarted():
                return [f"{plain(event.runner)}: loading engine {plain(event.engine)} (pid {event.pid})"]
            case ev.RunnerReady():
                return [f"{plain(event.runner)}: ready after {event.load_seconds:.1f} s"]
            case ev.RunnerFailed() | ev.RunnerLost():
                return [f"{plain(event.runner)}: {type(event).__name__.removeprefix('Runner').lower()}: "
                        f"{error_line(event.reason, 300)}"]
            case ev.WeightsFailed():
                return [f"{plain(event.runner)}: version {event.version} not loaded: {error_line(event.error, 300)}"]
            case ev.AdapterFailed():
                return [f"{plain(event.runner)}: version {event.version} of adapter {event.adapter} not loaded: "
                        f"{error_line(event.error, 300)}"]
            case ev.TaskReopened():
                return [f"{recorded.stream}: task {event.task} is run again: {error_line(event.reason, 300)}"]
            case ev.FinalizeFailed():
                return [f"{recorded.stream}: finalize failed: {error_line(event.error, 300)}"]
            case ev.BatchFinalized() | ev.BatchAborted():
                batch = self.state.batches.get(recorded.stream)
                if recorded.position > self._after:
                    self._told.add(recorded.stream)
                return [] if batch is None else [self._line(batch)]
            case ev.BatchTrained() if recorded.stream not in self._told:
                batch = self.state.batches.get(recorded.stream)
                return [] if batch is None else [f"{self._name(batch)}  trained on what the log had of it"]
        return []

    def _name(self, batch: BatchProgress) -> str:
        if batch.batch_type == "train":
            return f"step {batch.batch_id}" + (f"/{self._total}" if self._total is not None else "")
        return f"{'eval' if batch.batch_type == 'eval' else 'batch'} {plain(batch.batch_id)}"

    def _line(self, batch: BatchProgress) -> str:
        reward = "" if batch.reward is None else f"  reward {rewarded(batch)}"
        seconds = (batch.ended_at or batch.submitted_at) - batch.submitted_at - batch.away_seconds
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(batch.failed_by_kind.items()))
        failed = f"  failed attempts: {kinds}; the last: {error_line(batch.last_failure, 160)}" if kinds else ""
        ended = "  ABORTED" if batch.state == "aborted" else ""
        version = "" if batch.model_version is None else f"  version {batch.model_version}"
        rate = batch.response_tokens / seconds if seconds > 0 else None  # what stands beside it, divided
        made = "" if rate is None else f"  {rate:,.{0 if rate >= 10 else 1}f} tokens/s"
        return (f"{self._name(batch)}  {batch.finished}/{batch.tasks} tasks{reward}  {batch.response_tokens:,} tokens"
                f"{made}{version}  {seconds:.2f} s{failed}{ended}")

    # --- the terminal -----------------------------------------------------------------------------------------------
    def _render(self) -> RenderableType:
        now = time.time()
        if self._picture is None or not self._picture.runners:
            return Text(f"starting the actor system… {now - self._started:.0f} s", style="cyan")
        with self._lock:
            state = self.state
            batch = next((b for b in state.batches.values() if b.ended_at is None), None)
            batch = batch or next(reversed(state.batches.values()), None)
            evals = [b for b in state.evals() if b.ended_at is not None]
            lines = [Text(
                ("" if batch is None else f"{self._name(batch)}   ") + f"version {state.model_version}   "
                f"{state.response_tokens:,} tokens   {now - (state.started_at or now):.0f} s"
                + (f"   {state.failed_attempts} failed attempts" if state.failed_attempts else ""), style="bold green",
            )]
        if evals:
            told = (f"{plain(b.batch_id)} {rewarded(b)}" for b in evals[-4:])
            lines.append(Text("eval   " + "  ".join(told)))
        return Group(*lines, picture_view(self._picture, min(LINES, self._out.height) - len(lines)))
