"""TRL's real GRPOTrainer on scripted engines, and what AsyncGRPOTrainer does with a worker."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from benchmarks.trl_kills import KINDS, WRONG, Trainee, kill_while_training, training_figures
from tests.helpers.client_packages import ask
from tests.helpers.of_the_day import OTHERS, by_turns
from tests.helpers.servers import free_port
from tests.helpers.systems import StartSystem
from tests.helpers.warm_python import WarmPython

pytestmark = [by_turns("TRL", OTHERS), pytest.mark.timeout(900), pytest.mark.slow]

HERE = Path(__file__).parent
SCRIPTED = ["explorer.rollout_model.engine_type=scripted"]


def system(start_system: StartSystem, folder: Path, **sections: Any) -> Path:
    sections = {"synchronizer": {"sync_method": "memory"}, **sections}
    client = start_system(folder=folder, **sections)
    engine = {"explorer": {"rollout_model": {"engine_type": "scripted"}}}
    file = folder / "config.yaml"
    file.write_text(json.dumps({**engine, **sections, "store": {"url": client.config.store.url}}))
    return file


def test_runs_that_failed_are_in_no_baseline(start_system: StartSystem, tmp_path: Path, trl_python: WarmPython) -> None:
    rules = [{"prompt": "b=", "error": "the engine hiccuped", "times": 2}]
    explorer = {"rollout_model": {"engine_type": "scripted", "script": {"rules": rules}},
                "max_repeat_times_per_runner": 1}
    config = system(start_system, tmp_path, explorer=explorer)
    rollouts = {"workflow": "tests.helpers.trl_rewards:Flaky", "workflow_args": {"of": "a"}}
    settings = {"max_steps": 1, "per_device_train_batch_size": 32, "num_generations": 4, "shuffle_dataset": False}
    told = ask(HERE / "trl_step.py", trl_python, folder=str(tmp_path), config=str(config), rollouts=rollouts,
               settings=settings)
    [made] = told["generations"]
    assert made["prompts"][:8] == ["a="] * 4 + ["b="] * 4
    assert made["rollout_failed"] == [False, False, False, True, *[False] * 28]
    assert made["reward"][:8] == [0.0, 1.0, 2.0, None, 0.0, 1.0, 2.0, 3.0]
    assert made["masks"][:4] == [8, 8, 8, 0]
    of_three = [-1.0, 0.0, 1.0, 0.0]  # by their own mean and deviation, and none for the one that failed
    of_four = [(n - 1.5) / 1.2910 for n in range(4)]
    assert made["advantages"][:8] == pytest.approx([*of_three, *of_four], abs=1e-3)


def test_trl_rewards_its_answers_and_evals(start_system: StartSystem, tmp_path: Path, trl_python: WarmPython) -> None:
    config = system(start_system, tmp_path, buffer={"pipeline": {"operators": []}})
    settings = {"max_steps": 2, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16,
                "num_generations": 4, "num_generations_eval": 2, "gradient_accumulation_steps": 2, "save_steps": 1}
    told = ask(HERE / "trl_step.py", trl_python, folder=str(tmp_path), config=str(config), rollouts={},
               settings=settings, evaluate=True)
    assert [len(g["prompts"]) for g in told["generations"]] == [32, 32, 8]
    assert [{name.rsplit("/", 2)[0] for name in g["rollout_id"]} for g in told["generations"]][:2] == [
        {"0/trl-train-0"}, {"1/trl-train-0"}]
    assert [set(g["rollout_version"]) for g in told["generations"]] == [{0}, {1}, {2}]
    assert told["metrics"]["eval_reward"] == 100.0


def test_texts_are_prompts_as_trl_has_them_and_an_eval_of_other_data_has_its_columns(
    start_system: StartSystem, tmp_path: Path, trl_python: WarmPython
) -> None:
    config = system(start_system, tmp_path)
    rollouts = {"reward_fn": "tests.helpers.trl_rewards:is_truth"}
    settings = {"max_steps": 1, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_generations": 4}
    told = ask(HERE / "trl_step.py", trl_python, folder=str(tmp_path), config=str(config), rollouts=rollouts,
               settings=settings, texts=True, others="yz")
    for made in told["generations"]:
        assert made["prompt_ids"] == made["trl_ids"] == [list(prompt.encode()) for prompt in made["prompts"]]
    assert told["generations"][1]["prompts"] == ["y="] * 4 + ["z="] * 4
    assert told["generations"][1]["reward"] == [1.0] * 8


def test_a_trainer_with_more_epochs_goes_on(start_system: StartSystem, tmp_path: Path, trl_python: WarmPython) -> None:
    config = system(start_system, tmp_path, buffer={"pipeline": {"operators": []}})
    settings = {"per_device_train_batch_size": 16, "num_generations": 4, "save_steps": 1, "max_steps": -1}
    for epochs, step, taken in ((1, 2, 2), (2, 4, 2)):
        told = ask(HERE / "trl_step.py", trl_python, folder=str(tmp_path), config=str(config), rollouts={},
                   settings={**settings, "num_train_epochs": epochs})
        assert (told["step"], len(told["generations"])) == (step, taken)


def test_the_first_of_two_processes_asks_and_the_other_gets_its_part(
    start_system: StartSystem, tmp_path: Path, trl_python: WarmPython
) -> None:
    config = system(start_system, tmp_path)
    settings = {"max_steps": 2, "per_device_train_batch_size": 6, "num_generations": 4, "shuffle_dataset": False}
    given = {"folder": str(tmp_path), "config": str(config), "settings": settings,
             "rollouts": {"workflow": "tests.helpers.trl_rewards:Flaky", "workflow_args": {"of": "none"}}}
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor() as threads:  # as torchrun starts them
        for done in threads.map(lambda rank: trl_python.run(
            [str(HERE / "trl_step.py"), json.dumps(given)], timeout=300,
            variables={**both, "RANK": str(rank), "LOCAL_RANK": str(rank)}), range(2)):
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    parts = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for step in (0, 1):
        rows = [part["generations"][step] for part in parts]
        assert [name for part in rows for name in part["rollout_id"]] == [
            f"{step}/trl-train-0/{task}/{run}" for task in range(3) for run in range(4)]
        advantages = [value for part in rows for value in part["advantages"]]
        assert advantages == pytest.approx([(n - 1.5) / 1.2910 for n in range(4)] * 3, abs=1e-3)  # across both


def test_a_trainer_killed_with_all_parts_trains_on_all_as_planned(tmp_path: Path, trl_python: WarmPython) -> None:
    settings = {"max_steps": 20, "save_steps": 8, "per_device_train_batch_size": 64, "num_generations": 2}
    # Of 16 steps an epoch; killed after 3, 5, 9 and 19.
    plan = {}
    for folder, kinds in (("undisturbed", []), ("killed", list(KINDS))):
        trainee = Trainee(tmp_path / folder, SCRIPTED, settings, launch=trl_python.start)
        try:
            killed = kill_while_training(trainee, kinds, random.Random(1), seconds=240)
            found = training_figures(trainee, plan or None)
        finally:
            trainee.end()
        assert [kind for _, kind in killed] == kinds
        assert {name: found[name] for name in WRONG if found[name]} == {}, trainee.log_end()
        plan = found["plan"]
    assert found["starts"] > 1
    assert found["trained"] > found["steps"] == 20  # some steps were taken again


def test_async_worker_and_weight_transfer_do_what_the_trainer_does_with_them(
    start_system: StartSystem, tmp_path: Path, trl_python: WarmPython
) -> None:
    config = system(start_system, tmp_path)
    told = ask(HERE / "trl_async.py", trl_python, config=str(config))
    assert told["differences"] == []
    assert [sample[0] for step in told["first"] for sample in step] == [g for g in range(12) for _ in range(2)]
    assert all(sample[3] == 4 for step in told["first"] for sample in step)  # tokens that are trained on
    assert {sample[2] for step in told["first"] for sample in step} != {0.0}
    # Each step takes a batch. Those of the steps after the checkpoint's come again as they were, and what step 3 might
    # not have trained on; nothing that it surely has.
    begins = told["second"][0][0][0] // 2
    assert 1 <= begins <= 3
    again = told["first"][begins:]
    assert told["second"][: len(again)] == again
    assert told["arrays"] == ["int64", "int64", "float32"]
    assert "sample/dropped_stale_total" not in told["metrics"]
    assert told["stopped"] == "the rollouts are not running: call start()"
    with trinity_es.open_log(trinity_es.load_config(config).store.url) as log:
        submitted = [recorded.stream for recorded in log.read(types=["BatchSubmitted"])]
    assert len(submitted) == len(set(submitted))
