"""`trinity-es env install | list | remove | check`: environments of others, each in a Python environment of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, SetOption, note, print_json, read_config
from trinity_es.cli.run_in_view import quietly
from trinity_es.config.config import Config
from trinity_es.environments import installed as environments
from trinity_es.environments.installed import Installed
from trinity_es.environments.verifiers_tasks import PREFIX
from trinity_es.events.experience import Experience
from trinity_es.run import single_task
from trinity_es.text import plain

__all__ = ["env", "show", "tokens"]

SHOWN = 200
"""Maximum number of written tokens that are shown of an experience to a person."""
SHOWN_CHARACTERS = 1000
"""Maximum number of characters of a piece of a conversation."""
HELP = """Install environments of verifiers, each in a Python environment of its own, and try them.

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
        "--name", metavar="NAME", help="What to call it. Default: as its package.")] = None,
    beside: Annotated[list[str] | None, typer.Option(
        "--with", metavar="PACKAGE", help="A further package, as pip is told; repeat.")] = None,
    index: Annotated[str | None, typer.Option(
        "--index", metavar="URL", help="Where to look for packages besides the usual index.")] = None,
    python: Annotated[str | None, typer.Option(
        "--python", metavar="PYTHON", help="The Python to use. Default: this one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Install an environment of verifiers, in a Python environment of its own.

    \b
    Examples:
      trinity-es env install gsm8k-v1
      trinity-es env install ./my_environment
      trinity-es env install verifiers --name textarena --with "verifiers[ta]"
    """
    found = environments.install(package, name=name, beside=beside or (), index=index, python=python, say=note)
    if as_json:
        print_json(_told(found))
    else:
        print(f"{_line(found)}\nplay it: a taskset with `path: verifiers:{found.name}`; "
              f"try it: `trinity-es env check {found.name}`")


@env.command("list")
def list_installed(as_json: JsonOption = False) -> None:
    """List the environments that are installed."""
    found = environments.installed()
    if as_json:
        print_json([_told(one) for one in found])
        return
    for one in found:
        print(_line(one))
    if not found:
        print(f"none in {environments.environments_folder()}: `trinity-es env install NAME`")


@env.command()
def remove(name: NameArgument) -> None:
    """Delete an environment."""
    print(f"removed {_line(environments.remove(name))}")


@env.command()
def check(
    name: NameArgument,
    config: ConfigOption = None,
    overrides: SetOption = None,
    index: Annotated[int, typer.Option("--index", metavar="N", help="Task of the environment, from 0.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Play one task, and show what the model read, and token by token what it wrote.

    With the engine of a config, or without one with an engine that writes letters at random. A taskset of the config
    that is this environment says how it is played. Exits 1 when the run failed.

    \b
    Examples:
      trinity-es env check gsm8k-v1
      trinity-es env check gsm8k-v1 --config train.yaml --json
    """
    found = environments.find(name)
    settings = read_config(config, overrides) if config else _scripted()
    settings = _with_environment(settings, found.name)
    note(f"starting {found.name} {found.version} and engine {settings.explorer.rollout_model.engine_type}: this may "
         "take minutes where data or a model is loaded"
         + ("" if config else " (no --config: the engine writes letters at random, so the reward says little)"))
    with quietly(), tempfile.TemporaryDirectory() as folder:
        task = single_task.choose(settings, found.name, index)
        played = asyncio.run(single_task.play(settings, task, runs=1, folder=Path(folder)))
    if as_json:
        print_json({**{k: v for k, v in played.as_dict().items() if k != "folder"},
                    "tokens": [tokens(e, texts) for e, texts in zip(played.experiences, played.texts, strict=True)]})
    else:
        show(played.experiences, played.texts, played.failures)
    if played.failures:
        raise typer.Exit(1)


def _scripted() -> Config:
    """Return a config whose engine needs no GPU and says nothing sensible."""
    return Config.from_dict({"name": "check", "explorer": {
        "max_timeout": 300.0, "rollout_model": {"engine_type": "scripted", "max_response_tokens": 16}}})


def _with_environment(settings: Config, name: str) -> Config:
    inputs = settings.buffer.explorer_input
    mine = next((t for t in [*inputs.tasksets, *inputs.eval_tasksets] if _names(t.path, name)), None)
    taskset: dict[str, Any] = {"path": f"{PREFIX}{name}"} if mine is None else mine.model_dump(exclude_unset=True)
    told = settings.model_dump(exclude_unset=True)
    told.setdefault("buffer", {})["explorer_input"] = {"tasksets": [{**taskset, "name": name}]}
    return Config.from_dict(told)


def _names(path: str, name: str) -> bool:
    """Return True if this is an environment's path, however it spells the name."""
    return path.startswith(PREFIX) and environments.plain_name(path.removeprefix(PREFIX)) == name


def _told(one: Installed) -> dict[str, Any]:
    return {"name": one.name, "distribution": one.distribution, "packages": one.packages, "versions": one.versions,
            "folder": str(one.folder)}


def _line(one: Installed) -> str:
    return f"{one.name}  {', '.join(f'{n} {v}' for n, v in one.versions.items())}  {one.folder}"


def tokens(e: Experience, texts: list[str]) -> list[dict[str, Any]]:
    """Return an experience token by token: `logprob` is null where the model only read it."""
    ids, first = e.tokens.tolist(), e.prompt_length
    mask = e.action_mask.tolist() if e.action_mask is not None else [True] * (len(ids) - first)
    logprobs = e.logprobs.tolist() if e.logprobs is not None else [None] * (len(ids) - first)
    return [
        {"at": i, "id": token, "text": text, "sampled": i >= first and mask[i - first],
         "logprob": logprobs[i - first] if i >= first and mask[i - first] else None}
        for i, (token, text) in enumerate(zip(ids, texts, strict=True))
    ]


def show(experiences: list[Experience], texts: list[list[str]], failures: list[tuple[int, str, str]]) -> None:
    """Print what came of a task: what the model wrote token by token, what it only read piece by piece."""
    for e, pieces in zip(experiences, texts, strict=True):
        rows = tokens(e, pieces)
        sampled = sum(row["sampled"] for row in rows)
        print(f"experience {e.eid.step}: reward {e.reward:g}, {len(rows)} tokens, {sampled} of them written by the "
              f"model{f', {e.truncate_status}' if e.truncate_status else ''}")
        lines = 0
        for written, group in itertools.groupby(rows, key=lambda row: row["sampled"]):
            part = list(group)
            text = "".join(row["text"] for row in part)
            print(f"  {part[0]['at']}-{part[-1]['at']}  {'written' if written else 'read'}  {_quoted(text)}")
            for row in part if written else ():
                lines += 1
                if lines <= SHOWN:
                    logprob = "" if row["logprob"] is None else f"logprob {row['logprob']:.4f}"
                    print(f"    {row['at']:<6} id {row['id']:<8} {_quoted(row['text']):<12} {logprob}".rstrip())
        if lines > SHOWN:
            print(f"    ({lines - SHOWN} more tokens were written: --json has them)")
        metrics = sorted((e.metrics or {}).items())
        if metrics:
            print("  metrics  " + "  ".join(f"{plain(k)} = {v:g}" for k, v in metrics))
    for _, kind, why in failures:
        print(f"FAILED ({kind}): {plain(why, 2000)}")


def _quoted(text: str) -> str:
    """Return a text as one line, its line breaks visible."""
    return plain(json.dumps(text, ensure_ascii=False), SHOWN_CHARACTERS)
