"""A package of another author brings a workflow, a reward, an environment, a monitor, an engine and a command."""

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

PAGE = (ROOT / "docs" / "INTEGRATIONS.md").read_text().partition("## Bring it as a package")[2]
CODE, PROJECT = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)
CONFIG: dict[str, Any] = {
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


def run(home: Path, *arguments: str, config: dict[str, Any] = CONFIG, code: int = 0) -> str:
    (home / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "trinity_es", *arguments], cwd=home, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": f"{home / 'site'}:{ROOT}"}, check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_package_of_another_author_brings_one_of_each(home: Path) -> None:
    out = run(home, "run", "config.json")
    assert "metrics of step 1" in out
    assert "closed" in out
    run(home, "export", "--experiences", "all.jsonl", "--config", "config.json")
    rows = [json.loads(line) for line in (home / "all.jsonl").read_text().splitlines()]
    assert sorted((row["prompt"], row["reward"]) for row in rows) == [
        ("Roll a 1.\n", 0.0), ("Roll a 2.\n", 1.0), ("Roll a 3.\n", 0.0)]
    assert "dice:Roll" in run(home, "show", "1", "--task", "0", "--json", "--config", "config.json")
    assert run(home, "roll", "--sides", "20") == "you rolled a 20\n"
    assert re.search(r"Commands of other packages:\n +roll +dice:roll", run(home, "--help"))
    assert {"dice", "math_workflow"} <= json.loads(run(home, "workflows", "--json"))["workflow"].keys()


@pytest.mark.parametrize(("path", "told"), [
    ("dice:none", "ValueError: invalid literal for int"), ("dice:0", "dice:0 is empty"),
    ("rice:6", "no installed package registers the environment rice"),
])
def test_an_environment_that_fails_is_refused_by_name_before_a_run_starts(home: Path, path: str, told: str) -> None:
    inputs = {"tasksets": [{"name": "d", "path": path, "workflow": "dice", "reward_fn": "hit"}]}
    config = {**CONFIG, "store": {}, "buffer": {"explorer_input": inputs}}
    assert told in run(home, "run", "config.json", config=config, code=2)


def test_a_name_that_two_packages_register_is_refused_with_both(home: Path) -> None:
    other = home / "site" / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[trinity_es.workflows]\ndice = other:Roll\n")
    told = run(home, "workflows", code=2)
    assert re.search(r"two packages register the workflow 'dice': (dice and other|other and dice)\. Uninstall", told)
