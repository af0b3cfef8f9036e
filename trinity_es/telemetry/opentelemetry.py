"""OpenTelemetry traces of a log: one trace per batch, with a span for each task and each attempt.

A lost attempt also has a span for each answer and step that its journal kept.

`start_traces` follows a log in its own thread, and sends each batch over OTLP/HTTP when the batch has ended. It is off
unless an endpoint is set (`monitor.otlp_endpoint`, or OpenTelemetry's variables). Batches that end while no process
follows the log are not sent. Times are those of the log. Ids derive from the log's generation, batch, task and attempt,
so two processes that follow one log send the same spans.

Traces can't disturb a run: the thread only reads the log, and holds one batch at a time. If a batch can't be sent, it
is skipped, and the failure is logged once. `ATTRIBUTES` have names of the proposed `rl.*` conventions, if there is one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from trinity_es.events.errors import ConfigError, LogNotFound
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.projections.history.attempts import Attempt, BatchTimeline, TaskTimeline, fold_timeline
from trinity_es.projections.reading.journal_parts import JournalPart, kept_parts
from trinity_es.projections.reading.log_reader import Log, open_log, read_repeatedly

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["ATTRIBUTES", "Traces", "spans_of", "start_traces"]

ATTRIBUTES = {
    "rl.system": "Resource: `trinity_es`.",
    "rl.run.id": "Resource: the log's generation, one training run.",
    "rl.log": "Resource: the log's URL, without a password.",
    "rl.batch.id": "On all spans: the batch's id, as text.",
    "rl.batch.type": "Batch: `train`, `eval` or `collect`.",
    "rl.batch.state": "Batch: `finalized` or `aborted`.",
    "rl.batch.tasks": "Batch: number of tasks.",
    "rl.batch.tasks.finished": "Batch: tasks whose runs all completed.",
    "rl.batch.tasks.failed": "Batch: tasks with a run that failed for good.",
    "rl.batch.tasks.dropped": "Batch: tasks dropped before they finished.",
    "rl.batch.attempts.failed": "Batch: failed attempts.",
    "rl.task.index": "Task, attempt: the task's number in the batch.",
    "rl.task.state": "Task: `finished`, `failed` or `dropped`.",
    "rl.task.runs": "Task: number of its runs.",
    "rl.task.attempts": "Task: number of dispatches to runners.",
    "rl.attempt": "Attempt: its number for these runs, from 1.",
    "rl.attempt.first_run": "Attempt: number of its first run.",
    "rl.attempt.runs": "Attempt: number of its runs, which are consecutive.",
    "rl.attempt.outcome": "Attempt: `finished`, `dropped`, `running` (its batch was aborted), or its failure's kind.",
    "rl.attempt.seconds": "Attempt: duration measured by the runner.",
    "rl.failure.kind": "Failed attempt: `data`, `workflow`, `timeout`, `grader`, `runner_lost`, `infra`.",
    "rl.call.finish": "Kept answer: its finish reason; `partial` if it is incomplete.",
    "rl.call.kept": "Kept answer: number of its tokens that an earlier attempt had generated.",
    "rl.call.model": "Kept answer: the model that generated it.",
    "rl.call.tokens": "Kept answer: number of its tokens.",
    "rl.run": "Kept answer, step: the run of the task.",
    "rl.step.name": "Kept step: its name in the workflow.",
    "rl.step.state": "Kept step: `done` if its result was kept, else `begun`.",
    "rl.runner": "Attempt: its runner.",
    "rl.runner.incarnation": "Attempt: the incarnation (process number) of its runner.",
    "rl.weights.version": "Batch, attempt, kept answer: newest weights version among its tokens.",
    "rl.reward": "Batch, task: mean reward of its runs.",
    "rl.tokens.response": "Batch, task: number of response tokens.",
}
"""Attributes of spans and of the resource, by name, with their meanings."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
READ_SECONDS = 1.0
CLOSE_SECONDS = 5.0
SPANS_PER_CALL = 500
_WIDTH = 500
"""Maximum number of characters of an error or another text in a span."""

_LOG = logging.getLogger("trinity_es.traces")


