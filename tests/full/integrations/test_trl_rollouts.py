"""The rollout function and callback for TRL: ids, order, weights, failures. Trainer and system are stand-ins."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import trinity_es
from tests.helpers.trl_trainers import EOS, Rows, StandInClient, StandInTrainer, answer
from trinity_es.errors import AlreadyRunning, ConfigError, DataError, SyncError, UnknownWorkflow, WorkflowError
from trinity_es.events.vocabulary import WeightsPublished
from trinity_es.integrations.step_versions import step_version
from trinity_es.system.run_lock import RunLock

if TYPE_CHECKING:
    import torch

    from trinity_es.integrations import trl
    from trinity_es.integrations.trl import Rollouts, last_checkpoint, resume, rollout_reward

ROWS = [{"prompt": "a=", "answer": "a"}, {"prompt": "b=", "answer": "b"}]
ASKED = ["a=", "a=", "b=", "b="]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import torch and transformers in the process that runs these tests, not in each that collects them."""
    import torch

    from trinity_es.integrations import trl

    names = ("Rollouts", "last_checkpoint", "resume", "rollout_reward")
    globals().update(torch=torch, trl=trl, **{name: getattr(trl, name) for name in names})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> StandInClient:
    found = StandInClient()
    monkeypatch.setattr(trl, "connect", lambda config, *, resumed_at=None: found)
    return found


def rollouts(tmp_path: Path, **given: Any) -> Rollouts:
    config = trinity_es.Config.from_dict(
        {"explorer": {"rollout_model": {"engine_type": "scripted"}}, "synchronizer": {"sync_method": "memory"}},
        folder=tmp_path)
    return Rollouts(config, **{"reward_fn": "rewards:letters", **given})


def generated(tmp_path: Path, trainer: StandInTrainer, asked: list[str] = ASKED, **given: Any) -> dict[str, list[Any]]:
    return rollouts(tmp_path, **given)(asked, trainer)


def begin(made: Rollouts, trainer: StandInTrainer, batches: int = 4, sampler: Any = None) -> None:
    loader = SimpleNamespace(sampler=None, batch_sampler=SimpleNamespace(sampler=sampler))
    loader = type("Loader", (), {**vars(loader), "__len__": lambda self: batches})()
    made.on_train_begin(trainer.args, trainer.state, None, train_dataloader=loader)


