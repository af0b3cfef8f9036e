"""P50, P53: an explorer that chooses rows as Trinity-RFT does, goes on where it was cut off, and its own metrics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trinity_es
from tests.helpers.runs import explored
from tests.helpers.systems import scripted
from trinity_es import Explorer
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.projections.reading.task_mean_rewards import pass_rates
from trinity_es.tasksets.selectors import Selector
from trinity_es.tasksets.taskset import Taskset
from trinity_es.telemetry.metrics_file import read_metrics


def by_level(response: str, prompt: str, truth: str | None) -> float:
    return float(int(prompt.split()[-1]) % 2 == 0)


def config_of(folder: Path, **sections: Any) -> trinity_es.Config:
    for name, rows in (("a", 9), ("b", 4), ("check", 2)):
        lines = [{"prompt": f"question {i}", "weak": i / 10, "strong": min(1.0, i / 10 + 0.4)} for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = {"reward_fn": f"{__name__}:by_level", "rollout_args": {"max_tokens": 4}, "epochs": 1}
    learning = {"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"],
                "kwargs": {"tau": 0, "target_reward": 1.0, "m": 2}}
    inputs = {
        "interleave": "shuffled", "drop_last": True,
        "tasksets": [
            {"name": "a", "path": "a.jsonl", "repeat_times": 2, "data_selector": learning, **common},
            {"name": "b", "path": "b.jsonl", "data_selector": {"selector_type": "shuffle"}, **common},
        ],
        "eval_tasksets": [{"name": "check", "path": "check.jsonl", **common}],
    }
    data: dict[str, Any] = {
        "mode": "both", "explorer": {"eval_interval": 2}, "buffer": {"batch_size": 3, "explorer_input": inputs},
        "synchronizer": {"sync_interval": 2},
    }
    return scripted(folder, **data, **sections)


def learning_selector(folder: Path) -> Selector:
    [config, _] = config_of(folder).buffer.explorer_input.tasksets
    found = Taskset(config).selector
    assert found is not None
    return found


def rows_of(config: trinity_es.Config) -> list[list[tuple[str, int]]]:
    with trinity_es.open_log(config.store.url) as log:
        return [
            [(t["index"]["taskset"], t["index"]["index"]) for t in r.event.tasks or []] for r in log.events()
            if isinstance(r.event, ev.BatchSubmitted) and r.event.batch_type == "train"
        ]


def test_p50_p53_rows_are_chosen_learnt_from_and_gone_on_with(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = config_of(folders[0])
    assert explored(Explorer(whole)).step == 4  # 13 tasks are four steps of 3; the last is dropped
    steps = rows_of(whole)
    order = [0] * 9 + [1] * 4
    np.random.default_rng(0).shuffle(order)
    for i, step in enumerate(steps):
        assert Counter(name for name, _ in step) == Counter("ab"[n] for n in order[3 * i : 3 * i + 3])
    permutation = np.random.default_rng(42).permutation(4).tolist()
    b = [row for step in steps for name, row in step if name == "b"]
    assert b == permutation[: len(b)]
    with trinity_es.open_log(whole.store.url) as log:
        learnt = learning_selector(folders[0])
        for number, step in enumerate(steps, 1):
            if number == 3:  # the first after weights came in: it may depend on the steps before them
                for before in (1, 2):
                    learnt.learn(*pass_rates(log, before).get("a", ([], [])))
            position = sum(name == "a" for s in steps[: number - 1] for name, _ in s)
            mine = [row for name, row in step if name == "a"]
            assert mine == learnt.rows(position, len(mine)), number
        rows, rates = pass_rates(log, 1)["a"]
        assert rates == [float(row % 2 == 0) for row in rows]
        taken = [t["index"]["taskset_id"] for r in log.events() if isinstance(r.event, ev.BatchSubmitted)
                 for t in r.event.tasks or [] if "taskset_id" in t["index"]]
        assert set(taken) == {0, 1}
        assert log.verify() == []

    # A run that was cut off after a step chooses as the one that was not: what it learnt is in the log.
    assert explored(Explorer(config_of(folders[1], total_steps=3))).step == 3
    assert explored(Explorer(config_of(folders[1]))).step == 4
    assert rows_of(config_of(folders[1])) == steps

    metrics = read_metrics(Path(whole.run_dir) / "metrics.jsonl")
    assert metrics[1]["rollout/model_version"] == metrics[2]["rollout/model_version"] == 0
    assert 0 < metrics[1]["explorer/time/wait_explore_step"] < 60
    assert 0 < metrics[2]["explorer/time/wait_explore_step"] < 60
    assert metrics[2]["explore/time/sync_interval"] >= metrics[2]["explorer/time/wait_explore_step"]
    assert "explore/time/sync_interval" not in metrics[1]
    assert 0 < metrics[0]["time/eval"] < 60
    assert "time/eval" in metrics[2]


def test_p50_a_run_that_would_have_no_step_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, total_steps=3)
    data = config.to_dict()
    data["buffer"]["batch_size"] = 14
    explorer = Explorer(trinity_es.Config.from_dict(data))
    with pytest.raises(ConfigError, match=r"the tasksets have 13 tasks, fewer than buffer.batch_size 14"):
        explorer.locate()
    explorer.release()
