"""A log as OpenTelemetry traces: a batch is a trace, with a span for each task and below it one for each attempt.

`start_traces` follows a log in a thread of its own and sends a batch, whole, when it has ended, over OTLP/HTTP. Off
unless an endpoint is set (`monitor.otlp_endpoint`, or the variables of OpenTelemetry). Times are those of the log; ids
are made of the log's generation, the batch, task and attempt, so that the same span, sent twice by two who look at one
log, is the same span. Sends the batches that end after it starts: after a restart nothing is sent again, and what
ended in between is not sent.

Nothing here can disturb a run: the thread reads the log and holds one batch at a time, and what can't be sent is given
up, said once. Names of attributes (`ATTRIBUTES`) follow the proposed `rl.*` conventions where those have one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from trinity_es.events.errors import ConfigError, LogNotFound
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.records.recorded import Recorded
from trinity_es.projections.history.attempts import Attempt, BatchTimeline, TaskTimeline, tell
from trinity_es.projections.reading.follow import look_again
from trinity_es.projections.reading.log_reader import Log, open_log

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["ATTRIBUTES", "Traces", "spans_of", "start_traces"]

ATTRIBUTES = {
    "rl.system": "Resource: `trinity_es`.",
    "rl.run.id": "Resource: the log's generation, one training run.",
    "rl.log": "Resource: where the log is, without a password.",
    "rl.batch.id": "On all spans: the batch's id, as text.",
    "rl.batch.type": "Batch: `train`, `eval` or `collect`.",
    "rl.batch.state": "Batch: `finalized` or `aborted`.",
    "rl.batch.tasks": "Batch: tasks in it.",
    "rl.batch.tasks.finished": "Batch: those of which every run completed.",
    "rl.batch.tasks.failed": "Batch: those of which a run failed for good.",
    "rl.batch.tasks.dropped": "Batch: those given up unfinished.",
    "rl.batch.attempts.failed": "Batch: attempts that failed.",
    "rl.task.index": "Task, attempt: its number in the batch.",
    "rl.task.state": "Task: `finished`, `failed`, `dropped`.",
    "rl.task.runs": "Task: runs wanted of it.",
    "rl.task.attempts": "Task: units dispatched.",
    "rl.attempt": "Attempt: which one at these runs, from 1.",
    "rl.attempt.first_run": "Attempt: its first run; it has `rl.attempt.runs` in a row.",
    "rl.attempt.runs": "Attempt: runs in it.",
    "rl.attempt.outcome": "Attempt: `finished`, `dropped`, `running` (its batch was aborted), or its failure's kind.",
    "rl.attempt.seconds": "Attempt: what it took as the runner measured it.",
    "rl.failure.kind": "Attempt that failed: `data`, `workflow`, `timeout`, `grader`, `runner_lost`, `infra`.",
    "rl.runner": "Attempt: the runner that had it.",
    "rl.runner.incarnation": "Attempt: which life of it.",
    "rl.weights.version": "Batch, attempt: the newest weights that made any of the tokens.",
    "rl.reward": "Batch, task: mean reward of the runs.",
    "rl.tokens.response": "Batch, task: response tokens.",
}
"""Every attribute of a span or of the resource, and what it says."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
LOOK_SECONDS = 1.0
CLOSE_SECONDS = 5.0
CHUNK = 500
"""Spans of one request."""
_WIDTH = 500
"""Characters of a text from outside."""

_LOG = logging.getLogger("trinity_es.traces")