def test_a_step_is_one_batch_with_a_task_for_each_group(tmp_path: Path, client: StandInClient) -> None:
    found = generated(tmp_path, StandInTrainer(ROWS))
    [(batch_id, tasks)] = client.submitted.items()
    assert batch_id == "0/trl-train-0"
    assert [(t["raw_task"], t["repeat_times"]) for t in tasks] == [
        ({"answer": "a", "prompt": "a="}, 2), ({"answer": "b", "prompt": "b="}, 2)]
    assert tasks[1]["index"] == {"taskset": "trl-train", "index": 1}
    assert tasks[0]["rollout_args"] == {
        "temperature": 0.9, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_tokens": 8}
    assert found["prompt_ids"] == [[1, 2]] * 4
    assert found["completion_ids"] == [[10, 20], [10, 21], [11, 20], [11, 21]]  # by task, by run
    assert found["logprobs"] == [[-0.5, -0.25]] * 4
    assert found["env_mask"] == [[1, 1]] * 4
    assert found["reward"] == rollout_reward(**found) == [1.0] * 4
    assert found["rollout_id"][2] == "0/trl-train-0/1/0"


@pytest.mark.parametrize(("args", "steps"), [
    ({}, [3, 4]), ({"gradient_accumulation_steps": 2}, [1, 2]), ({"steps_per_generation": 2, "save_steps": 2}, [6, 8]),
], ids=["a batch a step", "two a step", "one of two steps"])
def test_a_trainer_says_where_it_goes_on_and_up_to_which_step_the_log_has_what_it_asks_for(
    tmp_path: Path, client: StandInClient, caplog: pytest.LogCaptureFixture, args: dict[str, Any], steps: list[int]
) -> None:
    caplog.set_level("INFO", "trinity_es.integrations")

    def begins(step: int) -> str:
        begin(rollouts(tmp_path), StandInTrainer(ROWS, step=step, **args))
        return caplog.messages[-1]

    assert begins(0) == "trainer trl begins with the model as it was given"
    made, trainer = rollouts(tmp_path), StandInTrainer(ROWS, **args)
    begin(made, trainer)
    for n in range(4):
        made(ASKED, trainer)
        if n == 2:
            known = begins(0)
        for _ in range(args.get("steps_per_generation", 1)):
            if (n + 1) % args.get("gradient_accumulation_steps", 1) == 0:
                trainer.end_step(made)
    assert known.endswith(f": up to step {steps[0]} it trains on what the log has")
    assert begins(0).endswith(f": up to step {steps[1]} it trains on what the log has")
    assert begins(steps[1]) == f"trainer trl goes on from checkpoint-{steps[1]}"
    last = list(client.submitted)[-1]
    client.failed[last] = {(last, task, run) for task in (0, 1) for run in (0, 1)}  # it is generated again
    assert begins(0).endswith(f": up to step {steps[0]} it trains on what the log has")


def test_another_trainer_of_the_store_is_refused_before_it_asks(tmp_path: Path, client: StandInClient) -> None:
    made, trainer = rollouts(tmp_path, name="another"), StandInTrainer(ROWS)
    lock = RunLock(made.config, "trainer")
    with pytest.raises(AlreadyRunning, match=rf"a trainer runs on sqlite:.* already \(process {os.getpid()} "):
        begin(made, trainer)
    with pytest.raises(AlreadyRunning):
        made(ASKED, trainer)
    assert client.submitted == {}
    lock.release()
    for one in (made, rollouts(tmp_path)):  # a process may have one after another
        begin(one, trainer)


def test_weights_that_two_trainers_write_at_once_are_published_by_one(tmp_path: Path, client: StandInClient) -> None:
    config = trinity_es.Config.from_dict({"explorer": {"rollout_model": {"engine_type": "scripted"}}}, folder=tmp_path)
    trainer = StandInTrainer(ROWS, step=2)
    trainer.processing_class.save_pretrained = lambda folder: None
    rivals = [1, 0]

    def save(folder: Path, state_dict: Any) -> None:
        folder.mkdir(parents=True)
        if rivals.pop():
            (folder.parent / "version_2" / "its").mkdir(parents=True)

    trainer.model.save_pretrained = save
    Rollouts(config, reward_fn="rewards:letters")(ASKED, trainer)
    assert client.synced == [2]
    client.weights = WeightsPublished(version=1, path="")
    trainer.model.training = False
    with pytest.raises(SyncError, match=r"version 2 was not published: \S+version_2 can't be written .*trainer named"):
        Rollouts(config, reward_fn="rewards:letters")(ASKED, trainer)
    assert client.synced == [2]


def three_steps(made: Rollouts, trainer: StandInTrainer) -> Iterator[dict[str, list[Any]]]:
    for _ in range(3):
        yield made(ASKED, trainer)
        trainer.end_step(made)


def test_a_trainer_that_goes_on_gets_what_is_stored(tmp_path: Path, client: StandInClient) -> None:
    first, killed = rollouts(tmp_path), StandInTrainer(ROWS)
    begin(first, killed)
    before = list(three_steps(first, killed))
    again, trainer = rollouts(tmp_path), StandInTrainer(ROWS, step=1)
    begin(again, trainer)
    after = list(three_steps(again, trainer))
    assert client.generated == [f"{step}/trl-train-0" for step in range(4)]
    assert after[:2] == before[1:]
    assert client.synced == [1, 2, 3]  # each version once
    assert client.acknowledged[3:] == [("1/trl-train-0", 2), ("2/trl-train-0", 3), ("3/trl-train-0", 4)]


def test_each_call_of_a_step_is_a_batch_and_evals_are_none_of_training(tmp_path: Path, client: StandInClient) -> None:
    made, trainer = rollouts(tmp_path), StandInTrainer(ROWS, gradient_accumulation_steps=2)
    begin(made, trainer)
    made(ASKED, trainer)
    made(ASKED, trainer)
    trainer.end_step(made)
    trainer.model.training = False
    found = made(ASKED, trainer)
    assert list(client.submitted)[:2] == ["0/trl-train-0", "0/trl-train-1"]
    assert list(client.submitted)[2].startswith("1/trl-eval-0-")
    assert found["completion_ids"] == [[10, 20], [10, 21], [11, 20], [11, 21]]
    assert client.acknowledged == [("0/trl-train-0", 1), ("0/trl-train-1", 1)]
    assert client.synced == [1]


def test_a_generation_of_several_steps_is_acknowledged_by_the_last_step(tmp_path: Path, client: StandInClient) -> None:
    made, trainer = rollouts(tmp_path), StandInTrainer(ROWS, steps_per_generation=2, save_steps=2)
    begin(made, trainer)
    made(ASKED, trainer)
    for acknowledged in ([], [("0/trl-train-0", 2)]):
        trainer.end_step(made)
        assert client.acknowledged == acknowledged
    with pytest.raises(ConfigError, match="save_steps is 3, but each generation lasts 2 steps"):
        begin(made, StandInTrainer(ROWS, steps_per_generation=2, save_steps=3))
    trainer.state.global_step = 3
    with pytest.raises(ConfigError, match="the checkpoint of step 3 lies within a generation"):
        begin(made, trainer)


@pytest.mark.parametrize(("asked", "said"), [
    ("bbaa", "'0/trl-train-0' is in the log with other prompts"),
    ("abab", "groups of 2 equal prompts: prompt 1 differs"),
])
def test_prompts_that_are_not_stored_are_refused(tmp_path: Path, client: StandInClient, asked: str, said: str) -> None:
    generated(tmp_path, StandInTrainer(ROWS))
    with pytest.raises(DataError, match=said):
        generated(tmp_path, StandInTrainer(ROWS), [f"{letter}=" for letter in asked])


def test_a_run_that_failed_for_good_is_a_row_that_nothing_is_learned_from(
    tmp_path: Path, client: StandInClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.failing = {("0/trl-train-0", 0, 1), ("0/trl-train-0", 1, 0), ("0/trl-train-0", 1, 1)}

    def length(completions: Any, **columns: Any) -> list[float]:
        return [7.0] * len(completions)

    async def slow(completions: Any, **columns: Any) -> list[float]:
        return [8.0] * len(completions)

    trainer = StandInTrainer(ROWS, reward_funcs=[rollout_reward, length, slow])
    found = generated(tmp_path, trainer)
    assert found["rollout_failed"] == [False, True, True, True]
    assert found["completion_ids"] == [[10, 20], [EOS], [EOS], [EOS]]
    assert found["prompt_ids"] == [[1, 2], [1, 2], [EOS], [EOS]]
    assert found["env_mask"] == [[1, 1], [0], [0], [0]]
    columns = {"prompts": ASKED, "completions": [""] * 4, **found}
    assert [fn.__name__ for fn in trainer.reward_funcs] == ["rollout_reward", "length", "slow"]
    said = [trainer.reward_funcs[0](**columns), trainer.reward_funcs[1](**columns),
            asyncio.run(trainer.reward_funcs[2](**columns))]
    assert said == [[1.0, None, None, None], [7.0, None, None, None], [8.0, None, None, None]]
    assert "the sandbox is gone" in caplog.text


def test_a_batch_without_any_run_is_an_error_and_is_generated_again(tmp_path: Path, client: StandInClient) -> None:
    client.failing = {("0/trl-train-0", task, run) for task in (0, 1) for run in (0, 1)}
    with pytest.raises(WorkflowError, match=r"no run succeeded .finalized.*the sandbox is gone"):
        generated(tmp_path, StandInTrainer(ROWS))
    client.failing = set()
    assert generated(tmp_path, StandInTrainer(ROWS))["reward"] == [1.0] * 4
    assert client.generated == ["0/trl-train-0"] * 2


def test_an_engine_beyond_a_step_gets_its_weights_as_a_newer_version(tmp_path: Path, client: StandInClient) -> None:
    assert [step_version(step, current) for step, current in ((3, 0), (3, 3), (3, 5), (5, 1000003), (2, 1000003))] == [
        3, 3, 1000003, 1000005, 2000002]
    made, trainer = rollouts(tmp_path), StandInTrainer(ROWS, step=5)
    made(ASKED, trainer)
    trainer.state.global_step = 3  # another trainer, with an eval that was not made then
    trainer.model.training = False
    made(ASKED, trainer)
    assert client.synced == [5, 1000003]


def test_the_last_experience_of_a_run_is_its_row(tmp_path: Path, client: StandInClient) -> None:
    client.extra = [answer(0, 1, step=1, reward=0.5, tokens=[1, 2, 3, 7, 8, 9], prompt_length=3,
                           logprobs=[-1.0, 0.0, -2.0], action_mask=[True, False, True]),
                    answer(1, 1, step=1, tokens=[1, 2, 3], prompt_length=3, logprobs=None, reward=0.25,
                           truncate_status="prompt_truncated")]
    found = generated(tmp_path, StandInTrainer(ROWS))
    assert found["completion_ids"] == [[10, 20], [7, 8, 9], [11, 20], [EOS]]
    assert found["env_mask"] == [[1, 1], [1, 0, 1], [1, 1], [0]]  # what was said without a token is not learned from
    assert found["reward"] == [1.0, 0.5, 1.0, 0.25]
    assert found["prompt_ids"][1] == [1, 2, 3]


def test_rows_that_can_t_be_told_apart_by_their_prompts_are_refused(tmp_path: Path, client: StandInClient) -> None:
    rows = [*ROWS, {"prompt": "a=", "answer": "A"}]
    with pytest.raises(DataError, match="row 0 of trl-train and row 2 of trl-train have the same prompt and dif"):
        generated(tmp_path, StandInTrainer(rows))
    generated(tmp_path, StandInTrainer(rows), columns=[])
    assert [t["raw_task"] for t in client.submitted["0/trl-train-0"]] == [{"prompt": "a="}, {"prompt": "b="}]


def test_what_a_trainer_s_data_lack_is_refused_before_a_system_is_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"trl-train has no column 'anwser': it has prompt, answer; did you mean ans"):
        rollouts(tmp_path, columns=["anwser"]).check(StandInTrainer(ROWS))
    trainer = StandInTrainer(ROWS)
    trainer.eval_dataset = {"hard": Rows([{"prompt": "z=", "truth": "z"}])}
    with pytest.raises(DataError, match=r"hard has no column 'answer': it has prompt, truth$"):
        rollouts(tmp_path, columns=["answer"]).check(trainer)
    rollouts(tmp_path).check(trainer)
    trainer.train_dataset = Rows([{"question": "z="}])
    with pytest.raises(DataError, match="trl-train has no column 'prompt': it has question"):
        rollouts(tmp_path).check(trainer)
    assert trainer.reward_funcs == []


def test_an_eval_of_another_data_set_has_its_columns(tmp_path: Path, client: StandInClient) -> None:
    made, trainer = rollouts(tmp_path), StandInTrainer(ROWS)
    trainer.model.training = False
    trainer.callback_handler.eval_dataloader = SimpleNamespace(dataset=trainer.eval_dataset)
    made(ASKED, trainer)
    for truth in ("z", "Z"):
        others = Rows([{"prompt": "z=", "answer": truth}])
        trainer.callback_handler.eval_dataloader = SimpleNamespace(dataset=SimpleNamespace(dataset=others))  # a part
        made(["z=", "z="], trainer)
    asked = [[task["raw_task"]["answer"] for task in tasks] for tasks in client.submitted.values()]
    assert asked == [["a", "b"], ["z"], ["Z"]]


def test_a_prompt_of_no_data_set_is_refused_where_tasks_need_its_columns(tmp_path: Path, client: StandInClient) -> None:
    for given in ({}, {"columns": ["answer"]}):
        with pytest.raises(DataError, match=r"no row of trl-train has the prompt 'z=', .* or Rollouts\(columns="):
            generated(tmp_path, StandInTrainer(ROWS), ["z=", "z="], **given)
    trainer = StandInTrainer(ROWS)
    trainer.model.training, trainer.eval_dataset = False, None
    with pytest.raises(DataError, match="no row of a data set has the prompt 'z='"):
        generated(tmp_path, trainer, ["z=", "z="])
    assert client.submitted == {}
    generated(tmp_path, trainer, ["z=", "z="], columns=[])
    generated(tmp_path, StandInTrainer([{"prompt": "a="}]), ["z=", "z="])  # nothing is lost
    assert [tasks[0]["raw_task"] for tasks in client.submitted.values()] == [{"prompt": "z="}] * 2


@pytest.mark.parametrize(("names", "columns", "refused"), [
    (["prompt", "answer"], None, True), (None, None, True), (None, ["answer"], True), (["prompt"], None, False),
    (["prompt", "answer"], [], False), (None, [], False),
])
def test_a_stream_of_more_than_prompts_is_refused_unless_no_columns_are_asked_for(
    tmp_path: Path, client: StandInClient, names: list[str] | None, columns: list[str] | None, refused: bool
) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):  # as a `datasets.IterableDataset` is one
        column_names = names

        def __iter__(self) -> Any:
            return iter(ROWS)

    trainer = StandInTrainer(ROWS)
    trainer.train_dataset = Stream()
    made = rollouts(tmp_path, columns=columns)
    loader = torch.utils.data.DataLoader(Stream(), batch_size=4, collate_fn=list)
    made.on_train_begin(trainer.args, trainer.state, None, train_dataloader=loader)
    if refused:
        with pytest.raises(DataError, match=r"trl-train is a stream, .*, or columns=\[\]"):
            made(ASKED, trainer)
    else:
        made(ASKED, trainer)
        assert client.submitted["0/trl-train-0"][0]["raw_task"] == {"prompt": "a="}


