"""The answer of `why`: what a batch waits for, in values and in words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trinity_es.events.store.database.urls import file_of
from trinity_es.events.values import BatchId, BatchLifecycleState, local_time

__all__ = [
    "ADD_SERVER", "OF_TRAINER", "Waiting", "Why", "another_life", "counted", "go_on", "mend", "mend_weights", "mended",
    "resume_command", "span", "start_server", "unread",
]

SHOWN = 5
"""Things told as text; the JSON has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    cause: str
    """Of a unit: `running`, `slow`, `hung`, `unstored` (its runner can't store what it finished), `interrupted` (when
    the system ended), `away` (its host is). Of a host: `draining`, `host_lost`. Of a runner that takes no units:
    `loading`, `server` (of others, not there), `weights`, `failed`, `quarantined`, `lost`, `ended`. Of one that could
    not load the current weights: `refused`. Of units without
    a runner: `no_runner`, `no_server`, `places`, `elsewhere`, `dispatch`, `paused`. Of the batch: `finalizing`,
    `grace`, `finalize`, `finalize_failed`, `training`, `nothing`. Of the system: `unwritten` (the log can't be),
    `no_system`, `ending` (what is left of one), `restarting`, `no_answer`, `fenced`, `no_coordinator`, `unseen` (on
    another host). Of the log: `no_database`."""
    what: str
    """The unit, the runner or the step, in words."""
    text: str
    """One sentence, without a full stop."""
    task: int | None = None
    attempt: int | None = None
    charged_attempt: int | None = None
    """Its number among those that count against `max_attempts`: one that ended with its runner does not."""
    max_attempts: int | None = None
    runner: str | None = None
    incarnation: int | None = None
    since: float | None = None
    """Unix seconds."""
    seen: float | None = None
    """The last sign of life of its runner."""
    limit: float | None = None
    """Seconds that the attempt may take."""
    host: str = ""
    """The host that it is about, or that its runner is on; empty: the head's own."""
    server: str = ""
    """URL of the server of others that is its runner's engine, where the system told."""
    resume: str = ""
    """Of a system that is gone, and of a step that failed whole: the command that goes on with the `trinity-es run`
    that its batches are of."""
    system_up: bool = False
    """Of a step that failed whole: its system runs, and its runners have loaded what failed."""
    person: bool = False
    """It does not pass without a person."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The cause: the same while only time goes by."""
        cause = "running" if self.cause == "slow" else self.cause
        return (cause, self.task, self.attempt, self.runner, self.incarnation)

    @property
    def way_out(self) -> str:
        """The thing that a person can do about it; empty: none."""
        if self.cause == "quarantined" or (self.cause == "failed" and self.server):
            return mend(self.runner or "NAME", self.server) + "; nothing of the batch is lost"
        if self.cause in ("no_system", "ending"):
            return go_on(self.resume)
        if self.cause == "server":
            return start_server(self.server)
        if self.cause == "refused":
            return mend_weights(self.server)
        if self.cause == "all_failed":
            loaded = ", end runners that have it loaded (`trinity-es restart-runner`)" if self.system_up else ""
            anew = (f"{mended(self.resume)} generates the step anew" if self.resume else
                    "start its trainer again: TRL's has the batch generated anew")
            return f"mend what failed{loaded}, and {anew}"
        return _WAYS.get(self.cause, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What a batch waits for, the most important first. `str()` is the text for a person."""

    batch_id: BatchId
    batch_type: str
    state: str
    tasks: int
    settled: int
    running_units: int
    pending_units: int
    failed_attempts: int
    moved_at: float
    """Unix seconds of its last event."""
    now: float
    stalled: bool
    """Nothing will come of it without a person, or nothing has come for longer than it should."""
    waiting: tuple[Waiting, ...]

    @property
    def cause(self) -> str:
        return self.waiting[0].cause

    @property
    def of_trainer(self) -> bool:
        """It is the trainer's turn, or nobody's: no stall is made of it."""
        return self.cause in OF_TRAINER

    @property
    def sentence(self) -> str:
        """The first thing that it waits for."""
        return self.waiting[0].text

    @property
    def line(self) -> str:
        return f"batch {self.batch_id} is {self.state}, {self.settled} of {self.tasks} tasks settled; {self.sentence}"

    def sentences(self) -> list[str]:
        """Return a line on the batch, a line on each thing that it waits for, and the way out where there is one to
        take.
        """
        ended = self.state in (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)
        units = f", {counted(self.running_units, 'unit')} with runners, {self.pending_units} without"
        moved = (
            f"; {'its last event was at' if ended else 'nothing has moved since'} {local_time(self.moved_at)} "
            f"({span(self.now - self.moved_at)} ago)"
        )
        out = [
            f"batch {self.batch_id} ({self.batch_type}) is {self.state}: {self.settled} of "
            f"{counted(self.tasks, 'task')} settled{'' if ended else units}"
            f"{'' if self.cause == 'no_database' else moved}"
        ]
        out += [f"  {w.text}" for w in self.waiting[:SHOWN]]
        if len(self.waiting) > SHOWN:
            out.append(f"  and {len(self.waiting) - SHOWN} more like these")
        ways = list(dict.fromkeys(w.way_out for w in self.waiting if w.way_out))
        out += [f"what to do: {way}" for way in ways[:SHOWN]]
        return out

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def as_dict(self) -> dict[str, Any]:
        out = asdict(self) | {"cause": self.cause, "line": self.line, "sentences": self.sentences()}
        return out | {"waiting": [asdict(w) for w in self.waiting]}


def mend(runner: str, server: str) -> str:
    """Return what to do about a runner that is not started again by itself. `server`: URL of its engine's, if any."""
    return f"mend what it names, then {another_life(runner, server)}"


def another_life(runner: str, server: str) -> str:
    """Return how a runner gets another life, or its server is taken away. `server`: URL of its engine's, if any."""
    way = f"`trinity-es restart-runner {runner}`"
    return way + (f", or take its server away: `trinity-es scale CONFIG --remove {server}`" if server else "")


def mend_weights(server: str) -> str:
    """Return what to do about a runner that can't load the current weights. `server`: URL of its engine's, if any."""
    way = "mend what it names, or publish a newer version: it tries again by itself"
    return way + (f"; or take its server away: `trinity-es scale CONFIG --remove {server}`" if server else "")


def start_server(url: str) -> str:
    """Return what to do about a server of others that is not there, or can't be used as it is."""
    return f"start or mend the server {url}, or take it away: `trinity-es scale CONFIG --remove {url}`"


def resume_command(store: str) -> str:
    """Return the command that goes on with the `trinity-es run` of a store, by its URL.

    The log is named itself: the config file may be that of another run, where `--set` gave this one its name. Where a
    password is left out of a database's URL, or the log does not say where it lies, the config file is what one has.
    """
    if not store or "***" in store:
        return "trinity-es resume CONFIG"
    if (path := file_of(store)) is not None:
        store = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return f"trinity-es resume {shlex.quote(store)}"


def mended(resume: str) -> str:
    """Return the command that goes on with a run of which something was mended. `resume`: `resume_command`'s."""
    if resume.endswith(" CONFIG"):
        return f"`{resume}`"
    return f"`{resume}` (`trinity-es resume CONFIG` where the config file was mended: a log holds it as it was)"


def go_on(resume: str) -> str:
    """Return how what a dead system left open is gone on with. `resume`: of a `trinity-es run`, its command."""
    way = (f"`{resume}` goes on with the run where it stopped" if resume else
           "`trinity-es up CONFIG` goes on with what is open (start the trainer of your own again)")
    return f"{way}; finished tasks are not run again"


ADD_SERVER = "`trinity-es scale CONFIG --add URL` adds a server"
_WAYS = {
    "no_database": "see to the database, or to the way to it: all goes on by itself when it answers again",
    "no_answer": "`trinity-es status` tells more; `trinity-es down` and `trinity-es up` go on with what is open",
    "unwritten": "do what it says: what was acknowledged is safe, and all goes on by itself after that",
    "unstored": "do what it says: what is finished is kept in the runner, and is stored by itself after that",
    "unseen": "ask on that host: `trinity-es why` there sees its processes",
    "fenced": "stop the system that is not wanted with `trinity-es down` on its own host; the batch is the other one's",
    "failed": "mend what it names, then `trinity-es down` and `trinity-es up`; nothing of the batch is lost",
    "no_server": ADD_SERVER,
    "away": "nothing, where the host comes back in time; else see to its network, or to the machine: `trinity-es "
            "hosts` tells how it is",
    "host_lost": "`trinity-es join` on it brings it back, where it does not come by itself",
    "draining": "nothing, where other hosts work; else `trinity-es join` on another, or start it there again",
    "ended": "`trinity-es down` and `trinity-es up` start runners again",
    "hung": "a silent runner is ended after system.heartbeat_timeout or hang_timeout, and what it had is attempted "
            "again; where that does not come, the workflow blocks: see the runner's text log, or give the batch up "
            "with abort_batch",
    "finalize": "the trainer calls finalize_train_batch or finalize_eval_batch; a scheduler calls get_results",
    "paused": "start a Scheduler on this store, or ask one for its results: it goes on with what waits",
    "finalize_failed": "mend the pipeline (buffer.pipeline), then finalize it again: it has all its experiences",
    "training": "nothing where no trainer takes part; a trainer calls acknowledge(batch_id, step) when it has used it, "
                "TRL's and `trinity-es run` by themselves: one that has ended is started again",
    "loading": "nothing, while the engine loads: its runner's text log in system.log_dir tells how far it is",
}


OF_TRAINER = {"finalize", "finalize_failed", "grace", "paused", "training", "all_failed", "nothing"}
"""Causes that no stall is made of: it is the trainer's turn."""


def unread(live: Mapping[str, Any], error: str, *, now: float) -> list[Why]:
    """Return what the open batches wait for while the log can't be read, as the running system says; `error` where it
    does not say what is wrong.
    """
    said = str(live.get("trouble") or error)
    waiting = (Waiting(cause="no_database", what="the database", text=said, person=True),)
    return [
        Why(
            batch_id=row["batch_id"], batch_type=str(row.get("batch_type", "of some type")), state=row["state"],
            tasks=row["tasks"], settled=row["settled"], running_units=row.get("running_units", 0),
            pending_units=row.get("pending_units", 0), failed_attempts=row.get("failed_attempts", 0), moved_at=now,
            now=now, stalled=True, waiting=waiting,
        )
        for row in live.get("batches", [])
    ]


def span(seconds: float) -> str:
    """Return a length of time as a person says it."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= 2 * size:
            rest = int(seconds % size // below)
            return f"{int(seconds // size)} {name}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.0f} s"


def counted(n: int, name: str) -> str:
    return f"{n} {name}" if n == 1 else f"{n} {name}s"
