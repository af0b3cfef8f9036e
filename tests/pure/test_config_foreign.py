"""C8: a config that was written for Trinity-RFT is answered key by key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.config_files import problems
from tests.helpers.paths import ROOT
from trinity_es.config.config import Config
from trinity_es.config.config_docs import describe
from trinity_es.config.trinity_rft_keys import foreign_keys, foreign_values, markdown
from trinity_es.events.errors import ConfigError

FOREIGN, FOREIGN_VALUES = foreign_keys(), foreign_values()
TAKES_ANYTHING = [row[0] for row in describe() if row[1] == "mapping"]
OURS = {row[0] for row in describe()}
SECTIONS = {key[: m.start()] for key in OURS for m in re.finditer(r"\.|\[\]", key)}


def theirs() -> list[str]:
    lines = (ROOT / "tests" / "trinity_rft_keys.txt").read_text().split("\n")
    keys = [line for line in lines if line and not line.startswith("#")]
    again = {"tasksets[].": ("eval_tasksets[].", "taskset."), "rollout_model.": ("auxiliary_models[].",)}
    for one, other in ((one, other) for one, others in again.items() for other in others):
        keys += [k.replace(one, other) for k in keys if f".{one}" in k]
    return keys


def nested(key: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": [{"c": value}]}}` for "a.b[].c"."""
    for piece in reversed(key.split(".")):
        value = {piece.removesuffix("[]"): [value] if piece.endswith("[]") else value}
    assert isinstance(value, dict)
    return value


