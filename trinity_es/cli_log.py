"""The commands that read a log: `batches, show, events, replay, verify`, and `rebuild`, which makes its tables again.

They need no actor system, GPU, torch, vllm or thespian, and work beside a live run as on a dead one's file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinity_es.cli_common import (
    ConfigOption,
    JsonOption,
    LogOption,
    choose_log,
    counter,
    find_batch,
    open_chosen,
    parse_at,
    print_json,
)

if TYPE_CHECKING:
    from events.log import Recorded
    from projections.audit import Log

__all__ = ["batches", "events", "rebuild", "replay", "show", "verify"]

BatchArgument = Annotated[
    str, typer.Argument(metavar="BATCH", help="Id of the batch, as `trinity-es batches` shows it: 3, or 0/letters.")
]


def batches(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List every batch: its state, what came of it, what it cost.

    \b
    Example:
      trinity-es batches --log runs/letters/first/log.sqlite
    """
    with open_chosen(log, config) as opened:
        rows = opened.batches()
    if as_json:
        from dataclasses import asdict

        print_json([asdict(row) | {"seconds": row.ended_at and row.ended_at - row.submitted_at} for row in rows])
        return
    from trinity_es import views

    views.console().print(views.batches_table(rows))


def show(
    batch: BatchArgument,
    every: Annotated[bool, typer.Option("--all", help="Every task, not the first 40.")] = False,
    log: LogOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one batch: its state and result, then each task from dispatch to its end.

    \b
    Example:
      trinity-es show 3 --all
    """
    from projections import timeline
    from trinity_es import views

    with open_chosen(log, config) as opened:
        batch_id = find_batch(opened, batch)
        story = timeline.tell(opened.events(batch_id))
    if as_json:
        print_json(timeline.as_json(story))
        return
    views.print_story(views.console(), story, limit=None if every else 40)


def events(
    batch: Annotated[
        str | None, typer.Argument(metavar="[BATCH]", help="Only this batch's.", show_default=False)
    ] = None,
    after: Annotated[int, typer.Option("--after", min=0, help="Only those after this position.")] = 0,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many.")] = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only this type, as in TaskFinished; repeat.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones as they come.")] = False,
    log: LogOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print events, a line each: position, time, stream, type, what it says. With --json a document a line.

    \b
    Examples:
      trinity-es events 3
      trinity-es events --type AttemptFailed --type RunnerLost
      trinity-es events -f --after 1200 --json
    """
    import orjson

    from events.vocabulary import EVENTS
    from trinity_es import views

    unknown = [name for name in types or [] if name not in EVENTS]
    if unknown:
        raise typer.BadParameter(f"no event is called {unknown[0]!r}: there are {', '.join(sorted(EVENTS))}",
                                 param_hint="--type")
    with open_chosen(log, config) as opened:
        printed = 0
        for recorded in _chosen_events(opened, batch, after, follow):
            if types and recorded.type not in types:
                continue
            if as_json:
                line = orjson.dumps({
                    "position": recorded.position, "recorded_at": recorded.recorded_at, "stream": recorded.stream,
                    "version": recorded.version, "type": recorded.type, "schema_version": recorded.schema_version,
                    "data": orjson.Fragment(recorded.data), "metadata": recorded.metadata,
                }).decode()
            else:
                line = views.event_line(recorded)
            sys.stdout.write(line + "\n")
            if follow:
                sys.stdout.flush()
            printed += 1
            if printed == limit:
                return


def _chosen_events(log: Log, batch: str | None, after: int, follow: bool) -> Iterator[Recorded]:
    if batch is None:
        return log.follow(after, stop=lambda: False) if follow else log.events(after=after)
    batch_id = find_batch(log, batch)
    if not follow:
        return log.events(batch_id, after)
    from events.values import batch_stream

    stream = batch_stream(batch_id)
    return (r for r in log.follow(after, stop=lambda: False) if r.stream == stream)


def replay(
    batch: BatchArgument,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="POSITION_OR_TIME", help="As it was then: a position of the log, or an ISO time."),
    ] = None,
    log: LogOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a batch's state from its events, now or at any moment, and check its final result.

    Exits 1 when the result that the trainer was told differs from the one computed again from the log, to the last bit.

    \b
    Examples:
      trinity-es replay 3
      trinity-es replay 3 --at 120
      trinity-es replay 3 --at 2026-03-01T12:30:00
    """
    from projections.audit import canonical
    from trinity_es import views

    moment = parse_at(at)
    with open_chosen(log, config) as opened:
        batch_id = find_batch(opened, batch)
        head = opened.head().position
        if isinstance(moment, int) and moment > head:
            raise typer.BadParameter(f"{moment} is after the log's last position, {head}", param_hint="--at")
        state = opened.replay(batch_id, moment)
        stored, again = opened.check_result(batch_id)
    equal = None if stored is None else canonical(stored) == canonical(again)
    if as_json:
        print_json({
            "state": views.state_json(state), "at": at, "result_equal": equal, "stored_result": stored,
            "recomputed_result": again,
        })
    else:
        views.print_state(views.console(), state)
        if equal is None:
            print("the batch has not ended: there is no result to compare")
        elif equal:
            print("its final result, as stored, equals the one computed from the log, bit for bit")
        else:
            print("ITS FINAL RESULT, AS STORED, DIFFERS from the one computed from the log:")
            for line in views.differences(stored, again):
                print(f"  {line}")
    if equal is False:
        raise typer.Exit(1)


def verify(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check a whole log: order, hash chain, results computed again, payloads whole. Exits 1 when something is wrong.

    \b
    Example:
      trinity-es verify && echo sound
    """
    import time

    started = time.monotonic()
    with open_chosen(log, config) as opened:
        position, count, url = opened.head().position, len(opened.batches()), opened.url
        problems = opened.verify(counter("checked"))
    seconds = time.monotonic() - started
    if as_json:
        print_json({"log": url, "events": position, "batches": count, "problems": problems, "seconds": seconds})
    else:
        from trinity_es.views import plain

        for problem in problems:
            print(plain(problem))
        verdict = f"{len(problems)} problems" if problems else "sound"
        print(f"{verdict}: {position:,} events and {count} batches checked in {seconds:.1f} s "
              f"({position / max(seconds, 1e-6):,.0f} events/s)")
    if problems:
        raise typer.Exit(1)


def rebuild(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Make the tables of batches and runners again from the log. A live run waits meanwhile.

    \b
    Example:
      trinity-es rebuild --log runs/letters/first/log.sqlite
    """
    import time

    from events.log import EventLog
    from projections import readmodels

    url = choose_log(log, config)
    started = time.monotonic()
    with EventLog.open(url, projectors=readmodels.projectors()) as opened:
        opened.rebuild(counter("read"))
        position, shown = opened.head().position, opened.url
    answer: dict[str, Any] = {"log": shown, "events": position, "seconds": time.monotonic() - started}
    if as_json:
        print_json(answer)
    else:
        rate = position / max(answer["seconds"], 1e-6)
        print(f"the tables were made again from {position:,} events in {answer['seconds']:.1f} s "
              f"({rate:,.0f} events/s)")
