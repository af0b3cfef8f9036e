"""`sync_method: nccl` on the real actor system, over gloo: tensors go from here into the engines (PARITY P34)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.memory_sync import play, served
from tests.helpers.runs import events_of
from tests.helpers.servers import free_port
from tests.helpers.systems import StartSystem, play_batch
from trinity_es import Task, Workflow
from trinity_es.actors.engines.checkpoints import tensor_headers, torch_type
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.engines.vllm.weight_sender import GlooGroup
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import SyncError
from trinity_es.events.experience import Experience
from trinity_es.testing import ScriptedEngine, wait_until
from trinity_es.weights import shared_memory

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::ResourceWarning")]


class GroupEngine(ScriptedEngine):
    """A scripted engine that gets its weights from a gloo group, and answers with what it got last."""

    received = "nothing"

    async def join_weight_group(
        self, address: str, port: int, rank_offset: int, world_size: int, timeout: float
    ) -> None:
        self.group = await asyncio.to_thread(GlooGroup, address, port, rank_offset, world_size, 20.0)

    async def receive_weights(self, version: int, path: str, timeout: float) -> None:
        from pathlib import Path

        import torch

        got = {}
        for name, (kind, shape) in sorted(tensor_headers(Path(path)).items()):
            got[name] = torch.empty(shape, dtype=getattr(torch, torch_type(kind)))
            try:
                await asyncio.to_thread(self.group.broadcast, got[name])
            except RuntimeError as e:
                raise SyncError(f"version {version} did not come: {e}") from e
        self.received = f"{float(got['layer.bias'][0]):g} by the group"
        self.model_version = version
        self.script["response"] = self.received

    async def load_weights(self, version: int, path: str) -> None:
        await super().load_weights(version, path)
        self.script["response"] = "loaded from its place"


def state(seed: float) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {"layer.weight": np.full((64, 64), seed, np.float32), "layer.bias": torch.full((4,), seed)}


@pytest.fixture
def client(start_system: StartSystem) -> Iterator[RolloutClient]:
    found = start_system(
        explorer={"rollout_model": {"engine_num": 2, "engine_type": "tests.full.system.test_weight_group:GroupEngine"}},
        synchronizer={"sync_method": "nccl", "sync_timeout": 60.0},
        system={"restart_pause": 0.1},
        buffer={"pipeline": {"operators": []}},
    )
    yield found
    shutil.rmtree(shared_memory.memory_dir(found.config), ignore_errors=True)


def answers(client: RolloutClient, batch_id: int) -> set[str]:
    """What the engines answer now: enough tasks for both."""
    reward = "tests.main.test_deaths:always_one"
    task: dict[str, Any] = {"workflow": "single_turn", "raw_task": {"prompt": "p"}, "rollout_args": {"max_tokens": 40}}
    tasks = [Task(**task, reward_fn=reward) for _ in range(8)]
    play_batch(client, batch_id, tasks)
    return {e.response_text or "" for e in client.experiences(batch_id)}


def test_p34_tensors_go_over_the_group_and_engines_that_come_later_find_them_in_memory(client: RolloutClient) -> None:
    config = client.config
    assert client.sync_weights(1, state(1.5))["from_group"]
    assert client.sync_weights(2, state(2.5))["from_group"]
    assert answers(client, 1) == {"2.5 by the group"}
    assert [e.method for _, e in events_of(config, "WeightsPublished")] == ["nccl", "nccl"]
    np.testing.assert_array_equal(client.get_weight("layer.bias"), np.full(4, 2.5, np.float32))
    victim = next(r for r in client.status()["runners"] if r["runner"] == "runner-1")
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(
        lambda: [r for r in client.status()["runners"] if r["incarnation"] > victim["incarnation"]
                 and r["model_version"] == 2], "the new runner to have the weights", 60,
    )
    assert answers(client, 2) <= {"2.5 by the group", "loaded from its place"}
    assert client.sync_weights(3, state(3.5))["from_group"]  # a new group was made, with the new runner in it
    assert answers(client, 3) == {"3.5 by the group"}


def test_p34_setup_weight_sync_group_by_hand_and_what_does_not_fit(client: RolloutClient) -> None:
    made = client.setup_weight_sync_group("127.0.0.1", free_port())
    assert made == {"runners": ["runner-0", "runner-1"], "world_size": 3}
    assert client._publisher.sender is not None
    sender = client._publisher.sender
    assert client.sync_weights(1, state(1.5))["from_group"]
    assert client._publisher.sender is sender  # the group that was made by hand was used


def test_p34_a_transfer_that_breaks_leaves_both_engines_serving_the_old_weights(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.sync_weights(1, state(1.5))["from_group"]
    sender = client._publisher.sender
    assert sender is not None

    def half(given: Any) -> None:
        sender.group.broadcast(given["layer.bias"])
        sender.group = None  # as when its process dies

    monkeypatch.setattr(sender, "send", half)
    with pytest.raises(SyncError, match="did not come"):
        client.sync_weights(2, state(2.5))
    assert served(client) == [1, 1]
    assert answers(client, 1) == {"1.5 by the group"}
    assert client.sync_weights(3, state(3.5))["from_group"]
    assert answers(client, 2) == {"3.5 by the group"}


def test_p34_engines_that_know_no_groups_load_from_memory(start_system: StartSystem) -> None:
    client = start_system(synchronizer={"sync_method": "nccl", "sync_timeout": 60.0})
    try:
        done = client.sync_weights(1, state(1.5))
        assert (done["from_group"], served(client)) == (False, [1])
        assert [e.method for _, e in events_of(client.config, "WeightsPublished")] == ["memory"]
        with pytest.raises(SyncError, match="ScriptedEngine can't join a group for weights"):
            client.setup_weight_sync_group("127.0.0.1", port := free_port())
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))  # it is not waited for any more
        play(client, 1)
    finally:
        shutil.rmtree(shared_memory.memory_dir(client.config), ignore_errors=True)


# --- requests in flight when new weights come: `synchronizer.in_flight` -----------------------------------------------
TOKENS = 40


class Noting(ScriptedEngine):
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        Path(os.environ["BEGAN"]).touch()
        return await super().generate(prompt, sampling)

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        Path(os.environ["BEGAN"]).touch()
        async for part in super().stream(prompt, sampling):
            yield part


class TwoTurns(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        answers = [(await self.model.generate_async([65, 66], max_tokens=TOKENS))[0] for _ in range(2)]
        for answer in answers:
            answer.reward = 1.0
        return answers


class TwoTurnsOverHTTP(TwoTurns):
    async def run_async(self) -> list[Experience]:
        client = self.model.get_openai_async_client()
        for _ in range(2):
            await client.completions.create(model=client.model_path, prompt="x", max_tokens=TOKENS)
        answers = self.model.extract_experience_from_history()
        for answer in answers:
            answer.reward = 1.0
        return answers


@pytest.mark.parametrize(("in_flight", "workflow"), [
    ("finish", TwoTurns), ("finish", TwoTurnsOverHTTP), ("keep", TwoTurns),
])
def test_requests_in_flight_end_with_the_weights_that_they_began_with_if_the_config_says_so(
    in_flight: str, workflow: type[Workflow], start_system: StartSystem, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = tmp_path / "began"
    monkeypatch.setenv("BEGAN", str(began))
    client = start_system(
        explorer={"rollout_model": {
            "engine_type": f"{__name__}:Noting", "engine_args": {"token_seconds": 0.05},
        }}, synchronizer={"in_flight": in_flight},
    )
    client.submit_batch(batch_id=1, tasks=[Task(workflow=workflow)], batch_type="train")
    wait_until(began.exists, "the first request")
    client.sync_weights(1, tmp_path)
    client.finalize_train_batch(1, timeout=60)
    spans: list[Any] = [e.info.get("version_spans") for e in client.experiences(1)]
    first = [[0, 0, TOKENS]] if in_flight == "finish" else None  # the scripted engine does not say which made which
    assert spans == [first, [[1, 0, TOKENS]]]