def start_traces(url: str, endpoint: str | None = None) -> Traces | None:
    """Start to send the batches of the log at `url` that end from now on. Returns None if no endpoint is set.

    `endpoint`: address of an OTLP/HTTP receiver (`http://localhost:4318`); default: OpenTelemetry's own variables. If
    OpenTelemetry is not installed, raises ConfigError for an `endpoint`. For the variables, which may be meant for
    other programs, a warning is logged.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        exporter = _make_exporter(endpoint)
    except ConfigError as e:
        if endpoint is not None:
            raise
        _LOG.warning("no traces are sent: %s", e)
        return None
    traces = Traces(url, exporter)
    traces.start()
    return traces


def _make_exporter(endpoint: str | None) -> SpanExporter:
    """Return an exporter to this endpoint. Raises ConfigError if OpenTelemetry's packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(
            f"traces need the packages of OpenTelemetry ({e}): pip install 'trinity-es[otel]', or remove "
            "monitor.otlp_endpoint from the config"
        ) from e
    # The exporter would log every failure; this module logs the first one.
    logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
    if endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces")


class Traces:
    """Sends each batch of a log to `exporter` when the batch has ended, from `start` until `close`."""

    def __init__(self, url: str, exporter: SpanExporter, *, interval: float = READ_SECONDS) -> None:
        self._url, self._exporter = url, exporter
        self._stop = threading.Event()
        self._warned_actions: set[str] = set()
        """Actions ("reading the log", "sending") whose failure was logged."""
        self._generation: str | None = None
        """Generation of the log at the last read; None before the first read."""
        self._position = 0
        """Position up to which the log was read."""
        self._sent_hashes: set[bytes] = set()
        """Hashes of the final events of sent batches."""
        self._thread = threading.Thread(
            target=read_repeatedly, name="traces", daemon=True,
            args=(url, self._send_ended_batches, self._stop, interval, partial(self._warn_once, "reading the log")),
        )

    def start(self) -> None:
        """Start the thread. It sends only batches that end from now on."""
        try:
            with open_log(self._url) as log:
                self._start_from_head(log)
        except LogNotFound:  # the log does not exist yet
            self._generation = ""
        except Exception as e:  # the thread tries again
            self._warn_once("reading the log", e)
        self._thread.start()

    def _start_from_head(self, log: Log) -> None:
        """Skip all events that the log has now."""
        head = log.head()
        self._generation, self._position = head.generation, head.position

    def close(self) -> None:
        """Send the batches that have ended by now, within CLOSE_SECONDS, and shut the exporter down."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        closing = threading.Thread(target=self._exporter.shutdown, name="traces-end", daemon=True)
        closing.start()
        closing.join(1.0)

    def _send_ended_batches(self, log: Log) -> None:
        """Send each batch that has ended since the last call, once."""
        if self._generation is None:
            self._start_from_head(log)
        head = log.head()
        if head.generation != self._generation:  # a new log at this URL: all of it is unread
            self._generation, self._position = head.generation, 0
        self._position = min(self._position, head.position)  # the log was restored from a copy
        for final_event in log.read_rare(["BatchFinalized", "BatchAborted"], after=self._position):
            self._position = final_event.position
            if final_event.hash in self._sent_hashes:
                continue
            self._sent_hashes.add(final_event.hash)  # before sending, so that no batch is sent twice
            try:
                self._send_batch(log, final_event)
            except Exception as e:
                self._warn_once("sending", e)

    def _send_batch(self, log: Log, final_event: Recorded) -> None:
        """Send the spans of the batch that this event ended. Raises OSError if the receiver refuses them."""
        events = takewhile(lambda r: r.position <= final_event.position, log.read(stream=final_event.stream))
        timeline = fold_timeline(events)
        attempts = [attempt for task in timeline.tasks for attempt in task.attempts]
        journals = kept_parts(log, {attempt.kept.payload for attempt in attempts if attempt.kept is not None})
        spans = list(spans_of(timeline, final_event.stream, log.head().generation, masked(log.url), journals))
        for first in range(0, len(spans), SPANS_PER_CALL):
            if self._exporter.export(spans[first : first + SPANS_PER_CALL]).name != "SUCCESS":
                raise OSError(f"the OTLP receiver refused {len(spans)} spans of {final_event.stream}: its log says why")

    def _warn_once(self, action: str, error: Exception) -> None:
        if action not in self._warned_actions:
            self._warned_actions.add(action)
            _LOG.warning("traces: %s fails, the run goes on without them (said once): %s: %s", action,
                         type(error).__name__, error)


def spans_of(
    timeline: BatchTimeline, stream: str, generation: str, url: str = "",
    journals: Mapping[str, Sequence[JournalPart]] | None = None,
) -> Iterator[ReadableSpan]:
    """Yield the spans of an ended batch: the batch's own span, then those of each task and its attempts.

    `journals`: answers and steps that the journals of lost attempts kept, by the digest of the journal's payload.
    """
    state = timeline.state
    spans = _SpanFactory(f"{generation}\0{stream}\0{timeline.first_position}", str(state.batch_id), {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "trinity-es"), "rl.system": "trinity_es",
        "rl.run.id": generation, "rl.log": url,
    })
    end = timeline.last_at if timeline.ended_at is None else timeline.ended_at
    rewards = [reward for task in timeline.tasks for reward in task.rewards]
    counts, is_aborted = timeline.counts, state.state.value == "aborted"
    yield spans.span(
        "rl.batch", (), None, timeline.submitted_at, end,
        {
            "rl.batch.type": state.batch_type, "rl.batch.state": state.state.value,
            "rl.batch.tasks": len(timeline.tasks),
            **{f"rl.batch.tasks.{name}": counts[name] for name in ("finished", "failed", "dropped")},
            "rl.batch.attempts.failed": state.failed_attempts,
            "rl.tokens.response": sum(task.response_tokens for task in timeline.tasks),
            "rl.reward": sum(rewards) / len(rewards) if rewards else None,
            "rl.weights.version": max(timeline.versions, default=None),
        },
        error=timeline.turns[-1][1] if is_aborted else None, turns=timeline.turns,
    )
    for task in timeline.tasks:
        yield from _task_spans(spans, task, end)
        yield from _part_spans(spans, task, journals or {})


def _task_spans(spans: _SpanFactory, task: TaskTimeline, batch_end: float) -> Iterator[ReadableSpan]:
    """Yield the spans of a task and of its attempts. The span of an unfinished task ends with its batch."""
    end = batch_end if task.ended_at is None else task.ended_at
    start = task.attempts[0].dispatched_at if task.attempts else end
    last_message = next((a.message for a in reversed(task.attempts) if a.message), "")
    yield spans.span(
        "rl.task", (task.task,), (), start, end,
        {
            "rl.task.index": task.task, "rl.task.state": task.state, "rl.task.runs": task.runs,
            "rl.task.attempts": len(task.attempts), "rl.reward": task.reward,
            "rl.tokens.response": task.response_tokens,
        },
        error=last_message if task.state == "failed" else None,
    )
    # An attempt is dispatched again under the same number if the coordinator died after the first dispatch.
    dispatch_counts: Counter[tuple[int, int]] = Counter()
    for attempt in task.attempts:
        key = attempt.run_id_base, attempt.attempt
        dispatch_counts[key] += 1
        yield _attempt_span(spans, task.task, attempt, dispatch_counts[key], end)


def _part_spans(
    spans: _SpanFactory, task: TaskTimeline, journals: Mapping[str, Sequence[JournalPart]]
) -> Iterator[ReadableSpan]:
    """Yield a span for each answer and step that the journal of a lost attempt kept. `journals`: parts by payload."""
    for kept in (attempt.kept for attempt in task.attempts if attempt.kept is not None):
        # Several, if the coordinator died after a dispatch: the next one has the same number.
        lost_attempts = [a for a in task.attempts if (a.runner, a.incarnation, a.attempt) ==
                         (kept.runner, kept.incarnation, kept.attempt) and
                         a.run_id_base <= kept.run_id_base < a.run_id_base + a.runs]
        if not lost_attempts:
            continue
        lost_attempt = lost_attempts[-1]
        # The journal begins with the parts of earlier attempts, which have their own spans.
        earlier_seconds = 0.0 if lost_attempt.kept is None else lost_attempt.kept.seconds
        attempt_key = task.task, lost_attempt.run_id_base, lost_attempt.attempt, len(lost_attempts)
        for number, part in enumerate(journals.get(kept.payload, ())):
            if part.ended > earlier_seconds and kept.run_id_base <= part.run < kept.run_id_base + kept.runs:
                part_key = (*attempt_key, kept.run_id_base, number)
                journal_start = lost_attempt.dispatched_at - earlier_seconds
                yield _part_span(spans, part, part_key, attempt_key, journal_start, earlier_seconds)


def _part_span(
    spans: _SpanFactory, part: JournalPart, key: tuple[int, ...], parent: tuple[int, ...], journal_start: float,
    earlier_seconds: float,
) -> ReadableSpan:
    """Return the span of a kept answer or step. The part's times count from `journal_start`."""
    attributes: dict[str, Any] = {"rl.task.index": key[0], "rl.run": part.run}
    if part.step:
        attributes |= {"rl.step.name": part.step[:_WIDTH], "rl.step.state": part.finish or "begun"}
    else:
        attributes |= {
            "rl.call.model": part.model or None, "rl.call.tokens": part.tokens,
            "rl.call.kept": part.splices[-1] if part.splices else 0, "rl.call.finish": part.finish or "partial",
            "rl.weights.version": max(part.versions, default=None),
        }
    return spans.span("rl.step" if part.step else "rl.call", key, parent,
                      journal_start + max(part.began, earlier_seconds), journal_start + part.ended, attributes)


