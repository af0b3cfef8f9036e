"""A rollout of a LoRA adapter is generated again with the adapter's version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.adapters import make_adapter
from tests.helpers.handmade import write
from tests.helpers.made_rollouts import record
from trinity_es import Task
from trinity_es.actors.engines.adapter_checks import checked_adapter
from trinity_es.audit.regenerate import find_rollout, regenerate
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import WeightNotFound
from trinity_es.testing import ScriptedEngine


def reward(**_: Any) -> float:
    return 1.0


def test_a_rollout_of_an_adapter_is_generated_again_with_its_version(tmp_path: Path) -> None:
    config = trinity_es.Config.from_dict(
        {"mode": "explore", "explorer": {"rollout_model": {"engine_type": "scripted", "lora": {}}}}, folder=tmp_path
    )
    folder = make_adapter(tmp_path / "math")

    async def play() -> None:
        engine = ScriptedEngine(config.explorer.rollout_model.engine_config())
        await engine.load_adapter("math", 3, str(folder))
        task = Task(
            workflow="trinity_es.workflows:SingleTurnWorkflow", reward_fn="tests.full.test_adapters_told:reward",
            raw_task={"prompt": "a"}, rollout_args={"seed": 3, "adapter": "math", "max_tokens": 9},
        )
        await record(tmp_path / "log.sqlite", engine, config, [task])

    asyncio.run(play())
    event = ev.AdapterPublished(adapter="math", version=3, path=str(folder), rank=8, size=12_345,
                                digest=checked_adapter(folder).digest)
    write(tmp_path / "log.sqlite", [(event.own_stream(), [event])])
    with trinity_es.open_log(str(tmp_path / "log.sqlite")) as log:
        rollout = find_rollout(log, 1, 0, 0)
    assert rollout.experiences[0].info["adapter_spans"] == [["math", 3, 0, 9]]
    found = regenerate(rollout)
    assert found.equal, found
    assert found.turns[0].sampling["adapter"] == "math"
    make_adapter(folder, seed=1)
    with pytest.raises(WeightNotFound, match=r"version 3 of adapter 'math' can't be loaded: the files at .* changed"):
        regenerate(rollout)
