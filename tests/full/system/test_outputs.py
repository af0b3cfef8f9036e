"""Outputs of the pipeline: each train batch once and whole, whoever dies in between (P29)."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.systems import StartSystem, kill_everybody, pid_of, play_batch
from trinity_es import Task
from trinity_es.client import health
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.system import running_system
from trinity_es.testing import SleepWorkflow, wait_until

pytestmark = pytest.mark.timeout(240)


class Moody:
    """An output of a user's own: a file for each key, and troubles where a file in its folder asks for them."""

    def __init__(self, path: str) -> None:
        self.folder = Path(path)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, key: str, experiences: list[Experience]) -> None:
        if (self.folder / "full").exists():
            raise OSError("no space left on this device")
        with (self.folder / "calls").open("a") as calls:
            calls.write(f"{key}\n")
        if (self.folder / "slow").exists():
            time.sleep(60)
        if (self.folder / "short").exists():
            time.sleep(1.5)
        (self.folder / f"{key}.json").write_text(json.dumps([e.eid.uid for e in experiences]))


MOODY = "tests.full.system.test_outputs:Moody"


def tasks(n: int = 2, runs: int = 2) -> list[Task]:
    return [Task(workflow=SleepWorkflow, workflow_args={"reward": i}, repeat_times=runs) for i in range(n)]


def generate(client: RolloutClient, *batch_ids: BatchId) -> None:
    for batch_id in batch_ids:
        play_batch(client, batch_id, tasks(), timeout=90)


def key_of(client: RolloutClient, batch_id: BatchId) -> str:
    number = f"{batch_id:06d}" if isinstance(batch_id, int) else batch_id.replace("/", "%2F")
    return f"step-{number}-{client.batch(batch_id).submission}"


def of_output(client: RolloutClient, name: str, kind: str = "OutputWritten") -> list[Any]:
    return [r.event for r in client.log.read(stream=f"output/{name}", types=[kind])]


def wait_written(client: RolloutClient, name: str, batches: int) -> None:
    wait_until(lambda: len(of_output(client, name)) >= batches, f"{batches} batches in output {name}", 60)


def uids(client: RolloutClient, batch_id: BatchId) -> list[str]:
    return [e.eid.uid for e in client.experiences(batch_id)]


def outputs(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"pipeline": {"outputs": list(entries)}}


