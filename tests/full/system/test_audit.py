"""A2: a log of a system that is gone answers everything, on a machine that has neither torch nor vllm nor actors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

import trinity_es
from tests.helpers.handmade import cli, history, write
from tests.helpers.paths import ROOT
from tests.helpers.systems import StartSystem, limit_file_size, play_batch, sleepers, started
from trinity_es import BatchLifecycleState
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError, LogUnavailable, PayloadNotFound
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.reading.log_reader import canonical
from trinity_es.projections.verify.log import verify_log
from trinity_es.testing import wait_until

AUDITOR = """
import sys, json

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "thespian", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import trinity_es

log = trinity_es.open_log(sys.argv[1])
positions = [e.position for e in log.events(1)]
middle = positions[len(positions) // 2]
print(json.dumps({
    "batches": [[b.batch_id, b.state, b.tasks, b.finished] for b in log.batches()],
    "events": len(positions),
    "final": log.replay(1).final_result,
    "same": log.check_result(1)[0] == log.check_result(1)[1],
    "middle": [log.replay(1, at=middle).state, log.replay(1, at=middle).completed_task_count],
    "problems": log.verify(),
}))
"""


@pytest.fixture(scope="module")
def dead_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object]]:
    client = started(tmp_path_factory.mktemp("dead"))
    result = play_batch(client, 1, sleepers(6, seconds=0.02, reward=1 / 3))
    client.submit_batch(batch_id="1/letters", tasks=sleepers(2, reward=0.1), batch_type="eval")
    client.finalize_eval_batch("1/letters", timeout=30)
    client.submit_batch(batch_id=2, tasks=sleepers(2, seconds=60), batch_type="train")
    client.abort_batch(2, reason="enough")
    url = client.config.store.url
    client.shutdown()
    return url, result


def test_a2_a_dead_log_is_read_without_torch_vllm_or_actors(dead_log: tuple[str, dict[str, object]]) -> None:
    url, result = dead_log
    done = subprocess.run(
        [sys.executable, "-c", AUDITOR, url], capture_output=True, text=True, timeout=60, check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["batches"] == [[1, "finalized", 6, 6], ["1/letters", "finalized", 2, 2], [2, "aborted", 2, 0]]
    assert canonical(told["final"]) == canonical(result)
    assert told["same"] is True
    assert told["middle"][0] == "running"
    assert 0 < told["middle"][1] <= 6
    assert told["problems"] == []


def test_a2_state_at_a_position_and_at_a_time(dead_log: tuple[str, dict[str, object]]) -> None:
    with trinity_es.open_log(dead_log[0]) as log:
        events = list(log.events(1))
        before = log.replay(1, at=events[0].position)
        assert (before.state, before.completed_task_count) == (BatchLifecycleState.RUNNING, 0)
        assert log.replay(1, at=events[-1].position).state is BatchLifecycleState.FINALIZED
        ended = datetime.fromtimestamp(events[-1].recorded_at, UTC)
        assert log.replay(1, at=ended).state is BatchLifecycleState.FINALIZED
        with pytest.raises(BatchNotFound, match="not submitted yet"):
            log.replay(1, at=events[0].position - 1)
        with pytest.raises(BatchNotFound, match="no batch 99"):
            log.replay(99)
        with pytest.raises(BatchNotFound, match="there is one with the id 1"):
            log.replay("1")
        for digits in ("9" * 20, "9" * 5000):
            with pytest.raises(BatchNotFound, match="no batch"):
                log.replay(digits)


def test_verify_finds_a_changed_payload_and_a_lost_one(dead_log: tuple[str, dict[str, object]], tmp_path: Path) -> None:
    before = Path(dead_log[0].removeprefix("sqlite:///"))
    path = shutil.copytree(before.parent, tmp_path / "copy") / before.name
    changed = next(p for p in Path(f"{path}.payloads").rglob("*") if p.is_file())
    os.chmod(changed, 0o600)
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    with trinity_es.open_log(str(path)) as log:
        [problem] = log.verify()
        assert f"{changed.name} in" in problem
        assert "was changed" in problem
        changed.unlink()
        [problem] = log.verify()
        assert f"{changed.name} is missing" in problem


def test_a6_a_full_disk_is_an_error_and_loses_nothing(start_system: StartSystem) -> None:
    client = start_system()
    result = play_batch(client, 1, sleepers(2))
    limit_file_size(client, 1024)
    with pytest.raises(LogUnavailable):
        client.submit_batch(batch_id=2, tasks=sleepers(2), batch_type="train")
    limit_file_size(client, psutil.RLIM_INFINITY)
    with pytest.raises(BatchNotFound):
        client.batch(2)
    wait_until(lambda: client.status()["runners"], "the runner to be known again")
    play_batch(client, 2, sleepers(2))
    assert canonical(client.finalize_train_batch(1)) == canonical(result)
    assert client.log.verify() == []


def test_a_time_as_shown_names_the_state_after_the_event_of_that_time(dead_log: tuple[str, dict[str, object]]) -> None:
    with trinity_es.open_log(dead_log[0]) as log:
        for recorded in log.events():
            shown = datetime.fromtimestamp(recorded.recorded_at, UTC).isoformat()
            assert datetime.fromisoformat(shown).timestamp() == recorded.recorded_at


# --- payloads that were lost ------------------------------------------------------------------------------------------
def test_tasks_whose_payload_is_lost_are_named_run_again_and_the_batch_is_finalized(start_system: StartSystem) -> None:
    client = start_system()
    url = client.config.store.url
    client.submit_batch(batch_id=1, tasks=sleepers(4, seconds=0.01), batch_type="train")
    wait_until(lambda: client.batch(1).is_complete, "the tasks to be done")
    lost = client.batch(1).tasks[2].payloads[0].digest
    with_it = [n for n, task in enumerate(client.batch(1).tasks) if task.payloads[0].digest == lost]
    way = f"run its tasks again with `trinity-es redo 1 {' '.join(map(str, with_it))}`"
    (Path(f"{url.removeprefix('sqlite:///')}.payloads") / lost[:2] / lost).unlink()
    assert [p for p in verify_log(url).problems if lost in p and way in p]
    with pytest.raises(PayloadNotFound, match=way.replace("`", ".")):
        client.finalize_train_batch(1, timeout=30)
    assert way in client.why(1)
    told = cli("redo", "1", *with_it, "--log", url, "--reason", "the disk lost it")
    assert told.exit_code == 0, told.output
    result = client.finalize_train_batch(1, timeout=60)
    assert result["finished_task_count"] == 4
    assert sorted(e.eid.task for e in client.experiences(1)) == [0, 1, 2, 3]
    events = [r.event for r in client.log.events(1)]
    assert Counter(e.task for e in events if isinstance(e, ev.TaskFinished)) == {
        n: 1 + (n in with_it) for n in range(4)}
    reopened = [e for e in events if isinstance(e, ev.TaskReopened)]
    assert [e.task for e in reopened] == with_it
    assert reopened[0].reason.endswith(" asked for this: the disk lost it")
    assert client.log.verify() == []
    with pytest.raises(DataError, match="its result was handed out and can't change"):
        client.redo(1, 2)
    refused = cli("redo", "1", "2", "--log", url)
    assert refused.exit_code == 2
    assert "its result was handed out and can't change" in refused.output


def test_what_an_earlier_try_of_a_batch_id_had_is_not_said_to_run_again(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    open_payloads(str(path))
    again = ev.BatchSubmitted(batch_id=3, batch_type="train", repeat_times=[2], tasks=[{}])
    write(path, [*history("d" * 64), (batch_stream(3), [again])])
    [told] = [p for p in verify_log(f"sqlite:///{path}").problems if "d" * 64 in p]
    assert "redo" not in told