def told(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as e:
        Config.from_dict(data)
    return e.value.details["problems"]


def is_ours(key: str) -> bool:
    """A key of ours, a section of them, or within a key that takes any mapping (`rollout_args`)."""
    if key.startswith("buffer.explorer_input.eval_tasksets[]."):
        return is_ours(key.replace("eval_tasksets", "tasksets"))
    return key in OURS | SECTIONS or any(key.startswith(f"{taker}.") for taker in TAKES_ANYTHING)


def test_c8_every_key_of_trinity_rft_is_ours_or_has_an_answer() -> None:
    keys = theirs()
    assert len(keys) > 400
    unanswered = []
    for key in keys:
        if is_ours(key):
            continue
        [said] = [p for p in told(nested(key, {})) if "unknown key" in p]
        named = re.sub(r"\[0\]", "[]", said.partition("unknown key ")[2].partition(";")[0])
        clause = said.partition("; ")[2]
        if not key.startswith(named) or clause != FOREIGN.get(named):
            unanswered.append(said)
    assert unanswered == []


def test_c8_an_answer_names_keys_that_there_are() -> None:
    named = {
        (theirs, ours)
        for theirs, text in {**FOREIGN, **dict.fromkeys(FOREIGN_VALUES, "")}.items()
        for ours in re.findall(r"\b(?:[a-z_]+(?:\[\])?\.)+[a-z_]+\b(?:\[\])?", text)
        if not re.match(r"(task|model)\.", ours)  # task.raw_task, model.chat: what a workflow has
    }
    assert len(named) > 100
    wrong = {pair for pair in named if not is_ours(pair[1])}
    assert wrong == set()


def test_c8_no_key_of_ours_is_foreign() -> None:
    assert set(FOREIGN) & OURS == set()


def test_c8_a_section_is_answered_key_by_key_with_lines(tmp_path: Path) -> None:
    lines = problems(tmp_path, """\
        algorithm:
          algorithm_type: grpo
          repeat_times: 8
          optimizer: {lr: 1.0e-6}
        cluster: {node_num: 1, gpu_per_node: 8}
        buffer:
          total_epochs: 1
          explorer_input:
            taskset:
              path: openai/gsm8k
              default_workflow_type: math_workflow
              format: {prompt_key: question}
            eval_tasksets:
            - {name: a, path: a.jsonl, storage_type: file, task_selector: {selector_type: random}}
    """)
    evals = "buffer.explorer_input.eval_tasksets[0]"
    assert sorted(lines) == sorted([
        f"line 14: unknown key {evals}.storage_type; there is none here: the path decides how it is read",
        f"line 14: unknown key {evals}.task_selector; there is none here: an eval plays every row once",
        "line 11: unknown key buffer.explorer_input.taskset.default_workflow_type; it is "
        "buffer.explorer_input.tasksets[].workflow here",
        "line 9: unknown key buffer.explorer_input.taskset; it is buffer.explorer_input.tasksets here: a list, with "
        "one entry or more",
        "line 7: unknown key buffer.total_epochs; it is buffer.explorer_input.tasksets[].epochs here: each taskset has "
        "its own",
        "line 2: unknown key algorithm.algorithm_type; it is buffer.pipeline.operators here: the advantage, such as "
        "grpo; the loss is the trainer's",
        "line 3: unknown key algorithm.repeat_times; it is buffer.explorer_input.tasksets[].repeat_times here",
        "line 1: unknown key algorithm; it is trainer.class and trainer.args here: the loss is the trainer's",
        "line 5: unknown key cluster; it is explorer.rollout_model.engine_num and "
        "explorer.rollout_model.tensor_parallel_size here: nothing is shared out by Ray",
    ])


@pytest.mark.parametrize(("key", "value"), list(FOREIGN_VALUES))
def test_c8_a_value_of_theirs_is_answered(key: str, value: str) -> None:
    [said] = told(nested(key, int(value) if value.isdigit() else value))
    assert said.startswith(f"config: {key} must be ")
    assert said.endswith(f"; {FOREIGN_VALUES[key, value]}")


def test_c8_a_monitor_that_is_built_in_is_answered_by_its_name() -> None:
    answers = {value: text for (key, value), text in FOREIGN_VALUES.items() if key == "monitor.monitor_type"}
    assert answers == {name: f"write [{name}]" for name in ("tensorboard", "wandb", "mlflow", "swanlab")}


def test_p56_interpolations_and_foreign_keys_are_told_in_one_round(tmp_path: Path) -> None:
    lines = problems(tmp_path, """\
        checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
        model: {model_path: "${oc.env:OTHER}", max_model_len: 2048}
        buffer:
          batch_size: ${oc.env:BATCH}
          total_epochs: ${oc.env:EPOCHS,1}
        explorer:
          name: ${buffer.batch_size}
          runner_per_model: 8
        synchronizer: {sync_style: dynamic_by_trainer}
    """)

    def unset(name: str, key: str) -> str:
        return (
            f"{key} needs the environment variable {name}, which is not set: set it, or write a default, as in "
            f"${{oc.env:{name},default}}; or give the value with --set {key}=..."
        )

    assert lines == [
        f"line 2: {unset('OTHER', 'model.model_path')}",
        f"line 4: {unset('BATCH', 'buffer.batch_size')}",
        "line 7: explorer.name holds ${buffer.batch_size}, but only ${oc.env:NAME} and "
        "${oc.env:NAME,default} are resolved: quote a default that holds a comma, bracket or brace, or write \\${ for "
        "the text ${ itself; or give the value with --set explorer.name=...",
        "line 2: unknown key model.max_model_len; it is explorer.rollout_model.max_model_len here",
        "line 8: unknown key explorer.runner_per_model; it is explorer.max_concurrency here: one runner per engine "
        "runs that many units at once",
        "line 5: unknown key buffer.total_epochs; it is buffer.explorer_input.tasksets[].epochs here: each taskset has "
        "its own",
        "line 9: synchronizer.sync_style must be one of 'fixed', 'trainer_driven', 'fully_async', not "
        "'dynamic_by_trainer'; it is trainer_driven here",
    ]
    wrong = {"buffer": {"batch_size": "${oc.env:BATCH}"}, "explorer": {"max_concurrency": 0}}
    assert len(told(wrong)) == 2


def test_c8_the_guide_names_the_defaults_of_the_keys_that_it_says_differ() -> None:
    guide = (ROOT / "docs" / "FROM_TRINITY_RFT.md").read_text().partition("Defaults that differ")[2]
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| (.+) \| (.+) \|$", guide, re.MULTILINE)
    assert len(rows) == 17
    default = {row[0]: row[2] for row in describe()}
    for key, theirs, here in rows:
        assert here.partition(":")[0].strip("`") == default[key].strip("`"), key
        assert theirs != here


def test_c8_the_page_of_keys_is_what_the_code_prints() -> None:
    page = (ROOT / "docs" / "TRINITY_RFT_KEYS.md").read_text()
    assert page == markdown(), "docs/TRINITY_RFT_KEYS.md is old: make docs"
