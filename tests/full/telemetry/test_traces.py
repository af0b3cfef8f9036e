"""Batches as OpenTelemetry traces: whole, once, and with the same ids whoever sends them."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import copied, finished, history, put_back, unit, write
from tests.helpers.paths import ROOT
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.store.log import EventLog
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.history.attempts import fold_timeline
from trinity_es.projections.reading.journal_parts import JournalPart
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.telemetry.monitors import Monitors
from trinity_es.telemetry.opentelemetry import ATTRIBUTES, Traces, spans_of, start_traces
from trinity_es.testing import wait_until

pytest.importorskip("opentelemetry.sdk")
DIGEST = "0" * 64


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "log.db", history(DIGEST))
    return tmp_path / "log.db"


def another(path: Path, batch_id: int) -> None:
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=batch_id, batch_type="train", repeat_times=[2], tasks=[{}]),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0)], model_version=5),
        finished(0, DIGEST),
    ]
    state = fold(events)
    write(path, [(batch_stream(batch_id), [*events, ev.BatchFinalized(result=batch_result(state))])])


def memory() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def spans(path: Path, batch_id: int | str, parts: Mapping[str, Sequence[JournalPart]] | None = None) -> list[Any]:
    with open_log(str(path)) as log:
        return list(spans_of(
            fold_timeline(log.events(batch_id)), batch_stream(batch_id), log.head().generation, journals=parts,
        ))


def lost_twice(path: Path) -> dict[str, list[JournalPart]]:
    """Batch 13, whose task was lost with two runners; what its journal had, by the digest of the payload."""
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=13, batch_type="train", repeat_times=[2], tasks=[{}], max_attempts=2)]
    for life, (digest, seconds) in enumerate([("1" * 64, 2.0), ("2" * 64, 4.0)], 1):
        who = {"runner": f"runner-{life}", "incarnation": 1, "task": 0, "run_id_base": 0, "attempt": life}
        events += [
            ev.TasksDispatched(runner=f"runner-{life}", incarnation=1, units=[unit(0, life)], model_version=5),
            ev.AttemptFailed(**who, failed_runs=[0, 1], kind="runner_lost", message="signal 9", retry=True,
                             blamed=False),
            ev.AttemptKept(**who, runs=2, payload=digest, calls=0, open_calls=1, tokens=20 * life, steps=1,
                           seconds=seconds),
        ]
    events += [ev.TasksDispatched(runner="runner-3", incarnation=1, units=[unit(0, 3)], model_version=5),
               finished(0, DIGEST, attempt=3)]
    state = fold(events)
    write(path, [(batch_stream(13), [*events, ev.BatchFinalized(result=batch_result(state))])])
    paid = JournalPart(run=1, step="pay", began=0.5, ended=1.0, finish="done")
    answer = JournalPart(run=1, began=1.5, ended=2.0, tokens=20, model="m", versions=[4, 5])
    longer = replace(answer, ended=4.0, tokens=40, splices=[20])
    return {"1" * 64: [paid, answer], "2" * 64: [paid, longer]}


def test_a_lost_attempt_has_a_span_for_each_answer_and_step_that_was_kept_of_it(path: Path) -> None:
    parts = lost_twice(path)
    batch, *others = spans(path, 13, parts)
    lives = {s.context.span_id: s for s in others if s.name == "rl.attempt"}
    kept = [s for s in others if s.name in ("rl.call", "rl.step")]
    assert [(s.name, lives[s.parent.span_id].attributes["rl.attempt"]) for s in kept] == [
        ("rl.step", 1), ("rl.call", 1), ("rl.call", 2)]  # what the second life only had from the first is the first's
    assert [s.attributes["rl.call.tokens"] for s in kept[1:]] == [20, 40]
    assert [s.attributes["rl.call.kept"] for s in kept[1:]] == [0, 20]
    assert kept[0].attributes["rl.step.state"] == "done"
    assert (kept[1].attributes["rl.call.model"], kept[1].attributes["rl.weights.version"]) == ("m", 5)
    assert all(lives[s.parent.span_id].start_time <= s.start_time <= s.end_time for s in kept)
    assert [s.context for s in spans(path, 13, parts)] == [s.context for s in [batch, *others]]
    assert len({s.context.span_id for s in others}) == len(others)


@contextlib.contextmanager
def tracing(path: Path, exporter: Any) -> Iterator[Traces]:
    traces = Traces(str(path), exporter, interval=0.01)
    traces.start()
    yield traces
    traces.close()


def sent(exporter: Any) -> list[str]:
    return [s.attributes["rl.batch.id"] for s in exporter.get_finished_spans() if s.name == "rl.batch"]


def test_a_batch_is_a_trace_of_its_tasks_and_their_attempts(path: Path) -> None:
    batch, *others = spans(path, 3)
    assert (batch.name, batch.parent, batch.status.is_ok) == ("rl.batch", None, True)
    assert dict(batch.attributes) == {
        "rl.batch.id": "3", "rl.batch.type": "train", "rl.batch.state": "finalized", "rl.batch.tasks": 2,
        "rl.batch.tasks.finished": 2, "rl.batch.tasks.failed": 0, "rl.batch.tasks.dropped": 0,
        "rl.batch.attempts.failed": 1, "rl.tokens.response": 28, "rl.weights.version": 5,
        "rl.reward": pytest.approx((0.5 + 0.5 + 1 / 3 + 0.1 + 0.1 + 1 / 3) / 4),
    }
    tasks = {s.attributes["rl.task.index"]: s for s in others if s.name == "rl.task"}
    attempts = [s for s in others if s.name == "rl.attempt"]
    assert [len(tasks), len(attempts)] == [2, 3]
    assert all(s.parent.span_id == batch.context.span_id for s in tasks.values())
    assert all(s.parent.span_id == tasks[s.attributes["rl.task.index"]].context.span_id for s in attempts)
    assert {s.context.trace_id for s in others} == {batch.context.trace_id}
    assert len({s.context.span_id for s in [batch, *others]}) == 6
    failed, again = (s for s in attempts if s.attributes["rl.task.index"] == 0)
    assert (failed.attributes["rl.failure.kind"], failed.status.is_ok) == ("workflow", False)
    assert (again.attributes["rl.attempt"], again.attributes["rl.runner"]) == (2, "runner-1")
    for span in others:
        assert batch.start_time <= span.start_time <= span.end_time <= batch.end_time
    with open_log(str(path)) as log:
        submitted = next(iter(log.events(3)))
    assert batch.start_time == pytest.approx(submitted.recorded_at * 1e9, abs=1e3)


def test_the_same_span_has_the_same_ids_every_time_and_another_batch_has_others(path: Path) -> None:
    one, again, other = spans(path, 3), spans(path, 3), spans(path, "0/letters")
    assert [s.context for s in one] == [s.context for s in again]
    assert not {s.context.span_id for s in one} & {s.context.span_id for s in other}
    assert other[0].context.trace_id != one[0].context.trace_id


def test_an_aborted_batch_is_an_error_and_its_task_was_dropped_or_never_begun(path: Path) -> None:
    batch, task = spans(path, 4)
    assert (batch.attributes["rl.batch.state"], batch.status.description) == ("aborted", "aborted: no longer wanted")
    assert task.start_time == task.end_time == batch.end_time


def test_only_attributes_that_are_documented_are_sent(path: Path) -> None:
    parts = lost_twice(path)
    sent = {name for batch_id in (3, "0/letters", 4, 13) for s in spans(path, batch_id, parts)
            for name in [*s.attributes, *(n for n in s.resource.attributes if n.startswith("rl."))]}
    assert sent == ATTRIBUTES.keys()
    docs = (ROOT / "docs" / "OBSERVABILITY.md").read_text()
    for name, meaning in ATTRIBUTES.items():
        assert f"| `{name}` | {meaning} |" in docs


def test_what_ends_from_now_on_is_sent_once_and_not_again_after_a_restart(path: Path) -> None:
    first, second = memory(), memory()
    with tracing(path, first):
        another(path, 11)
        wait_until(lambda: first.get_finished_spans(), "the batch that ended to be sent")
    with tracing(path, second):
        another(path, 12)  # what ended before the end is sent
    assert [sent(first), sent(second)] == [["11"], ["12"]]


def test_a_log_that_is_made_later_is_sent_from_its_beginning(tmp_path: Path) -> None:
    exporter = memory()
    with tracing(tmp_path / "log.db", exporter):
        write(tmp_path / "log.db", history(DIGEST))
    assert sent(exporter) == ["0/letters", "3", "4"]


def test_a_log_that_is_another_now_or_a_copy_of_before_is_sent_and_nothing_twice(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = memory()
    with tracing(path, exporter) as traces:
        copied(path, tmp_path / "before")
        another(path, 11)
        wait_until(lambda: sent(exporter) == ["11"], "batch 11 to be sent")
        put_back(tmp_path / "before", path)
        with open_log(str(path)) as log:
            wait_until(lambda: traces._position == log.head().position, "the copy to be seen")
        another(path, 12)  # in the place of batch 11, to the position
        wait_until(lambda: sent(exporter) == ["11", "12"], "batch 12 to be sent")
        write(tmp_path / "other", history(DIGEST))
        put_back(tmp_path / "other", path)
        wait_until(lambda: len(sent(exporter)) == 5, "the other log to be sent")
    assert sent(exporter) == ["11", "12", "0/letters", "3", "4"]
    assert caplog.records == []


class Broken:
    def __init__(self) -> None:
        self.tried = 0

    def export(self, spans: Sequence[Any]) -> Any:
        self.tried += 1
        raise ConnectionError("nobody is there")

    def shutdown(self) -> None:
        """Nothing is open."""


def test_a_receiver_that_is_away_is_told_once_and_disturbs_nobody(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = Broken()
    with caplog.at_level(logging.WARNING, "trinity_es.traces"), tracing(path, broken):
        for batch_id in (11, 12, 13):
            another(path, batch_id)
            wait_until(lambda n=batch_id - 10: broken.tried >= n, "the next try")
    assert broken.tried == 3
    assert [r.getMessage() for r in caplog.records] == [
        "traces: sending fails, the run goes on without them (said once): ConnectionError: nobody is there"
    ]


# --- the way there ----------------------------------------------------------------------------------------------------
@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that takes what is posted to it: (path, body)."""
    taken: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def batches_of(body: bytes) -> list[str]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(body)
    return [span.attributes[0].value.string_value for resource in request.resource_spans
            for scope in resource.scope_spans for span in scope.spans if span.name == "rl.batch"]


