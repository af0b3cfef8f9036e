"""The live overview of a run for `watch`, read from the log alone.

An overview costs the same on a long log as on a short one. Open batches, runners and the last rare events come from
read models and indices, throughput comes from the events of the last seconds. The reason why a batch waits is folded
from its events once, then from its new events.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trinity_es.cli.render.batch_tables import columns, console, counted_text, reward_text, state_text, when
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogError, LogUnavailable
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import batch_stream
from trinity_es.projections.host_states import HostLife, host_of, last_lives
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.reading.overview import NOTABLE
from trinity_es.projections.tables.batch_queries import BatchRow
from trinity_es.projections.tables.runner_history import RunnerIncarnation, natural_key
from trinity_es.projections.why.system_state import Followed
from trinity_es.safe_text import clock, devices, error_line, event_line, name_of, place_of, plain, sparkline

__all__ = ["RunOverview", "read_overview", "render_overview", "show_live"]

PAUSE_FACTOR = 4
"""Pause after an overview, as a multiple of the time that it took. So drawing takes at most a fifth of a core."""
WINDOW_SECONDS = 30.0
"""Length of the time window in which throughput is measured. It ends now, or with the last event of an idle run."""
_WINDOW_EVENTS = 4000
"""Maximum number of events in the throughput's time window. With more events the window is shortened."""
_OPEN_STATES = ("running", "finalizing", "pending")


@dataclass(slots=True, kw_only=True)
class RunOverview:
    """State of a run at one moment, as `watch` shows it."""

    url: str
    position: int
    """The log's last position."""
    now: float
    """Unix seconds."""
    last_at: float | None
    """Time of the last event; None for an empty log."""
    open_batches: list[BatchRow] = field(default_factory=list)
    ended: list[BatchRow] = field(default_factory=list)
    """The batches that ended last, newest first."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the last train batches, in order."""
    runners: list[RunnerIncarnation] = field(default_factory=list)
    """The newest process of each runner."""
    deaths: dict[str, int] = field(default_factory=dict)
    """Number of processes that died, by runner."""
    hosts: list[HostLife] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    """Number of finished tasks by joined host."""
    tokens_per_second: float = 0.0
    tasks_per_second: float = 0.0
    stalls: list[Recorded] = field(default_factory=list)
    """Stalls of open batches, newest first."""
    last: list[Recorded] = field(default_factory=list)
    """The last notable events, oldest first."""
    waiting: list[str] = field(default_factory=list)
    """Reasons why open batches wait, one line per batch."""

    def as_json(self) -> dict[str, Any]:
        return {
            "log": self.url, "position": self.position, "now": self.now, "last_at": self.last_at,
            "going_on": [asdict(row) for row in self.open_batches], "ended": [asdict(row) for row in self.ended],
            "rewards": self.rewards, "runners": [asdict(life) for life in self.runners], "deaths": self.deaths,
            "hosts": [asdict(life) | {"finished": self.finished.get(life.host, 0)} for life in self.hosts],
            "tokens_per_second": self.tokens_per_second, "tasks_per_second": self.tasks_per_second,
            "stalls": list(map(place_of, self.stalls)), "last": list(map(place_of, self.last)), "waiting": self.waiting,
        }


def read_overview(log: Log, now: float | None = None, followed: Followed | None = None) -> RunOverview:
    """Read the run's current state from its log. Repeated calls should pass the same `followed` (see `Log.why`)."""
    now = time.time() if now is None else now
    head = log.head().position
    newest = log.at(head)
    overview = RunOverview(url=log.url, position=head, now=now, last_at=None if newest is None else newest.recorded_at)
    for state in _OPEN_STATES:
        overview.open_batches += log.batches(state=state, limit=20)
    overview.ended = [row for row in log.batches(sort="ended", descending=True, limit=3) if row.ended_at is not None]
    train_batches = log.batches(batch_type="train", sort="ended", descending=True, limit=60)
    overview.rewards = [row.reward for row in reversed(train_batches) if row.reward is not None]
    last_life_by_runner: dict[str, RunnerIncarnation] = {}
    for life in log.runner_lives():
        last_life_by_runner[life.runner] = life
        overview.deaths[life.runner] = overview.deaths.get(life.runner, 0) + life.died
    overview.runners = sorted(last_life_by_runner.values(), key=lambda life: natural_key(host_of(life.runner)))
    overview.hosts = sorted(last_lives(log.hosts()).values(), key=lambda h: natural_key(h.host))
    overview.finished = log.finished_elsewhere()
    open_ids = {row.batch_id for row in overview.open_batches}
    with contextlib.suppress(LogError):  # the rest of the overview is shown without it
        answers = log.why_open(now, followed=followed)[:8]
        overview.waiting = [str(why).splitlines()[0] for why in answers if why.batch_id in open_ids]
    first = min((row.first_position for row in overview.open_batches), default=head)
    open_streams = {batch_stream(row.batch_id) for row in overview.open_batches}
    stalls = log.read_rare(["StallDetected"], after=first, limit=100, descending=True)
    overview.stalls = list(islice((r for r in stalls if r.stream in open_streams), 5))
    overview.last = list(log.read_rare(NOTABLE, limit=12, descending=True))[::-1]
    _measure_throughput(log, overview)
    return overview


