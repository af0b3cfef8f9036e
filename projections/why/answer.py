"""Answer of `why` about a batch: everything that the batch waits for, as values and as text for people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trinity_es.events.store.database.urls import file_of
from trinity_es.events.values import BatchId, BatchLifecycleState, local_time
from trinity_es.projections.event_texts import counted

__all__ = [
    "ADD_SERVER", "OF_TRAINER", "Waiting", "Why", "end_of_run", "restart_advice", "resume_advice", "resume_after_fix",
    "resume_command", "span", "weights_advice", "why_without_log",
]

SHOWN = 5
"""Maximum number of lines of each kind in the text. The JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One thing that a batch waits for."""

    cause: str
    """Cause, one of:

    - of a unit on a runner: `running`, `slow`, `hung`, `unstored` (its runner can't store what it finished),
      `interrupted` (the system ended), `away` (the coordinator does not hear from its host)
    - of a host: `draining`, `host_lost`
    - of a runner that gets no units: `loading`, `server` (its external server does not answer), `weights`, `failed`,
      `quarantined`, `lost`, `ended`
    - of a runner that could not load the current weights: `refused`
    - of units without a runner: `no_runner`, `no_server`, `places`, `elsewhere`, `dispatch`, `paused`
    - of the batch: `finalizing`, `grace`, `finalize`, `finalize_failed`, `groups_missing`, `training`, `all_failed`,
      `nothing`
    - of the system: `unwritten` (the log can't be written), `no_system`, `ending`, `restarting`, `no_answer`, `fenced`,
      `no_coordinator`, `unseen` (on another host)
    - of the log: `no_database`
    """
    what: str
    """Subject of the wait, such as a unit, a runner or the trainer."""
    text: str
    """One sentence without a full stop."""
    task: int | None = None
    attempt: int | None = None
    charged_attempt: int | None = None
    """Number of the attempt among those that count towards `max_attempts`. Attempts lost with a runner don't count."""
    max_attempts: int | None = None
    runner: str | None = None
    incarnation: int | None = None
    since: float | None = None
    """Unix seconds."""
    seen: float | None = None
    """Unix seconds of the runner's last sign of life."""
    limit: float | None = None
    """Time limit of the attempt in seconds."""
    host: str = ""
    """Host that the batch waits for, or host of `runner`; empty for the head's own host."""
    server: str = ""
    """URL of the external server that is the runner's engine, if the running system reported it."""
    resume: str = ""
    """Command that resumes the `trinity-es run`, if the system is gone or all runs of a step failed."""
    system_up: bool = False
    """True if all runs of a step failed and the system still runs, with the code that failed loaded in its runners."""
    person: bool = False
    """True if the wait lasts until a person acts."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the wait, which does not change as time passes."""
        cause = "running" if self.cause == "slow" else self.cause
        return (cause, self.task, self.attempt, self.runner, self.incarnation)

    @property
    def way_out(self) -> str:
        """Advice for a person; empty if there is nothing to do."""
        if self.cause == "quarantined" or (self.cause == "failed" and self.server):
            restart = restart_advice(self.runner or "NAME", self.server)
            return f"fix what it names, then {restart}; nothing of the batch is lost"
        if self.cause in ("no_system", "ending"):
            return resume_advice(self.resume)
        if self.cause == "server":
            remove = f"`trinity-es scale CONFIG --remove {self.server}`"
            return f"start or fix the server {self.server}, or remove it: {remove}"
        if self.cause == "refused":
            return weights_advice(self.server)
        if self.cause == "all_failed":
            loaded = ", end runners that have it loaded (`trinity-es restart-runner`)" if self.system_up else ""
            restart = (f"{resume_after_fix(self.resume)} generates the step again" if self.resume else
                       "start its trainer again: TRL's trainer submits the batch again")
            return f"fix what failed{loaded}, and {restart}"
        return _WAYS.get(self.cause, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Answer for one batch, with the most important `Waiting` first. `str()` gives the text for people."""

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
    """True if the batch needs a person, or has made no progress for too long."""
    waiting: tuple[Waiting, ...]

    @property
    def cause(self) -> str:
        return self.waiting[0].cause

    @property
    def of_trainer(self) -> bool:
        """True if the batch waits for its trainer or for nothing, which never counts as a stall."""
        return self.cause in OF_TRAINER

    @property
    def sentence(self) -> str:
        return self.waiting[0].text

    @property
    def line(self) -> str:
        return f"batch {self.batch_id} is {self.state}, {self.settled} of {self.tasks} tasks settled; {self.sentence}"

    def sentences(self) -> list[str]:
        """Return a line on the batch, a line on each `Waiting`, and lines on what to do."""
        is_ended = self.state in (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)
        units = f", {counted(self.running_units, 'unit')} with runners, {self.pending_units} without"
        last_event = (
            f"; {'its last event was at' if is_ended else 'nothing has moved since'} {local_time(self.moved_at)} "
            f"({span(self.now - self.moved_at)} ago)"
        )
        lines = [
            f"batch {self.batch_id} ({self.batch_type}) is {self.state}: {self.settled} of "
            f"{counted(self.tasks, 'task')} settled{'' if is_ended else units}"
            f"{'' if self.cause == 'no_database' else last_event}"
        ]
        lines += [f"  {w.text}" for w in self.waiting[:SHOWN]]
        if len(self.waiting) > SHOWN:
            lines.append(f"  and {len(self.waiting) - SHOWN} more like these")
        advice = list(dict.fromkeys(w.way_out for w in self.waiting if w.way_out))
        lines += [f"what to do: {text}" for text in advice[:SHOWN]]
        return lines

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"cause": self.cause, "line": self.line, "sentences": self.sentences()}
        return fields | {"waiting": [asdict(w) for w in self.waiting]}


def restart_advice(runner: str, server: str) -> str:
    """Return the commands that restart a runner or remove its server. `server`: the server's URL, empty without one."""
    command = f"`trinity-es restart-runner {runner}`"
    return command + (f", or remove its server: `trinity-es scale CONFIG --remove {server}`" if server else "")


def weights_advice(server: str) -> str:
    """Return advice on a runner that can't load the current weights."""
    advice = "fix what it names, or publish a newer version: it tries again by itself"
    return advice + (f"; or remove its server: `trinity-es scale CONFIG --remove {server}`" if server else "")


def resume_command(store: str) -> str:
    """Return the command that resumes the `trinity-es run` of the store at this URL.

    The command names the log. (The config file may belong to another run, if this run's name came from `--set`.) If
    the URL is empty or lacks its password, the command names the config file.
    """
    if not store or "***" in store:
        return "trinity-es resume CONFIG"
    if (path := file_of(store)) is not None:
        store = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return f"trinity-es resume {shlex.quote(store)}"


def end_of_run(run: Mapping[str, Any]) -> list[str]:
    """Return phrases on the time of the last event and on the last trained step of a dead run. `run`: from `health`."""
    last_at, trained = run.get("last_at"), run.get("trained")
    return ([f"the log's last event was at {local_time(last_at)}"] if last_at else []) + (
        [f"the last trained step is {trained}"] if trained is not None else [])


def resume_after_fix(resume: str) -> str:
    """Return the command that resumes a run after a fix, with a hint if the config file changed."""
    if resume.endswith(" CONFIG"):
        return f"`{resume}`"
    return f"`{resume}` (`trinity-es resume CONFIG` if you changed the config file: the log holds the old one)"


def resume_advice(resume: str) -> str:
    """Return advice on how to continue after a system died. `resume`: command that resumes its run, or ""."""
    command = (f"`{resume}` goes on with the run where it stopped" if resume else
               "`trinity-es up CONFIG` goes on with what is open (start the trainer of your own again)")
    return f"{command}; finished tasks are not run again"


ADD_SERVER = "`trinity-es scale CONFIG --add URL` adds a server"
_WAYS = {
    "no_database": "check the database and the network to it: everything goes on by itself when it answers again",
    "no_answer": "`trinity-es status` says more; `trinity-es down` and `trinity-es up` go on with what is open",
    "unwritten": "do what it says: acknowledged data is safe, and everything goes on by itself after that",
    "unstored": "do what it says: the runner keeps what it finished, and stores it by itself after that",
    "unseen": "run `trinity-es why` on that host, where it sees the processes",
    "fenced": "stop the unwanted system with `trinity-es down` on its own host; the other one has the batch",
    "failed": "fix what it names, then `trinity-es down` and `trinity-es up`; nothing of the batch is lost",
    "no_server": ADD_SERVER,
    "away": "nothing if the host comes back in time; if not, check its machine and network: `trinity-es hosts` shows "
            "its state",
    "host_lost": "`trinity-es join` on it brings it back, if it does not come by itself",
    "draining": "nothing if other hosts work; if not, `trinity-es join` on another host, or on this one again",
    "ended": "`trinity-es down` and `trinity-es up` start runners again",
    "hung": "the guardian ends a silent runner after system.heartbeat_timeout or hang_timeout, and its units are "
            "attempted again; if it does not, the workflow blocks: see the runner's text log, or give up the batch "
            "with abort_batch",
    "finalize": "the trainer calls finalize_train_batch or finalize_eval_batch; a scheduler calls get_results",
    "paused": "start a Scheduler on this store, or ask one for its results: it dispatches the waiting units",
    "groups_missing": "the trainer calls add_tasks, or finalizes the batch without groups",
    "finalize_failed": "fix the pipeline (buffer.pipeline), then finalize the batch again: it has all its experiences",
    "training": "nothing if there is no trainer; a trainer calls acknowledge(batch_id, step) when it has used a batch "
                "(TRL's and `trinity-es run` do so by themselves): start it again if it has ended",
    "loading": "nothing while the engine loads: its runner's text log in system.log_dir shows how far it is",
}


OF_TRAINER = {"finalize", "finalize_failed", "groups_missing", "grace", "paused", "training", "all_failed", "nothing"}
"""Causes for which the batch waits for its trainer, or for nothing. They are never a stall."""


def why_without_log(live: Mapping[str, Any], error: str, *, now: float) -> list[Why]:
    """Make answers for open batches from the running system's status, if `error` prevents reads of the log."""
    text = str(live.get("trouble") or error)
    waiting = (Waiting(cause="no_database", what="the database", text=text, person=True),)
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
    """Return a duration as text, such as `2 h 5 min`."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, name, small_size, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= 2 * size:
            rest = int(seconds % size // small_size)
            return f"{int(seconds // size)} {name}" + (f" {rest} {small_name}" if rest else "")
    return f"{seconds:.0f} s"
