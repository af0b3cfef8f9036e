"""Weights as folders of random files, an engine that answers with their digest, and hosts without these folders."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.events.experience import Experience
from trinity_es.testing import ScriptedEngine
from trinity_es.workflows.workflow import Workflow

FILE = "model.safetensors"


class FileEngine(ScriptedEngine):
    """Engine that answers with the digest of its weights, and writes their path to `loaded.txt` of `engine_args`."""

    def __init__(self, config: EngineConfig) -> None:
        options = dict(config.options)
        self.log = options.pop("log", "")
        super().__init__(replace(config, options=options))
        self.script["response"] = said(Path(config.model_path)) if config.model_path else "nothing"

    async def load_weights(self, version: int, path: str) -> None:
        await super().load_weights(version, path)
        self.script["response"] = said(Path(path))
        self._write(path)

    async def load_adapter(self, name: str, version: int, path: str, digest: str = "") -> None:
        await super().load_adapter(name, version, path, digest)
        self._write(path)

    def _write(self, path: str) -> None:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{path}\n")


class AskWorkflow(Workflow):
    """Workflow that asks the model once, and keeps its answer."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        [answer] = await self.model.chat_async([{"role": "user", "content": "?"}], max_tokens=64)
        answer.reward = 1.0
        return [answer]


def said(folder: Path) -> str:
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()[:32]


def make_weights(folder: Path, size: int = 1000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / FILE).write_bytes(os.urandom(size))
    return folder


def hidden(*folders: Path) -> list[str]:
    """Return the prefix of a command that sees these folders empty."""
    mounts = " && ".join(f"mount -t tmpfs none '{folder}'" for folder in folders)
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


@cache
def lacks_mounts() -> str:
    """Return what is missing to hide folders on this machine; "" if nothing is."""
    if shutil.which("unshare") is None:
        return "there is no `unshare` here"
    try:
        subprocess.run([*hidden(Path("/mnt")), "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as e:
        return f"no right to mount in a namespace: {e}"
    return ""