def test_what_can_t_be_served_is_refused(tmp_path: Path, client: StandInClient) -> None:
    with pytest.raises(ConfigError, match="operators needs rewards"):
        rollouts(tmp_path, reward_fn=None)
    for name, value, said in (("reward_funcs", [torch.nn.Linear(1, 1)], "reward_funcs has a model"),
                              ("use_vllm", True, "use_vllm"), ("tools", [print], "has tools")):
        trainer = StandInTrainer(ROWS)
        setattr(trainer, name, value)
        with pytest.raises(ConfigError, match=said):
            generated(tmp_path, trainer)
    assert client.submitted == {}


def exact(completions: list[str], answr: list[str], *, strict: bool = True) -> list[float]:
    return [1.0 for _ in completions]


def of_all(prompts: list[str], completions: list[str], answer: list[str], rollout_id: list[str], log_metric: Any,
           level: int = 3, **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def test_a_reward_that_asks_for_what_no_row_has_is_refused_at_first(tmp_path: Path, client: StandInClient) -> None:
    said = ("the reward exact asks for 'answr', but the rows have no such column: the data has the columns answer, "
            "prompt; did you mean answer?")
    with pytest.raises(ConfigError, match=re.escape(said)):
        rollouts(tmp_path).check(StandInTrainer(ROWS, reward_funcs=[rollout_reward, exact]))
    with pytest.raises(ConfigError, match=re.escape(said)):
        rollouts(tmp_path, reward_fn=f"{__name__}:exact").check(StandInTrainer(ROWS, reward_funcs=[rollout_reward]))
    left_out = ("the reward of_all asks for 'answer', a column of the data that columns=[] leaves out: add 'answer' to "
                "columns, or omit columns, so that tasks get all")
    with pytest.raises(ConfigError, match=re.escape(left_out)):
        rollouts(tmp_path, reward_fn=f"{__name__}:of_all", columns=[], reward_fn_args={"rollout_id": ["x"]}).check(
            StandInTrainer(ROWS, reward_funcs=[rollout_reward]))
    rollouts(tmp_path, reward_fn=f"{__name__}:exact", reward_fn_args={"answr": ["b"]}).check(
        StandInTrainer(ROWS, reward_funcs=[rollout_reward, of_all]))
    assert client.submitted == {}


def test_a_missing_reward_is_told_apart_from_a_missing_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnknownWorkflow) as wrong:
        rollouts(tmp_path, reward_fn=f"{__name__}:exakt")
    assert wrong.value.message == (
        f"reward '{__name__}:exakt': {__name__} ({__file__}) has no exakt; did you mean exact?")
    rollouts(tmp_path, reward_fn="examples.grpo.reward:letter_share")
    assert caplog.text == ""
    rollouts(tmp_path, reward_fn="nowhere_to_be_found:exact")  # runners may have it
    assert "reward 'nowhere_to_be_found:exact' can't be imported (ModuleNotFoundError" in caplog.text


