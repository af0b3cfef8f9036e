"""What is told of LoRA adapters afterwards: by the command, the dashboard, the log's lines, and by generating again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import trinity_es
from tests.helpers.adapters import make_adapter
from tests.helpers.handmade import cli, write
from tests.helpers.made_rollouts import record
from trinity_es import Task
from trinity_es.actors.engines.adapters import checked_adapter
from trinity_es.audit.regenerate import find_rollout, regenerate
from trinity_es.dashboard.app import create_app
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import WeightNotFound
from trinity_es.testing import ScriptedEngine
from trinity_es.text import summary

RUNNER: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}


def published(adapter: str, version: int, path: str = "/a<b>", digest: str = "d") -> ev.AdapterPublished:
    return ev.AdapterPublished(adapter=adapter, version=version, path=path, rank=8, size=12_345, digest=digest)


STORY = [
    published("math", 1),
    ev.AdapterLoaded(**RUNNER, adapter="math", version=1, seconds=0.25),
    published("code", 1),
    published("math", 2),
    ev.AdapterFailed(**RUNNER, adapter="math", version=2, error="no <file>"),
    ev.AdapterRemoved(adapter="code", version=1),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.sqlite"
    write(path, [(event.own_stream(), [event]) for event in STORY])
    return path


def test_the_command_lists_every_version_and_what_became_of_it(log: Path) -> None:
    found = json.loads(cli("weights", "--adapters", "--log", log, "--json").stdout)
    assert [(v["adapter"], v["version"], v["rank"], v["size"]) for v in found] == [
        ("math", 1, 8, 12_345), ("code", 1, 8, 12_345), ("math", 2, 8, 12_345)
    ]
    assert [len(v["loads"]) for v in found] == [1, 0, 0]
    assert found[0]["loads"][0][:2] == ["runner-0", 1]
    assert [[f[3] for f in v["failures"]] for v in found] == [[], [], ["no <file>"]]
    assert [v["removed_at"] is not None for v in found] == [False, True, False]
    for command in (("weights", "--adapters"), ("weights",)):
        text = cli(*command, "--log", log).stdout
        assert "math" in text
        assert "12,345" in text
        assert "no <file>" in text
    assert json.loads(cli("weights", "--log", log, "--json").stdout) == []
    assert cli("verify", "--log", log).exit_code == 0


def test_the_dashboard_shows_them_beside_the_weights(log: Path) -> None:
    with TestClient(create_app(str(log)), base_url="http://localhost") as client:
        page = client.get("/weights").text
    assert "LoRA adapters" in page
    assert "/a&lt;b&gt;" in page
    assert "no &lt;file&gt;" in page
    assert page.index('data-key="amath/2"') < page.index('data-key="acode/1"') < page.index('data-key="amath/1"')


def test_each_event_is_a_line_that_names_the_adapter() -> None:
    assert [summary(event) for event in STORY] == [
        "adapter math version 1, rank 8, 12,345 bytes at /a<b>",
        "runner-0 serves version 1 of adapter math after 0.25 s",
        "adapter code version 1, rank 8, 12,345 bytes at /a<b>",
        "adapter math version 2, rank 8, 12,345 bytes at /a<b>",
        "runner-0 did not load version 2 of adapter math: no <file>",
        "adapter code, last of version 1",
    ]


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
    event = published("math", 3, str(folder), checked_adapter(folder).digest)
    write(tmp_path / "log.sqlite", [(event.own_stream(), [event])])
    with trinity_es.open_log(str(tmp_path / "log.sqlite")) as log:
        rollout = find_rollout(log, 1, 0, 0)
    assert rollout.experiences[0].info["adapter_spans"] == [["math", 3, 0, 9]]
    found = regenerate(rollout)
    assert found.equal, found
    assert found.turns[0].sampling["adapter"] == "math"
    make_adapter(folder, seed=1)
    with pytest.raises(WeightNotFound, match=r"version 3 of adapter 'math': the files at .* changed"):
        regenerate(rollout)
