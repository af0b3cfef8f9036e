"""Servers of others as engines of a whole system: they come and go in a run, and nothing is lost (stand-ins of vLLM's).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.servers import ServerProcess, letters, over_http, runs_by
from tests.helpers.systems import StartSystem, events, play_batch
from trinity_es.events import vocabulary as ev
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(180)


def test_i3_servers_come_and_go_with_a_file_and_drain_loses_nothing(
    start_system: StartSystem, three: list[ServerProcess], tiny: Path, other: Path, tmp_path: Path
) -> None:
    a, b, c = (server.url for server in three)
    listed = tmp_path / "servers"
    listed.write_text(f"{a}\n{b}\n")
    client = start_system(explorer=over_http(tiny, file=str(listed), poll_interval=0.2))
    wait_until(lambda: [r["state"] for r in client.status()["runners"]] == ["ready"] * 2, "both", 60)
    client.sync_weights(1, other)
    client.submit_batch(batch_id=1, tasks=letters(40), batch_type="train")
    wait_until(lambda: sum(runs_by(client, 1).values()) > 8, "some to be finished")
    listed.write_text(f"{b}\n{c}\n")  # a leaves with its hands full, c comes
    result = client.finalize_train_batch(1, timeout=60)
    assert result["finished_task_count"] == 40
    experiences = list(client.experiences(1))
    assert len({(e.eid.task, e.eid.run) for e in experiences}) == len(experiences) == 80
    assert {tuple(map(tuple, e.info["version_spans"])) for e in experiences} == {((1, 0, 8),)}
    by = runs_by(client, 1)
    assert by["runner-0"]
    assert by["runner-1"]
    failed = [e for e in client.log.events(batch_id=1) if isinstance(e.event, ev.AttemptFailed)]
    assert failed == [], "what the leaving runner had it ended"
    gone = next(e.position for e in client.log.events() if isinstance(e.event, ev.ServerRemoved))
    late = {e.event.runner for e in client.log.events(after=gone) if isinstance(e.event, ev.TasksDispatched)}
    assert "runner-0" not in late, "nothing more"
    wait_until(lambda: events(client, ev.RunnerRetired), "runner-0 to retire")
    added, removed = events(client, ev.ServerAdded), events(client, ev.ServerRemoved)
    assert [(e.url, e.runner) for e in added] == [(a, "runner-0"), (b, "runner-1"), (c, "runner-2")]
    assert [(e.url, e.runner, e.by) for e in removed] == [(a, "runner-0", "list")]
    assert [e.runner for e in events(client, ev.RunnerRetired)] == ["runner-0"]
    # The new one has the current weights before its first unit.
    wait_until(lambda: "runner-2" in {e.runner for e in events(client, ev.WeightsLoaded)}, "runner-2's weights", 60)
    play_batch(client, 2, letters(40))
    assert set(runs_by(client, 2)) == {"runner-1", "runner-2"}
    assert {e.info["model_version"] for e in client.experiences(2)} == {1}
    made_by = Counter[tuple[int, str]]()
    for line in map(json.loads, (tmp_path / "account").read_text().splitlines()):
        made_by[line["server"], line["weights"][0]] += line["tokens"]
    assert made_by[three[2].port, str(other)] > 0
    assert made_by[three[2].port, str(tiny)] <= 4, "but for the first look at it"
    history = list(client.log.events())
    ready = next(e.recorded_at for e in history if isinstance(e.event, ev.RunnerReady) and e.event.runner == "runner-2")
    first = next(
        e.recorded_at for e in history if isinstance(e.event, ev.TasksDispatched) and e.event.runner == "runner-2"
    )
    submitted = [e.recorded_at for e in history if isinstance(e.event, ev.BatchSubmitted) and e.recorded_at <= first]
    assert first - max(ready, *submitted) < 5.0
