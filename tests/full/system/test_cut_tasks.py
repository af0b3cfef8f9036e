"""`synchronizer.in_flight: cut`: a task that a step leaves unfinished goes on in the next one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import trinity_es
from tests.helpers.handmade import cli
from tests.helpers.prompts import prompts_used
from tests.helpers.runs import count, events_of, explored, finish_here, killed_when
from trinity_es import Explorer
from trinity_es.config.config import Config, load_config
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.telemetry.metrics_file import read_metrics

pytestmark = pytest.mark.timeout(240)

ROWS, TOKENS, LONG = 14, 120, (1, 2, 6)


def cutting(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"{'long' if i in LONG else 'short'} {i}", "answer": "x"}) for i in range(ROWS)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({
        "mode": "both",
        "explorer": {
            "over_rollout": {"ratio": 0.5, "wait_after_min": 0.0}, "progress": {"seconds": 0.1},
            "rollout_model": {"engine_type": "scripted", "script": {
                "latency_seconds": 0.8,
                "rules": [{"prompt": "long", "token_seconds": 0.02, "latency_seconds": 0}],
            }},
        },
        "buffer": {"batch_size": 4, "explorer_input": {"tasksets": [{
            "name": "questions", "path": "train.jsonl", "repeat_times": 2,
            "reward_fn": "tests.helpers.runs:early_letters", "rollout_args": {"max_tokens": TOKENS},
        }]}},
        "synchronizer": {"in_flight": "cut"},
        "trainer": {"class": "tests.helpers.runs:SteadyTrainer", "args": {"seconds": 0.1}},
        "system": {"keeper": False},
    }))
    return path


def rows_of(config: Config) -> dict[int, list[tuple[int, bool]]]:
    """Return by step the row of each task, and whether it goes on with an earlier step's."""
    with trinity_es.open_log(config.store.url) as log:
        steps = {}
        for _, event in events_of(config, "BatchSubmitted"):
            continued = {task.task: task for task in event.continues}
            rows = [task["index"]["index"] for task in log.tasks_of(event)]
            for number, of in continued.items():
                assert log.task(of.batch_id, of.cut_task)["index"]["index"] == rows[number]
            steps[int(event.batch_id)] = [(row, number in continued) for number, row in enumerate(rows)]
        return steps


def require_whole(config: Config) -> None:
    """Each row was read once and delivered once with both runs; nothing that was kept was generated again."""
    with trinity_es.open_log(config.store.url) as log:
        assert log.verify() == []
        assert prompts_used(log, "questions") == dict.fromkeys(range(ROWS), 1)
        steps, delivered, spans = rows_of(config), Counter[int](), []
        assert [row for step in steps.values() for row, continued in step if not continued] == list(range(ROWS))
        for step, rows in steps.items():
            assert len(rows) == 4 or step == max(steps)
            state = log.current(step)
            assert {rows[n][0] for n in state.cut} == {row for row, continued in steps.get(step + 1, ()) if continued}
            experiences = read_experiences(log.payloads(), state.experiences)
            delivered.update(rows[e.eid.task][0] for e in experiences)
            for e in experiences:
                assert len(e.logprobs) == TOKENS
                spans.append((rows[e.eid.task][0], e.version_spans, e.info.get("splices", [])))
        assert delivered == dict.fromkeys(range(ROWS), 2)
    for row, of_answer, splices in spans:
        assert (row in LONG) >= bool(splices)
        versions, starts = [version for version, _, _ in of_answer], [start for _, start, _ in of_answer]
        assert versions == sorted(set(versions))
        assert {*starts} <= {0, *splices}, "only a cut changes the weights of an answer"
    assert max(len(of_answer) for _, of_answer, _ in spans) >= 3


def test_what_a_step_leaves_goes_on_in_the_next_from_its_tokens(tmp_path: Path) -> None:
    config = load_config(cutting(tmp_path))
    explored(Explorer(config))
    require_whole(config)
    steps = rows_of(config)
    assert sum(continued for rows in steps.values() for _, continued in rows) >= 3
    metrics = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    cut = {step: m.get("rollout/cut_task_count", 0) for step, m in metrics.items()}
    went_on = {step: m.get("rollout/continued_task_count", 0) for step, m in metrics.items()}
    assert all(went_on[step + 1] == cut[step] for step in steps if step + 1 in steps)
    assert cut[max(steps)] == 0, "the last step waits for all its tasks"
    [(row, number)] = [(row, n) for n, (row, continued) in enumerate(steps[2]) if continued][:1]
    before = [row for row, _ in steps[1]].index(row)
    shown = cli("show", 1, "--task", before, "--log", config.store.url).stdout
    assert f"goes on as task {number} of batch 2" in shown
    shown = cli("show", 2, "--task", number, "--log", config.store.url).stdout
    assert f"goes on with task {before} of batch 1, cut once so far" in shown
    assert "the next attempt goes on from" in shown


@pytest.mark.slow
@pytest.mark.parametrize("reached", [
    lambda c: count(c, "BatchFinalized", 1) == 1 and count(c, "BatchSubmitted", 2) == 0,
    lambda c: count(c, "TasksDispatched", 2) >= 1,
    lambda c: count(c, "BatchFinalizing", 2) == 1,
], ids=["cut and in no batch", "gone on", "cut again"])
def test_after_kill_9_of_everything_cut_tasks_go_on_and_no_row_is_skipped_or_repeated(
    tmp_path: Path, reached: Callable[[Config], bool]
) -> None:
    path = cutting(tmp_path / "run")
    config = killed_when(reached, path, "the moment")
    assert finish_here("resume", path, cwd=tmp_path)[0] == 0
    require_whole(config)
