"""Monitors: where metrics go, and that none of them can stop a run (P37)."""

from __future__ import annotations

import asyncio
import json
import math
import posixpath
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.handmade import ROOT, finished, write
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, LogUnavailable
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.tables.read_models import projectors
from trinity_es.run.writable_log_wait import retry_until_written
from trinity_es.telemetry.metrics_file import JsonlMonitor, read_metrics
from trinity_es.telemetry.monitors import Monitors, finite_metrics
from trinity_es.testing import wait_until

HERE = "tests.full.test_monitors"


class Mine:
    made: list[Mine] = []  # noqa: RUF012  # shared on purpose: the test finds it here

    def __init__(self, fails: bool = False, hangs: bool = False) -> None:
        self.fails, self.hangs, self.rows, self.closed = fails, hangs, [], False
        self.go = threading.Event()
        Mine.made.append(self)

    rows: list[tuple[int, dict[str, float]]]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.fails:
            raise OSError("the server is away")
        if self.hangs:
            self.go.wait(60)
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


class NoMonitor:
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...


def config(folder: Path, *types: str, **args: dict[str, Any]) -> Config:
    names = {"Mine": f"{HERE}:Mine"}
    monitor = {"monitor_type": list(types), "monitor_args": {names.get(k, k): v for k, v in args.items()}}
    return Config.from_dict({"name": "r", "monitor": monitor}, folder=folder)


def told(conf: Config, *rows: tuple[Any, ...], after: float | None = None) -> None:
    """Have a run's monitors log these, and end. A row: metrics, step, and perhaps their prefix and position."""
    monitors = Monitors(conf, after=after)
    for metrics, step, *more in rows:
        prefix, position = more or ("rollout", None)
        if finite := finite_metrics(metrics, prefix):
            monitors.log((finite, step, position, None))
    monitors.close()


def put_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- jsonl ----------------------------------------------------------------------------------------------------------
def test_p37_jsonl_is_always_on_with_slash_names_step_and_time(tmp_path: Path) -> None:
    told(config(tmp_path), ({"rollout/reward/mean": 0.5, "nan/value": float("nan")}, 1),
         ({"loss": 2.0}, 1, "trainer", 7), ({"eval/check/reward/mean@1": 1}, 2))
    path = tmp_path / "runs/trinity/r/metrics.jsonl"
    assert [{k: v for k, v in row.items() if k != "time"} for row in lines(path)] == [
        {"step": 1, "rollout/reward/mean": 0.5}, {"step": 1, "position": 7, "trainer/loss": 2.0},
        {"step": 2, "eval/check/reward/mean@1": 1.0},
    ]
    assert abs(lines(path)[0]["time"] - time.time()) < 60
    assert read_metrics(path) == {
        1: {"rollout/reward/mean": 0.5, "trainer/loss": 2.0}, 2: {"eval/check/reward/mean@1": 1.0},
    }


def test_p37_a_run_that_goes_on_writes_the_file_anew_and_keeps_what_is_not_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf = config(tmp_path)
    write(place(conf), [batch(1, "train", 1.0)])
    whole = followed(conf, None)
    path = Path(conf.run_dir) / "metrics.jsonl"
    written = path.read_bytes()
    with path.open("a") as file:
        file.write('{"step": 3, "ti')  # the process died here
    assert followed(conf, 1) == whole
    assert path.read_bytes() == written
    assert [p.name for p in path.parent.glob("metrics.jsonl*")] == ["metrics.jsonl"]
    alike = re.sub(r'"time":[\d.]+', '"time":1.5', written.decode())  # of a run that had the same events before
    for n, mine in enumerate(['{"note": "mine"}\n', '{"note": "mine"}', alike], 1):
        path.write_text(mine)
        assert followed(conf, 1) == whole
        assert path.with_name(f"metrics.jsonl.{n}").read_text() == mine
    assert "has lines of another run" in caplog.text


