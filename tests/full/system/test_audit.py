"""A2: a log of a system that is gone answers everything, on a machine that has neither torch nor vllm nor actors."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest

import trinity_es
from tests.helpers.paths import ROOT
from tests.helpers.systems import play_batch, sleepers, started
from trinity_es.projections.reading.log_reader import canonical

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
    """The URL of a finished run's log, and what finalize had returned."""
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
    assert told["batches"] == [
        [1, "finalized", 6, 6], ["1/letters", "finalized", 2, 2], [2, "aborted", 2, 0],
    ]
    assert canonical(told["final"]) == canonical(result)
    assert told["same"] is True
    assert told["middle"][0] == "running"
    assert 0 < told["middle"][1] <= 6
    assert told["problems"] == []


def test_a_time_as_it_is_shown_names_the_state_after_the_event_of_that_time(
    dead_log: tuple[str, dict[str, object]],
) -> None:
    with trinity_es.open_log(dead_log[0]) as log:
        for recorded in log.events():
            shown = datetime.fromtimestamp(recorded.recorded_at, UTC).isoformat()
            assert datetime.fromisoformat(shown).timestamp() == recorded.recorded_at
