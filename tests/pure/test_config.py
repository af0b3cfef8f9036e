"""trinity_es.config.config: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.config_files import problems, refused, write
from tests.helpers.paths import ROOT
from trinity_es.actors.config.config import HostIdentity, LaunchedConfig
from trinity_es.config.config import Config, ConfigError, UnknownWorkflow, load_config
from trinity_es.events.secrets import Secret
from trinity_es.system.launch import launched_config
from trinity_es.workflows.math_rewards import _Math


# --- what is accepted -----------------------------------------------------------------------------------------------
def test_an_empty_file_is_a_config_of_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""))
    assert (config.project, config.name, config.mode, config.total_steps) == ("trinity", "run", "both", None)
    assert config.explorer.max_timeout == 1800.0
    assert config.explorer.rollout_model.engine_num == 1
    assert [o.name for o in config.buffer.pipeline.operators] == ["grpo"]
    assert config.store.durability == "power"


def test_relative_paths_are_relative_to_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write(tmp_path, """
        name: r1
        model: {model_path: ./model}
        buffer: {explorer_input: {tasksets: [{name: a, path: data/a.jsonl}]}}
        store: {url: sqlite:///here/log.sqlite}
    """)
    config = load_config("../run.yaml", ["checkpoint_root_dir=ckpt"])
    here = str(tmp_path)
    assert config.model.model_path == f"{here}/model"
    assert config.explorer.rollout_model.model_path == f"{here}/model"
    assert config.buffer.explorer_input.tasksets[0].path == f"{here}/data/a.jsonl"
    assert config.store.url == f"sqlite:///{here}/here/log.sqlite"
    assert config.system.log_dir == f"{here}/here/logs"
    assert config.checkpoint_dir == Path(here, "ckpt/trinity/r1")
    assert config.code_path == here


def test_the_store_is_named_for_project_and_run_unless_it_is_given(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "{project: p, name: r}"))
    assert config.store.url == f"sqlite:///{tmp_path}/runs/p/r/log.sqlite"
    assert config.system.log_dir == f"{tmp_path}/runs/p/r/logs"


@pytest.mark.parametrize(("path", "local"), [
    ("Qwen/Qwen2.5-0.5B", False), ("gpt2", False), ("./gpt2", True), ("../gpt2", True), ("models/gpt2", True),
    ("there", True),
])
def test_a_model_path_is_a_hub_id_unless_it_looks_like_a_path(tmp_path: Path, path: str, local: bool) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "there").mkdir()
    config = Config.from_dict({"model": {"model_path": path}}, folder=tmp_path)
    assert config.model.model_path == (os.path.normpath(tmp_path / path) if local else path)


@pytest.mark.parametrize(("text", "value"), [
    ("010", 10), ("-07", -7), ("0o10", 8), ("0x1F", 31), ("1_000", 1000), ("12:30:45", "12:30:45"), ("1:30", "1:30"),
    ("1:30.5", "1:30.5"), ("0b11", "0b11"), ("1e3", 1000.0), ("1.", 1.0), (".5", 0.5), ("-1.5e-3", -0.0015),
])
def test_numbers_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{class: 'a:B', args: {{given: {text}}}}}\n")
    given = load_config(path).trainer.args["given"]
    assert (given, type(given)) == (value, type(value))


def test_overrides_go_over_the_file_and_are_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, """
        buffer: {explorer_input: {tasksets: [{name: a, path: a.jsonl}, {name: b, path: b.jsonl}]}}
        explorer:
    """)
    config = load_config(path, [
        "explorer.rollout_model.temperature=0.5", "buffer.explorer_input.tasksets.0.repeat_times=4",
        "buffer.explorer_input.tasksets[1].shuffle=true", "total_steps=3", "total_steps=5", "explorer.name='7'",
        "trainer.args={lr: 3e-3, day: 2026-01-31}",
    ])
    assert config.explorer.rollout_model.temperature == 0.5
    assert config.buffer.explorer_input.tasksets[0].repeat_times == 4
    assert config.buffer.explorer_input.tasksets[1].shuffle is True
    assert config.total_steps == 5
    assert config.explorer.name == "7"
    assert config.trainer.args == {"lr": 3e-3, "day": "2026-01-31"}


def test_a_config_goes_through_its_dict_and_through_pickle_unchanged(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, """
        trainer: {class: "my.trainer:Trainer"}
        model: {model_path: ./m}
        store: {url: "postgresql+psycopg://u:secret@db/runs"}
        buffer: {explorer_input: {eval_tasksets: [{name: a, path: a.jsonl}]}, pipeline: {operators: []}}
    """))
    assert Config.from_dict(config.to_dict(), folder="/") == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.to_dict()["trainer"]["class"] == config.trainer.trainer_class == "my.trainer:Trainer"


def test_a_system_s_processes_get_the_config_itself_with_its_secrets_as_secrets() -> None:
    config = Config.from_dict({
        "trainer": {"class": "m:T", "args": {"api_key": "hunter2", "other": Secret("hunter3")}},
        "explorer": {"auxiliary_models": [{"name": "judge", "engine_type": "scripted"}]},
        "synchronizer": {"sync_method": "nccl"},
        "buffer": {"explorer_input": {"tasksets": [{"name": "a", "path": "a.jsonl", "workflow": "mine:W"}]}},
    })
    made = launched_config(config, {"pid": 1}, HostIdentity(name="gpu-7", life="x"))
    arrived = LaunchedConfig.model_validate(json.loads(json.dumps(made.plain())))
    assert pickle.loads(pickle.dumps(arrived)) == arrived == made
    assert arrived.masked() == config.masked()
    assert "hunter" not in str(arrived.masked())
    assert isinstance(arrived.trainer.args["other"], Secret)
    assert [arrived.engine_config(name).weight_transfer for name in arrived.models] == [True, False]
    assert (arrived.workflows, arrived.started_in) == (["mine:W"], os.getcwd())


def test_a_config_can_be_built_by_keyword_and_is_never_changed() -> None:
    config = Config(name="x", total_steps=2)
    assert config.store.url == f"sqlite:///{Path.cwd()}/runs/trinity/x/log.sqlite"
    for section in (config, config.explorer):
        with pytest.raises(ValueError, match="frozen"):
            section.name = "y"


def test_c8_an_engine_is_built_with_what_the_config_says() -> None:
    engine: dict[str, Any] = {
        "seed": 3, "max_model_len": 64, "dtype": "float32", "gpu_memory_utilization": 0.25, "tensor_parallel_size": 2,
        "enforce_eager": True, "model_path": "Org/Name", "server_args": {"tool_call_parser": "hermes"},
    }
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "logprobs": False}
    options = {"engine_args": {"swap_space": 1}, "script": {"tokens": 2}}
    lora = {"max_adapters": 2, "max_rank": 32}
    rollout = {**engine, **sampling, **options, "max_response_tokens": 9, "lora": {**lora, "adapter": "math"}}
    for kind, name, cls in (("vllm", "engine_args", "trinity_es.actors.engines.vllm.engine:VLLMEngine"),
                            ("scripted", "script", "trinity_es.testing:ScriptedEngine"), ("m:E", "engine_args", "m:E")):
        model = Config.from_dict({"explorer": {"rollout_model": {**rollout, "engine_type": kind}}}).rollout
        own = {"initial_version": 4, "weight_transfer": False, "options": options[name], "lora": lora}
        assert asdict(model.engine_config(initial_version=4)) == {**engine, **own}
        assert model.rollout_args() == {**sampling, "max_tokens": 9, "adapter": "math"}
        assert model.engine_class == cls
    assert Config().rollout.rollout_args() == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": 1024}


# --- what is refused ------------------------------------------------------------------------------------------------
TEXT = "{name: r, buffer: {explorer_input: {tasksets: []}}}"
HTTP = "explorer: {rollout_model: {engine_type: http, servers: {urls: ['http://a:1'%s]}%s}}"
NAMED = "explorer: {auxiliary_models: [%s]}"


@pytest.mark.parametrize(("text", "overrides", "message"), [
    ("name: r\nexplorer:\n  max_timeot: 3\n", [],
     "run.yaml line 3: unknown key explorer.max_timeot; did you mean explorer.max_timeout?"),
    ("", ["explorer.max_concurency=1"], "--set explorer.max_concurency: unknown key explorer.max_concurency; did you "
     "mean explorer.max_concurrency?"),
    ("batch_size: 3\n", [], "run.yaml line 1: unknown key batch_size; did you mean buffer.batch_size?"),
    ("name: 007\n", [], 'run.yaml line 1: name must be text, not 007; put it in quotes: "007"'),
    ("", ["name=1e3"], """--set name: name must be text, not 1e3; put it in quotes: --set 'name="1e3"'"""),
    ("a: [", [], "run.yaml line 1: not usable YAML"),
    ("name: a\nname: b\n", [], "run.yaml line 2: not usable YAML: the key 'name' appears twice"),
    ("- a\n", [], "run.yaml: must be a mapping of keys, such as `name: run`, not a list"),
    (TEXT, ["a.b"], "--set a.b: write the override as KEY=VALUE"),
    (TEXT, ["a..b=1"], "--set a..b: write the override as KEY=VALUE"),
    (TEXT, ["name.x=1"], "--set name.x: name is 'r', not a section, so it can't have the key 'x'"),
    (TEXT, ["name=["], "--set name: '[' is not usable YAML"),
    (TEXT, ["buffer.explorer_input.tasksets.0.name=1"], "--set buffer.explorer_input.tasksets.0.name: "
     "buffer.explorer_input.tasksets is a list of 0"),
    ("", ["buffer.explorer_input.tasksets=[{name: a, path: a.jsonl}, {name: a, path: b.jsonl}]"],
     "buffer.explorer_input has two tasksets with the name 'a'"),
    ("", ["store.url=redis://h/0"], "store.url must begin with sqlite:/// or postgresql"),
    ("", ["store.url=nonsense"], "store.url is no database URL"),
    ("", ["store.url=sqlite://"], "store.url must be a file"),
    ("", ["store.url='sqlite:///:memory:'"], "store.url must be a file"),
    ("", ["explorer.rollout_model.engine_type=http"], "needs one of servers.urls"),
    (HTTP % (", 'http://a:1'", ""), [], "names http://a:1 more than once"),
    (HTTP % ("", ", lora: {max_rank: 8}"), [], "has lora"),
    (HTTP % ("", ", server_args: {tool_call_parser: hermes}"), [], "has server_args"),
    (HTTP % ("", ""), ["synchronizer.sync_method=nccl"],
     "rollout_model.engine_type is http, and synchronizer.sync_method is nccl: "),
    (NAMED % "{name: judge, lora: {}}", [], "has lora, which only the rollout model can have"),
    (NAMED % "{name: a}, {name: a}", [], "two models with the name 'a'"),
    (NAMED % "{name: rollout}", [], "two models with the name 'rollout'"),
    (NAMED % "{name: runner}", [], "two models with the name 'runner'"),
])
def test_what_can_not_be_meant_is_refused_with_its_place_and_the_way_out(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    assert message in refused(tmp_path, text, *overrides)


def test_what_is_nearly_refused_is_taken(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), ['name="1e3"']).name == "1e3"
    assert load_config(write(tmp_path, HTTP % ("", "")), ["synchronizer.sync_method=memory"]).rollout.engine_num == 1


def test_every_problem_is_told_at_once_a_line_each(tmp_path: Path) -> None:
    found = problems(tmp_path, """\
        explorer:
          max_timeout: abc
          concurrent_mode: fast
          runner_per_model: 8
          rollout_model: {dtype: on, seed: 1.5, top_p: .nan, engine_type: tgi, gpu_memory_utilization: 2}
        buffer:
          batch_size: 0
          explorer_input:
            tasksets: [{name: a, path: a.jsonl}, {name: a, path: b.jsonl}]
            eval_tasksets: [{path: a.jsonl}]
        trainer: []
        name: ../up
        store: {durability: maybe}
    """)
    assert set(found) == {
        "line 12: name must be usable as a folder name (letters, digits, _ - .), not '../up'",
        "line 2: explorer.max_timeout must be a number, not 'abc'",
        "line 4: unknown key explorer.runner_per_model; it is explorer.max_concurrency here: one runner per "
        "engine runs that many units at once",
        "line 3: explorer.concurrent_mode must be one of 'sequential', 'asynchronous', 'multi-threading', "
        "not 'fast'",
        "line 5: explorer.rollout_model.engine_type must be one of http, scripted, vllm, \"module:Class\", "
        "not 'tgi'",
        "line 5: explorer.rollout_model.gpu_memory_utilization must be less than or equal to 1, not 2",
        "line 5: explorer.rollout_model.dtype must be text, not on; put it in quotes: \"on\"",
        "line 5: explorer.rollout_model.seed must be a whole number, not 1.5",
        "line 5: explorer.rollout_model.top_p must be a finite number, not nan",
        "line 7: buffer.batch_size must be greater than or equal to 1, not 0",
        "line 10: buffer.explorer_input.eval_tasksets[0].name is required",
        "line 11: trainer must be a mapping of keys, not a list",
        "line 13: store.durability must be one of 'process', 'power', not 'maybe'",
    }
    assert len(found) == 13


@pytest.mark.parametrize(("sections", "reason"), [
    ({}, "explorer.over_rollout.ratio is 0, so no step leaves a task unfinished"),
    ({"explorer": {"over_rollout": {"ratio": 0.5}, "progress": {"seconds": 0}}}, "explorer.progress.seconds is 0"),
    ({"explorer": {"over_rollout": {"ratio": 0.5, "return_partial_tasks": True}}}, "explorer.over_rollout.ret"),
    ({"explorer": {"over_rollout": {"ratio": 0.5}, "max_repeat_times_per_runner": 2}}, "explorer.max_repeat_times"),
    ({"explorer": {"over_rollout": {"ratio": 0.5}, "max_staleness": 0}}, "explorer.max_staleness is 0"),
    ({"explorer": {"over_rollout": {"ratio": 0.5}}, "store": {"retention": 1}, "synchronizer": {"sync_offset": 1}},
     "store.retention is 1, and the tokens of a cut task may be needed 2 steps later"),
])
def test_cutting_tasks_that_could_not_go_on_is_refused_by_name(sections: dict[str, Any], reason: str) -> None:
    data = {**sections, "synchronizer": {"in_flight": "cut", **sections.get("synchronizer", {})}}
    with pytest.raises(ConfigError, match=f"synchronizer.in_flight is 'cut', but {re.escape(reason)}"):
        Config.from_dict(data)
    data["synchronizer"]["in_flight"] = "keep"
    Config.from_dict(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1: 2}])
def test_arguments_that_could_not_be_recorded_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer.args must hold plain values only"):
        Config.from_dict({"trainer": {"args": {"x": value}}})


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: can't be read \(No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "run.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "run.yaml")


# --- nobody sees the password ---------------------------------------------------------------------------------------
def test_the_password_of_the_store_is_in_no_text_but_the_dict(tmp_path: Path) -> None:
    url = "postgresql+psycopg://u:secret@db:5432/runs?sslpassword=secret"
    config = Config.from_dict({"store": {"url": url}})
    assert "secret" not in f"{config.masked()} {config!r} {config} {config.store}"
    assert config.masked()["store"]["url"].startswith("postgresql+psycopg://u:***@db:5432/runs")
    assert config.store.url == url
    bad = "redis://u:secret@db"
    for text, overrides in [
        (f"store: '{bad}'", []), (f"store: {{url: '{bad}'}}", []), ("", [f"store={bad}"]), ("", [f"store.url={bad}"]),
        ("", [f"store.url.x={bad}", "a"]), (f"store: '{bad}'", ["store.url=3"]), ("", [f"store.url=[{bad}"]),
    ]:
        assert "secret" not in refused(tmp_path, text, *overrides)


# --- check ----------------------------------------------------------------------------------------------------------
SCRIPTED = "explorer: {rollout_model: {engine_type: scripted}}\n"


def test_check_finds_what_is_not_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert problems(tmp_path, """
        model: {model_path: ./none}
        buffer:
          explorer_input:
            tasksets: [{name: a, path: a.jsonl}, {name: b, path: data}]
            eval_tasksets: [{name: c, path: data, split: test}]
    """) == [
        "model.model_path: no folder none",
        "buffer.explorer_input.tasksets[0].path: no file a.jsonl",
        "buffer.explorer_input.tasksets[1].path: data is a folder: choose <split>.jsonl in it with "
        "buffer.explorer_input.tasksets[1].split (or .parquet, or a dataset's split)",
        "buffer.explorer_input.eval_tasksets[0].path: no file data/test.jsonl",
    ]


def test_p33_check_takes_parquet_files_and_dataset_directories(tmp_path: Path) -> None:
    for folder in ("set", "all/train"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "state.json").write_text("{}")
    (tmp_path / "all/test.parquet").touch()
    load_config(write(tmp_path, SCRIPTED + """
buffer:
  explorer_input:
    tasksets: [{name: a, path: set}, {name: b, path: all, split: train}, {name: c, path: all, split: test}]
""")).check()


def test_check_wants_a_model_for_vllm_but_lets_a_hub_id_be(tmp_path: Path) -> None:
    assert problems(tmp_path, "") == [
        "model.model_path is not set: give a folder or a hub id (or engine_type: scripted)"
    ]
    load_config(write(tmp_path, "model: {model_path: Qwen/Qwen2.5-0.5B}")).check()
    load_config(write(tmp_path, SCRIPTED)).check()


def test_check_imports_the_users_modules_from_the_folder_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "check_ok_module.py").write_text("class W:\n    class Inner: pass\n")
    (tmp_path / "a.jsonl").write_text("{}")
    text = SCRIPTED + "buffer: {explorer_input: {tasksets: [{name: a, path: a.jsonl, workflow: 'check_ok_module:%s'}]}}"
    before = list(sys.path)
    load_config(write(tmp_path, text % "W.Inner")).check()
    assert sys.path == before
    key = "buffer.explorer_input.tasksets[0].workflow"
    assert problems(tmp_path, text % "X") == [
        f"{key}: check_ok_module:X: check_ok_module (check_ok_module.py) has no X"
    ]
    with pytest.raises(UnknownWorkflow):
        load_config(tmp_path / "run.yaml").check()
    assert problems(tmp_path, text % "W.Iner") == [
        f"{key}: check_ok_module:W.Iner: check_ok_module (check_ok_module.py) has no Iner; did you mean Inner?"
    ]


def test_check_quotes_the_error_of_a_module_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "check_bad_module.py").write_text("raise SystemExit('bad day')")
    text = SCRIPTED + "trainer: {class: 'check_bad_module:T'}\nbuffer: {pipeline: {operators: [{name: 'nowhere_m:f'}]}}"
    [operator, trainer] = problems(tmp_path, text)
    assert operator.startswith(
        "buffer.pipeline.operators[0].name: nowhere_m:f: importing nowhere_m failed (ModuleNotFoundError: No module"
    )
    assert trainer.startswith(
        "trainer.class: check_bad_module:T: importing check_bad_module failed (SystemExit: bad day)"
    )


def test_check_refuses_names_that_nobody_registered(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    text = SCRIPTED + """buffer:
      explorer_input: {tasksets: [{name: a, path: a.jsonl, workflow: singel_turn}]}
      pipeline: {operators: [{name: grpoo}]}"""
    [operator, workflow] = problems(tmp_path, text)
    assert operator.startswith("buffer.pipeline.operators[0].name: there is no 'grpoo' (known: ")
    assert workflow.startswith("buffer.explorer_input.tasksets[0].workflow: there is no 'singel_turn' (known: ")
    assert "grpo" in operator
    assert workflow.endswith("; did you mean single_turn?")
    key = "buffer.explorer_input.tasksets[0].reward_fn"
    named = text.replace("singel_turn", "single_turn, reward_fn: math_rewrad")
    assert problems(tmp_path, named)[0].startswith(f"{key}: there is no 'math_rewrad' (known: accuracy_reward, ")
    assert len(problems(tmp_path, named.replace("rewrad", "reward"))) == 1


def test_check_tells_what_to_install_for_a_workflow_s_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    text = SCRIPTED + "buffer: {explorer_input: {tasksets: [{name: a, path: a.jsonl, workflow: %s}]}}"
    brought, named = text % "async_math_workflow", text % "single_turn, reward_fn: gsm8k_reward"
    own = text % "math_workflow, reward_fn: format_reward"
    monkeypatch.setattr(_Math, "needs", ("json", "math"))
    for config in (brought, named, own):
        load_config(write(tmp_path, config)).check()
    monkeypatch.setattr(_Math, "needs", ("not_installed_here", "math"))
    says = "needs the package not_installed_here: pip install \"trinity-es[math]\""
    assert problems(tmp_path, brought) == [f"buffer.explorer_input.tasksets[0]: math_reward {says}"]
    assert problems(tmp_path, named) == [f"buffer.explorer_input.tasksets[0]: gsm8k_reward {says}"]
    load_config(write(tmp_path, own)).check()


# --- auxiliary models -----------------------------------------------------------------------------------------------
def test_p15_an_auxiliary_model_is_by_default_the_model_and_is_checked_like_it(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    text = """
        model: {model_path: ./m}
        explorer: {auxiliary_models: [{name: same}, {name: other, model_path: ./n, engine_type: "no_such:E"}]}
    """
    same, other = load_config(write(tmp_path, text)).explorer.auxiliary_models
    assert same.model_path == str(tmp_path / "m")
    assert other.model_path == str(tmp_path / "n")
    [folder, engine] = problems(tmp_path, text)
    assert folder == "explorer.auxiliary_models[1].model_path: no folder n"
    assert engine.startswith("explorer.auxiliary_models[1].engine_type: no_such:E: importing no_such failed")


# --- docs -----------------------------------------------------------------------------------------------------------
def test_the_config_page_is_what_the_code_prints() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "trinity_es.config.config_docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs/CONFIG.md").read_text() == printed, "run `make docs` and commit docs/CONFIG.md"


# --- what is too large ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("key", [
    "explorer.rollout_model.seed", "explorer.max_retry_times", "buffer.queue.capacity", "total_steps",
    "trainer.args.seed", "name",
])
def test_a_whole_number_that_no_log_can_hold_is_refused(tmp_path: Path, key: str, digits: int) -> None:
    data: dict[str, Any] = {}
    *folders, leaf = key.split(".")
    here = data
    for folder in folders:
        here = here.setdefault(folder, {})
    here[leaf] = 10**digits
    with pytest.raises(ConfigError) as e:
        Config.from_dict(data)
    for told in (str(e.value), refused(tmp_path, "", f"{key}=1{'0' * digits}")):
        assert key.removesuffix(".seed") in told
        assert len(told) < 300


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    too_many = "the aliases (*name) expand to more than 100,000 values"
    assert too_many in refused(tmp_path, "\n".join(levels))
    assert too_many in refused(tmp_path, "", f"trainer.args={{{', '.join(levels)}}}")
    assert "recursive" in refused(tmp_path, "trainer: &a {args: *a}")
    shared = load_config(write(tmp_path, "{trainer: {args: {a: &a {b: [1, 2]}, c: *a, d: {<<: *a, e: 1}}}}"))
    assert shared.trainer.args == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": {"b": [1, 2], "e": 1}}