@pytest.mark.parametrize("room", [0, 10])
def test_lines_that_a_full_disk_does_not_take_are_written_when_it_has_room(tmp_path: Path, room: int) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    monitor.log({"a/x": 1.0}, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match=r"File too large|No space left"):
                monitor.log({"a/x": float(step)}, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row["step"] for row in lines(path)] == [1], "half a line was left"
    monitor.log({"a/x": 4.0}, 4)
    monitor.close()
    assert read_metrics(path) == {step: {"a/x": float(step)} for step in (1, 2, 3, 4)}


def test_a_run_waits_while_the_log_can_not_be_written(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[Exception] = [LogUnavailable("the disk of /here is full"), LogUnavailable("the disk of /here is full")]

    async def ask() -> int:
        if faults:
            raise faults.pop()
        return 7

    assert asyncio.run(retry_until_written(ask)) == 7
    assert caplog.messages == ["the run waits: the disk of /here is full", "the run goes on"]


def batch(batch_id: int | str, kind: str, *losses: float) -> tuple[str, list[ev.Event]]:
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=batch_id, batch_type=kind, repeat_times=[2], tasks=[{}]),  # type: ignore[arg-type]  # one of the two
        finished(0, "raw"),
    ]
    state = fold(events)
    events.append(ev.BatchFinalized(result=batch_result(state)))
    trained = [ev.BatchTrained(step=int(batch_id), metrics={"loss": x, "rollout/reward/mean": 9.0}) for x in losses]
    return f"batch/{batch_id}", [*events, *trained]


def place(conf: Config) -> Path:
    path = Path(conf.store.url.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def followed(conf: Config, after: float | None) -> list[tuple[int, list[str]]]:
    """What is in the file after a run on this log: each line's step, and the first parts of its names."""
    monitors = Monitors(conf, after=after)
    monitors.follow()
    monitors.close()
    found = lines(Path(conf.run_dir) / "metrics.jsonl")
    return [(r["step"], sorted({n.partition("/")[0] for n in r} - {"step", "time", "position"})) for r in found]


EVAL, ROLLOUT, TRAINER = ["eval"], ["explore", "explorer", "rollout"], ["trainer"]


def test_p37_metrics_are_those_of_the_log(tmp_path: Path) -> None:
    conf = config(tmp_path)
    monitors = Monitors(conf)
    monitors.follow()  # before there is a log
    write(place(conf), [batch(1, "train", 0.5), batch("1/check", "eval"), batch("odd", "eval")])
    path = Path(conf.run_dir) / "metrics.jsonl"
    wait_until(lambda: len(path.read_text().splitlines()) == 3, "three lines")
    monitors.close()
    found = read_metrics(path)
    assert list(found) == [1]
    assert (found[1]["trainer/loss"], found[1]["trainer/rollout/reward/mean"]) == (0.5, 9.0)
    assert found[1]["rollout/reward/mean"] != 9.0, "a trainer's metric is no step's"
    assert found[1]["rollout/finished_task_count"] == found[1]["eval/check/finished_task_count"] == 1.0


def test_p37_what_a_life_did_not_get_to_write_is_written_by_the_next_and_nothing_twice(tmp_path: Path) -> None:
    conf = config(tmp_path)
    write(place(conf), [
        batch(1, "train", 1.0), batch("1/check", "eval"), batch(2, "train", 2.0), batch(3, "train", 3.0, 3.5),
    ])
    everything = [(1, ROLLOUT), (1, TRAINER), (1, EVAL), (2, ROLLOUT), (2, TRAINER), (3, ROLLOUT)]
    assert followed(conf, None) == [*everything, (3, TRAINER), (3, TRAINER)]
    assert followed(conf, 2) == everything  # step 3 is trained again
    assert followed(conf, 2) == everything
    path = Path(conf.run_dir) / "metrics.jsonl"
    for left in (0, 1, 3):  # it died before it wrote the rest
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
        assert followed(conf, 2) == everything
    path.unlink()
    assert followed(conf, 3) == [*everything, (3, TRAINER)]  # the last training counts
    assert read_metrics(path)[3]["trainer/loss"] == 3.5
    with EventLog.open(conf.store.url, durability="process", projectors=projectors()) as log:
        event = ev.BatchTrained(step=2, metrics={"loss": 2.5})
        log.append([Write(stream="batch/2", expected_version=4, events=[event])], commit_id="again")
    assert followed(conf, 3)[-1] == (2, TRAINER)
    path.unlink()
    last = [(3, ROLLOUT), (3, TRAINER), (2, TRAINER)]  # a trainer elsewhere, which nothing happened to
    assert followed(conf, math.inf)[-3:] == last
    assert followed(conf, math.inf)[-3:] == last


# --- the others -----------------------------------------------------------------------------------------------------
def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_p37_tensorboard_shows_every_step_once_also_after_later_ones_and_a_resume(tmp_path: Path) -> None:
    conf = config(tmp_path, "tensorboard", tensorboard={"path": "tb"})
    x, late = "rollout/x", "eval/e/x"
    told(conf, *(({name: step / 4}, step) for name, step in ((x, 1), (x, 2), (late, 1), (x, 3), (late, 3))))
    folder = Path(conf.run_dir) / "tb"
    assert scalars(folder) == {x: [(1, 0.25), (2, 0.5), (3, 0.75)], late: [(1, 0.25), (3, 0.75)]}
    time.sleep(1.1)  # TensorBoard orders a folder's files by the second of their making
    told(conf, ({x: 8.0}, 3), after=2)
    assert scalars(folder) == {x: [(1, 0.25), (2, 0.5), (3, 8.0)], late: [(1, 0.25)]}


def test_p37_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from trinity_es.telemetry.monitor_services import TensorboardMonitor as T; t = T(sys.argv[1]); "
        "t.log({'a/b': 1.0}, 1); t.close(); print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tb")], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
    assert scalars(tmp_path / "tb") == {"a/b": [(1, 1.0)]}


