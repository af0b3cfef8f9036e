"""A user's own `events.py`, `actors/` and `projections.py` hurt nothing, in no process; the wheel holds one package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.systems import name_as_ours

CONFIG = """
mode: explore
explorer: {rollout_model: {engine_type: scripted}}
"""
WORKFLOWS = """
import actors, events, projections
from trinity_es import Experience, Workflow

def one():
    owners = {m.OWNER for m in (actors, events, projections)}
    return [Experience(tokens=[1, 2], prompt_length=1, reward=float(owners == {"the user"}))]

class Sync(Workflow):
    def run(self):
        return one()

class Async(Workflow):
    is_async = True
    async def run_async(self):
        return one()
"""
TRAINER = """
import events, trinity_es
from trinity_es import Task
assert events.OWNER == "the user"
with trinity_es.connect(trinity_es.load_config("config.yaml")) as client:
    client.wait_ready()
    client.submit_batch(batch_id=1, tasks=[Task(workflow=f"mine:{w}") for w in ("Sync", "Async")], batch_type="train")
    result = client.finalize_train_batch(1, timeout=60)
    print(result["finished_task_count"], [e.reward for e in client.experiences(1)])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a user, who calls his modules as we call ours."""
    folder = tmp_path / "project"
    folder.mkdir()
    name_as_ours(folder)
    return folder


def run(*command: object, cwd: Path, first: Path | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if first is not None:
        env["PYTHONPATH"] = str(first)
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_project_with_modules_named_as_our_rooms_runs(folder: Path) -> None:
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "mine.py").write_text(WORKFLOWS)
    (folder / "trainer.py").write_text(TRAINER)
    run("-m", "trinity_es", "up", "config.yaml", cwd=folder)
    try:
        assert run("trainer.py", cwd=folder) == "2 [1.0, 1.0]\n"
        assert json.loads(run("-m", "trinity_es", "batches", "--json", "-c", "config.yaml", cwd=folder))
    finally:
        run("-m", "trinity_es", "down", "config.yaml", cwd=folder)


def test_the_wheel_holds_one_package_which_runs_without_the_checkout(folder: Path, tmp_path: Path) -> None:
    run("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} == {"trinity_es"}
    packed = {p.relative_to(site).as_posix() for p in site.rglob("*.py")}
    rooms = [p for p in ROOT.glob("[a-z]*/") if p.name in ("events", "projections", "actors", "trinity_es")]
    ours = {p.relative_to(ROOT).as_posix() for room in rooms for p in room.rglob("*.py")}
    ours = {name if name.startswith("trinity_es/") else f"trinity_es/{name}" for name in ours}
    assert {p for p in packed if not p.startswith("trinity_es/_demo/")} == ours
    code = "import trinity_es; from trinity_es.events.store import log; print(trinity_es.__file__); print(log.__file__)"
    assert all(line.startswith(str(site)) for line in run("-c", code, cwd=folder, first=site).splitlines())
    run("-c", "from trinity_es._demo.trainer import GRPOTrainer", cwd=folder, first=site)  # as the pages name it
    told = run("-m", "trinity_es", "demo", "--engine", "scripted", "--steps", 2, "--json", cwd=folder, first=site)
    assert json.loads(told)["train_batches"] == 2


# --- a package of another author --------------------------------------------------------------------------------------
PAGE = (ROOT / "docs" / "INTEGRATIONS.md").read_text().partition("## Bring it as a package")[2]
CODE, PROJECT = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)
DICE: dict[str, Any] = {
    "name": "dice", "mode": "explore", "store": {"url": "sqlite:///log.sqlite"},
    "explorer": {"rollout_model": {"engine_type": "loaded", "engine_args": {"response": "2"}}},
    "buffer": {"batch_size": 3, "explorer_input": {"tasksets": [{"name": "d", "path": "dice:3", "reward_fn": "hit"}]}},
    "monitor": {"monitor_type": ["jsonl", "printed"]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dice")
    (folder / "dice").mkdir()
    (folder / "dice" / "dice.py").write_text(CODE)
    (folder / "dice" / "pyproject.toml").write_text(PROJECT)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=folder / "dice", check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder


def run_at_home(home: Path, *arguments: str, config: dict[str, Any] = DICE, code: int = 0) -> str:
    (home / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "trinity_es", *arguments], cwd=home, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": f"{home / 'site'}:{ROOT}"}, check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_package_of_another_author_brings_one_of_each(home: Path) -> None:
    out = run_at_home(home, "run", "config.json")
    assert "metrics of step 1" in out
    assert "closed" in out
    run_at_home(home, "export", "--experiences", "all.jsonl", "--config", "config.json")
    rows = [json.loads(line) for line in (home / "all.jsonl").read_text().splitlines()]
    assert sorted((row["prompt"], row["reward"]) for row in rows) == [
        ("Roll a 1.\n", 0.0), ("Roll a 2.\n", 1.0), ("Roll a 3.\n", 0.0)]
    assert "dice:Roll" in run_at_home(home, "show", "1", "--task", "0", "--json", "--config", "config.json")
    assert run_at_home(home, "roll", "--sides", "20") == "you rolled a 20\n"
    assert re.search(r"Commands of other packages:\n +roll +dice:roll", run_at_home(home, "--help"))
    assert {"dice", "math_workflow"} <= json.loads(run_at_home(home, "workflows", "--json"))["workflow"].keys()


@pytest.mark.parametrize(("path", "told"), [
    ("dice:none", "ValueError: invalid literal for int"), ("dice:0", "dice:0 is empty"),
    ("rice:6", "no installed package registers the environment rice"),
])
def test_an_environment_that_fails_is_refused_by_name_before_a_run_starts(home: Path, path: str, told: str) -> None:
    inputs = {"tasksets": [{"name": "d", "path": path, "workflow": "dice", "reward_fn": "hit"}]}
    config = {**DICE, "store": {}, "buffer": {"explorer_input": inputs}}
    assert told in run_at_home(home, "run", "config.json", config=config, code=2)


def test_a_name_that_two_packages_register_is_refused_with_both(home: Path) -> None:
    other = home / "site" / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[trinity_es.workflows]\ndice = other:Roll\n")
    told = run_at_home(home, "workflows", code=2)
    assert re.search(r"two packages register the workflow 'dice': (dice and other|other and dice)\. Uninstall", told)
