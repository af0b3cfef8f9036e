"""What a config and its tasks hold of secrets is in no file of a run but one, and workflows get it all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.helpers.systems import StartSystem, kill_system, play_batch
from trinity_es import Task, Workflow, connect
from trinity_es.actors.commands import PauseBatches
from trinity_es.events.experience import Experience
from trinity_es.system import lifecycle

KEYS = {"api_key": "s3cr3t-of-a-judge", "headers": {"Authorization": "s3cr3t-of-a-header"}}


class NeedsKeys(Workflow):
    async def run_async(self) -> list[Experience]:
        given = {**self.task.workflow_args}
        assert given.pop("unlisted") == "s3cr3t-by-type"
        if given != KEYS:
            raise ValueError(f"not the keys: {given}")
        return list(await self.model.chat_async([{"role": "user", "content": "hello"}]))


def task() -> Task:
    return Task(workflow=NeedsKeys, workflow_args={**KEYS, "unlisted": SecretStr("s3cr3t-by-type")})


def test_no_secret_is_in_the_log_or_shown_and_a_batch_that_is_resumed_has_them(
    start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {
        "explorer": {"rollout_model": {"engine_args": {"hf_token": "s3cr3t-of-a-hub"}}},
        "monitor": {"monitor_args": {"wandb": {"api_key": "s3cr3t-of-wandb", "other": SecretStr("s3cr3t-other")}}},
    }
    client = start_system(**sections)
    play_batch(client, 1, [task(), task()])
    client.request(PauseBatches(batches=[]))
    client.submit_batch(batch_id=2, tasks=[task()], batch_type="train")
    kill_system(client)
    lifecycle.start(client.config)
    with connect(client.config) as again:
        again.wait_ready(60)
        assert again.finalize_train_batch(2, timeout=60)["finished_task_count"] == 1
    shown = subprocess.run(
        [sys.executable, "-m", "trinity_es", "events", "--json", "--log", client.config.store.url],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout
    assert "BatchSubmitted" in shown
    assert "s3cr3t" not in shown
    holding = {p.name for p in tmp_path.rglob("*") if p.is_file() and b"s3cr3t" in p.read_bytes()}
    assert holding == {"secrets"}
    assert client.config.to_dict()["monitor"]["monitor_args"]["wandb"]["api_key"] == "s3cr3t-of-wandb"
