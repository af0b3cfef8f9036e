"""Every figure of a run, in commands, models, pages and exports, equals its count by SQL and JSON alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.helpers.handmade import cli
from tests.helpers.raw_figures import Batch, Event, count, read
from tests.helpers.troubled import troubled
from trinity_es.audit.perfetto import trace_events
from trinity_es.cli.render.watch import read_overview
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.page_urls import batch_url, rollouts_url
from trinity_es.events.values import batch_stream
from trinity_es.projections.history.attempts import fold_timeline
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.telemetry.opentelemetry import spans_of
from trinity_es.telemetry.prometheus import prometheus_text

SEED, SCHEDULES = 1000, 30
DEATHS = ("lost", "failed", "quarantined")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("troubled") / "log.sqlite"
    troubled(found, SEED, SCHEDULES)
    return found


@pytest.fixture(scope="module")
def events(path: Path) -> list[Event]:
    return read(path)


@pytest.fixture(scope="module")
def batches(events: list[Event]) -> dict[str, Batch]:
    return count(events)


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    with open_log(str(path)) as opened:
        yield opened


def told(path: Path, *command: object) -> Any:
    done = cli(*command, "--json", "--log", path)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def name_of(batch: Batch) -> str:
    """How a command line names it: the text "0" is another batch than the number 0."""
    return batch_stream(batch.batch_id).removeprefix("batch/")


def test_the_run_has_the_trouble_that_is_to_be_counted(events: list[Event], batches: dict[str, Batch]) -> None:
    types = Counter(e.type for e in events)
    assert types.keys() >= {"TaskDropped", "TasksAdded", "ResultsTaken", "BatchAborted", "RecoveryDecided",
                            "WeightsFailed", "RunnerLost", "RunnerRetired", "ExperiencesTaken", "FinalizeFailed"}
    assert types["BatchSubmitted"] > len(batches) + 5  # ids that were used again
    assert {"batch/0", "batch/'0'"} <= batches.keys()
    assert {s for b in batches.values() for s in b.states()} == {"finished", "failed", "dropped", "running", "pending"}
    assert {s.outcome for b in batches.values() for s in b.sent} >= {"finished", "dropped", "running", "runner_lost"}
    assert {b.state for b in batches.values()} >= {"finalized", "aborted", "running"}
    assert {kind for b in batches.values() for kind in b.failures} == {
        "data", "workflow", "timeout", "runner_lost", "infra"}


def test_the_list_of_batches(path: Path, batches: dict[str, Batch]) -> None:
    rows = told(path, "batches")
    assert [r["first_position"] for r in rows] == sorted(b.position for b in batches.values())
    for row in rows:
        batch = batches[batch_stream(row["batch_id"])]
        states = batch.states()
        assert row == {
            "batch_id": batch.batch_id, "batch_type": batch.kind, "state": batch.state, "tasks": len(batch.tasks),
            "finished": states["finished"], "failed": states["failed"], "dropped": states["dropped"],
            "failed_attempts": sum(batch.failures.values()), "experiences": batch.experiences,
            "prompt_tokens": batch.prompt_tokens, "response_tokens": batch.tokens,
            "reward": None if batch.reward is None else pytest.approx(batch.reward),
            "model_version": newest(batch), "sent": len({s.task for s in batch.sent}),
            "staleness": None if batch.staleness is None else pytest.approx(batch.staleness),
            "submitted_at": batch.submitted, "ended_at": batch.ended, "first_position": batch.position,
            "last_position": batch.last, "trained_step": batch.step, "trained_at": batch.trained,
            "seconds": None if batch.ended is None else batch.ended - batch.submitted,
        }, row["batch_id"]


def newest(batch: Batch) -> int | None:
    return max((t.newest for t in batch.tasks if t.newest is not None), default=None)


def test_one_batch_task_by_task(path: Path, batches: dict[str, Batch]) -> None:
    for batch in batches.values():
        shown = told(path, "show", name_of(batch))
        assert shown["batch_id"] == batch.batch_id
        for task, want in zip(shown["tasks"], batch.tasks, strict=True):
            assert (task["state"], task["response_tokens"], task["ended_at"], task["runs"]) == (
                batch.task_state(task["task"]), want.tokens, want.ended, want.runs)
            assert task["reward"] == (pytest.approx(mean(want.rewards.values())) if want.rewards else None)
            assert [(a["run_id_base"], a["runs"], a["attempt"], a["runner"], a["incarnation"], a["dispatched_at"],
                     a["ended_at"], a["outcome"], a["seconds"], a["completed_runs"]) for a in task["attempts"]] == [
                (s.base, s.runs, s.attempt, s.runner, s.life, s.at, s.ended, s.outcome, s.seconds, s.done)
                for s in batch.sent if s.task == task["task"]]
        versions = Counter(t.newest for t in batch.tasks if t.newest is not None)
        assert shown["versions"] == {str(version): n for version, n in sorted(versions.items())}
        whole = (batch.last_at if batch.ended is None else batch.ended) - batch.submitted
        assert sum(piece["seconds"] for piece in shown["pieces"]) == pytest.approx(whole)


def mean(values: Any) -> float:
    return sum(values) / len(values)


def test_a_batch_as_it_was_and_what_changed_since(path: Path, events: list[Event]) -> None:
    chance = Random(7)
    for at in chance.sample(range(events[0].position, events[-1].position), 12):
        then = count(events, at)
        batch = chance.choice(list(then.values()))
        state = told(path, "replay", name_of(batch), "--at", at)["state"]
        told_tasks = [batch.task_state(n) for n in range(len(batch.tasks))]
        assert (state["batch_id"], state["state"]) == (batch.batch_id, batch.state), at
        assert state["completed_task_count"] == sum(t.settled for t in batch.tasks)
        assert len(state["dropped"]) == told_tasks.count("dropped")
        flying = {(s.task, s.base) for s in batch.sent if s.outcome == "running"}
        assert {(f["unit"]["task"], f["unit"]["run_id_base"]) for f in state["running"]} == flying
        assert state["failed_attempts"] == sum(batch.failures.values())
        assert sum(ref["count"] for ref in state["experiences"]) == batch.delivered
        now = count(events)[batch_stream(batch.batch_id)]
        changed = {c["path"]: (c["before"], c["after"])
                   for c in told(path, "diff", name_of(batch), "--at", at)["changes"]}
        for figure, a, b in (("failed attempts", sum(batch.failures.values()), sum(now.failures.values())),
                             ("experiences delivered", batch.delivered, now.delivered),
                             ("tasks dropped", batch.states()["dropped"], now.states()["dropped"])):
            assert changed.get(figure) == (None if a == b else (a, b)), (at, figure)


def test_lives_of_runners_and_what_they_cost(path: Path, events: list[Event]) -> None:
    lives = {(e.data["runner"], e.data["incarnation"]) for e in events if e.stream.startswith("runner/")}
    starts = Counter((e.data["runner"], e.data["incarnation"]) for e in events if e.type == "RunnerStarted")
    ends: dict[tuple[str, int], Event] = {}
    for event in events:
        if event.type in ("RunnerLost", "RunnerFailed", "RunnerQuarantined", "RunnerRetired"):
            ends.setdefault((event.data["runner"], event.data["incarnation"]), event)
        elif event.type == "RunnerReady":  # its engine had failed, and is there after all
            ends.pop((event.data["runner"], event.data["incarnation"]), None)
    attempts, seconds, sent = Counter[tuple[str, int]](), Counter[tuple[str, int]](), dict[Any, float]()
    for event in events:
        if event.type == "TasksDispatched":
            sent.update({(event.stream, event.data["runner"], event.data["incarnation"], u["task"], u["run_id_base"],
                          u["attempt"]): event.at for u in event.data["units"]})
        if event.type == "AttemptFailed" and event.data["kind"] == "runner_lost":
            key = event.data["runner"], event.data["incarnation"]
            began = sent[event.stream, *key, event.data["task"], event.data["run_id_base"], event.data["attempt"]]
            attempts[key] += 1
            seconds[key] += max(0.0, min(event.at, ends[key].at if key in ends else event.at) - began)
    shown = told(path, "runners")
    assert {(life["runner"], life["incarnation"]) for life in shown} == lives
    for life in shown:
        key = life["runner"], life["incarnation"]
        assert life["attempts_lost"] == attempts[key]
        assert (life["how"] in (*DEATHS, "retired")) == (key in ends), life
        if key in ends:
            assert life["ended_at"] == ends[key].at
            if starts[key] == 1:  # the stand-in of the guardian numbers lives anew after the end of everything
                assert life["seconds_lost"] == pytest.approx(seconds[key])


def test_prompts(path: Path, batches: dict[str, Batch]) -> None:
    shown = told(path, "prompts")
    tried = {(s, sent.task) for s, b in batches.items() for sent in b.sent}
    assert shown["tasks"] == sum(len(b.tasks) for b in batches.values())
    assert shown["sent"] == len(tried)
    assert {(batch_stream(u["batch_id"]), u["task"]) for u in shown["never"]} == {
        (s, n) for s, b in batches.items() for n in range(len(b.tasks))} - tried


def test_usage(path: Path, events: list[Event]) -> None:
    """Takes and acknowledged steps, experience by experience."""
    shown = told(path, "usage")
    assert shown["more"] > 0
    delivered: dict[tuple[str, int], int] = {}
    current: dict[str, tuple[str, int]] = {}
    taken: list[tuple[tuple[str, int], int, int | None]] = []
    whole: list[tuple[tuple[str, int], int]] = []
    for event in events:
        match event.type:
            case "BatchFinalized" if event.data["result"]["batch_type"] == "train":
                current[event.stream] = event.stream, event.version
                delivered[event.stream, event.version] = event.data["selected"]
            case "BatchTrained" if event.stream in current:
                whole.append((current[event.stream], event.position))
            case "ExperiencesTaken":
                taken += [((batch_stream(i["batch_id"]), i["version"]), i["first"] + n, event.data["step"])
                          for i in event.data["items"] for n in range(i["count"])]
            case "ExperiencesReturned":
                taken = [t for t in taken if t[2] is None or t[2] <= event.data["step"]]
    queued = {key for key, _, _ in taken}
    uses = Counter((key, n) for key, n, _ in taken)
    uses.update((key, n) for key, _ in whole if key not in queued for n in range(delivered[key]))
    of_all = [uses[key, n] for key, much in delivered.items() for n in range(much)]
    assert (shown["delivered"], shown["never"], shown["once"], shown["more"]) == (
        len(of_all), of_all.count(0), of_all.count(1), sum(n > 1 for n in of_all))


def test_weights(path: Path, events: list[Event]) -> None:
    published: dict[int, list[Event]] = {}
    for event in events:
        if event.type == "WeightsPublished":
            published.setdefault(event.data["version"], []).append(event)
    shown = told(path, "weights")
    assert [w["method"] for w in shown[-2:]] == ["checkpoint", "memory"]
    assert [(w["version"], w["published_at"], w["position"], w["method"], w["path"]) for w in shown] == [
        (v, all_of[0].at, all_of[0].position, all_of[-1].data["method"], all_of[-1].data["path"])
        for v, all_of in published.items()]
    assert [load["seconds"] for w in shown for load in w["loads"]] == [
        e.data["seconds"] for v in published for e in events if e.type == "WeightsLoaded" and e.data["version"] == v]
    for name, kind in (("loads", "WeightsLoaded"), ("failures", "WeightsFailed")):
        assert [(w["version"], load["runner"], load["incarnation"], load["at"]) for w in shown for load in w[name]] == [
            (v, e.data["runner"], e.data["incarnation"], e.at) for v in published for e in events
            if e.type == kind and e.data["version"] == v]


def test_prometheus_and_the_first_page(log: Log, path: Path, events: list[Event], batches: dict[str, Batch]) -> None:
    found = {(s.name, *sorted(s.labels.values())): s.value for family in text_string_to_metric_families(
        prometheus_text(log, now=events[-1].at + 5).decode()) for s in family.samples}
    states, failures = Counter[str](), Counter[str]()
    for batch in batches.values():
        states.update(batch.states())
        failures.update(batch.failures)
    tokens = sum(b.tokens for b in batches.values())
    ended = [b for b in batches.values() if b.kind == "train" and b.state == "finalized"]
    last = max(ended, key=lambda b: (b.ended or 0.0, -b.position))
    want = {
        "tasks_submitted_total": sum(len(b.tasks) for b in batches.values()),
        "tasks_finished_total": states["finished"], "tasks_failed_total": states["failed"],
        "tasks_dropped_total": states["dropped"], "experiences_total": sum(b.experiences for b in batches.values()),
        "experiences_dropped_total": sum(b.filtered for b in batches.values()),
        "prompt_tokens_total": sum(b.prompt_tokens for b in batches.values()), "response_tokens_total": tokens,
        "batch_duration_seconds": (last.ended or 0.0) - last.submitted,
        "trained_step": max(b.step for b in batches.values() if b.step is not None),
        "weights_version": [e.data["version"] for e in events if e.type == "WeightsPublished"][-1],
        "coordinator_starts_total": sum(e.type == "CoordinatorStarted" for e in events),
        "stalls_total": sum(e.type == "StallDetected" for e in events), "log_head_position": len(events),
        "last_event_timestamp_seconds": events[-1].at, "last_event_age_seconds": 5.0,
    }
    want |= {f"batch_{name}": value for name, value in (("reward", last.reward), ("staleness_versions", last.staleness))
             if value is not None}
    for name, value in want.items():
        assert found.pop((f"trinity_es_{name}",)) == pytest.approx(value), name
    for kind, n in failures.items():
        assert found.pop(("trinity_es_attempts_failed_total", kind)) == n
    for (kind, state), n in Counter((b.kind, b.state) for b in batches.values()).items():
        assert found.pop(("trinity_es_batches", *sorted((kind, state)))) == n
    seen = log.overview()
    assert (seen.tasks, seen.finished, seen.failed, seen.dropped, seen.response_tokens, seen.failed_attempts) == (
        want["tasks_submitted_total"], states["finished"], states["failed"], states["dropped"], tokens,
        sum(failures.values()))
    assert sum(t.tokens * t.seconds for t in seen.throughput) == pytest.approx(tokens)
    assert sum(t.tasks * t.seconds for t in seen.throughput) == pytest.approx(states["finished"])
    finalized = sorted((b for b in batches.values() if b.state == "finalized"), key=lambda b: (b.ended, b.last))
    assert [p.value for p in seen.rewards] == pytest.approx(
        [b.reward for b in finalized if b.kind != "eval" and b.reward is not None])
    assert [p.value for p in seen.evals] == pytest.approx(
        [b.reward for b in finalized if b.kind == "eval" and b.reward is not None])
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        html = client.get("/").text
    page = plain(html)
    alone = next(p for p in seen.rewards if sum(other.step == p.step for other in seen.rewards) == 1)
    assert f"{alone.value:.6f}"[:8].rstrip("0") in html
    assert f"tasks finished {states['finished']:,} of {want['tasks_submitted_total']:,} " in page
    assert f"response tokens {tokens:,} " in page
    assert f"failed attempts {sum(failures.values()):,} " in page
    assert f"runner deaths {found.pop(('trinity_es_runner_deaths_total',)):.0f} " in page


def plain(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def test_pages_of_batches(path: Path, batches: dict[str, Batch]) -> None:
    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        for batch in batches.values():
            page, states = plain(client.get(batch_url(batch.batch_id)).text), batch.states()
            settled = states["finished"] + states["failed"]
            for said in (
                f"tasks settled {settled} of {len(batch.tasks)} running {states['running']} failed {states['failed']} "
                f"dropped {states['dropped']} failed attempts {sum(batch.failures.values())} ",
                f"experiences {batch.experiences:,} response tokens {batch.tokens:,} ",
                f"positions {batch.position:,} to {batch.last:,} ",
            ):
                assert said in page, (batch.batch_id, said)
            rewards = [r for t in batch.tasks for r in t.rewards.values()]
            rows = sum(len(t.done | t.lost) for t in batch.tasks)
            if rows:
                runs = plain(client.get(rollouts_url(batch.batch_id)).text)
                found = re.search(r"(\d+) runs?; reward ([-\d.]+) to ([-\d.]+), mean ([-\d.]+)", runs)
                assert (found is not None) == bool(rewards), runs
                if found is not None:
                    assert int(found[1]) == rows
                    assert [float(found[n]) for n in (2, 3, 4)] == pytest.approx(
                        [min(rewards), max(rewards), mean(rewards)], abs=1e-3)


def test_spans(log: Log, batches: dict[str, Batch]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    for stream, batch in batches.items():
        if batch.ended is None:
            continue
        whole, *parts = spans_of(fold_timeline(log.events(batch.batch_id)), stream, "generation")
        about, states = whole.attributes or {}, batch.states()
        rewards = [r for t in batch.tasks for r in t.rewards.values()]
        assert {name: about.get(f"rl.{name}") for name in (
            "batch.state", "batch.tasks", "batch.tasks.finished", "batch.tasks.failed", "batch.tasks.dropped",
            "batch.attempts.failed", "tokens.response", "reward", "weights.version")} == {
            "batch.state": batch.state, "batch.tasks": len(batch.tasks), "batch.tasks.finished": states["finished"],
            "batch.tasks.failed": states["failed"], "batch.tasks.dropped": states["dropped"],
            "batch.attempts.failed": sum(batch.failures.values()), "tokens.response": batch.tokens,
            "reward": pytest.approx(mean(rewards)) if rewards else None, "weights.version": newest(batch)}
        assert (whole.end_time or 0) - (whole.start_time or 0) == pytest.approx(
            1e9 * (batch.ended - batch.submitted), abs=2000)
        attempts = [p for p in parts if p.name == "rl.attempt"]
        assert Counter((p.attributes or {})["rl.attempt.outcome"] for p in attempts) == Counter(
            s.outcome for s in batch.sent)
        assert sum((p.end_time or 0) - (p.start_time or 0) for p in attempts) == pytest.approx(
            1e9 * sum((batch.ended if s.ended is None else s.ended) - s.at for s in batch.sent), abs=2000 * len(parts))


def test_the_trace_for_perfetto(log: Log, events: list[Event]) -> None:
    entries = list(trace_events(log.events()))
    slices = [e for e in entries if e["ph"] == "X"]
    whole = 1e6 * (events[-1].at - events[0].at)
    assert all(e["ts"] >= 0 and 0 <= e["dur"] <= whole + 1 for e in slices)
    assert {e["name"] for e in entries if e["ph"] == "i" and e["cat"] == "weights"} == {
        f"weights {e.data['version']}" + " failed" * (e.type == "WeightsFailed")
        for e in events if e.type in ("WeightsPublished", "WeightsFailed")}
    every: list[Any] = []  # of each submission
    ends = [e.position - 1 for e in events if e.type == "BatchSubmitted"] + [events[-1].position]
    firsts: dict[str, int] = {}
    for at in ends:
        for stream, batch in count(events, at).items():
            again = next((e for e in events if e.position == at + 1 and e.stream == stream), None)
            if again is not None or at == ends[-1]:
                every += batch.sent
                firsts[stream] = batch.position
    of_attempts = [e for e in slices if "attempt" in e["args"]]
    assert Counter(e["cat"] for e in of_attempts) == Counter(s.outcome for s in every)
    assert sum(e["dur"] for e in of_attempts) == pytest.approx(
        1e6 * sum((events[-1].at if s.ended is None else s.ended) - s.at for s in every), abs=len(every))
    lanes: dict[tuple[int, int], float] = {}
    for e in sorted(of_attempts, key=lambda e: (e["ts"], e["dur"])):  # no two of a lane at once
        assert e["ts"] >= lanes.get((e["pid"], e["tid"]), 0.0) - 0.2
        lanes[e["pid"], e["tid"]] = e["ts"] + e["dur"]


def test_the_run_at_a_glance(log: Log, events: list[Event], batches: dict[str, Batch]) -> None:
    seen = read_overview(log, now=events[-1].at + 3600)
    assert {batch_stream(r.batch_id) for r in seen.open_batches} == {s for s, b in batches.items() if b.ended is None}
    window = [e for e in events if e.at > events[-1].at - 30.0 and e.type in ("RunsFinished", "TaskFinished")]
    tokens = sum(r["response_tokens"] for e in window for r in e.data["runs"])
    assert seen.tokens_per_second == pytest.approx(tokens / 30.0)
    assert seen.tasks_per_second == pytest.approx(sum(e.type == "TaskFinished" for e in window) / 30.0)
