"""The explorer's plain loop on the real actor system (PARITY P32, P33)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from events import vocabulary as ev
from events.errors import ConfigError
from events.experience import Experience
from tests.system.conftest import scripted
from trinity_es import Explorer


class CountingTrainer:
    """A trainer that only counts what it is given."""

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
    common = {"reward_fn": "tests.system.test_explorer:always_half", "rollout_args": {"max_tokens": 4}}
    taskset = {"name": "questions", "path": "train.jsonl", "repeat_times": 2, "shuffle": True, **common}
    evalset = {"name": "check", "path": "eval.jsonl", **common}
    return scripted(
        folder,
        mode="both",
        explorer={"eval_interval": 2, **sections.pop("explorer", {})},
        buffer={"batch_size": 4, "explorer_input": {"tasksets": [taskset], "eval_tasksets": [evalset]}},
        trainer={"class": "tests.system.test_explorer:CountingTrainer", "keep_checkpoints": 2},
        **sections,
    )


def test_p32_p33_the_loop_uses_every_prompt_once_and_the_cursor_is_in_the_batch_s_transaction(tmp_path: Path) -> None:
    config = explorer_config(tmp_path)
    told: list[int] = []
    explorer = Explorer(config, on_step=lambda step, result: told.append(step))

    async def scenario() -> str:
        await explorer.prepare()
        try:
            return await explorer.explore()
        finally:
            await explorer.shutdown()

    assert asyncio.run(scenario()) == "explorer"
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
                assert event.tasks is not None
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
    kept = sorted(p.name for p in config.checkpoint_dir.iterdir())
    assert kept == ["global_step_2", "global_step_3"]


def test_a_store_that_holds_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = explorer_config(tmp_path, total_steps=1)

    async def once() -> None:
        explorer = Explorer(config)
        try:
            await explorer.prepare()
            await explorer.explore()
        finally:
            await explorer.shutdown()

    asyncio.run(once())
    with trinity_es.open_log(config.store.url) as log:
        before = log.head().position
    with pytest.raises(ConfigError, match="already holds a run"):
        asyncio.run(once())
    with trinity_es.open_log(config.store.url) as log:
        assert log.head().position == before
