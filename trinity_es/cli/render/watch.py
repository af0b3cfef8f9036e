"""The live picture of `watch`, drawn from the log alone.

A picture costs the same on a long log as on a short one. Open batches, runners and the last rare events come from read
models and indices, throughput from the events of the last seconds. What an open batch waits for is folded from its
events once, then from its new events.
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
from trinity_es.projections.reading.log_reader import NOTABLE, Log
from trinity_es.projections.tables.batch_queries import BatchRow
from trinity_es.projections.tables.runner_history import RunnerIncarnation, natural
from trinity_es.projections.why.system_state import Followed
from trinity_es.safe_text import clock, devices, error_line, event_line, name_of, place_of, plain, sparkline

__all__ = ["Picture", "look", "picture_view", "show_live"]

PAUSE_FACTOR = 4
"""Pause before the next picture, as a multiple of the time that one took: drawing takes a fifth of a core at most."""
WINDOW_SECONDS = 30.0
"""Time over which throughput is measured, up to now, or to the last event of a run that stands still."""
_WINDOW_EVENTS = 4000
"""Maximum number of events read for it; the window is shorter if it holds more."""
_OPEN_STATES = ("running", "finalizing", "pending")


@dataclass(slots=True, kw_only=True)
class Picture:
    """What `watch` shows of a run at one moment."""

    url: str
    position: int
    """The log's last position."""
    now: float
    """Unix seconds."""
    last_at: float | None
    """When the last event was recorded; None in an empty log."""
    going_on: list[BatchRow] = field(default_factory=list)
    ended: list[BatchRow] = field(default_factory=list)
    """The last batches that ended, newest first."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the last train batches, in order."""
    runners: list[RunnerIncarnation] = field(default_factory=list)
    """The last life of each runner."""
    deaths: dict[str, int] = field(default_factory=dict)
    """Number of deaths by runner."""
    hosts: list[HostLife] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    """Number of tasks finished by host, without the head."""
    tokens_per_second: float = 0.0
    tasks_per_second: float = 0.0
    stalls: list[Recorded] = field(default_factory=list)
    """Stalls of open batches, newest first."""
    last: list[Recorded] = field(default_factory=list)
    """The last notable events, in order."""
    waiting: list[str] = field(default_factory=list)
    """Reasons why open batches wait, a line each."""

    def as_json(self) -> dict[str, Any]:
        return {
            "log": self.url, "position": self.position, "now": self.now, "last_at": self.last_at,
            "going_on": [asdict(row) for row in self.going_on], "ended": [asdict(row) for row in self.ended],
            "rewards": self.rewards, "runners": [asdict(life) for life in self.runners], "deaths": self.deaths,
            "hosts": [asdict(life) | {"finished": self.finished.get(life.host, 0)} for life in self.hosts],
            "tokens_per_second": self.tokens_per_second, "tasks_per_second": self.tasks_per_second,
            "stalls": list(map(place_of, self.stalls)), "last": list(map(place_of, self.last)), "waiting": self.waiting,
        }


def look(log: Log, now: float | None = None, event_count: int = 12, followed: Followed | None = None) -> Picture:
    """Return a picture of the run as it is now; repeated calls should pass the same `followed` (see `Log.why`)."""
    now = time.time() if now is None else now
    head = log.head().position
    newest = log.at(head)
    picture = Picture(url=log.url, position=head, now=now, last_at=None if newest is None else newest.recorded_at)
    for state in _OPEN_STATES:
        picture.going_on += log.batches(state=state, limit=20)
    picture.ended = [row for row in log.batches(sort="ended", descending=True, limit=3) if row.ended_at is not None]
    train_batches = log.batches(batch_type="train", sort="ended", descending=True, limit=60)
    picture.rewards = [row.reward for row in reversed(train_batches) if row.reward is not None]
    last_life_by_runner: dict[str, RunnerIncarnation] = {}
    for life in log.runner_lives():
        last_life_by_runner[life.runner] = life
        picture.deaths[life.runner] = picture.deaths.get(life.runner, 0) + life.died
    picture.runners = sorted(last_life_by_runner.values(), key=lambda life: natural(host_of(life.runner)))
    picture.hosts = sorted(last_lives(log.hosts()).values(), key=lambda h: natural(h.host))
    picture.finished = log.finished_elsewhere()
    open_ids = {row.batch_id for row in picture.going_on}
    with contextlib.suppress(LogError):  # the rest of the picture is shown without it
        answers = log.why_open(now, followed=followed)[:8]
        picture.waiting = [str(why).splitlines()[0] for why in answers if why.batch_id in open_ids]
    first = min((row.first_position for row in picture.going_on), default=head)
    open_streams = {batch_stream(row.batch_id) for row in picture.going_on}
    stalls = log.rare(["StallDetected"], after=first, limit=100, descending=True)
    picture.stalls = list(islice((r for r in stalls if r.stream in open_streams), 5))
    picture.last = list(log.rare(NOTABLE, limit=event_count, descending=True))[::-1]
    _measure_throughput(log, picture)
    return picture


