"""Weights, adapters and models on hosts that can't read them where they were published: mount namespaces hide them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trinity_es
from tests.helpers.adapters import make_adapter
from tests.helpers.engines import largest_difference
from tests.helpers.hosts import Head, StartHead, host_joins, ready
from tests.helpers.real_engine import TOLERANCE, letters
from tests.helpers.systems import play_batch
from tests.helpers.weight_files import AskWorkflow, hidden, lacks_mounts, make_weights, said
from trinity_es import Task
from trinity_es.events import vocabulary as ev
from trinity_es.testing import wait_until
from trinity_es.weights.weights_reader import current_weights

pytestmark = [
    pytest.mark.postgres, pytest.mark.timeout(280), pytest.mark.skipif(bool(lacks_mounts()), reason=lacks_mounts())
]
MODEL = {"engine_type": "tests.helpers.weight_files:FileEngine", "engine_args": {"latency_seconds": 0.2}}


def explorer(places: int = 4, **model: Any) -> dict[str, Any]:
    return {"rollout_model": MODEL | model, "max_concurrency": places}


def play(head: Head, batch_id: int, tasks: int = 48) -> list[tuple[str, int]]:
    """Play a batch of questions, some of them on host b; returns what was answered, and by which version."""
    asks = [Task(workflow=AskWorkflow, raw_task={"i": i}) for i in range(tasks)]
    head.client.submit_batch(batch_id=batch_id, tasks=asks, batch_type="train")
    head.finish(batch_id, tasks)
    assert head.ran_on(batch_id)["b"] > 0
    return [(str(e.response_text), e.version_spans[0][0]) for e in head.client.experiences(batch_id)]


def loaded(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def test_a_host_pulls_model_weights_and_adapters_that_it_can_t_read_once_for_all_its_runners(
    start_head: StartHead, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    model, first, second = (make_weights(shared / name, 2**24) for name in ("model", "first", "second"))
    adapter = make_adapter(shared / "adapter")
    head = start_head(explorer=explorer(model_path=str(model), lora={"max_adapters": 2, "max_rank": 8}))
    log = "explorer.rollout_model.engine_args.log"
    b_loaded, c_loaded = tmp_path / "b.loaded", tmp_path / "c.loaded"
    b_set = "--set", "explorer.rollout_model.engine_num=2", "--set", f"{log}={b_loaded}"
    with (
        host_joins(head.url, "b", tmp_path, *b_set, inside=hidden(shared)) as b,
        host_joins(head.url, "c", tmp_path, "--set", f"{log}={c_loaded}"),
    ):
        ready(head.client, "b")
        ready(head.client, "c")
        assert "copying the model from the head" in b.said.read_text()
        answers = {text for text, _ in play(head, 1)}
        assert answers == {said(model)}

        runners = {"runner-0", "runner-0@b", "runner-1@b", "runner-0@c"}
        assert set(head.client.sync_weights(1, first, timeout=60)["runners"]) == runners
        assert set(play(head, 2)) == {(said(first), 1)}
        place, again = loaded(b_loaded)
        pulled = Path(place).parent
        assert place == again
        assert pulled.parent == Path("/dev/shm")
        assert loaded(c_loaded) == [str(first)], "what a host can read is used where it lies"

        head.client.sync_adapter("math", 1, adapter, timeout=60)
        assert {Path(path).parent for path in loaded(b_loaded)[2:]} == {pulled}
        head.client.restart_runner("runner-0@b")  # another life of it finds what is here
        wait_until(lambda: len(loaded(b_loaded)) == 6, "the restarted runner has weights and adapter", 60)

        head.client.sync_weights(2, second, timeout=60)
        assert set(play(head, 3)) == {(said(second), 2)}
        wait_until(lambda: not Path(place).exists(), "version 1 is removed", 10)
        assert len(list(pulled.iterdir())) == 2, "version 2 and the adapter"
        agent = (b.log_dir / "host.log").read_text()
        assert agent.count("version 1 is here after") == 2, "once for all runners, and once for a later one"
        assert b.drain() == 0
        assert not pulled.exists()
    assert {e.kind for e in head.events(ev.AttemptFailed)} <= {"runner_lost"}
    assert head.events(ev.WeightsFailed, ev.AdapterFailed) == []


def test_weights_in_the_head_s_memory_reach_a_host_with_a_memory_of_its_own(
    start_head: StartHead, tmp_path: Path
) -> None:
    head = start_head(explorer=explorer(), synchronizer={"sync_method": "memory"})
    with host_joins(head.url, "b", tmp_path, inside=hidden(Path("/dev/shm"))):
        ready(head.client, "b")
        for version in 1, 2:
            state = {"layer.weight": np.full((2**20,), version, np.float32)}
            assert set(head.client.sync_weights(version, state, timeout=60)["runners"]) == {"runner-0", "runner-0@b"}
            with trinity_es.open_log(head.url) as log:
                lies = Path(current_weights(log).path)
            assert set(play(head, version)) == {(said(lies), version)}
    assert head.events(ev.WeightsFailed) == []


def test_a_host_that_can_t_pull_gets_no_work_and_says_why(start_head: StartHead, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    weights = make_weights(shared / "first")
    head = start_head(explorer=explorer(places=1))
    head.client.sync_weights(1, weights, timeout=60)
    with host_joins(head.url, "b", tmp_path, "--set", "hosts.weights_dir=/proc/nowhere", inside=hidden(shared)):
        def reason() -> str:
            return next((r["reason"] for r in head.client.status()["runners"] if r["host"] == "b"), "")

        wait_until(lambda: "/proc/nowhere" in reason(), "the reason of host b's runner", 60)
        assert "could not load weights 1: version 1 can't be pulled into /proc/nowhere" in reason()
        head.submit(1, 2, 3.0)
        assert "/proc/nowhere" in head.client.why(1)
        head.finish(1, 2)
        assert head.ran_on(1)["b"] == 0
        [failed] = head.events(ev.WeightsFailed)
        assert failed.runner == "runner-0@b"


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_vllm_pulls(start_head: StartHead, tiny: Path, other: Path, tmp_path: Path) -> None:
    """The same calls with a real engine on host b: what came from there is compared with torch. The head's is scripted.

    Its name is short, as it is in the paths of the engine's sockets, of which the system takes 107 characters.
    """
    pytest.importorskip("vllm")
    from examples.grpo.trainer import GRPOTrainer

    shared = tmp_path / "shared"
    model, weights = shutil.copytree(tiny, shared / "model"), shutil.copytree(other, shared / "weights")
    sizes = {"max_model_len": 64, "max_response_tokens": 8, "gpu_memory_utilization": 0.3}
    head = start_head(explorer=explorer(engine_type="scripted", engine_args={}, model_path=str(model), **sizes))
    real = "--set", "explorer.rollout_model.engine_type=vllm"
    with host_joins(head.url, "b", tmp_path, *real, inside=hidden(shared)):
        ready(head.client, "b", 600)
        for batch_id, made_from in (1, tiny), (2, other):
            if batch_id == 2:
                head.client.sync_weights(1, weights, timeout=300)
            play_batch(head.client, batch_id, letters(64), timeout=300)
            on_b = {event.task for event in head.ended(batch_id) if event.runner == "runner-0@b"}
            found = [e for e in head.client.experiences(batch_id) if e.eid.task in on_b]
            assert {e.info["model_version"] for e in found} == {batch_id - 1}
            assert largest_difference(GRPOTrainer(str(made_from)), found) < TOLERANCE
