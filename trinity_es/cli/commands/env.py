"""The commands `env install | list | remove | check`, for verifiers environments, each in its own virtualenv."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, SetOption, note, print_json, read_config
from trinity_es.cli.run_in_view import silence_libraries
from trinity_es.config.config import Config
from trinity_es.environments import installs as environments
from trinity_es.environments.installs import Installed
from trinity_es.environments.verifiers_tasks import PREFIX
from trinity_es.events.experience import Experience
from trinity_es.run import single_task
from trinity_es.safe_text import plain

__all__ = ["env", "show", "tokens"]

MAX_TOKENS = 200
MAX_CHARACTERS = 1000
HELP = """Install verifiers environments, each in its own virtualenv, and try them.

\b
Examples:
  trinity-es env install gsm8k-v1
  trinity-es env list --json
  trinity-es env check gsm8k-v1 --config train.yaml
"""
env = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As `trinity-es env list` shows it.")]


@env.command()
def install(
    package: Annotated[str, typer.Argument(
        metavar="PACKAGE", help="NAME, NAME@VERSION, a folder or a wheel.", show_default=False)],
    name: Annotated[str | None, typer.Option(
        "--name", metavar="NAME", help="Name for the environment. Default: its package's.")] = None,
    beside: Annotated[list[str] | None, typer.Option(
        "--with", metavar="PACKAGE", help="Another package to install with it, in pip's syntax; repeat.")] = None,
    index: Annotated[str | None, typer.Option(
        "--index", metavar="URL", help="Additional package index.")] = None,
    python: Annotated[str | None, typer.Option(
        "--python", metavar="PYTHON", help="Python of the virtualenv. Default: this one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Install a verifiers environment in its own virtualenv.

    \b
    Examples:
      trinity-es env install gsm8k-v1
      trinity-es env install ./my_environment
      trinity-es env install verifiers --name textarena --with "verifiers[ta]"
    """
    installed = environments.install(package, name=name, beside=beside or (), index=index, python=python, say=note)
    if as_json:
        print_json(_as_json(installed))
    else:
        print(f"{_line(installed)}\nuse it in a taskset: `path: verifiers:{installed.name}`; "
              f"try it: `trinity-es env check {installed.name}`")


@env.command("list")
def list_installed(as_json: JsonOption = False) -> None:
    """List the installed environments."""
    installed = environments.installed()
    if as_json:
        print_json([_as_json(environment) for environment in installed])
        return
    for environment in installed:
        print(_line(environment))
    if not installed:
        print(f"none in {environments.environments_folder()}: `trinity-es env install NAME` installs one")


@env.command()
def remove(name: NameArgument) -> None:
    """Delete an environment."""
    print(f"removed {_line(environments.remove(name))}")


