"""`events`: what happened, an event a line, also as it comes; `watch`: the run at a glance, as it goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated

import orjson
import typer

from trinity_es import text
from trinity_es.cli import common
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.log import Recorded
from trinity_es.events.store.records.type_index import RARE
from trinity_es.events.values import batch_stream
from trinity_es.events.vocabulary import EVENTS
from trinity_es.projections.reading.log_reader import Log

__all__ = ["events", "watch"]

_TAIL = 5000
"""Events that are looked at from the end for the last of a bulk type."""


def events(
    batch: Annotated[str | None, typer.Argument(
        metavar="[BATCH]", help="Only this batch's.", show_default=False)] = None,
    after: Annotated[int, typer.Option("--after", min=0, max=common.MOST, help="Only those after this position.")] = 0,
    since: Annotated[str | None, typer.Option(
        "--since", metavar="TIME", help="Only those recorded since then.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, max=common.MOST, help="At most so many.")] = None,
    last: Annotated[int | None, typer.Option(
        "--last", min=1, max=common.MOST, help="The last so many, then on with --follow.")] = None,
    types: Annotated[list[str] | None, typer.Option(
        "--type", metavar="TYPE", help="Only this type, as in TaskFinished; repeat.")] = None,
    runner: Annotated[str | None, typer.Option(
        "--runner", metavar="NAME", help="Only what this runner did or what befell it.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones as they come.")] = False,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Print events, a line each: position, time, stream, type, what it says. With --json a document a line.

    \b
    Examples:
      trinity-es events 3
      trinity-es events --type AttemptFailed --type RunnerLost
      trinity-es events --runner runner-1 --last 20
      trinity-es events -f --last 10 --json
    """
    unknown = [name for name in types or [] if name not in EVENTS]
    if unknown:
        raise typer.BadParameter(f"no event is called {unknown[0]!r}: there are {', '.join(sorted(EVENTS))}",
                                 param_hint="--type")
    with common.open_chosen(log, config) as opened:
        stream = None
        if batch is not None:
            stream = batch_stream(common.find_batch(opened, batch))
        if since is not None:
            after = max(after, _before(opened, since))
        chosen = _Chosen(opened, stream, types, runner)
        head = opened.head().position  # before the tail is read: what comes between the two is followed
        tail = [] if last is None else chosen.last(last, after)
        at = after if last is None else max([head, *(r.position for r in tail)])
        if follow:
            found: Iterator[Recorded] = chain(tail, chosen.follow(at))
        else:
            found = chain(tail, iter(()) if last is not None else chosen.read(after))
        told = False
        for recorded in islice(found, limit):
            told = True
            if as_json:
                common.write_json(text.event_document(recorded).decode())
            else:
                sys.stdout.write(text.event_line(recorded) + "\n")
            if follow:
                sys.stdout.flush()
        if runner is not None and not told:
            common.require_runner(opened, runner, "--runner")


def watch(
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="How often to look.")] = 1.0,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Show a run at a glance, as it goes: batches, runners, throughput, stalls, the last events. q or Ctrl-C ends it.

    Reads the log beside its writer, so it shows a dead run's last moment too. In a pipe each picture that is new is
    printed as text; --json is one picture.

    \b
    Examples:
      trinity-es watch
      trinity-es watch --once --json
      trinity-es watch --log postgresql://me@db/runs --every 5
    """
    from trinity_es.cli.render.watch import look, show_live  # here: `events` needs no rich

    with common.open_chosen(log, config) as opened:
        if as_json:
            common.print_json(look(opened).as_json())
        else:
            show_live(opened, once=once, every=every)


def _before(log: Log, text: str) -> int:
    at = common.parse_at(text, log, option="--since")
    if isinstance(at, int):
        raise typer.BadParameter(f"{text} is a position: say --after {text}", param_hint="--since")
    position = log.position_of(at) or 0
    # What was recorded at that very moment is since then.
    while position and at is not None and (r := log.at(position)) is not None and r.recorded_at == at.timestamp():
        position -= 1
    return position


class _Chosen:
    """Events by stream, type and runner; rare types are found without reading the bulk of the log."""

    def __init__(self, log: Log, stream: str | None, types: list[str] | None, runner: str | None) -> None:
        self._log, self._stream, self._types, self._runner = log, stream, types, runner
        self._of_runner = None if runner is None else f"runner/{runner}"
        # As it stands in an event: what does not hold it is not worth decoding.
        self._mark = b"" if runner is None else orjson.dumps(runner.encode(errors="replace").decode())[1:-1]
        self._rare = stream is None and types is not None and set(types) <= set(RARE)

    def _wanted(self, r: Recorded) -> bool:
        if (self._stream is not None and r.stream != self._stream) or (self._types and r.type not in self._types):
            return False
        if self._runner is None or r.stream == self._of_runner:
            return True
        return self._mark in r.data and getattr(r.event, "runner", None) == self._runner

    def read(self, after: int) -> Iterator[Recorded]:
        """Yield the events after this position, in order."""
        if self._rare:
            return filter(self._wanted, self._log.rare(self._types, after=after))
        return filter(self._wanted, self._log.read(stream=self._stream, types=self._types, after=after))

    def follow(self, after: int) -> Iterator[Recorded]:
        return filter(self._wanted, self._log.follow(after, stop=lambda: False, trouble=_Away()))

    def last(self, count: int, after: int) -> list[Recorded]:
        """Return the last `count` events.

        Those of a bulk type are sought among the last events of the log, further back where there are few.
        """
        if self._rare:
            newest = filter(self._wanted, self._log.rare(self._types, after=after, descending=True))
            return list(islice(newest, count))[::-1]
        if self._stream is not None:
            return list(self.read(after))[-count:]
        head, span = self._log.head().position, _TAIL
        while True:
            start = max(after, head - span)
            found = list(self.read(start))
            if len(found) >= count or start == after:
                return found[-count:]
            span *= 4


class _Away:
    """Says on stderr that the database is away, and that it is back; once each."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, error: LogUnavailable | None) -> None:
        if error is not None and not self._said:
            common.note(f"waiting for the log: {error.message}")
        elif error is None and self._said:
            common.note("the log is back")
        self._said = error is not None