def _measure_throughput(log: Log, picture: Picture) -> None:
    """Set the picture's tokens and tasks per second from the events of the last WINDOW_SECONDS."""
    if picture.last_at is None:
        return
    end_at = picture.now if picture.now - picture.last_at < WINDOW_SECONDS else picture.last_at
    earliest = picture.position - _WINDOW_EVENTS
    start = max(log.position_of(end_at - WINDOW_SECONDS) or 0, earliest)
    tokens = tasks = 0
    for recorded in log.events(after=start):
        event = recorded.event
        if isinstance(event, ev.RunsFinished):
            tokens += event.response_tokens
            tasks += isinstance(event, ev.TaskFinished)
    # The time does not start at the window's first event: results that arrive together after a pause took that pause.
    first_event = log.at(max(1, start if start == earliest else 1))
    begin_at = end_at if first_event is None else first_event.recorded_at
    seconds = max(1.0, min(WINDOW_SECONDS, end_at - begin_at))
    picture.tokens_per_second = tokens / seconds
    picture.tasks_per_second = tasks / seconds


# --- drawing --------------------------------------------------------------------------------------------------------
def picture_view(picture: Picture, height: int | None = None) -> RenderableType:
    """Return the picture for a terminal; `height` limits its lines, at the cost of the last events."""
    parts: list[RenderableType] = [_head(picture), _runners_table(picture)]
    if picture.hosts:
        parts.append(_hosts_table(picture))
    if picture.going_on or picture.ended:
        parts.append(_batches_table(picture))
    for line in picture.waiting:
        parts.append(_one_line(Text(f"  {plain(line, 300)}", style="cyan")))
    for stall in picture.stalls:
        parts.append(_one_line(Text(f"stall  {event_line(stall)}", style="bold yellow")))
    other_lines = 4 + len(picture.runners) + len(picture.going_on) + len(picture.ended) + len(picture.waiting) \
        + len(picture.stalls) + (len(picture.hosts) + 1 if picture.hosts else 0)
    room = len(picture.last) if height is None else max(2, height - other_lines - 2)
    parts.append(Text("last events", style="bold"))
    parts += [_one_line(Text(event_line(recorded))) for recorded in picture.last[-room:]]
    return Group(*parts)


def _one_line(line: Text) -> Text:
    """Make a text end with … at the terminal's edge, and return it."""
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _head(picture: Picture) -> Text:
    """Return the line of figures at the top."""
    if picture.last_at is None:
        return Text(f"{plain(picture.url)}: no event yet", style="bold")
    silence = picture.now - picture.last_at
    last = f"last event {silence:.0f} s ago" if silence < 3600 else f"last event {clock(picture.last_at, date=True)}"
    reward = f"   reward {picture.rewards[-1]:z.3f} {sparkline(picture.rewards, 40)}" if picture.rewards else ""
    return _one_line(Text(
        f"position {picture.position:,}   {last}   {picture.tokens_per_second:,.0f} tokens/s   "
        f"{picture.tasks_per_second:.1f} tasks/s{reward}   {plain(picture.url)}", style="bold",
    ))


