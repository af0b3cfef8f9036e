"""The explorer's loop on the real actor system, alone and beside trainers in other processes (PARITY P32 to P34)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.runs import AT_ONCE, command, count, explored, finish_here, make_config, outcome, went_well
from tests.helpers.systems import merge, scripted
from trinity_es import Explorer
from trinity_es.config.config import load_config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.experience import Experience
from trinity_es.system import leftovers
from trinity_es.testing import wait_until


class CountingTrainer:
    def __init__(self, model_path: str, **args: Any) -> None:
        self.steps: list[int] = []

    def step(self, experiences: list[Experience]) -> dict[str, float]:
        self.steps.append(len(experiences))
        return {"loss": 1.0 / len(self.steps)}

    def save(self, path: str) -> None:
        Path(path).mkdir(parents=True)


def always_half(response: str, prompt: str, truth: str | None) -> float:
    return 0.5


def explorer_config(folder: Path, rows: int = 10, **sections: Any) -> trinity_es.Config:
    lines = [json.dumps({"prompt": f"question {i}", "answer": "x"}) for i in range(rows)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text("\n".join(lines[:3]))
    common = {"reward_fn": "tests.full.system.test_explorer:always_half", "rollout_args": {"max_tokens": 4}}
    taskset = {"name": "questions", "path": "train.jsonl", "repeat_times": 2, "shuffle": True, **common}
    evalset = {"name": "check", "path": "eval.jsonl", **common}
    common_sections: dict[str, Any] = {
        "mode": "both",
        "explorer": {"eval_interval": 2},
        "buffer": {"batch_size": 4, "explorer_input": {"tasksets": [taskset], "eval_tasksets": [evalset]}},
        "trainer": {"class": "tests.full.system.test_explorer:CountingTrainer", "keep_checkpoints": 2},
    }
    return scripted(folder, **merge(common_sections, sections))


def test_p32_p33_the_loop_uses_every_prompt_once_and_the_cursor_is_in_the_batch_s_transaction(tmp_path: Path) -> None:
    config = explorer_config(tmp_path)
    told: list[int] = []
    explored(Explorer(config, on_step=lambda step, result: told.append(step)))
    assert told == [1, 2, 3]  # 4 + 4 + 2 rows
    with trinity_es.open_log(config.store.url) as log:
        assert {b.batch_id: b.state for b in log.batches()} == dict.fromkeys(
            ["0/check", 1, 2, "2/check", 3], "finalized"
        )
        used: Counter[str] = Counter()
        commits: dict[Any, str] = {}
        cursors = []
        trained = {}
        for recorded in log.events():
            event = recorded.event
            if isinstance(event, ev.BatchSubmitted) and event.batch_type == "train":
                used.update(t["raw_task"]["prompt"] for t in event.tasks)
                commits[event.batch_id] = recorded.commit_id
            if isinstance(event, ev.TasksetAdvanced):
                cursors.append((event.batch_id, event.epoch, event.offset))
                assert commits[event.batch_id] == recorded.commit_id
            if isinstance(event, ev.BatchTrained):
                trained[recorded.stream] = (event.step, event.metrics["loss"])
        assert used == {f"question {i}": 1 for i in range(10)}
        assert cursors == [(1, 0, 4), (2, 0, 8), (3, 1, 0)]
        assert trained == {f"batch/{n}": (n, 1.0 / n) for n in (1, 2, 3)}
        versions = [r.event.version for r in log.events() if isinstance(r.event, ev.WeightsLoaded)]
        assert versions == [1, 2, 3]
        assert log.verify() == []
    kept = sorted(p.name for p in config.checkpoint_dir.glob("global_step_*"))
    assert kept == ["global_step_2", "global_step_3"]


def test_a_store_that_holds_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = explorer_config(tmp_path, total_steps=1)
    measured: dict[str, float] = {}

    async def once() -> None:
        explorer = Explorer(config)
        try:
            await explorer.prepare()
            assert await explorer.explore() == "explorer"
            measured.update(await explorer.evaluate())  # of one's own accord, on the weights as they are
        finally:
            await explorer.shutdown()

    asyncio.run(once())
    assert measured["eval/check/reward/mean@1"] == 0.5
    with trinity_es.open_log(config.store.url) as log:
        before = log.head().position
        assert [b.batch_id for b in log.batches()] == ["0/check", 1, "1/check"]
    with pytest.raises(ConfigError, match="already holds a run, and the run is complete"):
        asyncio.run(once())
    with trinity_es.open_log(config.store.url) as log:
        assert log.head().position == before


def test_p32_steps_of_a_period_are_submitted_without_waiting_for_each_other(tmp_path: Path) -> None:
    script = {"latency_seconds": 0.5, "rules": [{"prompt": "exam", "latency_seconds": 1.5}]}
    slow = {"engine_type": "scripted", "script": script}
    config = explorer_config(tmp_path, rows=16, synchronizer={"sync_interval": 2}, explorer={"rollout_model": slow})
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "exam"}))  # slower than what it runs beside
    explored(Explorer(config))
    happened = []
    with trinity_es.open_log(config.store.url) as log:
        for event in (r.event for r in log.events()):
            match event:
                case ev.BatchSubmitted():
                    happened.append(f"submitted {event.batch_id}")
                case ev.BatchFinalized():
                    happened.append(f"generated {event.result['batch_id']}")
                case ev.WeightsPublished():
                    happened.append(f"weights {event.version}")
    at = happened.index
    assert [h for h in happened if h.startswith("weights")] == ["weights 2", "weights 4"]
    assert at("submitted 0/check") < at("submitted 1") < at("submitted 2") < at("generated 1") < at("generated 2")
    assert at("weights 2") < at("submitted 2/check") < at("submitted 3") < at("submitted 4") < at("generated 3")
    assert at("generated 2/check") < at("weights 4")  # an eval measures one version


def test_p34_a_trainer_of_ones_own_connects_to_an_explorer_that_waits_for_nobody(tmp_path: Path) -> None:
    config = explorer_config(
        tmp_path, mode="explore", trainer={"class": None},
        synchronizer={"sync_style": "trainer_driven", "max_inflight_batches": 2},
        explorer={"rollout_model": {"engine_type": "scripted", "script": {"latency_seconds": 0.1}}},
    )
    trained: list[Any] = []
    with trinity_es.running(config) as client:
        exploring = threading.Thread(target=lambda: explored(Explorer(config)), daemon=True)
        exploring.start()
        position = 0
        for _ in range(3):  # it generates them all, whatever the trainer does
            batch_id, position = client.next_batch(position, timeout=60)
            trained.append(batch_id)
        exploring.join(60)
        assert not exploring.is_alive()
        for step, batch_id in enumerate(trained, 1):
            assert len(list(client.experiences(batch_id))) == (4 if step == 3 else 8)
            client.acknowledge(batch_id, step)
        (tmp_path / "my weights").mkdir()
        client.sync_weights(7, tmp_path / "my weights")  # numbered as the trainer likes
        assert trained == [1, 2, 3]
        assert client.status()["weights_version"] == 7


def parts_of(path: Path, *modes: str) -> list[subprocess.Popen[str]]:
    return [command("run", path, "--set", f"mode={mode}", cwd=path.parent) for mode in modes]


def finished_well(*parts: subprocess.Popen[str]) -> None:
    for part in parts:
        with part:
            _, err = part.communicate(timeout=150)
            assert part.returncode == 0, err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_p32_explorer_and_trainer_in_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Though the trainer's process is killed on the way and started again."""
    both = make_config(tmp_path / "both", interval=2)
    went_well("run", both, *AT_ONCE, cwd=tmp_path)
    wanted = outcome(load_config(both))
    assert wanted["versions"] == [2, 4, 5]
    again = make_config(tmp_path / "again", interval=2)
    config = load_config(again)
    [exploring, training] = parts_of(again, "explore", "train")
    ended = lambda: [part.communicate()[1] for part in (exploring, training) if part.poll() is not None]  # noqa: E731
    try:
        wait_until(lambda: count(config, "BatchTrained", 3) == 1 or ended(), "step 3 trained", 90)
        assert ended() == []
    except BaseException:
        exploring.kill()  # the system ends with who started it
        training.kill()
        raise
    training.kill()
    training.communicate(timeout=30)
    assert exploring.poll() is None
    finished_well(*parts_of(again, "train"), exploring)
    assert outcome(config) == wanted
    assert leftovers.leftovers(config) == []


@pytest.mark.slow
def test_p34_an_explorer_whose_trainer_never_comes_says_so(tmp_path: Path) -> None:
    path = make_config(tmp_path / "run")
    alone = ("--set", "mode=explore", "--set", "synchronizer.sync_timeout=2")
    code, _, err = finish_here("run", path, *alone, cwd=tmp_path)
    assert code == 2
    assert "the trainer published no weights newer than step 0's within 2 s (synchronizer.sync_timeout)" in err
    assert leftovers.leftovers(load_config(path)) == []
    lonely, _, err = finish_here("run", path, "--set", "mode=train", "--set", "system.startup_timeout=2", cwd=tmp_path)
    assert lonely == 2
    assert "no actor system came up" in err
