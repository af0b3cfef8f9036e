"""A payload that was lost costs its tasks another run, and not the batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.handmade import cli, history, write
from tests.helpers.systems import StartSystem, sleepers
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, PayloadNotFound
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.verify.log import verify_log
from trinity_es.testing import wait_until


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
    assert reopened[0].reason.startswith("the disk lost it (asked for by pid")
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