def test_p29_every_output_has_a_batch_as_the_trainer_gets_it(start_system: StartSystem, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    client = start_system(buffer=outputs(
        {"name": "jsonl"}, {"name": "parquet"}, {"name": MOODY, "args": {"path": str(tmp_path / "mine")}},
        {"name": "jsonl", "args": {"path": "elsewhere"}},
    ))
    generate(client, 1, "2/more")
    client.submit_batch(batch_id="2/eval", tasks=tasks(), batch_type="eval")
    client.finalize_eval_batch("2/eval", timeout=60)
    play_batch(client, 3, [])
    client.submit_batch(batch_id=4, tasks=tasks(), batch_type="train")
    client.abort_batch(4, reason="not wanted", keep_partial_results=True)
    client.process_experiences([Experience.serialize_many(list(client.experiences(1)))])
    for name in ("jsonl", "parquet", "Moody", "jsonl_2"):
        wait_written(client, name, 4)
        written = of_output(client, name)
        keys = [key_of(client, b) for b in (1, "2/more", 3)]
        assert [e.key for e in written][:3] == keys
        assert written[3].key.startswith("processed-")
        assert [e.experiences for e in written] == [4, 4, 0, 4]

    run = Path(client.config.run_dir)
    delivered = list(client.experiences(1))
    lines = [json.loads(s) for s in (run / f"outputs/jsonl/{keys[0]}.jsonl").read_text().splitlines()]
    table = pq.read_table(run / f"outputs/parquet/{keys[0]}.parquet").to_pylist()
    for e, line, row in zip(delivered, lines, table, strict=True):
        assert line["tokens"] == row["tokens"] == e.tokens.tolist()
        assert line["logprobs"] == pytest.approx(e.logprobs.tolist())
        assert row["logprobs"] == e.logprobs.tolist()
        assert row["advantages"] == e.advantages.tolist()
        assert (line["batch"], line["task"], line["run"]) == (1, e.eid.task, e.eid.run)
        assert (row["batch"], row["suffix"], row["reward"]) == ("1", e.eid.suffix, e.reward)
        assert line["info"] == json.loads(row["info"]) == e.info
        assert (line["oldest_version"], line["prompt"], line["completion"]) == (0, e.prompt_text, e.response_text)
    assert (run / f"outputs/jsonl/{keys[2]}.jsonl").read_bytes() == b""
    assert pq.read_table(run / f"outputs/parquet/{keys[2]}.parquet").num_rows == 0
    assert len(list((run / "elsewhere").iterdir())) == 4
    assert json.loads((tmp_path / f"mine/{keys[1]}.json").read_text()) == uids(client, "2/more")
    assert client.log.verify() == []


def test_p29_an_output_that_fails_holds_up_no_batch_and_misses_none(start_system: StartSystem, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    client = start_system(store={"retention": 1}, buffer=outputs({"name": MOODY, "args": {"path": str(mine)}}))
    generate(client, 1)
    wait_written(client, "Moody", 1)
    (mine / "full").touch()
    generate(client, 2, 3, 4)
    for batch_id in (1, 2, 3, 4):
        client.acknowledge(batch_id, batch_id)  # retention would free 2 and 3 now
    wait_until(lambda: of_output(client, "Moody", "OutputFailed"), "the failure to be in the log")
    wait_until(lambda: client.log.was_freed(1), "batch 1 to be freed")
    [failed] = of_output(client, "Moody", "OutputFailed")
    assert (failed.key, failed.retry) == (key_of(client, 2), True)
    assert "no space left" in failed.error
    assert "no space left" in client.status()["outputs"][0]["error"]
    assert any("output Moody" in p and "no space left" in p for p in health.read_health(client.config)["problems"])
    assert not client.log.was_freed(2)
    (mine / "full").unlink()
    wait_written(client, "Moody", 4)
    assert [e.key for e in of_output(client, "Moody")] == [key_of(client, b) for b in (1, 2, 3, 4)]
    assert len(of_output(client, "Moody", "OutputFailed")) == 1
    assert json.loads((mine / f"{key_of(client, 4)}.json").read_text()) == uids(client, 4)
    wait_until(lambda: client.status()["outputs"][0]["error"] is None, "the output to be well")


def test_p29_lost_payloads_are_given_up_and_the_next_batch_written(start_system: StartSystem, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    client = start_system(buffer=outputs({"name": MOODY, "args": {"path": str(mine)}}))
    mine.mkdir(exist_ok=True)
    (mine / "full").touch()
    generate(client, 1)
    wait_until(lambda: of_output(client, "Moody", "OutputFailed"), "the failure to be in the log")
    for task in client.batch(1).tasks:
        client._payloads.delete(task.payloads[0].digest)
    (mine / "full").unlink()
    generate(client, 2)
    wait_written(client, "Moody", 1)
    assert [(e.key, e.retry) for e in of_output(client, "Moody", "OutputFailed")] == [
        (key_of(client, 1), True), (key_of(client, 1), False),
    ]
    assert [e.key for e in of_output(client, "Moody")] == [key_of(client, 2)]


def test_p29_kill_9_of_all_while_an_output_writes_leaves_nothing_out_and_nothing_twice(
    start_system: StartSystem, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    sections = {"buffer": outputs({"name": "jsonl"}, {"name": MOODY, "args": {"path": str(mine)}})}
    client = start_system(**sections)
    generate(client, 1)
    wait_written(client, "Moody", 1)
    (mine / "slow").touch()
    generate(client, 2, 3)
    wait_until(lambda: key_of(client, 2) in (mine / "calls").read_text(), "batch 2 to be in the middle of its write")
    wait_written(client, "jsonl", 3)
    keys = [key_of(client, b) for b in (1, 2, 3)]
    kill_everybody(client)
    assert sorted(p.name for p in mine.glob("*.json")) == [f"{keys[0]}.json"]
    (mine / "slow").unlink()
    left = Path(client.config.run_dir) / "outputs/jsonl/.unfinished-left"
    left.touch()

    again = start_system(**sections)
    wait_written(again, "Moody", 3)
    assert [e.key for e in of_output(again, "Moody")] == keys
    assert (mine / "calls").read_text().split() == [keys[0], keys[1], keys[1], keys[2]]
    assert [e.key for e in of_output(again, "jsonl")] == keys
    generate(again, 4)
    wait_written(again, "jsonl", 4)
    assert not left.exists()


@pytest.mark.chaos
@pytest.mark.slow
def test_p29_outputs_are_complete_when_the_coordinator_is_killed(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(buffer=outputs({"name": "jsonl"}, {"name": "parquet"}))
    chance, batches = random.Random(29), list(range(1, 13))
    for batch_id in batches:
        generate(client, batch_id)
        if batch_id % 2 == 0:
            time.sleep(chance.uniform(0.0, 0.05))
            os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
    for name in ("jsonl", "parquet"):
        wait_written(client, name, len(batches))
        written = of_output(client, name)
        assert [e.key for e in written] == [key_of(client, b) for b in batches]
        folder = Path(client.config.run_dir) / "outputs" / name
        assert sorted(p.stem for p in folder.iterdir() if not p.name.startswith(".")) == sorted(e.key for e in written)
    for batch_id in batches:
        lines = (Path(client.config.run_dir) / f"outputs/jsonl/{key_of(client, batch_id)}.jsonl").read_text()
        found = [json.loads(line) for line in lines.splitlines()]
        parts = ("batch", "task", "run", "step", "suffix")
        assert ["/".join(str(e[p]) for p in parts) for e in found] == uids(client, batch_id)


def test_p29_the_last_batch_is_written_before_the_system_ends(start_system: StartSystem, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "short").touch()
    client = start_system(buffer=outputs({"name": MOODY, "args": {"path": str(mine)}}))
    generate(client, 1)
    key, config = key_of(client, 1), client.config
    client.shutdown()
    assert (mine / f"{key}.json").is_file()
    with trinity_es.open_log(config.store.url) as log:
        events = [r.event for r in log.read(stream="output/Moody")]
        assert isinstance(events[0], ev.OutputWritten)
        [finalized] = [r for r in log.read(stream=batch_stream(1)) if isinstance(r.event, ev.BatchFinalized)]
        assert events[0].position == finalized.position
    assert running_system.find(config) is None
