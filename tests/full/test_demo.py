"""The demo from end to end on the real actor system, and that what a command started it also ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.paths import ROOT
from trinity_es import open_log
from trinity_es.cli.demo_folder import eval_interval, find_examples, judge, make
from trinity_es.config.config import load_config
from trinity_es.system import leftovers
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(300)


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "trinity_es", *map(str, args)]


def run(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command(*args), cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


def left_of(config: Path) -> list[int]:
    return [p.pid for p in leftovers.leftovers(load_config(config))]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """(folder, summary, stderr) of a demo with the scripted engine."""
    home = tmp_path_factory.mktemp("home")
    done = run("demo", "--engine", "scripted", "--steps", 3, "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    (folder,) = (home / "runs").iterdir()
    yield folder, json.loads(done.stdout), done.stderr
    assert left_of(folder / "config.yaml") == []


def test_the_demo_runs_to_its_end_and_sums_up_what_the_log_says(demo: tuple[Path, dict[str, Any], str]) -> None:
    folder, told, stderr = demo
    assert (told["train_batches"], told["batches"], told["failed_attempts"]) == (3, 5, 0)
    assert [e["batch_id"] for e in told["evals"]] == ["0/letters", "3/letters"]
    assert told["response_tokens"] == 3 * 32 * 8 * 8 + 2 * 16 * 4 * 8
    assert told["learned"] is None
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "loading engine" in stderr
    assert "step 3/3  32/32 tasks" in stderr


def test_no_process_is_left_behind_by_the_demo(demo: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, _ = demo
    assert left_of(folder / "config.yaml") == []
    named = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    assert named == []


def test_the_log_of_the_demo_is_found_and_sound(demo: tuple[Path, dict[str, Any], str]) -> None:
    folder, told, _ = demo
    home = folder.parent.parent
    assert run("verify", cwd=home).returncode == 0
    replayed = run("replay", "3", "--json", cwd=home)
    assert json.loads(replayed.stdout)["result_equal"] is True
    assert told["log"] in replayed.stderr
    assert run("show", "3", "--log", told["log"], cwd=home).returncode == 0


def test_each_run_of_the_demo_has_its_own_tokens(demo: tuple[Path, dict[str, Any], str]) -> None:
    folder, told, _ = demo
    shown = run("show", "3", "--task", "1", "--log", told["log"], cwd=folder.parent.parent).stdout
    rows = [line.split() for line in shown.splitlines() if line.split()[1:3] == ["runner-0", "#1"]]
    assert [(row[0], row[-3]) for row in rows] == [(str(i), "8") for i in range(8)], shown
    assert len({row[-4] for row in rows}) == 1, "they have one prompt"
    assert "prompt tokens were not read again" in shown


@pytest.mark.slow
def test_the_folder_of_the_demo_runs_again_under_another_name(demo: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, _ = demo
    again = run("run", folder / "config.yaml", cwd=folder)
    assert again.returncode == 2
    assert "--set name=" in again.stderr
    named = ("--set", "name=second", "--set", "total_steps=1")
    done = run("run", folder / "config.yaml", *named, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout
    with open_log(str(folder / "runs/letters/second/log.sqlite")) as log:
        assert [b.batch_id for b in log.batches()] == ["0/letters", 1]


def test_the_demo_never_writes_into_a_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = run("demo", "--engine", "scripted", "--dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "--dir" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def long_run(folder: Path) -> Path:
    """A config whose run would take minutes."""
    config = make(folder, seed=0, steps=500, engine="scripted").config
    config.write_text(config.read_text().replace("engine_type: scripted", "engine_type: scripted\n    "
                                                 "script: {latency_seconds: 1.0}"))
    return config


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("moment", ["while it starts", "while it runs"])
def test_a_run_that_is_stopped_takes_its_system_along(
    tmp_path: Path, sent: signal.Signals, code: int, moment: str
) -> None:
    config = long_run(tmp_path / "demo")
    with subprocess.Popen(command("run", config), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                          ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        if moment == "while it runs":
            while "eval 0/letters" not in running.stdout.readline():
                assert running.poll() is None
        else:
            wait_until(lambda: left_of(config), "a process of the system")
        running.send_signal(sent)
        _, stderr = running.communicate(timeout=60)
    assert running.returncode == code, stderr
    assert left_of(config) == []
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_up_serves_status_is_well_and_down_leaves_nothing(tmp_path: Path) -> None:
    config = long_run(tmp_path / "demo")
    assert run("status", "--config", config, cwd=tmp_path).returncode == 1
    up = run("up", config, "--json", cwd=tmp_path)
    assert up.returncode == 0, up.stderr
    try:
        assert psutil.pid_exists(json.loads(up.stdout)["pid"])
        status = run("status", "--config", config, "--json", cwd=tmp_path)
        assert status.returncode == 0, status.stdout
        found = json.loads(status.stdout)
        assert [r["state"] for r in found["runners"]] == ["ready"]
        assert found["coordinator"]["epoch"] == 1
        twice = run("up", config, cwd=tmp_path)
        assert twice.returncode == 2
        assert "already" in twice.stderr
    finally:
        down = run("down", config, "--json", cwd=tmp_path)
    assert json.loads(down.stdout) == {"was_running": True, "killed": 0, "left": [], "run": []}
    assert left_of(config) == []


@pytest.mark.slow
def test_down_ends_what_a_dead_system_left(tmp_path: Path) -> None:
    config = long_run(tmp_path / "demo")
    up = run("up", config, "--json", cwd=tmp_path)
    assert up.returncode == 0, up.stderr
    admin = psutil.Process(json.loads(up.stdout)["pid"])
    admin.kill()
    admin.wait(10)
    down = run("down", config, "--json", cwd=tmp_path)
    assert down.returncode == 0, down.stderr
    assert json.loads(down.stdout)["left"] == []
    time.sleep(0.5)
    assert left_of(config) == []


@pytest.mark.slow
def test_up_with_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("explorer: {rollout_model: {engine_type: scripted, script: {nonsense: 1}}}\n")
    done = run("up", config, cwd=tmp_path)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert left_of(config) == []


def test_an_eval_is_of_the_last_weights_whatever_the_steps() -> None:
    assert (eval_interval(160), eval_interval(97), eval_interval(3)) == (20, 97, 3)
    assert all(steps % eval_interval(steps) == 0 for steps in range(1, 300))


def test_the_verdict_is_no_where_the_model_did_not_learn() -> None:
    def verdict(before: float | None, after: float | None, steps: int = 1000) -> bool | None:
        told = {"eval_reward_before": before, "eval_reward_after": after}
        return judge(told, steps=steps, learns=True)[0]

    assert verdict(0.004, 0.7) is True
    assert verdict(0.004, 0.69) is False
    assert verdict(0.06, 0.9) is False
    assert verdict(None, None) is False
    assert verdict(0.004, 0.1, steps=3) is None


def test_the_code_of_the_demo_is_found() -> None:
    assert {"tiny_model.py", "taskset.py", "trainer.py", "reward.py"} <= {p.name for p in find_examples().iterdir()}