def test_a_new_process_draws_the_order_of_the_epoch_that_it_is_in(tmp_path: Path, client: StandInClient) -> None:
    def sampler() -> Any:
        return SimpleNamespace(num_samples=9, seed=5, generator=torch.Generator().manual_seed(5))

    def order(of: Any) -> list[int]:
        return list(torch.randperm(9, generator=of.generator).tolist())

    one = sampler()
    orders = [order(one) for _ in range(3)]
    made, trainer, fresh = rollouts(tmp_path), StandInTrainer(ROWS, step=9), sampler()  # of four steps an epoch
    begin(made, trainer, sampler=fresh)
    assert order(fresh) == orders[2]
    begin(made, trainer, sampler=fresh)  # it goes on by itself
    assert order(fresh) == order(one)


def test_the_last_checkpoint_is_one_that_was_written_whole(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "missing") is None
    for step, text in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (20, '{"glob')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-30").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(("max_steps", "epochs", "trains"), [
    (10, 3.0, False), (11, 1.0, True), (-1, 2.0, False), (-1, 1.9, False), (-1, 3.0, True), (-1, 2.1, True),
])
def test_a_trainer_that_was_killed_after_its_last_step_takes_no_step_more_and_one_with_more_epochs_does(
    tmp_path: Path, max_steps: int, epochs: float, trains: bool
) -> None:
    did: list[str] = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path), max_steps=max_steps, num_train_epochs=epochs), state=None,
        get_train_dataloader=lambda: range(5),
        set_initial_training_values=lambda args, loader: (0, math.ceil(args.num_train_epochs * len(loader))),
        train=lambda resume_from_checkpoint: did.append(f"train from {resume_from_checkpoint}"),
        _load_from_checkpoint=lambda checkpoint: did.append(f"load {checkpoint}"))
    resume(trainer)
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(json.dumps({"global_step": 10, "max_steps": 10}))
    resume(trainer)
    assert did == ["train from None", f"{'train from' if trains else 'load'} {tmp_path}/checkpoint-10"]
    assert getattr(trainer.state, "global_step", None) == (None if trains else 10)