@env.command()
def check(
    name: NameArgument,
    config: ConfigOption = None,
    overrides: SetOption = None,
    index: Annotated[int, typer.Option("--index", metavar="N", help="Task of the environment, counted from 0.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Play one task of an environment, and show what the model read and, token by token, what it wrote.

    Uses the engine of a config, and the settings of its taskset for this environment, if any. Without a config the
    engine writes random letters. Exits 1 if the run failed.

    \b
    Examples:
      trinity-es env check gsm8k-v1
      trinity-es env check gsm8k-v1 --config train.yaml --json
    """
    environment = environments.find(name)
    if config:
        settings = read_config(config, overrides)
    else:
        settings = Config.from_dict({"name": "check", "explorer": {
            "max_timeout": 300.0, "rollout_model": {"engine_type": "scripted", "max_response_tokens": 16}}})
    settings = _with_environment(settings, environment.name)
    note(f"starting {environment.name} {environment.version} and engine {settings.explorer.rollout_model.engine_type}: "
         "this may take minutes if data or a model is loaded"
         + ("" if config else " (no --config: the engine writes random letters, so the reward says little)"))
    silence_libraries()
    with tempfile.TemporaryDirectory() as folder:
        task = single_task.choose(settings, environment.name, index)
        played = asyncio.run(single_task.play(settings, task, runs=1, folder=Path(folder)))
    if as_json:
        print_json({**{k: v for k, v in played.as_dict().items() if k != "folder"},
                    "tokens": [tokens(e, texts) for e, texts in zip(played.experiences, played.texts, strict=True)]})
    else:
        show(played.experiences, played.texts, played.failures)
    if played.failures:
        raise typer.Exit(1)


def _with_environment(settings: Config, name: str) -> Config:
    """Return the config with this environment as its only taskset. A configured taskset of it keeps its settings."""
    inputs = settings.buffer.explorer_input
    configured = next((t for t in [*inputs.tasksets, *inputs.eval_tasksets] if t.path.startswith(PREFIX)
                       and environments.plain_name(t.path.removeprefix(PREFIX)) == name), None)
    taskset: dict[str, Any] = {"path": f"{PREFIX}{name}"} if configured is None else configured.model_dump(
        exclude_unset=True)
    data = settings.model_dump(exclude_unset=True)
    data.setdefault("buffer", {})["explorer_input"] = {"tasksets": [{**taskset, "name": name}]}
    return Config.from_dict(data)


def _as_json(environment: Installed) -> dict[str, Any]:
    return {"name": environment.name, "distribution": environment.distribution, "packages": environment.packages,
            "versions": environment.versions, "folder": str(environment.folder)}


def _line(environment: Installed) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in environment.versions.items())
    return f"{environment.name}  {versions}  {environment.folder}"


def tokens(e: Experience, texts: list[str]) -> list[dict[str, Any]]:
    """Return a dict per token of an experience. `texts`: the text of each token.

    For tokens that the model did not generate, `sampled` is False and `logprob` None.
    """
    ids, first = e.tokens.tolist(), e.prompt_length
    mask = e.action_mask.tolist() if e.action_mask is not None else [True] * (len(ids) - first)
    logprobs = e.logprobs.tolist() if e.logprobs is not None else [None] * (len(ids) - first)
    return [
        {"at": i, "id": token, "text": text, "sampled": i >= first and mask[i - first],
         "logprob": logprobs[i - first] if i >= first and mask[i - first] else None}
        for i, (token, text) in enumerate(zip(ids, texts, strict=True))
    ]


def show(experiences: list[Experience], texts: list[list[str]], failures: list[tuple[int, str, str]]) -> None:
    """Print a task's experiences: generated text token by token, other text in whole pieces."""
    for e, pieces in zip(experiences, texts, strict=True):
        rows = tokens(e, pieces)
        sampled_count = sum(row["sampled"] for row in rows)
        print(f"experience {e.eid.step}: reward {e.reward:g}, {len(rows)} tokens, {sampled_count} of them written by "
              f"the model{f', {e.truncate_status}' if e.truncate_status else ''}")
        written_count = 0
        for is_sampled, group in itertools.groupby(rows, key=lambda row: row["sampled"]):
            piece = list(group)
            text = "".join(row["text"] for row in piece)
            print(f"  {piece[0]['at']}-{piece[-1]['at']}  {'written' if is_sampled else 'read'}  {_quoted(text)}")
            for row in piece if is_sampled else ():
                written_count += 1
                if written_count <= MAX_TOKENS:
                    logprob = "" if row["logprob"] is None else f"logprob {row['logprob']:.4f}"
                    print(f"    {row['at']:<6} id {row['id']:<8} {_quoted(row['text']):<12} {logprob}".rstrip())
        if written_count > MAX_TOKENS:
            print(f"    ({written_count - MAX_TOKENS} more tokens were written: --json has them)")
        metrics = sorted((e.metrics or {}).items())
        if metrics:
            print("  metrics  " + "  ".join(f"{plain(k)} = {v:g}" for k, v in metrics))
    for _, kind, message in failures:
        print(f"FAILED ({kind}): {plain(message, 2000)}")


def _quoted(text: str) -> str:
    """Return a text as one line in quotes, with escapes, cut to MAX_CHARACTERS."""
    return plain(json.dumps(text, ensure_ascii=False), MAX_CHARACTERS)