def _measure_throughput(log: Log, overview: RunOverview) -> None:
    """Set the overview's tokens and tasks per second from the events of the last WINDOW_SECONDS."""
    if overview.last_at is None:
        return
    end_at = overview.now if overview.now - overview.last_at < WINDOW_SECONDS else overview.last_at
    earliest = overview.position - _WINDOW_EVENTS
    start = max(log.position_of(end_at - WINDOW_SECONDS) or 0, earliest)
    tokens = tasks = 0
    for recorded in log.events(after=start):
        event = recorded.event
        if isinstance(event, ev.RunsFinished):
            tokens += event.response_tokens
            tasks += isinstance(event, ev.TaskFinished)
    # The window does not begin at its first event, because results that arrive after a pause took that pause.
    first_event = log.at(max(1, start if start == earliest else 1))
    begin_at = end_at if first_event is None else first_event.recorded_at
    seconds = max(1.0, min(WINDOW_SECONDS, end_at - begin_at))
    overview.tokens_per_second = tokens / seconds
    overview.tasks_per_second = tasks / seconds


# --- drawing --------------------------------------------------------------------------------------------------------
def render_overview(overview: RunOverview, height: int | None = None) -> RenderableType:
    """Return the overview as tables and lines. `height` limits the number of lines by leaving out events."""
    parts: list[RenderableType] = [_figures_line(overview), _runners_table(overview)]
    if overview.hosts:
        parts.append(_hosts_table(overview))
    if overview.open_batches or overview.ended:
        parts.append(_batches_table(overview))
    parts += [_one_line(f"  {plain(line, 300)}", "cyan") for line in overview.waiting]
    parts += [_one_line(f"stall  {event_line(stall)}", "bold yellow") for stall in overview.stalls]
    other_lines = 4 + len(overview.runners) + len(overview.open_batches) + len(overview.ended) + len(overview.waiting) \
        + len(overview.stalls) + (len(overview.hosts) + 1 if overview.hosts else 0)
    room = len(overview.last) if height is None else max(2, height - other_lines - 2)
    parts.append(Text("last events", style="bold"))
    parts += [_one_line(event_line(recorded)) for recorded in overview.last[-room:]]
    return Group(*parts)


