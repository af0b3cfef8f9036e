"""The benchmark of a run's checkpoints, on the real actor system (PARITY P35)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import trinity_es
from tests.helpers.handmade import cli, history, write
from tests.helpers.runs import command, count, events_of, finish_here, kill_run
from trinity_es import Explorer
from trinity_es.config.config import Config, load_config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.values import sort_batch_id
from trinity_es.system import leftovers
from trinity_es.testing import ScriptedEngine, wait_until

pytestmark = pytest.mark.timeout(200)


def by_version(response: str, prompt: str, truth: str | None) -> float:
    return sum(c < "m" for c in response) / max(1, len(response))


def bench_config(folder: Path, steps: tuple[int, ...] = (2, 4, 10), **rollout_model: Any) -> Path:
    """A config with the checkpoints of a run that was: the scripted engine needs no more than their folders."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"question {i}", "answer": "x"}) for i in range(4)]
    (folder / "eval.jsonl").write_text("\n".join(lines))
    evalset = {"path": "eval.jsonl", "repeat_times": 2, "reward_fn": "tests.full.system.test_benchmark:by_version",
               "rollout_args": {"max_tokens": 8}}
    data: dict[str, Any] = {
        "explorer": {"rollout_model": {"engine_type": "scripted"} | rollout_model},
        "buffer": {"explorer_input": {"eval_tasksets": [{"name": "check", **evalset}, {"name": "again", **evalset}]}},
        "system": {"keeper": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    for step in steps:
        checkpoint(path, step).mkdir(parents=True)
    return path


def checkpoint(path: Path, step: int) -> Path:
    return load_config(path).checkpoint_dir / f"global_step_{step}"


def as_bench(path: Path) -> Config:
    return load_config(path, ["mode=bench"])


def weights_by_eval(config: Config) -> dict[Any, set[tuple[int, int]]]:
    with trinity_es.open_log(config.store.url) as log:
        return {
            row.batch_id: {
                (r.event.model_version, r.event.model_version_end)
                for r in log.events(row.batch_id) if isinstance(r.event, ev.RunsFinished)
            }
            for row in log.batches()
        }


def test_p35_every_checkpoint_is_evaluated_in_order_on_its_own_weights_and_only_once(tmp_path: Path) -> None:
    path = bench_config(tmp_path / "run")
    done = cli("bench", "--json", path)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["step"] for row in told["checkpoints"]] == [0, 2, 4, 10]
    rewards = [row["rewards"]["check"] for row in told["checkpoints"]]
    assert len(set(rewards)) > 1
    assert all(row["rewards"]["again"] == row["rewards"]["check"] for row in told["checkpoints"])
    metrics = told["checkpoints"][1]["metrics"]
    assert metrics["bench/check/reward/mean@2"] == rewards[1]
    assert metrics["bench/again/finished_task_count"] == 4.0
    assert not [key for key in metrics if key.startswith("eval/")]

    config = as_bench(path)
    assert config.store.url.endswith("/bench/log.sqlite")
    evals = weights_by_eval(config)
    assert evals == {f"{v}/bench/{name}": {(v, v)} for v in (0, 2, 4, 10) for name in ("check", "again")}
    assert [sort_batch_id(b)[0] for b in evals] == [0, 0, 2, 2, 4, 4, 10, 10]
    with trinity_es.open_log(config.store.url) as log:
        assert log.verify() == []
        head = log.head()
    shown = cli("bench", path)  # again: it is complete, and nothing starts
    assert shown.exit_code == 0, shown.stderr
    assert "is complete" in shown.stderr
    assert shown.stdout.splitlines()[2].split() == ["the", "model", f"{rewards[0]:.3f}", f"{rewards[0]:.3f}"]
    with trinity_es.open_log(config.store.url) as log:
        assert log.head() == head

    checkpoint(path, 12).mkdir()
    checkpoint(path, 7).mkdir()  # older than what the engines serve
    more = cli("run", path, "--set", "mode=bench", "--json")
    assert more.exit_code == 1, more.stderr
    rows = {row["step"]: row for row in json.loads(more.stdout)["checkpoints"]}
    assert rows[12]["rewards"]["check"] is not None
    assert "never go back" in rows[7]["problem"]
    assert set(weights_by_eval(config)) - set(evals) == {"12/bench/check", "12/bench/again"}
    assert leftovers.leftovers(config) == []


def test_p35_the_newest_checkpoint_alone_and_one_that_does_not_load(tmp_path: Path) -> None:
    path = bench_config(tmp_path / "run", steps=(2, 30))
    latest = cli("bench", "--json", path, "--set", "explorer.bench_on_latest_checkpoint=true")
    assert latest.exit_code == 0, latest.stderr
    assert [row["step"] for row in json.loads(latest.stdout)["checkpoints"]] == [30]
    assert set(weights_by_eval(as_bench(path))) == {"30/bench/check", "30/bench/again"}

    broken = bench_config(tmp_path / "broken", steps=(2, 4, 6), engine_type="tests.full.system.test_benchmark:Picky")
    (checkpoint(broken, 4) / "unloadable").touch()
    done = cli("bench", "--json", broken)
    assert done.exit_code == 1, done.stderr
    rows = {row["step"]: row for row in json.loads(done.stdout)["checkpoints"]}
    assert sorted(rows) == [0, 2, 4, 6]
    assert "unloadable" in rows[4]["problem"]
    assert rows[4]["metrics"] == {}
    assert rows[6]["rewards"]["check"] is not None
    assert weights_by_eval(as_bench(broken))["6/bench/check"] == {(6, 6)}


class Picky(ScriptedEngine):
    async def load_weights(self, version: int, path: str) -> None:
        if (Path(path) / "unloadable").exists():
            raise trinity_es.TrinityError(f"{path} is unloadable")
        await super().load_weights(version, path)


@pytest.mark.slow
def test_p35_a_benchmark_that_was_killed_goes_on(tmp_path: Path) -> None:
    path = bench_config(tmp_path / "run", script={"latency_seconds": 0.3})
    config = as_bench(path)
    one = ("--set", "explorer.max_concurrency=1")  # one task after the other
    with command("bench", path, *one, cwd=tmp_path) as running:
        wait_until(lambda: count(config, "TaskFinished", "4/bench/check") >= 1, "the eval of step 4", timeout=60)
        kill_run(config, running)
    done = {(s, e.task) for s, e in events_of(config, "TaskFinished")}
    code, out, err = finish_here(
        "resume", config.store.url, "--json", "--set", "explorer.rollout_model.script.latency_seconds=0", cwd=tmp_path)
    assert code == 0, err
    assert "continuing the benchmark" in err
    assert [row["step"] for row in json.loads(out)["checkpoints"]] == [0, 2, 4, 10]
    after = [(s, e.task) for s, e in events_of(config, "TaskFinished")]
    assert len(after) == len(set(after)) == 4 * 2 * 4
    assert done <= set(after)
    assert weights_by_eval(config)["4/bench/again"] == {(4, 4)}
    assert [e.version for _, e in events_of(config, "WeightsPublished")] == [2, 4, 10]


def test_p35_what_can_not_be_benchmarked_says_so_before_anything_starts(tmp_path: Path) -> None:
    path = bench_config(tmp_path / "run", steps=())
    nothing = cli("bench", path, "--set", "explorer.eval_on_startup=false")
    assert (nothing.exit_code, "there is no checkpoint in" in nothing.stderr) == (2, True)
    none = cli("bench", path, "--set", "buffer.explorer_input.eval_tasksets=[]")
    assert (none.exit_code, "eval_tasksets is empty" in none.stderr) == (2, True)
    assert not list(tmp_path.rglob("*.sqlite"))


def test_p35_the_log_of_a_run_is_not_benchmarked_into(tmp_path: Path) -> None:
    path = bench_config(tmp_path / "run")
    log = tmp_path / "log.sqlite"
    write(log, history("0" * 64))
    with pytest.raises(ConfigError, match="holds a run, but a benchmark needs a log of its own"):
        Explorer(load_config(path, ["mode=bench", f"store.url=sqlite:///{log}"])).locate()
