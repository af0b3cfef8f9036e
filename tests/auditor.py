"""The auditor's commands on a sample log: `python -m tests.auditor` prints their outputs in docs/AUDIT.md again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.sample_log import make
from tests.helpers.handmade import ROOT
from tests.helpers.made_rollouts import record
from trinity_es import Config, Task
from trinity_es.cli import app
from trinity_es.testing import ScriptedEngine

__all__ = ["PAGE", "SAMPLE", "blocks", "build", "run", "same"]

PAGE = ROOT / "docs" / "AUDIT.md"
SAMPLE, OTHER = "runs/letters/sample/log.sqlite", "runs/letters/other/log.sqlite"
REAL = "runs/letters/real/log.sqlite"
_BLOCK = re.compile(r"```console\n\$ (trinity-es [^\n]*)\n(.*?)```", re.DOTALL)
_VOLATILE = re.compile(r"in [\d.]+ s \([\d,]+ events/s\)|(?<=  1/0/0/0/)[0-9a-f]{6}")


def build(folder: Path) -> None:
    """Make the two runs of the page under `folder`."""
    for name, batches in ((SAMPLE, 9), (OTHER, 4)):
        (folder / name).parent.mkdir(parents=True)
        with in_folder(folder):
            make(name, batches=batches, tasks=70, seed=6, dead=True)
    with in_folder(folder):
        asyncio.run(_real(Path(REAL)))


async def _real(path: Path) -> None:
    """Play one batch on a real runner with the ScriptedEngine, so that its rollouts can be regenerated."""
    script = {"tokens": 12}
    config = Config.from_dict(
        {"mode": "explore", "explorer": {"rollout_model": {"engine_type": "scripted", "script": script}}},
        folder=path.parent,
    )
    weights = path.parent / "checkpoints" / "global_step_4"
    weights.mkdir(parents=True)
    engine = ScriptedEngine(config.explorer.rollout_model.engine_config())
    await engine.load_weights(4, str(weights))
    task = Task(
        workflow="trinity_es.workflows:SingleTurnWorkflow", reward_fn="tests.full.test_regenerating:reward",
        repeat_times=2, rollout_args={"seed": 3}, raw_task={"prompt": "Spell backwards: river garden"},
    )
    await record(path, engine, config, [task], weights=str(weights))


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the (command, output) of each console block of a page."""
    return _BLOCK.findall(text)


def run(command: str, folder: Path) -> tuple[str, int]:
    """Return the output of a command of the page in `folder`, with the sample log and in UTC, and its exit code."""
    with in_folder(folder):
        done = CliRunner().invoke(app, shlex.split(command)[1:], env={"TRINITY_ES_LOG": SAMPLE, "COLUMNS": "180"})
    assert done.exit_code in (0, 1), f"{command}: {done.output}"
    return done.stdout, done.exit_code


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Change to this folder and to UTC: paths and times on the page are the same everywhere."""
    before, zone = Path.cwd(), os.environ.get("TZ")
    os.chdir(folder)
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.pop("TZ")
        if zone is not None:
            os.environ["TZ"] = zone
        time.tzset()


def same(shown: str, printed: str) -> bool:
    """Whether the page shows what was printed, but for spaces at ends of lines, how fast this machine is, and the one
    id that chance made.
    """
    return _plain(shown) == _plain(printed)


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in _VOLATILE.sub("in a moment", text).strip().splitlines()]


def main() -> None:
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as name:
        build(Path(name))

        def again(match: re.Match[str]) -> str:
            printed, _ = run(match[1], Path(name))
            body = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
            return f"```console\n$ {match[1]}\n{body}\n```"

        text = _BLOCK.sub(again, text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
