"""The examples of environments, from their own configs, with an engine that says "a" to everything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import trinity_es
from tests.helpers.of_the_day import EXAMPLES, by_turns
from tests.helpers.openenv_servers import listening
from tests.helpers.paths import ROOT
from trinity_es.environments.installs import Installed, install
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.projections.reading.log_reader import Log
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

FOLDER = ROOT / "examples" / "environments"
STEPS, RUNS = 2, 12


def overrides(store: str, folder: Path, **more: object) -> list[str]:
    changes = {
        "explorer.rollout_model.engine_type": "scripted", "explorer.rollout_model.engine_args": "{}",
        "explorer.rollout_model.script": "{response: aaaaaaaaaaaaaaaa}", "trainer.class": "null", "total_steps": STEPS,
        "model.model_path": "''", "explorer.eval_interval": 2, "store.url": store, "run_dir": folder,
        "checkpoint_root_dir": folder, **more,
    }
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]


@contextmanager
def playing(example: str, folder: Path, **more: object) -> Iterator[str]:
    """Run an example; give the address of its log, and wait for its end."""
    store = f"sqlite:///{folder / 'log.sqlite'}"
    command = [sys.executable, "-W", "ignore", "-m", "examples.environments", example,
               *overrides(store, folder, **more)]
    with (folder / "stderr").open("w") as said, subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=said
    ) as process:
        try:
            yield store
            code = process.wait(600)
        finally:
            process.terminate()
        assert code == 0, (folder / "stderr").read_text()


def trained(log: Log, step: int) -> list[Experience]:
    [finalized] = [r.event for r in log.read(stream=f"batch/{step}", types=["BatchFinalized"])]
    assert isinstance(finalized, ev.BatchFinalized)
    with closing(log.payloads()) as payloads:
        return read_experiences(payloads, finalized.experiences)


def require_each_once(log: Log, tasks: int) -> None:
    assert log.verify() == []
    for step in range(1, STEPS + 1):
        found = trained(log, step)
        assert Counter((e.eid.task, e.eid.run) for e in found) == {
            (task, run): 1 for task in range(tasks) for run in range(RUNS)}
        for e in found:
            ids = e.tokens[e.prompt_length :][e.action_mask].tolist()
            assert bytes(ids) == b"a" * len(ids)
            assert len(ids) % 16 == 0 < len(ids)
            assert e.reward == e.metrics["reward"]


@by_turns(EXAMPLES[1], EXAMPLES)
def test_j2_the_example_of_verifiers_plays_its_tasks_and_pins_them(letters: Installed, tmp_path: Path) -> None:
    install(str(FOLDER / "letters"))
    with playing("verifiers", tmp_path) as store:
        pass
    with trinity_es.open_log(store) as log:
        require_each_once(log, tasks=8)
        assert {e.reward for e in trained(log, 1)} == {0.0, 1.0}
        sources = [r.event.source for r in log.read(types=["TasksetResolved"])]
    assert {(s.path, s.is_eval, s.rows) for s in sources} == {("verifiers:letters", e, 8) for e in (False, True)}
    assert all(s.revision.startswith("0.1 sha256:") for s in sources)


@by_turns(EXAMPLES[2], EXAMPLES)
def test_j2_the_example_of_openenv_ends_each_step_though_its_server_is_killed_and_nothing_is_doubled(
    openenv_python: str, tmp_path: Path
) -> None:
    command = [openenv_python, str(FOLDER / "openenv_server.py")]
    with listening(command) as server:
        url = "workflow_args.url"
        inputs = "buffer.explorer_input"
        with playing("openenv", tmp_path, **{
            f"{inputs}.tasksets.0.{url}": server.url, f"{inputs}.eval_tasksets.0.{url}": server.url,
            "explorer.rollout_model.script": "{response: aaaaaaaaaaaaaaaa, latency_seconds: 0.2}",
            "explorer.max_concurrency": 2,  # two tasks at once: most of the step is still to come when the server dies
        }) as store:
            wait_until(lambda: runs_of(store, 1) >= RUNS, "a part of the first step", 240)
            server.kill()
            server.start()
            time.sleep(0.2)  # what had just begun has waited for it, and is in the middle of its episodes now
            server.kill()
            server.start()
    with trinity_es.open_log(store) as log:
        require_each_once(log, tasks=16)
        kinds = {r.event.kind for r in log.read(types=["AttemptFailed"])}
    assert kinds == {"infra"}


def runs_of(store: str, step: int) -> int:
    try:
        with trinity_es.open_log(store) as log:
            done = [r.event for r in log.read(types=["TaskFinished", "RunsFinished"], stream=f"batch/{step}")]
    except TrinityError:
        return 0
    return sum(len(e.runs) for e in done)