@pytest.mark.parametrize("package", ["wandb", "trackio", "swanlab"])
def test_p37_a_service_has_one_run_for_all_lives(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb drops what comes with a step before its newest, as evals do: it gets ours as a metric, the x axis of all.
    """
    began: list[dict[str, Any]] = []
    said: list[Any] = []
    run = SimpleNamespace(
        log=lambda metrics, step=None: said.append((metrics, step)), finish=lambda: said.append("finish"),
        define_metric=lambda name, step_metric=None: said.append((name, step_metric)))

    def init(**args: Any) -> Any:
        began.append(args)
        return run

    put_in(monkeypatch, package, init=init)
    conf = config(tmp_path, package, **{package: {"group": "g", "project": "mine"}})
    for after in (None, 1):
        told(conf, ({"a/b": 1.0}, 2), ({"a/b": 2.0}, 1), after=after)
    wandb = [("step", None), ("*", "step"), ({"a/b": 1.0, "step": 2}, None), ({"a/b": 2.0, "step": 1}, None), "finish"]
    assert said == (wandb if package == "wandb" else [({"a/b": 1.0}, 2), ({"a/b": 2.0}, 1), "finish"]) * 2
    assert began[0] == began[1]
    assert (began[0]["project"], began[0]["group"], began[0]["resume"]) == ("mine", "g", "allow")
    told(conf)
    assert len(began) == 2  # nothing to say: no run there
    told(config(tmp_path / "other", package), ({"a/b": 1.0}, 1))
    name = "name" if package == "trackio" else "id"
    assert began[2][name] != began[0][name], "another store is another run"


class Mlflow:
    """What of MLflow's client the monitor asks; metrics in batches of at most a thousand, as its server takes them."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.experiments: dict[str, str] = {}
        self.told: list[tuple[str, str, float, int]] = []
        self.statuses: list[str] = []

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return found and SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
        return [r for r in self.runs if r.experiment in experiments
                and filter_string == f"tags.`trinity_es.run` = '{r.tags['trinity_es.run']}'"]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        number = SimpleNamespace(run_id=f"run-{len(self.runs)}")
        self.runs.append(SimpleNamespace(experiment=experiment, name=run_name, tags=tags, info=number))
        return self.runs[-1]

    def update_run(self, run_id: str, status: str) -> None:
        self.statuses.append(status)

    def set_terminated(self, run_id: str) -> None:
        self.statuses.append("FINISHED")

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        assert len(metrics) <= 1000
        for name, *_ in metrics:  # one that it refuses takes all others of the call with it
            assert re.fullmatch(r"[/\w.\- :]{1,250}", name), name
            assert posixpath.normpath(name) == name.removeprefix("/"), name
        self.told += [(run_id, name, value, step) for name, value, _, step in metrics]


def test_p37_mlflow_has_one_run_for_all_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Mlflow()
    asked: list[str] = []

    def client(tracking_uri: str) -> Mlflow:
        asked.append(tracking_uri)
        return server

    put_in(monkeypatch, "mlflow", MlflowClient=client)
    put_in(monkeypatch, "mlflow.entities", Metric=lambda *values: values)
    conf = config(tmp_path, "mlflow", mlflow={"tracking_uri": "http://x:1", "experiment": "mine"})
    odd = {"rollout/right (%)/mean": 2.0, "rollout//a/../b": 3.0, "/c/": 4.0, f"rollout/{'d' * 300}": 5.0}
    for after in (None, 1):
        told(conf, ({"eval/a/mean@4": 1.0} | {f"a/{n}": 0.5 for n in range(1496)} | odd, (after or 0) + 1), after=after)
    assert asked == ["http://x:1"] * 2
    assert [(r.experiment, r.name) for r in server.runs] == [("0", "r")]
    assert list(server.experiments) == ["mine"]
    assert server.statuses == ["RUNNING", "FINISHED"] * 2
    assert len(server.told) == 2 * 1501
    names = ["eval/a/mean_at_4", "rollout/right ___/mean", "rollout/b", "c", f"rollout/{'d' * 242}"]
    assert {t for t in server.told if t[2] != 0.5} == {
        ("run-0", name, float(value), step) for step in (1, 2) for value, name in enumerate(names, 1)
    }


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow", "swanlab"])
def test_p37_a_missing_package_is_named_by_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name] or [name]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'trinity-es\[{name}\]'"):
        Monitors(config(tmp_path, name))


