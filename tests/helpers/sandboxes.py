"""The sandbox service in its own process, its lease provider, and workflows that use it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from trinity_es import Experience, Workflow
from trinity_es.testing import wait_until

CREATION_TIMEOUT = 9.0
"""Time limit of the workflows for making a sandbox, generous for a busy machine."""


class Service:
    """Process of the sandbox service. A share `slow` of the sandboxes takes long to make."""

    def __init__(self, folder: Path, seed: int = 0, slow: float = 0.0) -> None:
        folder.mkdir(exist_ok=True)
        place = folder / "sandboxes.url"
        told = [str(place), str(seed), str(slow)]
        self._process = subprocess.Popen([sys.executable, "-m", "tests.helpers.sandbox_service", *told])
        self.url = wait_until(lambda: place.exists() and place.read_text(), "the service of sandboxes to serve", 30)

    def boxes(self) -> list[dict[str, Any]]:
        """Return all sandboxes ever made: `key`, `handle`, `made`, `ended` (unix seconds or null), `users`."""
        return list(_ask(self.url, "boxes"))

    def alive(self) -> list[dict[str, Any]]:
        return [box for box in self.boxes() if box["ended"] is None]

    def refuse(self, on: bool) -> None:
        """Refuse all releases from now on, or accept them again."""
        _ask(self.url, "refuse", on=int(on))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _ask(url: str, what: str, **args: Any) -> Any:
    query = "&".join(f"{k}={v}" for k, v in args.items())
    with urllib.request.urlopen(f"{url}/{what}?{query}", timeout=30) as answer:
        return json.loads(answer.read())


class Sandboxes:
    """Lease provider of the sandbox service."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create(self, key: str, ttl: float) -> str:
        return str(_ask(self.url, "create", key=key, ttl=ttl))

    def release(self, key: str, handle: str | None) -> None:
        _ask(self.url, "release", key=key, handle=handle or "")

    def renew(self, key: str, handle: str, ttl: float) -> None:
        _ask(self.url, "renew", key=key, ttl=ttl)

    def use(self, handle: str, user: str) -> None:
        _ask(self.url, "use", handle=handle, user=user)


class AsyncSandboxes(Sandboxes):
    async def create(self, key: str, ttl: float) -> str:  # type: ignore[override]  # either is a provider
        return await asyncio.to_thread(super().create, key, ttl)

    async def release(self, key: str, handle: str | None) -> None:  # type: ignore[override]
        await asyncio.to_thread(super().release, key, handle)

    async def renew(self, key: str, handle: str, ttl: float) -> None:  # type: ignore[override]
        await asyncio.to_thread(super().renew, key, handle, ttl)


def _experiences() -> list[Experience]:
    return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0)]


def _user(workflow: Workflow) -> str:
    return f"{workflow.task.batch_id}-{workflow.task.task_id}-{uuid.uuid4().hex}"


def _leased(workflow: Workflow, provider: str) -> Any:
    args = workflow.task.workflow_args
    return workflow.lease(provider, {"url": args["url"]}, ttl=args.get("ttl", 600.0), creation_timeout=CREATION_TIMEOUT)


class Uses(Workflow):
    """Workflow that uses a sandbox for a while, in a worker. `workflow_args`: `url`, `seconds`; `ttl`, `how`."""

    def run(self) -> list[Experience]:
        args, user = self.task.workflow_args, _user(self)
        with _leased(self, "tests.helpers.sandboxes:Sandboxes") as held:
            until = time.monotonic() + args["seconds"]
            while True:
                held.provider.use(held.handle, user)
                if args.get("how") == "raise":
                    raise RuntimeError("this run fails")
                if args.get("how") == "exit":
                    os._exit(3)
                if time.monotonic() >= until:
                    break
                time.sleep(0.05)
        return _experiences()


class AsyncUses(Workflow):
    """Async version of the workflow, on the engine's loop."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        args, user = self.task.workflow_args, _user(self)
        async with _leased(self, "tests.helpers.sandboxes:AsyncSandboxes") as held:
            until = time.monotonic() + args["seconds"]
            while time.monotonic() < until:
                await asyncio.to_thread(held.provider.use, held.handle, user)
                await asyncio.sleep(0.05)
        return _experiences()