def _attempt_span(spans: _SpanFactory, task: int, attempt: Attempt, dispatch: int, end: float) -> ReadableSpan:
    """Return the span of an attempt's `dispatch`-th dispatch. An open attempt ends with its task, at `end`."""
    has_failed = attempt.outcome not in ("finished", "dropped", "running")
    return spans.span(
        "rl.attempt", (task, attempt.run_id_base, attempt.attempt, dispatch), (task,), attempt.dispatched_at,
        end if attempt.ended_at is None else attempt.ended_at,
        {
            "rl.task.index": task, "rl.attempt": attempt.attempt, "rl.attempt.first_run": attempt.run_id_base,
            "rl.attempt.runs": attempt.runs, "rl.attempt.outcome": attempt.outcome,
            "rl.attempt.seconds": attempt.seconds, "rl.failure.kind": attempt.outcome if has_failed else None,
            "rl.runner": attempt.runner, "rl.runner.incarnation": attempt.incarnation,
            "rl.weights.version": attempt.model_version,
        },
        error=f"{attempt.outcome}: {attempt.message}" if has_failed else None,
    )


class _SpanFactory:
    """Creates the spans of one batch, which are a trace. Their ids derive from `seed`."""

    def __init__(self, seed: str, batch: str, resource: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import TraceFlags

        self._seed, self._batch = seed, batch
        self._trace_id = int.from_bytes(sha256(seed.encode()).digest()[:16], "big")
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("trinity_es", VERSION)
        self._flags = TraceFlags(TraceFlags.SAMPLED)

    def _span_context(self, key: tuple[int, ...]) -> Any:
        from opentelemetry.trace import SpanContext

        digest = sha256(f"{self._seed}\0{key}".encode()).digest()
        return SpanContext(self._trace_id, int.from_bytes(digest[:8], "big"), is_remote=False, trace_flags=self._flags)

    def span(
        self, name: str, key: tuple[int, ...], parent: tuple[int, ...] | None, start: float, end: float,
        attributes: Mapping[str, Any], *, error: str | None = None, turns: list[tuple[float, str]] | None = None,
    ) -> ReadableSpan:
        """Return a span. `key` identifies the span in its trace, `parent` its parent. Times are unix seconds."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        status = Status(StatusCode.OK) if error is None else Status(StatusCode.ERROR, error[:_WIDTH])
        return ReadableSpan(
            name, context=self._span_context(key), parent=None if parent is None else self._span_context(parent),
            resource=self._resource,
            attributes={"rl.batch.id": self._batch, **{k: v for k, v in attributes.items() if v is not None}},
            events=[Event("rl.batch.turn", {"rl.text": what[:_WIDTH]}, _nanoseconds(at)) for at, what in turns or []],
            kind=SpanKind.INTERNAL, status=status, start_time=_nanoseconds(start),
            end_time=_nanoseconds(max(start, end)), instrumentation_scope=self._scope,
        )


def _nanoseconds(at: float) -> int:
    return round(at * 1e6) * 1000
