"""`${oc.env:NAME,default}` in a config: what it stands for, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.config_files import refused, write
from trinity_es.config.config import Config, load_config
from trinity_es.config.interpolation import escape_texts, resolve_texts
from trinity_es.events.errors import ConfigError
from trinity_es.events.secrets import Secret

VARIABLES = {"A": "a", "N": "8", "EMPTY": "", "SET_NULL": "null", "OTHERS": "has ${A} in"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    for name in ("NO", "NOT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("text", "expected"), [
    ("${oc.env:A}", "a"),
    ("${oc.env:N}", "8"),  # a text, whatever it looks like
    ("${oc.env:SET_NULL}", "null"),
    ("${ oc.env: A }", "a"),
    ("x-${oc.env:A}/${oc.env:N}", "x-a/8"),
    ("$${oc.env:A}", "$a"),
    ("${oc.env:EMPTY,default}", ""),  # it is set
    ("${oc.env:OTHERS}", "has ${A} in"),  # not looked at again
    ("${oc.env:NO,b}", "b"),
    ("${oc.env:NO, a b }", "a b"),
    ("${oc.env:NO,}", ""),
    ("${oc.env:NO,''}", ""),
    ("${oc.env:NO,'a, b'}", "a, b"),
    ('${oc.env:NO,"a b"}', "a b"),
    (r"${oc.env:NO,C:\x}", r"C:\x"),
    ("${oc.env:NO,http://u:8/v1?x@y}", "http://u:8/v1?x@y"),
    ("${oc.env:NO,null}", None),
    ("${oc.env:NO,'null'}", "null"),
    ("${oc.env:NO,1.50}", "1.50"),  # it keeps its spelling; OmegaConf makes 1.5 of it
    ("${oc.env:NO,true}", "true"),
    (r"\${oc.env:A}", "${oc.env:A}"),
    (r"\\${oc.env:A}", r"\a"),
    ("no $ {such} thing $NAME $(x) {y}", "no $ {such} thing $NAME $(x) {y}"),
    (r"a \{ b", r"a \{ b"),
])
def test_a_text_is_resolved(text: str, expected: str | None) -> None:
    assert resolve_texts(text)[:2] == (expected, {})
    assert resolve_texts(escape_texts(expected))[0] == expected


def test_it_is_resolved_in_a_file_in_overrides_and_in_a_dict(tmp_path: Path) -> None:
    text = """
        name: run-${oc.env:A}
        explorer: {max_concurrency: "${oc.env:N}", max_timeout: "1${oc.env:N}.5", eval_on_startup: "${oc.env:NO,no}"}
        buffer: {batch_size: "${oc.env:NO,16}"}
        total_steps: ${oc.env:NO,null}
        trainer: {args: {size: "${oc.env:N}", sizes: ["${oc.env:N}", 9]}}
    """
    config = load_config(write(tmp_path, text), ["project=${oc.env:A}", "explorer.stall_after='${oc.env:N}'"])
    assert (config.project, config.name) == ("a", "run-a")
    assert (config.explorer.max_concurrency, config.explorer.max_timeout, config.explorer.stall_after) == (8, 18.5, 8.0)
    assert config.explorer.eval_on_startup is False
    assert (config.buffer.batch_size, config.total_steps) == (16, None)
    assert config.trainer.args == {"size": "8", "sizes": ["8", 9]}, "a key that takes anything gets the text"
    assert Config.from_dict({"explorer": {"max_concurrency": "${oc.env:N}"}}).explorer.max_concurrency == 8


@pytest.mark.parametrize(("text", "message"), [
    ("buffer: {batch_size: '${oc.env:A}'}", "run.yaml line 1: buffer.batch_size must be a whole number, not 'a'"),
    ("buffer: {batch_size: '8'}", "run.yaml line 1: buffer.batch_size must be a whole number, not '8'"),
    ("monitor: {monitor_type: '${oc.env:A}'}", "run.yaml line 1: monitor.monitor_type must be a list, not 'a'"),
    ("name: ${oc.env:NO}", "run.yaml line 1: name needs the environment variable NO, which is not set: set it, or "
     "write a default, as in ${oc.env:NO,default}; or give the value with --set name=..."),
    ("name: ${HOME}", "run.yaml line 1: name holds ${HOME}, but only ${oc.env:NAME} and "
     "${oc.env:NAME,default} are resolved: quote a default "
     "that holds a comma, bracket or brace, or write \\${ for the text ${ itself; "
     "or give the value with --set name=..."),
    ("name: '${oc.decode:x}'", "name holds ${oc.decode:...}, but only ${oc.env:NAME}"),
    ("name: ${model.path}", "name holds ${model.path}, but only ${oc.env:NAME}"),
    ("trainer: {args: {x: [1, '${x}']}}", "trainer.args.x[1] holds ${x}, but only ${oc.env:NAME}"),
    ("name: ${oc.env:NO", "name holds ${oc.env:NO...}, but only ${oc.env:NAME} and"),
    ("name: ${oc.env:NO,a,b}", "name holds ${oc.env:NO...}, but only ${oc.env:NAME}"),
    ("name: '${oc.env:NO,[0]}'", "quote a default that holds a comma, bracket or brace"),
    ("name: '${oc.env:NO,${oc.env:A}}'", "name holds ${oc.env:NO...}, but only ${oc.env:NAME}"),
    ("name: \"${oc.env:NO,'${oc.env:A}'}\"", "name holds ${oc.env:NO...}, but only ${oc.env:NAME}"),
    ("name: '${oc.env:}'", "name holds ${oc.env:...}, but only ${oc.env:NAME}"),
])
def test_what_can_not_be_resolved_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_an_override_takes_the_place_of_what_can_not_be_resolved(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "name: ${oc.env:NO}"), ["name=x"]).name == "x"
    assert refused(tmp_path, "", "name=${HOME}").startswith("--set name: name holds ${HOME}, ")


def test_what_looks_like_one_in_the_end_goes_through_the_dict(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, r"trainer: {args: {x: '\${HOME} ${oc.env:OTHERS}', y: '\\\\\${z}'}}"))
    assert config.trainer.args == {"x": "${HOME} has ${A} in", "y": r"\\${z}"}
    assert Config.from_dict(config.to_dict(), folder="/") == config
    assert config.masked()["trainer"]["args"] == config.trainer.args
    secret = f"${{secret:{'0f' * 12}}}"  # the name of a task's secret
    assert Config.from_dict({"trainer": {"args": {"x": secret}}}).trainer.args == {"x": secret}


def test_a_variable_named_as_a_secret_is_one_under_any_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "hunter2-of-judge")
    args: dict[str, Any] = {
        "api_key": "${oc.env:A,x}", "plain": "${oc.env:JUDGE_API_KEY}", "within": "Key ${oc.env:JUDGE_API_KEY}",
        "default": "${oc.env:NO_TOKEN,hunter2-of-judge}",
    }  # fmt: skip
    config = Config.from_dict({"trainer": {"args": args}, "store": {"url": "postgresql+psycopg://u:${oc.env:A}@db/x"}})
    assert config.trainer.args["plain"] == "hunter2-of-judge"
    assert isinstance(config.trainer.args["within"], Secret)
    assert set(config.masked()["trainer"]["args"].values()) == {"***"}
    assert config.masked()["store"]["url"] == "postgresql+psycopg://u:***@db/x"
    assert Config.from_dict(config.to_dict(), folder=os.sep) == config
    for key in ("project", "store.url", "explorer.max_concurrency", "mode", "trainer.class"):
        with pytest.raises(ConfigError) as e:
            load_config(write(tmp_path, ""), [f"{key}=/${{oc.env:JUDGE_API_KEY}}"])
        assert "hunter2" not in str(e.value)
        assert "***" in str(e.value) or key == "store.url"
    hidden = refused(tmp_path, "monitor: {monitor_args: {wandb: {api_key: 'a${hunter2}'}}}")
    assert "hunter2" not in hidden
    assert "api_key holds ${...}, but only ${oc.env:NAME}" in hidden


@pytest.mark.parametrize("field", ["command", "restart_command"])
def test_a_key_in_a_command_for_servers_is_recorded_nowhere(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_TOKEN", "s3same-open")
    servers = {"command": "echo", field: "list --token ${oc.env:CLUSTER_TOKEN}"}
    rollout = {"engine_type": "http", "model_path": "m", "servers": servers}
    config = Config.from_dict({"explorer": {"rollout_model": rollout}})
    for one in (config, Config.from_dict(config.to_dict())):
        assert "s3same" not in str(one.masked())
        assert getattr(one.explorer.rollout_model.servers, field) == "list --token s3same-open"
