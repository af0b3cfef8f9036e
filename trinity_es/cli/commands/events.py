"""The commands `events` and `watch`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated

import orjson
import typer

from trinity_es import safe_text
from trinity_es.cli import common
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.log import Recorded
from trinity_es.events.store.records.event_queries import RARE
from trinity_es.events.values import batch_stream
from trinity_es.events.vocabulary import EVENTS
from trinity_es.projections.reading.log_reader import Log

__all__ = ["events", "watch"]

_TAIL_EVENTS = 5000
"""Number of events at the log's end that `--last` searches first for events of a frequent type."""


def events(
    batch: Annotated[str | None, typer.Argument(
        metavar="[BATCH]", help="Only events of this batch.", show_default=False)] = None,
    after: Annotated[int, typer.Option(
        "--after", min=0, max=common.MAX_INTEGER, help="Only events after this position.")] = 0,
    since: Annotated[str | None, typer.Option(
        "--since", metavar="TIME", help="Only events recorded since then.")] = None,
    limit: Annotated[int | None, typer.Option(
        "--limit", "-n", min=1, max=common.MAX_INTEGER, help="Print at most N events.")] = None,
    last: Annotated[int | None, typer.Option(
        "--last", min=1, max=common.MAX_INTEGER,
        help="Begin with the last N events; --follow goes on from there.")] = None,
    types: Annotated[list[str] | None, typer.Option(
        "--type", metavar="TYPE", help="Only events of this type, as in TaskFinished; repeat.")] = None,
    runner: Annotated[str | None, typer.Option(
        "--runner", metavar="NAME", help="Only events of this runner.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events as they come.")] = False,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Print events, a line each: position, time, stream, type and content. With --json each line is a JSON document.

    \b
    Examples:
      trinity-es events 3
      trinity-es events --type AttemptFailed --type RunnerLost
      trinity-es events --runner runner-1 --last 20
      trinity-es events -f --last 10 --json
    """
    unknown_types = [name for name in types or [] if name not in EVENTS]
    if unknown_types:
        raise typer.BadParameter(f"there is no event type {unknown_types[0]!r}. The types are: "
                                 f"{', '.join(sorted(EVENTS))}", param_hint="--type")
    with common.open_chosen(log, config) as opened:
        stream = None if batch is None else batch_stream(common.find_batch(opened, batch))
        if since is not None:
            at = common.parse_at(since, opened, option="--since")
            if isinstance(at, int):
                raise typer.BadParameter(f"{since} is a position: use --after {since}", param_hint="--since")
            after = max(after, common.position_before(opened, at))
        selection = _Selection(opened, stream, types, runner)
        head = opened.head().position  # before `tail` is read, so that --follow prints events that come meanwhile
        tail = [] if last is None else selection.last(last, after)
        if follow:
            follow_after = after if last is None else max([head, *(r.position for r in tail)])
            selected: Iterator[Recorded] = chain(tail, selection.follow(follow_after))
        else:
            selected = selection.read(after) if last is None else iter(tail)
        has_printed = False
        for recorded in islice(selected, limit):
            has_printed = True
            if as_json:
                common.write_json(safe_text.event_document(recorded).decode())
            else:
                sys.stdout.write(safe_text.event_line(recorded) + "\n")
            if follow:
                sys.stdout.flush()
        if runner is not None and not has_printed:
            common.require_runner(opened, runner, "--runner")


def watch(
    once: Annotated[bool, typer.Option("--once", help="Show the state once, then end.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Time between updates.")] = 1.0,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Show a run live: batches, runners, throughput, stalls, the last events. q or Ctrl-C ends it.

    It reads only the log; for a dead run it shows the last state. In a pipe each new state is printed as text; --json
    prints the state once.

    \b
    Examples:
      trinity-es watch
      trinity-es watch --once --json
      trinity-es watch --log postgresql://me@db/runs --every 5
    """
    from trinity_es.cli.render.watch import read_overview, show_live  # not at the top: `events` does not need rich

    with common.open_chosen(log, config) as opened:
        if as_json:
            common.print_json(read_overview(opened).as_json())
        else:
            show_live(opened, once=once, interval=every)


class _Selection:
    """Selects events of a log by stream, type and runner. For rare types, most of the log is not read."""

    def __init__(self, log: Log, stream: str | None, types: list[str] | None, runner: str | None) -> None:
        self._log = log
        self._stream = stream
        self._types = types
        self._runner = runner
        self._runner_stream = None if runner is None else f"runner/{runner}"
        # The runner's name as it stands in an event's JSON. Events without it need not be decoded.
        self._runner_json = b"" if runner is None else orjson.dumps(runner.encode(errors="replace").decode())[1:-1]
        self._is_rare = stream is None and types is not None and set(types) <= set(RARE)

    def _matches(self, r: Recorded) -> bool:
        if (self._stream is not None and r.stream != self._stream) or (self._types and r.type not in self._types):
            return False
        if self._runner is None or r.stream == self._runner_stream:
            return True
        return self._runner_json in r.data and getattr(r.event, "runner", None) == self._runner

    def read(self, after: int) -> Iterator[Recorded]:
        if self._is_rare:
            return filter(self._matches, self._log.read_rare(self._types, after=after))
        return filter(self._matches, self._log.read(stream=self._stream, types=self._types, after=after))

    def follow(self, after: int) -> Iterator[Recorded]:
        return filter(self._matches, self._log.follow(after, stop=lambda: False, trouble=_OutageNotes()))

    def last(self, count: int, after: int) -> list[Recorded]:
        """Return the last `count` selected events after this position.

        For frequent types, the search begins near the log's end and goes further back until there are enough.
        """
        if self._is_rare:
            newest = filter(self._matches, self._log.read_rare(self._types, after=after, descending=True))
            return list(islice(newest, count))[::-1]
        if self._stream is not None:
            return list(self.read(after))[-count:]
        head, tail_events = self._log.head().position, _TAIL_EVENTS
        while True:
            start = max(after, head - tail_events)
            tail = list(self.read(start))
            if len(tail) >= count or start == after:
                return tail[-count:]
            tail_events *= 4


class _OutageNotes:
    """Callback that prints a note when the database becomes unavailable, and another when it is back."""

    def __init__(self) -> None:
        self._unavailable = False

    def __call__(self, error: LogUnavailable | None) -> None:
        if error is not None and not self._unavailable:
            common.note(f"waiting for the log: {error.message}")
        elif error is None and self._unavailable:
            common.note("the log is back")
        self._unavailable = error is not None