def start_traces(url: str, endpoint: str | None = None) -> Traces | None:
    """Send the batches of the log at `url` that end from now on to `endpoint`; None where no endpoint is set.

    `endpoint` is the address of an OTLP/HTTP receiver (`http://localhost:4318`); without one, OpenTelemetry's own
    variables count. Raises ConfigError where the packages are missing; where only a variable asks for it, that is a
    warning: others may have set it.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        exporter = _otlp(endpoint)
    except ConfigError as e:
        if endpoint is not None:
            raise
        _LOG.warning("no traces are sent: %s", e)
        return None
    traces = Traces(url, exporter)
    traces.start()
    return traces


def _otlp(endpoint: str | None) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(
            f"traces need the packages of OpenTelemetry ({e}): pip install 'trinity-es[otel]', or leave out "
            "monitor.otlp_endpoint"
        ) from e
    # It would tell every failure; here it is told once.
    logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
    if endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces")


class Traces:
    """Sends each batch of a log to `exporter` when it has ended, from `start` until `close`."""

    def __init__(self, url: str, exporter: SpanExporter, *, interval: float = LOOK_SECONDS) -> None:
        self._url, self._exporter = url, exporter
        self._stop = threading.Event()
        self._failed: set[str] = set()
        self._generation: str | None = None
        """That of the log at the last look; None: there was none yet."""
        self._last = 0
        """The position up to which it was looked at."""
        self._sent: set[bytes] = set()
        """The hashes of the events that ended what was sent."""
        self._thread = threading.Thread(
            target=look_again, name="traces", daemon=True,
            args=(url, self._look, self._stop, interval, partial(self._complain, "reading the log")),
        )

    def start(self) -> None:
        """Begin: what ends from here on is sent."""
        try:
            with open_log(self._url) as log:
                self._begin(log)
        except LogNotFound:  # it is being made: all of it is to come
            self._generation = ""
        except Exception as e:  # the thread will find out
            self._complain("reading the log", e)
        self._thread.start()

    def _begin(self, log: Log) -> None:
        head = log.head()
        self._generation, self._last = head.generation, head.position

    def close(self) -> None:
        """Send what has ended by now, as far as that takes a few seconds."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        closing = threading.Thread(target=self._exporter.shutdown, name="traces-end", daemon=True)
        closing.start()
        closing.join(1.0)

    def _look(self, log: Log) -> None:
        if self._generation is None:
            self._begin(log)
        head = log.head()
        if head.generation != self._generation:  # another run in its place: all of it is new
            self._generation, self._last = head.generation, 0
        self._last = min(self._last, head.position)  # the log was put back to a copy
        for ended in log.rare(["BatchFinalized", "BatchAborted"], after=self._last):
            self._last = ended.position
            if ended.hash in self._sent:
                continue
            self._sent.add(ended.hash)  # before it is sent: never twice
            try:
                self._send(log, ended)
            except Exception as e:
                self._complain("sending", e)

    def _send(self, log: Log, ended: Recorded) -> None:
        events = takewhile(lambda r: r.position <= ended.position, log.read(stream=ended.stream))
        spans = list(spans_of(tell(events), ended.stream, log.head().generation, masked(log.url)))
        for first in range(0, len(spans), CHUNK):
            if self._exporter.export(spans[first : first + CHUNK]).name != "SUCCESS":
                raise OSError(f"the receiver did not take {len(spans)} spans of {ended.stream}")

    def _complain(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            _LOG.warning("traces: %s fails, the run goes on without them (said once): %s: %s", what,
                         type(error).__name__, error)


def spans_of(story: BatchTimeline, stream: str, generation: str, url: str = "") -> Iterator[ReadableSpan]:
    """Yield the spans of a batch that has ended: its own, then of each task and its attempts."""
    made = _Made(f"{generation}\0{stream}\0{story.first_position}", {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "trinity-es"), "rl.system": "trinity_es",
        "rl.run.id": generation, "rl.log": url,
    })
    state = story.state
    end = story.last_at if story.ended_at is None else story.ended_at
    rewards = [reward for task in story.tasks for reward in task.rewards]
    counts, aborted = story.counts, state.state.value == "aborted"
    yield made.span(
        "rl.batch", (), None, story.submitted_at, end,
        {
            "rl.batch.id": str(state.batch_id), "rl.batch.type": state.batch_type, "rl.batch.state": state.state.value,
            "rl.batch.tasks": len(story.tasks),
            **{f"rl.batch.tasks.{name}": counts[name] for name in ("finished", "failed", "dropped")},
            "rl.batch.attempts.failed": state.failed_attempts,
            "rl.tokens.response": sum(task.response_tokens for task in story.tasks),
            "rl.reward": sum(rewards) / len(rewards) if rewards else None,
            "rl.weights.version": max(story.versions, default=None),
        },
        error=story.turns[-1][1] if aborted else None, turns=story.turns,
    )
    for task in story.tasks:
        yield from _of_task(made, str(state.batch_id), task, end)