def test_a_run_sends_them_to_its_otlp_endpoint(tmp_path: Path, receiver: tuple[str, list[tuple[str, bytes]]]) -> None:
    endpoint, taken = receiver
    config = Config.model_validate({
        "run_dir": str(tmp_path), "store": {"url": f"sqlite:///{tmp_path / 'log.db'}"},
        "monitor": {"otlp_endpoint": endpoint},
    })
    monitors = Monitors(config)
    monitors.follow()
    write(tmp_path / "log.db", history(DIGEST))
    monitors.close()
    assert {path for path, _ in taken} == {"/v1/traces"}
    assert {batch for _, body in taken for batch in batches_of(body)} == {"0/letters", "3", "4"}


def test_the_variable_of_opentelemetry_turns_it_on_and_nothing_is_off(
    path: Path, receiver: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, taken = receiver
    assert start_traces(str(path)) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    traces = start_traces(str(path))
    assert traces is not None
    another(path, 21)
    traces.close()
    assert [batch for _, body in taken for batch in batches_of(body)] == ["21"]
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_traces(str(path)) is None


def test_the_extra_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"trinity-es\[otel\]"):
        start_traces(str(path), "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING, "trinity_es.traces"):
        assert start_traces(str(path)) is None
    assert "trinity-es[otel]" in caplog.text


def test_the_log_is_only_read(path: Path) -> None:
    with EventLog.open(str(path), read_only=True) as log:
        before = log.head()
    with tracing(path, memory()):
        pass
    with EventLog.open(str(path), read_only=True) as log:
        assert log.head() == before
