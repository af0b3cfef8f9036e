"""Lease providers whose resources are files, and that fail on demand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from pathlib import Path

LATE = threading.Event()
"""Event for which late resources wait."""
ASKED: list[str] = []
"""Keys of all resources that this process tried to make."""
RELEASED: list[tuple[str, str | None]] = []
"""(key, handle) of all resources that this process released."""


class Kept:
    """Provider that keeps a file for each resource in a folder, named by its key."""

    def __init__(self, folder: str, how: str = "") -> None:
        self.folder, self.how = Path(folder), how

    def create(self, key: str, ttl: float) -> str:
        ASKED.append(key)
        match self.how:
            case "late":
                LATE.wait(30)
            case "takes its time":
                time.sleep(0.4)
            case "refuses":
                (self.folder / key).touch()
                raise ConnectionError("no sandbox today")
            case "times out":
                raise TimeoutError("its own")
        (self.folder / key).touch()
        return {"secret": "hf_" + "a" * 24, "large": "x" * 10_000}.get(self.how, f"of {key}")

    def release(self, key: str, handle: str | None) -> None:
        print("released", key)  # noqa: T201  # a provider may
        match self.how:
            case "hangs":
                time.sleep(60)
            case "hangs with a child":  # as a command that waits for a daemon
                child = subprocess.Popen(["sleep", "600"])
                (self.folder / "child").write_text(str(child.pid))
                child.wait()
            case "leaves a child":  # a background process inherits all open files
                if (pid := os.fork()) == 0:
                    os.setsid()
                    time.sleep(600)
                    os._exit(0)
                (self.folder / "child").write_text(str(pid))
            case "says a key":
                raise ConnectionError(f"401: {os.environ['SANDBOX_API_KEY']} sk-{'a' * 24} https://me:hunter22@host/x")
            case "exits":
                os._exit(3)
            case "fails" | "refuses to end":
                raise ConnectionError("out of order")
        (self.folder / key).unlink(missing_ok=True)
        RELEASED.append((key, handle))


class HandedOver(Kept):
    """Provider whose resource is a file named by the handle, with the key of the lease that may release it."""

    def create(self, key: str, ttl: float) -> str:
        (self.folder / key).write_text(key)
        return key

    def attach(self, key: str, handle: str, ttl: float) -> None:
        if self.how == "can't attach":
            raise ConnectionError("the sandbox does not answer")
        assert (self.folder / handle).exists()
        (self.folder / handle).write_text(key)

    def release(self, key: str, handle: str | None) -> None:
        file = self.folder / (handle or key)
        if file.exists() and file.read_text() == key:
            file.rename(self.folder / f"{file.name}.released")


class AsyncHandedOver(HandedOver):
    async def attach(self, key: str, handle: str, ttl: float) -> None:  # type: ignore[override]
        if self.how == "hangs":
            await asyncio.sleep(60)
        super().attach(key, handle, ttl)


class AsyncKept(Kept):
    async def create(self, key: str, ttl: float) -> str:  # type: ignore[override]  # either is a provider
        match self.how:
            case "slow":
                await asyncio.sleep(60)
            case "is not stopped":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        return super().create(key, ttl)

    async def release(self, key: str, handle: str | None) -> None:  # type: ignore[override]
        if self.how == "hangs":
            await asyncio.sleep(60)
        super().release(key, handle)


class Connected(AsyncKept):
    """Provider with a connection that works only on the event loop that made it."""

    async def create(self, key: str, ttl: float) -> str:
        self.loop = asyncio.get_running_loop()
        match self.how:
            case "ends the process":
                raise SystemExit(3)
            case "waits":
                (self.folder / key).touch()
                ASKED.append(key)
                try:
                    await asyncio.sleep(60)
                finally:
                    (self.folder / key).unlink()
        return await super().create(key, ttl)

    async def renew(self, key: str, handle: str, ttl: float) -> None:
        self._require_loop()
        if self.how == "renews for long":
            ASKED.append(key)
            await asyncio.sleep(60)

    async def release(self, key: str, handle: str | None) -> None:
        self._require_loop()
        await super().release(key, handle)

    def _require_loop(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("its connection is of another event loop")


class Half:
    """Class without the methods of a provider."""

    def create(self, key: str, ttl: float) -> str:
        return key