def _of_task(made: _Made, batch: str, task: TaskTimeline, end: float) -> Iterator[ReadableSpan]:
    ended = end if task.ended_at is None else task.ended_at
    begun = task.attempts[0].dispatched_at if task.attempts else ended
    message = next((a.message for a in reversed(task.attempts) if a.message), "")
    yield made.span(
        "rl.task", (task.task,), (), begun, ended,
        {
            "rl.batch.id": batch, "rl.task.index": task.task, "rl.task.state": task.state, "rl.task.runs": task.runs,
            "rl.task.attempts": len(task.attempts), "rl.reward": task.reward,
            "rl.tokens.response": task.response_tokens,
        },
        error=message if task.state == "failed" else None,
    )
    again: dict[tuple[int, int], int] = {}  # the same attempt may be dispatched twice: its coordinator died in between
    for attempt in task.attempts:
        key = attempt.run_id_base, attempt.attempt
        again[key] = again.get(key, 0) + 1
        yield _of_attempt(made, batch, task.task, attempt, again[key], ended)


def _of_attempt(made: _Made, batch: str, task: int, attempt: Attempt, again: int, end: float) -> ReadableSpan:
    failed = attempt.outcome not in ("finished", "dropped", "running")
    return made.span(
        "rl.attempt", (task, attempt.run_id_base, attempt.attempt, again), (task,), attempt.dispatched_at,
        end if attempt.ended_at is None else attempt.ended_at,
        {
            "rl.batch.id": batch, "rl.task.index": task, "rl.attempt": attempt.attempt,
            "rl.attempt.first_run": attempt.run_id_base, "rl.attempt.runs": attempt.runs,
            "rl.attempt.outcome": attempt.outcome, "rl.attempt.seconds": attempt.seconds,
            "rl.failure.kind": attempt.outcome if failed else None, "rl.runner": attempt.runner,
            "rl.runner.incarnation": attempt.incarnation, "rl.weights.version": attempt.model_version,
        },
        error=f"{attempt.outcome}: {attempt.message}" if failed else None,
    )


class _Made:
    """Makes the spans of one trace."""

    def __init__(self, seed: str, about: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import TraceFlags

        self._seed = seed
        self._trace = int.from_bytes(sha256(seed.encode()).digest()[:16], "big")
        self._resource = Resource.create(dict(about))
        self._scope = InstrumentationScope("trinity_es", VERSION)
        self._flags = TraceFlags(TraceFlags.SAMPLED)

    def _context(self, key: tuple[int, ...]) -> Any:
        from opentelemetry.trace import SpanContext

        digest = sha256(f"{self._seed}\0{key}".encode()).digest()
        return SpanContext(self._trace, int.from_bytes(digest[:8], "big"), is_remote=False, trace_flags=self._flags)

    def span(
        self, name: str, key: tuple[int, ...], parent: tuple[int, ...] | None, start: float, end: float,
        attributes: Mapping[str, Any], *, error: str | None = None, turns: list[tuple[float, str]] | None = None,
    ) -> ReadableSpan:
        """`key` names the span within its trace, and `parent` the one above it; times in unix seconds."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        status = Status(StatusCode.OK) if error is None else Status(StatusCode.ERROR, error[:_WIDTH])
        return ReadableSpan(
            name, context=self._context(key), parent=None if parent is None else self._context(parent),
            resource=self._resource, attributes={k: v for k, v in attributes.items() if v is not None},
            events=[Event("rl.batch.turn", {"rl.text": what[:_WIDTH]}, _nanoseconds(at)) for at, what in turns or []],
            kind=SpanKind.INTERNAL, status=status, start_time=_nanoseconds(start),
            end_time=_nanoseconds(max(start, end)), instrumentation_scope=self._scope,
        )


def _nanoseconds(at: float) -> int:
    return round(at * 1e6) * 1000