def _one_line(text: str, style: str = "") -> Text:
    """Return a text that ends with … at the terminal's edge."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _figures_line(overview: RunOverview) -> Text:
    if overview.last_at is None:
        return Text(f"{plain(overview.url)}: no event yet", style="bold")
    silence = overview.now - overview.last_at
    last = f"last event {silence:.0f} s ago" if silence < 3600 else f"last event {clock(overview.last_at, date=True)}"
    reward = f"   reward {overview.rewards[-1]:z.3f} {sparkline(overview.rewards, 40)}" if overview.rewards else ""
    return _one_line(
        f"position {overview.position:,}   {last}   {overview.tokens_per_second:,.0f} tokens/s   "
        f"{overview.tasks_per_second:.1f} tasks/s{reward}   {plain(overview.url)}", "bold")


def _runners_table(overview: RunOverview) -> Table:
    table = columns("runner", "state", "weights", "deaths", "since")
    for life in overview.runners:
        since = life.ended_at or life.ready_at or life.started_at
        state = "loading" if life.how == "running" and life.ready_at is None else life.how
        table.add_row(
            Text(plain(f"{life.runner} #{life.incarnation}", 40)), state_text(state), str(life.model_version),
            counted_text(overview.deaths.get(life.runner, 0)), when(since),
        )
    return table


def _hosts_table(overview: RunOverview) -> Table:
    table = columns("host", "state", "since", "runners ready", "tasks", "devices", "reason", right=("tasks",))
    for host in overview.hosts:
        running = [life for life in overview.runners if host_of(life.runner) == host.host and life.how == "running"]
        ready_count = sum(life.ready_at is not None for life in running)
        table.add_row(
            Text(plain(f"{host.host} #{host.epoch}", 40)), state_text(host.state), clock(host.since, date=True),
            f"{ready_count} of {len(running)}" if host.is_present else "", f"{overview.finished.get(host.host, 0):,}",
            devices(host.places), Text(error_line(host.reason, 80)),
        )
    return table


def _batches_table(overview: RunOverview) -> Table:
    table = columns("batch", "type", "state", "settled", "failed attempts", "reward", "tokens", "weights", "seconds")
    for row in [*overview.open_batches, *overview.ended]:
        end = row.ended_at if row.ended_at is not None else max(overview.last_at or 0.0, row.submitted_at)
        table.add_row(
            Text(plain(name_of(row.batch_id), 40)), row.batch_type, state_text(row.state),
            f"{row.finished + row.failed}/{row.tasks}", str(row.failed_attempts),
            reward_text(row), f"{row.response_tokens:,}",
            "" if row.model_version is None else str(row.model_version), f"{end - row.submitted_at:.1f}",
        )
    return table


def show_live(log: Log, *, once: bool = False, interval: float = 1.0) -> None:
    """Draw the overview every `interval` seconds until q or Ctrl-C; in a pipe, print it after new events.

    With `once`, print one overview.
    """
    out = console()
    if not out.is_terminal:
        out.width = 180  # lines are cut in a pipe too, as users read them there
    if once:
        out.print(render_overview(read_overview(log)))
        return
    if not out.is_terminal:
        _print_news(log, out, interval)
        return
    with contextlib.suppress(KeyboardInterrupt), _quit_key() as wait_for_quit, \
            Live(console=out, screen=True, auto_refresh=False) as live:
        for overview, outage in _overviews(log, interval, wait_for_quit):
            view = "" if overview is None else render_overview(overview, out.height - bool(outage))
            live.update(Group(Text(outage, style="red"), view) if outage else view, refresh=True)


def _overviews(
    log: Log, interval: float, wait_for_quit: Callable[[float], bool]
) -> Iterator[tuple[RunOverview | None, str]]:
    """Yield (newest overview, ""), until `wait_for_quit` returns True.

    While the database or its file is unavailable, yield (last overview, reason).
    """
    overview, followed = None, Followed()
    while True:
        begun_at, outage = time.monotonic(), ""
        try:
            overview = read_overview(log, followed=followed)
        except LogUnavailable as e:
            if not (e.details.get("passing") or e.details.get("missing")):
                raise
            outage = plain(f"waiting for the log: {e.message}")
        yield overview, outage
        if wait_for_quit(max(interval, PAUSE_FACTOR * (time.monotonic() - begun_at))):
            return


def _print_news(log: Log, out: Console, interval: float) -> None:
    """Until Ctrl-C, print an overview after new events, and a line when the log becomes unavailable or is back."""
    position, last_outage = -1, ""
    with contextlib.suppress(KeyboardInterrupt):
        for overview, outage in _overviews(log, interval, _wait):
            if outage != last_outage:
                out.print(Text(outage or "the log is back"))
                last_outage = outage
            if overview is not None and overview.position != position:
                position = overview.position
                out.print(render_overview(overview))
                out.print()
            out.file.flush()


def _wait(seconds: float) -> bool:
    """Sleep and return False, because without a terminal no key can end the view."""
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _quit_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for a number of seconds and returns True if q is pressed meanwhile."""
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios
    import tty

    old_settings = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def wait_for_quit(seconds: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and sys.stdin.read(1) in ("q", "Q", "\x04", "")

    try:
        yield wait_for_quit
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, old_settings)