def _runners_table(picture: Picture) -> Table:
    table = columns("runner", "state", "weights", "deaths", "since")
    for life in picture.runners:
        since = life.ended_at or life.ready_at or life.started_at
        state = "loading" if life.how == "running" and life.ready_at is None else life.how
        deaths = picture.deaths.get(life.runner, 0)
        table.add_row(
            Text(plain(f"{life.runner} #{life.incarnation}", 40)), state_text(state), str(life.model_version),
            counted_text(deaths), when(since),
        )
    return table


def _hosts_table(picture: Picture) -> Table:
    table = columns("host", "state", "since", "runners ready", "tasks", "devices", "reason", right=("tasks",))
    for host in picture.hosts:
        running = [life for life in picture.runners if host_of(life.runner) == host.host and life.how == "running"]
        ready_count = sum(life.ready_at is not None for life in running)
        table.add_row(
            Text(plain(f"{host.host} #{host.epoch}", 40)), state_text(host.state), clock(host.since, date=True),
            f"{ready_count} of {len(running)}" if host.there else "", f"{picture.finished.get(host.host, 0):,}",
            devices(host.places), Text(error_line(host.reason, 80)),
        )
    return table


def _batches_table(picture: Picture) -> Table:
    table = columns("batch", "type", "state", "settled", "failed attempts", "reward", "tokens", "weights", "seconds")
    for row in [*picture.going_on, *picture.ended]:
        end = row.ended_at if row.ended_at is not None else max(picture.last_at or 0.0, row.submitted_at)
        table.add_row(
            Text(plain(name_of(row.batch_id), 40)), row.batch_type, state_text(row.state),
            f"{row.finished + row.failed}/{row.tasks}", str(row.failed_attempts),
            reward_text(row), f"{row.response_tokens:,}",
            "" if row.model_version is None else str(row.model_version), f"{end - row.submitted_at:.1f}",
        )
    return table


def show_live(log: Log, *, once: bool = False, interval: float = 1.0) -> None:
    """Draw every `interval` seconds until q or Ctrl-C; in a pipe print a picture whenever there are new events.

    With `once`, print one picture.
    """
    out = console()
    if not out.is_terminal:
        out.width = 180  # people read it in a pipe too, so its lines are cut
    if once:
        out.print(picture_view(look(log)))
        return
    if not out.is_terminal:
        _print_news(log, out, interval)
        return
    with contextlib.suppress(KeyboardInterrupt), _quit_key() as wait_for_quit, \
            Live(console=out, screen=True, auto_refresh=False) as live:
        for picture, outage in _pictures(log, interval, wait_for_quit):
            view = "" if picture is None else picture_view(picture, out.height - bool(outage))
            live.update(Group(Text(outage, style="red"), view) if outage else view, refresh=True)


def _pictures(
    log: Log, interval: float, wait_for_quit: Callable[[float], bool]
) -> Iterator[tuple[Picture | None, str]]:
    """Yield the newest picture and an empty text, until `wait_for_quit` returns True.

    While the database or its file is unavailable, yield the last picture and the reason.
    """
    picture, followed = None, Followed()
    while True:
        begun_at, outage = time.monotonic(), ""
        try:
            picture = look(log, followed=followed)
        except LogUnavailable as e:
            if not (e.details.get("passing") or e.details.get("missing")):
                raise
            outage = plain(f"waiting for the log: {e.message}")
        yield picture, outage
        if wait_for_quit(max(interval, PAUSE_FACTOR * (time.monotonic() - begun_at))):
            return


def _print_news(log: Log, out: Console, interval: float) -> None:
    """Print a picture after new events, and a line when the log becomes unavailable or is back; until Ctrl-C."""
    position, last_outage = -1, ""
    with contextlib.suppress(KeyboardInterrupt):
        for picture, outage in _pictures(log, interval, _wait):
            if outage != last_outage:
                out.print(Text(outage or "the log is back"))
                last_outage = outage
            if picture is not None and picture.position != position:
                position = picture.position
                out.print(picture_view(picture))
                out.print()
            out.file.flush()


def _wait(seconds: float) -> bool:
    """Wait, and return False: without a terminal no key ends the view."""
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _quit_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for some seconds and returns True if q is pressed meanwhile."""
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
