"""A run of the explorer continues after everything died, and ends as if nothing had happened (promises 3 and 4)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import trinity_es
from tests.helpers import runs
from tests.helpers.handmade import cli, history, write
from tests.helpers.of_the_day import of_the_day
from tests.helpers.prompts import prompts_used
from trinity_es import Explorer
from trinity_es.client import teardown
from trinity_es.config.config import Config, load_config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AlreadyRunning, ConfigError
from trinity_es.events.values import batch_stream
from trinity_es.run.trainer_loop import TrainerProcess
from trinity_es.system import leftovers, running_system
from trinity_es.telemetry.metrics_file import read_metrics
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(240)
STEADY = {"class": "tests.helpers.runs:SteadyTrainer"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    return runs.outcomes(lambda folder, interval: runs.make_config(folder, interval=interval), tmp_path_factory)


MOMENTS: dict[str, tuple[int, Callable[[Config], bool]]] = {
    "in the middle of step 2": (1, lambda c: runs.count(c, "TaskFinished", 2) >= 2),
    "in the first eval": (1, lambda c: runs.count(c, "TaskFinished", "0/check") >= 1),
    "step 2 generated, not trained": (1, lambda c: runs.count(c, "BatchFinalized", 2) == 1),
    "step 3 trained, its weights not saved": (1, lambda c: runs.count(c, "BatchTrained", 3) == 1),
    "weights 2 published, the eval after it open": (1, lambda c: runs.count(c, "TasksDispatched", "2/check") >= 1),
    "in the middle of a period": (2, lambda c: runs.count(c, "BatchTrained", 3) == 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", [*MOMENTS][:1] + of_the_day([*MOMENTS][1:]))
def test_promise_3_and_4_after_kill_9_of_everything_a_resumed_run_ends_as_if_nothing_had_been(
    tmp_path: Path, undisturbed: Callable[[int], dict[str, Any]], moment: str
) -> None:
    interval, reached = MOMENTS[moment]
    path = runs.make_config(tmp_path / "run", interval=interval)
    config = runs.killed_when(reached, path, moment)
    finished = {(s, e.task) for s, e in runs.events_of(config, "TaskFinished")}
    rows_of = path.with_name("train.jsonl")
    rows_before = rows_of.read_text()
    rows_of.write_text(f'{rows_before}\n{{"prompt": "one more"}}')
    code, out, err = runs.finish_here("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    assert code == 2
    assert "has 15 rows, sha256:" in err
    assert "the run in this log began with 14 rows" in err
    rows_of.write_text(rows_before)
    out, err = runs.went_well("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    assert "going on with the run" in err
    assert runs.outcome(config) == undisturbed(interval)
    assert runs.outcome(config)["used"] == dict.fromkeys(range(runs.ROWS), 1)
    assert leftovers.leftovers(config) == []
    after = Counter((s, e.task) for s, e in runs.events_of(config, "TaskFinished"))
    assert set(after.values()) == {1}, "a finished task was run again"
    assert finished <= set(after)
    assert finished
    rows = [line for line in out.splitlines() if line.startswith("batches")]
    assert rows == ["batches          8 (5 to train on, 3 evals)"]


@pytest.mark.slow
def test_a_run_that_dies_twice_uses_prompts_once(tmp_path: Path, undisturbed: Callable[[int], dict[str, Any]]) -> None:
    path = runs.make_config(tmp_path / "run")
    for number in (1, 2):
        config = runs.killed_when(lambda c, n=number: runs.count(c, "TaskFinished", n) >= 1, path, f"step {number}")
    runs.went_well("resume", config.store.url, *runs.AT_ONCE, cwd=tmp_path)
    assert runs.outcome(config) == undisturbed(1)
    decisions = Counter(e.decision for _, e in runs.events_of(config, "RecoveryDecided"))
    assert decisions["resume"] >= 1  # not at each death: a step may just have ended by then


def kill_command_in_step_2(path: Path, config: Config) -> None:
    with runs.command("run", path, cwd=path.parent) as running:
        wait_until(lambda: runs.count(config, "TaskFinished", 2) >= 1, "step 2", timeout=60)
        running.kill()
        running.communicate(timeout=30)


@pytest.mark.slow
def test_a_run_of_which_only_the_command_was_killed_goes_on_in_its_system_and_ends_it(
    tmp_path: Path, undisturbed: Callable[[int], dict[str, Any]]
) -> None:
    path = runs.make_config(tmp_path / "run", system={"detach": True})
    config = load_config(path)
    kill_command_in_step_2(path, config)
    assert leftovers.leftovers(config)
    taskset = path.parent / "train.jsonl"
    taskset.rename(taskset.with_suffix(".away"))  # a resume that comes to nothing leaves it whose it was
    assert runs.finish_here("resume", path, *runs.AT_ONCE, cwd=tmp_path)[0] == 2
    taskset.with_suffix(".away").rename(taskset)
    assert leftovers.leftovers(config)
    _, err = runs.went_well("resume", path, *runs.AT_ONCE[:2], cwd=tmp_path)
    assert "changed since its last start: trainer.args.seconds was 0.3 and is 0\n" in err
    assert runs.outcome(config) == undisturbed(1)
    assert len(runs.events_of(config, "CoordinatorStarted")) == 1
    assert leftovers.leftovers(config) == []


@pytest.mark.slow
def test_a_system_has_the_settings_of_the_run_or_the_run_is_refused(tmp_path: Path) -> None:
    path = runs.make_config(tmp_path / "run", system={"detach": True}, total_steps=2)
    config = load_config(path)
    other = ("--set", "explorer.max_concurrency=1")
    assert cli("up", path).exit_code == 0
    try:
        refused = cli("run", path, *other)
        assert refused.exit_code == 2
        assert "was started with other settings: explorer.max_concurrency was 2 and is 1. End it with" in refused.stderr
        another = cli("run", path, "--set", "model.model_path=m").stderr
        assert "other settings: model.model_path was '' and is 'm'" in another
        assert runs.count(config, "BatchSubmitted", 1) == 0
        assert cli("run", path, *runs.AT_ONCE[:2], "--set", "total_steps=1").exit_code == 0
        assert running_system.is_up(config), "it was not started by the run"
    finally:
        assert cli("down", path).exit_code == 0
    kill_command_in_step_2(path, config)
    assert running_system.is_up(config), "it was detached"
    code, _, err = runs.finish_here("resume", path, *runs.AT_ONCE[:2], *other, cwd=tmp_path)
    assert (code, leftovers.leftovers(config)) == (0, []), err
    assert len(runs.events_of(config, "CoordinatorStarted")) == 3, "the run's own is started again"


@pytest.mark.slow
def test_a_system_that_the_keeper_brought_up_after_its_command_died_is_ended_with_the_run(tmp_path: Path) -> None:
    path = runs.make_config(tmp_path / "run", system={"keeper": True, "detach": True})
    config = runs.killed_when(lambda c: runs.count(c, "TaskFinished", 2) >= 1, path, "step 2")
    try:
        again = "the keeper to start the system again"
        wait_until(lambda: len(runs.events_of(config, "CoordinatorStarted")) == 2, again, timeout=60)
        runs.went_well("resume", path, *runs.AT_ONCE[:2], cwd=tmp_path)
        assert running_system.keeper(config) is None
        assert leftovers.leftovers(config) == []
    finally:
        teardown.end_system(config)


def test_a_complete_run_is_shown_not_repeated_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    path = runs.make_config(tmp_path / "run", total_steps=2, trainer=STEADY)
    config = load_config(path)
    runs.explored(Explorer(config))
    before = runs.outcome(config)
    again = cli("run", path)
    assert again.exit_code == 2
    assert "the run is complete (step 2)" in again.stderr
    shown = cli("resume", "--json", path)
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["train_batches"] == 2
    assert runs.outcome(config) == before
    from_log = cli("resume", Path(config.store.url.removeprefix("sqlite:///")), "--set", "total_steps=3")
    assert from_log.exit_code == 0, from_log.stderr
    assert set(runs.outcome(config)["batches"]) == {"0/check", 1, 2, "2/check", 3}
    assert not {1, 2} & {e.batch_id for _, e in runs.events_of(config, "BatchSubmitted")[3:]}


def refuses(response: str) -> float:
    raise RuntimeError("the judge is away")


def test_a_run_of_which_each_run_failed_is_an_error_and_names_the_failure(tmp_path: Path) -> None:
    tasksets = [{"name": "questions", "path": "train.jsonl", "reward_fn": "tests.full.system.test_resume:refuses"}]
    path = runs.make_config(tmp_path / "run", total_steps=1, mode="explore", trainer={}, buffer={
        "batch_size": 2, "explorer_input": {"tasksets": tasksets}})
    done = cli("run", path)
    assert done.exit_code == 2
    assert "because every run failed, the last with" in done.stderr
    assert "the judge is away" in done.stderr
    assert "`trinity-es show 1` shows all failures" in done.stderr


def test_what_is_no_run_to_resume_says_so(tmp_path: Path) -> None:
    path = runs.make_config(tmp_path / "run")
    nothing = cli("resume", path)
    assert (nothing.exit_code, "no run to resume" in nothing.stderr) == (2, True)
    assert "no run under" in cli("resume", cwd=tmp_path).stderr
    assert "can't be read" in cli("resume", "missing.yaml", cwd=tmp_path).stderr


def test_two_explorers_never_go_on_with_one_run(tmp_path: Path) -> None:
    config = load_config(runs.make_config(tmp_path / "run"))
    first = Explorer(config)
    assert first.locate()
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()} "):
        Explorer(config).locate()
    asyncio.run(first.shutdown())
    second = Explorer(config)
    assert second.locate()
    with pytest.raises(AlreadyRunning, match="a trainer runs"):  # it trains too
        TrainerProcess(config).locate()
    asyncio.run(second.shutdown())
    alone = TrainerProcess(config)
    assert alone.locate()
    with pytest.raises(AlreadyRunning, match="a trainer runs"):
        Explorer(config).locate()
    asyncio.run(alone.shutdown())
    third = Explorer(config)
    assert third.locate()
    third.release()


def test_a_run_whose_checkpoint_is_gone_says_so_before_anything_starts(tmp_path: Path) -> None:
    config = load_config(runs.make_config(tmp_path / "run", total_steps=1, trainer=STEADY))
    runs.explored(Explorer(config))
    (config.checkpoint_dir / "global_step_1").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="global_step_1 is gone"):
        Explorer(config).locate()


def state_of(config: Config, step: int) -> Any:
    return json.loads((config.checkpoint_dir / f"global_step_{step}" / "state.json").read_text())


@pytest.mark.parametrize("how", ["moved", "copied", "copied, and the original went on"])
def test_a_run_whose_folder_was_moved_or_copied_goes_on_from_its_own_checkpoint(tmp_path: Path, how: str) -> None:
    path = runs.make_config(tmp_path / "run", total_steps=2, trainer=STEADY)
    original = load_config(path)
    runs.explored(Explorer(original))
    state = state_of(original, 2)
    there = tmp_path / "elsewhere" / "run"
    if how == "moved":
        there.parent.mkdir()
        path.parent.rename(there)
    else:
        shutil.copytree(path.parent, there)
        (original.checkpoint_dir / "global_step_2" / "state.json").write_text("not the copy's")
        if "went on" in how:
            shutil.rmtree(original.checkpoint_dir)
    config = load_config(there / path.name)
    done = cli("resume", there / path.name, "--set", "total_steps=3")
    assert done.exit_code == 0, done.stderr
    assert state_of(config, 2) == state
    assert state_of(config, 3)["steps"] == 3
    places = {e.version: e.path for _, e in runs.events_of(config, "WeightsPublished")}
    assert places == {1: ANY, **{v: str(config.checkpoint_dir / f"global_step_{v}") for v in (2, 3)}}


def test_a_run_never_touches_the_checkpoints_of_another(tmp_path: Path) -> None:
    path = runs.make_config(tmp_path / "run", total_steps=1, trainer=STEADY)
    config = load_config(path)
    runs.explored(Explorer(config))
    before = {p: p.read_bytes() for p in config.checkpoint_dir.glob("*/**/*") if p.is_file()}
    other = load_config(path, [f"store.url=sqlite:///{tmp_path}/other.sqlite"])
    with pytest.raises(ConfigError, match=r"holds checkpoints that this run did not make \(global_step_1\): move"):
        Explorer(other).locate()
    (config.checkpoint_dir / "global_step_3").mkdir()  # of somebody who is further, or of this run's own later time
    (config.checkpoint_dir / "begun.json").write_text(json.dumps({"step": 3, "store": "another"}))
    refused = cli("resume", path, "--set", "total_steps=3")
    assert refused.exit_code == 2
    assert "(global_step_3): move them away" in refused.stderr
    assert runs.count(config, "BatchSubmitted", 2) == 0
    beside = Explorer(load_config(path, ["mode=explore", "total_steps=3"]))
    assert beside.locate(), "a trainer elsewhere may be publishing it just now"
    beside.release()
    assert {p: p.read_bytes() for p in before} == before


class TornOnce(runs.SteadyTrainer):
    def save(self, path: str) -> None:
        torn = Path(path).parent.parent / "torn"
        if path.endswith("global_step_2") and not torn.exists():
            torn.touch()
            Path(path).mkdir(parents=True)
            (Path(path) / "half").touch()
            raise RuntimeError("torn")
        super().save(path)


def test_a_checkpoint_that_this_run_began_to_write_is_made_again(tmp_path: Path) -> None:
    trainer = {"class": "tests.full.system.test_resume:TornOnce"}
    path = runs.make_config(tmp_path / "run", total_steps=2, trainer=trainer)
    config = load_config(path)
    error = cli("run", path).exception
    assert "torn" in str(error)
    assert "TornOnce.save raised it in step 2" in getattr(error, "__notes__", [""])[0]
    assert re.search(r"last step is 2 of 2.*`trinity-es resume .* goes on with it", cli("status", path).stdout)
    half = config.checkpoint_dir / "global_step_2"
    assert [p.name for p in half.iterdir()] == ["half"]
    done = cli("resume", path)
    assert done.exit_code == 0, done.stderr
    assert "the run is complete, with step 2" in cli("status", path).stdout
    assert [p.name for p in half.iterdir()] == ["state.json"]
    assert sorted(p.name for p in config.checkpoint_dir.glob("global_*")) == ["global_step_1", "global_step_2"]


def test_a_log_whose_batches_no_explorer_submitted_is_left_as_it_is(tmp_path: Path) -> None:
    config = load_config(runs.make_config(tmp_path / "run"))
    file = Path(config.store.url.removeprefix("sqlite:///"))
    file.parent.mkdir(parents=True)
    write(file, history("0" * 64))
    with pytest.raises(ConfigError, match=r"already holds another run \(4 batches\), not an explorer's"):
        Explorer(config).locate()
    assert prompts_used(trinity_es.open_log(config.store.url), "questions") == {}


@pytest.mark.slow
def test_a_demo_that_was_killed_is_resumed_by_name_of_nothing_and_ends_as_a_demo(tmp_path: Path) -> None:
    with runs.command("demo", "--engine", "scripted", "--steps", 48, cwd=tmp_path) as running:
        def settings() -> Config | None:
            found = list(tmp_path.glob("runs/demo-*/config.yaml"))
            return load_config(found[0]) if found else None

        config = wait_until(settings, "the config")
        wait_until(lambda: runs.count(config, "BatchSubmitted", 4) or running.poll() is not None, "step 4", timeout=60)
        assert running.poll() is None
        runs.kill_run(config, running)
    out, _ = runs.went_well("resume", "--json", cwd=tmp_path)
    told = json.loads(out)
    assert (told["train_batches"], told["batches"], len(told["rewards"])) == (48, 52, 48)
    assert "The scripted engine cannot learn" in told["verdict"]
    assert Path(told["picture"]).read_bytes().startswith(b"\x89PNG")
    with trinity_es.open_log(config.store.url) as log:
        used = prompts_used(log, "letters")
    assert (sum(used.values()), len(used), set(used.values())) == (48 * 32, 512, {3})


def test_p37_the_metrics_of_a_run_that_was_killed_are_whole_and_none_is_there_twice(tmp_path: Path) -> None:
    path = runs.make_config(tmp_path, monitor={"monitor_type": ["tensorboard"]})
    file = Path(load_config(path).run_dir) / "metrics.jsonl"
    config = runs.killed_when(lambda _: file.exists() and '"step":3' in file.read_text(), path, "step 3", 90)
    with file.open("a") as torn:
        torn.write('{"step":')
    runs.went_well("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    seen = Counter((row["step"], name) for row in rows for name in row if "/" in name)
    assert set(seen.values()) == {1}
    metrics = read_metrics(file)
    with trinity_es.open_log(config.store.url) as log:
        for step in range(1, runs.STEPS + 1):
            trained = [r.event for r in log.read(stream=batch_stream(step), types=["BatchTrained"])]
            result = (log.replay(step).final_result or {})["metrics"]
            assert {k: v for k, v in metrics[step].items() if k in result} == result
            assert {"trainer/loss": metrics[step]["trainer/loss"]} in [
                {f"trainer/{k}": v for k, v in e.metrics.items()} for e in trained if isinstance(e, ev.BatchTrained)
            ]
    assert [step for step in sorted(metrics) if "eval/check/finished_task_count" in metrics[step]] == [0, 2, 4]
    assert list((Path(config.run_dir) / "tensorboard").iterdir())