@pytest.mark.parametrize(("types", "args", "says"), [
    (["csv"], {}, "no monitor 'csv'; known: mlflow, swanlab, tensorboard, trackio, wandb"),
    ([f"{HERE}:NoMonitor"], {}, "no method close"),
    ([f"{HERE}:Mine"], {"Mine": {"colour": "red"}}, "can't be built with"),
    ([], {"wandb": {}}, "monitor_args has 'wandb'"),
])
def test_p37_a_monitor_that_can_not_work_is_refused_at_the_start(
    types: list[str], args: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        Monitors(config(tmp_path, *types, **args))


def test_p37_a_failing_monitor_is_named_and_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    conf = config(tmp_path, f"{HERE}:Mine", "tensorboard", Mine={"fails": True})
    told(conf, *(({"a/b": 1.0}, step) for step in (1, 2, 3)))
    assert [message for message in caplog.messages if "the server is away" in message] == [
        f"monitor {HERE}:Mine fails, the run goes on (said once): OSError: the server is away"
    ]
    assert Mine.made[-1].closed
    assert [step for step, _ in scalars(Path(conf.run_dir) / "tensorboard")["a/b"]] == [1, 2, 3]
    assert sorted(read_metrics(Path(conf.run_dir) / "metrics.jsonl")) == [1, 2, 3]


def test_p37_a_monitor_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    conf = config(tmp_path, f"{HERE}:Mine", Mine={"hangs": True})
    monitors = Monitors(conf)
    for step in (1, 2, 3):
        monitors.log(({"a/b": 1.0}, step, None, None))  # would wait a minute each
    assert sorted(read_metrics(Path(conf.run_dir) / "metrics.jsonl")) == [1, 2, 3]
    mine = Mine.made[-1]
    mine.go.set()
    wait_until(lambda: len(mine.rows) == 3, "the monitor to catch up")
    monitors.close()
    assert [step for step, _ in mine.rows] == [1, 2, 3]


def test_p37_a_metrics_file_that_fails_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    conf = config(tmp_path)
    (Path(conf.run_dir) / "metrics.jsonl").mkdir(parents=True)
    told(conf, ({"a/b": 1.0}, 1))
    assert "monitor jsonl fails" in caplog.text
