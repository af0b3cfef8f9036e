"""The live view of a run: it follows the log, so it shows what is durable and nothing else.

On a terminal a panel that is redrawn; elsewhere a line a step. `RunView` is a context manager around a run; it reads
the log in a thread of its own and never delays what it watches. When it ends, `state` is the fold of all of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogNotFound, NotALog, TrinityError
from trinity_es.events.store.log import Recorded
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.run import BatchProgress, RunState, evolve_run
from trinity_es.text import plain, sparkline

__all__ = ["RunView"]

RATE_SECONDS = 10.0
"""How long the time is over which tokens a second are counted, or all since the log began."""
REDRAWN_A_SECOND = 4


class RunView:
    """Shows the run whose log is (or will be) at `url`, until the `with` block ends.

    `after`: events up to this position are counted, but not told. `total_steps` only for display.
    """

    def __init__(self, url: str, out: Console, *, total_steps: int | None = None, after: int = 0) -> None:
        self.state = RunState()
        self.error: str | None = None
        """Why the view ended early; the run itself goes on."""
        self._url, self._out, self._total, self._after = url, out, total_steps, after
        self._loading: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._tokens: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._stack = ExitStack()
        self._live = out.is_terminal
        self._started = time.time()

    def __enter__(self) -> Self:
        if self._live:
            self._stack.enter_context(Live(
                get_renderable=self._render, console=self._out, refresh_per_second=REDRAWN_A_SECOND, transient=False,
            ))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(timeout=30.0)
        self._stack.close()

    # --- following --------------------------------------------------------------------------------------------------
    def _follow(self) -> None:
        try:
            while True:
                last = self._stopping.is_set()
                try:
                    log = open_log(self._url)
                    break
                except (LogNotFound, NotALog):  # it is being made
                    if last:
                        return
                    self._stopping.wait(0.1)
            with log:
                for recorded in log.follow(stop=self._stopping.is_set):
                    with self._lock:
                        evolve_run(self.state, recorded)
                        lines = self._take(recorded)
                    if not self._live and recorded.position > self._after:
                        for line in lines:
                            self._out.print(Text(line), soft_wrap=True)
        except TrinityError as e:
            self.error = str(e)

    def _take(self, recorded: Recorded) -> list[str]:
        """Note what a view needs beyond the fold; returns the lines that a pipe gets."""
        event, at = recorded.event, recorded.recorded_at
        match event:
            case ev.RunnerStarted():
                self._loading[event.runner] = at
                return [f"{plain(event.runner)}: loading engine {plain(event.engine)} (pid {event.pid})"]
            case ev.RunnerReady():
                self._loading.pop(event.runner, None)
                return [f"{plain(event.runner)}: ready after {event.load_seconds:.1f} s"]
            case ev.RunnerFailed() | ev.RunnerLost():
                self._loading.pop(event.runner, None)
                self._reasons[event.runner] = event.reason
                return [f"{plain(event.runner)}: {type(event).__name__.removeprefix('Runner').lower()}: "
                        f"{plain(event.reason, 300)}"]
            case ev.WeightsFailed():
                return [f"{plain(event.runner)}: version {event.version} not loaded: {plain(event.error, 300)}"]
            case ev.RunsFinished():
                self._tokens.append((at, event.response_tokens))
                while self._tokens and self._tokens[0][0] < at - RATE_SECONDS:
                    self._tokens.popleft()
            case ev.TaskReopened():
                return [f"{recorded.stream}: task {event.task} is run again: {plain(event.reason, 300)}"]
            case ev.FinalizeFailed():
                return [f"{recorded.stream}: finalize failed: {plain(event.error, 300)}"]
            case ev.BatchFinalized() | ev.BatchAborted():
                batch = self.state.batches.get(recorded.stream)
                return [] if batch is None else [self._line(batch)]
        return []

    def _name(self, batch: BatchProgress) -> str:
        if batch.batch_type == "train":
            return self._step(batch.batch_id)
        return f"{'eval' if batch.batch_type == 'eval' else 'batch'} {plain(batch.batch_id)}"

    def _line(self, batch: BatchProgress) -> str:
        name = self._name(batch)
        reward = "" if batch.reward is None else f"  reward {batch.reward:.3f}"
        seconds = (batch.ended_at or batch.submitted_at) - batch.submitted_at
        failed = f"  {batch.failed_attempts} failed attempts" if batch.failed_attempts else ""
        ended = "  ABORTED" if batch.state == "aborted" else ""
        return (f"{name}  {batch.finished}/{batch.tasks} tasks{reward}  {batch.response_tokens:,} tokens  "
                f"{self._rate():,.0f} tokens/s  version {batch.model_version or 0}  {seconds:.2f} s{failed}{ended}")

    def _step(self, step: object) -> str:
        return f"step {step}" + (f"/{self._total}" if self._total is not None else "")

    def _rate(self, now: float | None = None) -> float:
        if not self._tokens:
            return 0.0
        newest = self._tokens[-1][0] if now is None else now
        seconds = max(1.0, min(RATE_SECONDS, newest - (self.state.started_at or newest)))
        return sum(n for at, n in self._tokens if at > newest - RATE_SECONDS) / seconds

    # --- the terminal -----------------------------------------------------------------------------------------------
    def _render(self) -> RenderableType:
        with self._lock:
            now = time.time()
            lines: list[Text] = [self._runners_line(now)]
            if self.state.batches:
                lines += self._batch_lines(now)
            for line in lines:
                line.no_wrap, line.overflow = True, "ellipsis"
            return Group(*lines)

    def _runners_line(self, now: float) -> Text:
        if not self.state.runners:
            return Text(f"starting the actor system… {now - self._started:.0f} s", style="cyan")
        told = []
        for name, what in sorted(self.state.runners.items()):
            if name in self._loading:
                told.append(f"{name} loading engine… {now - self._loading[name]:.0f} s")
            elif what in ("failed", "lost"):
                told.append(f"{name} {what}: {plain(self._reasons.get(name, ''), 80)}")
            else:
                told.append(f"{name} {what}")
        wrong = any(what in ("failed", "lost") for what in self.state.runners.values())
        return Text(plain("; ".join(told)), style="red" if wrong else "dim")

    def _batch_lines(self, now: float) -> list[Text]:
        state = self.state
        batch = next((b for b in state.batches.values() if b.ended_at is None), list(state.batches.values())[-1])
        train = [b for b in state.train() if b.reward is not None]
        evals = [b for b in state.evals() if b.reward is not None]
        what = self._name(batch)
        width = 24
        full = int(width * batch.finished / batch.tasks) if batch.tasks else width
        lines = [
            Text.assemble(
                (f"{what:<16}", "bold"), ("━" * full, "green"), ("━" * (width - full), "dim"),
                f" {batch.finished}/{batch.tasks} tasks  {batch.state}",
            ),
            Text(
                f"version {state.model_version}   {self._rate(now):,.0f} tokens/s   {state.response_tokens:,} tokens   "
                f"{now - (state.started_at or now):.0f} s"
                + (f"   {state.failed_attempts} failed attempts" if state.failed_attempts else "")
            ),
        ]
        rewards = [b.reward for b in train if b.reward is not None]
        if rewards:
            lines.append(Text(f"reward {rewards[-1]:.3f}    {sparkline(rewards)}", style="green"))
        if evals:
            lines.append(Text("eval   " + "  ".join(f"{plain(b.batch_id)} {b.reward:.3f}" for b in evals[-4:])))
        return lines
