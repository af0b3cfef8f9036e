"""A log's metrics: right, few, named as Prometheus wants it, in the docs and in the Grafana file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from benchmarks import sample_log
from tests.helpers.handmade import ROOT, history, write
from trinity_es.dashboard.app import create_app
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.telemetry.prometheus import CONTENT_TYPE, METRICS, prometheus_text

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(path: Path, now: float | None = None) -> Series:
    with open_log(str(path)) as log:
        text = prometheus_text(log, now).decode()
    return {(s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(text) for s in family.samples}


def one(found: Series, name: str, **labels: str) -> float:
    return found[f"trinity_es_{name}", tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "log.db"
    sample_log.make(str(path), batches=12, tasks=8, seed=1, payloads=False)
    return path


def test_a_new_log_says_what_is_zero_and_leaves_out_what_there_is_not(tmp_path: Path) -> None:
    EventLog.open(str(tmp_path / "log.db"), create=True, durability="process", projectors=projectors()).close()
    found = scraped(tmp_path / "log.db")
    assert one(found, "log_head_position") == one(found, "tasks_submitted_total") == 0
    assert not any(name in {"trinity_es_batch_reward", "trinity_es_last_event_age_seconds"} for name, _ in found)


def test_no_label_can_take_a_value_that_is_not_in_the_docs(tmp_path: Path, sample: Path) -> None:
    write(tmp_path / "log.db", history("0" * 64))
    series = set(scraped(sample))
    assert set(scraped(tmp_path / "log.db")) <= series  # the same ones, whatever the run
    assert len(series) < 60
    allowed = {metric.name: metric.labels for metric in METRICS}
    for name, labels in series:
        assert all(value in allowed[name][label] for label, value in labels)


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"trinity_es(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)(_|$)", metric.name)
        assert metric.help.endswith(".")


def test_the_docs_are_those_that_the_code_prints() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "trinity_es.telemetry.prometheus"], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=60,
    ).stdout
    assert (ROOT / "docs" / "METRICS.md").read_text() == printed, "print it again"


def test_grafana_asks_for_metrics_and_labels_that_there_are() -> None:
    dashboard = orjson.loads((ROOT / "docs" / "grafana.json").read_bytes())
    known = {metric.name: {*metric.labels, "job"} for metric in METRICS}
    asked: set[str] = set()
    for panel in dashboard["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            found = re.findall(r"(trinity_es_\w+)(?:\{([^}]*)\})?", target["expr"])
            assert found, target
            for name, labels in found:
                assert name in known, f"{panel['title']}: there is no {name}"
                asked.add(name)
                assert {label.split("=")[0] for label in re.findall(r"\w+=", labels)} <= known[name]
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= known[found[0][0]]
    assert asked == known.keys(), "a metric that nobody sees"


def test_every_end_of_a_runner_that_was_not_wanted_is_a_death(tmp_path: Path) -> None:
    ends: list[list[ev.Event]] = [
        [ev.RunnerLost(runner="r", incarnation=1, reason="killed")],
        [ev.RunnerFailed(runner="r", incarnation=2, reason="no memory")],
        [ev.RunnerQuarantined(runner="r", incarnation=3, deaths=3, period_seconds=600, reason="too often")],
        [ev.RunnerRetired(runner="r", incarnation=4)],
        [],
    ]
    lives: list[ev.Event] = []
    for i, end in enumerate(ends, 1):
        lives += [ev.RunnerStarted(runner="r", incarnation=i, pid=i, host="here", engine="vllm"), *end]
    write(tmp_path / "log.db", [("runner/r", lives)])
    found = scraped(tmp_path / "log.db")
    assert one(found, "runner_deaths_total") == 3
    states = {dict(labels)["state"]: value for (name, labels), value in found.items() if name == "trinity_es_runners"}
    assert states == dict.fromkeys(states, 0) | {"starting": 1}


def asked(path: Path, token: str | None = None, **headers: str) -> Any:
    with TestClient(create_app(str(path), token=token), base_url="http://localhost") as client:
        return client.get("/metrics", headers=headers)


def test_the_dashboard_serves_the_metrics_of_its_log_to_who_brings_its_token(sample: Path, tmp_path: Path) -> None:
    answer = asked(sample)
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    with open_log(str(sample)) as log:
        expected = prometheus_text(log).splitlines()
    assert answer.content.splitlines()[:-1] == expected[:-1]  # the last line is the age
    assert asked(sample, "long enough").status_code == 401
    assert asked(sample, "long enough", Authorization="Bearer long enough").status_code == 200
    answer = asked(tmp_path / "none.db")
    assert answer.status_code == 503
    assert "no log at" in answer.text
