"""A6: bad input gets a clear error at the earliest moment; nothing is lost and nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import trinity_es
from tests.helpers.parity_rows import NewId
from trinity_es import Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import (
    BatchNotFound,
    ConfigError,
    TaskNotSerializable,
    TrinityError,
    UnknownWorkflow,
)
from trinity_es.system import lifecycle
from trinity_es.testing import SleepWorkflow


def test_a_workflow_that_can_not_be_imported_is_refused_on_submission(shared: RolloutClient, new_id: NewId) -> None:
    for name, says in (("no_such_module:W", "no_such_module"), ("nonsense", "not registered"),
                       ("trinity_es.testing:Nothing", "Nothing")):
        with pytest.raises(UnknownWorkflow, match=says):
            shared.submit_batch(batch_id=new_id(), tasks=[Task(workflow=name)], batch_type="train")


def test_a_model_path_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = trinity_es.Config.from_dict({"model": {"model_path": "./nowhere"}}, folder=tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        lifecycle.start(config)
    assert not (tmp_path / "runs").exists()


_HELD: list[Any] = []
_HELD.append(_HELD)
ABSURD: dict[str, Any] = {
    "none": None, "nan": float("nan"), "-inf": float("-inf"), "-1": -1, "huge": 10**400, "nul": "x\0", "half": "\ud800",
    "long": "x" * 100_000, "bytes": b"\xff", "list": [], "holds itself": _HELD, "mapping": {}, "object": object(),
    "class": Task, "array": np.zeros(3),
}


def _calls(batch: int, new: int) -> dict[str, dict[str, Any]]:
    """Every method with arguments that it takes."""
    tasks = [Task(workflow=SleepWorkflow, raw_task={"i": 1})]
    return {
        "read": {"refs": []},
        "pack": {"tasks": tasks},
        "submit_batch": {"batch_id": new, "tasks": tasks, "batch_type": "train", "min_wait_num": 1, "cursor": None},
        "finalize_train_batch": {"batch_id": batch, "timeout": 0.1},
        "finalize_eval_batch": {"batch_id": batch, "timeout": 0.1},
        "abort_batch": {"batch_id": batch, "reason": "r", "keep_partial_results": False},
        "redo": {"batch_id": batch, "tasks": [0], "reason": ""},
        "process_experiences": {"payloads": []},
        "experiences": {"batch_id": batch},
        "take_experiences": {"n": 1000, "timeout": 0.1, "step": None},
        "processed_experiences": {"after": 0},
        "acknowledge": {"batch_id": batch, "step": 1, "metrics": {"a": 1.0}},
        "next_batch": {"after": 0, "timeout": 0.1},
        "batch": {"batch_id": batch},
        "why": {"batch_id": batch},
        "get_weight": {"name": "x"},
        "setup_weight_sync_group": {"master_address": "127.0.0.1", "master_port": 0},
        "status": {"patience": 10.0},
        "restart_runner": {"name": "nobody", "reason": ""},
        "get_runner_state": {"name": "runner-0"},
        "get_key_state": {"key": "pid"},
        "wait_ready": {"timeout": 10.0},
    }


@pytest.mark.parametrize("method", _calls(0, 0))
def test_whatever_an_argument_is_the_error_is_one_of_ours(shared: RolloutClient, new_id: NewId, method: str) -> None:
    batch = new_id()
    shared.submit_batch(batch_id=batch, tasks=_calls(0, 0)["pack"]["tasks"], batch_type="train")
    for name in _calls(0, 0)[method]:
        for kind, value in ABSURD.items():
            if name in ("timeout", "patience") and kind in ("none", "huge"):
                continue  # waits for ever, as it was told
            arguments = _calls(batch, new_id())[method] | {name: value}
            try:
                found = getattr(shared, method)(**arguments)
                if isinstance(found, Iterator):
                    list(found)
            except (TrinityError, TimeoutError):
                pass
            except Exception as e:
                pytest.fail(f"{method}({name}={kind}) raised {e!r}")


@pytest.mark.parametrize(("task", "says"), [
    (Task(workflow=cast(Any, 10**400)), "is no class"),
    (Task(workflow=SleepWorkflow, reward_fn=cast(Any, 3)), "is no class"),
    (Task(workflow=SleepWorkflow, raw_task={"a": _HELD}), "contains itself"),
    (Task(workflow=SleepWorkflow, raw_task=cast(Any, [1])), "raw_task is a list: a mapping"),
    (Task(workflow=SleepWorkflow, format_args=cast(Any, 3)), "format_args is a int: a mapping"),
    (Task(workflow=SleepWorkflow, workflow_args={"judge": lambda x: x}), r"workflow_args\.judge"),
    (Task(workflow=SleepWorkflow, workflow_args={"x": float("nan")}), "nan"),
])
def test_a_task_that_is_none_is_named(shared: RolloutClient, new_id: NewId, task: Task, says: str) -> None:
    batch, good = new_id(), Task(workflow=SleepWorkflow, raw_task={})
    with pytest.raises(TaskNotSerializable, match=f"^task 1: .*{says}"):
        shared.submit_batch(batch_id=batch, tasks=[good, task], batch_type="train")
    with pytest.raises(BatchNotFound):
        shared.batch(batch)
