"""Main module of a process that releases leases which their runs can't release. The log names the providers.

It reads one JSON document from stdin (`seconds`, and `leases`: `lease`, `provider`, `args`, `handle` of each). It
writes a line of JSON per lease to stdout (`lease`, `error`). Providers are users' code, so they run in this process:
if one hangs or crashes, the coordinator goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import orjson

from trinity_es.actors.lease_providers import build_provider
from trinity_es.events.processes import end_with_parent

__all__ = ["main"]

MAX_CONCURRENT = 32
"""Maximum number of concurrent releases."""


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a provider's prints must not mix with the answers
    job = orjson.loads(sys.stdin.buffer.read())
    asyncio.run(_release_all(job["leases"], job["seconds"], answers))


async def _release_all(leases: list[dict[str, Any]], seconds: float, answers: BinaryIO) -> None:
    """Release the leases, each within `seconds`; write a line of JSON for each to `answers`, then end the process."""
    semaphore = asyncio.Semaphore(MAX_CONCURRENT)

    async def release(lease: dict[str, Any]) -> None:
        async with semaphore:
            try:
                error = ""
                provider = build_provider(lease["provider"], lease["args"])
                await asyncio.wait_for(_release(provider, lease), seconds)
            except TimeoutError:
                error = f"it had not ended after {seconds:g} s"
            except BaseException as e:
                error = f"{type(e).__name__}: {e}"
        answers.write(orjson.dumps({"lease": lease["lease"], "error": error.encode(errors="replace").decode()}) + b"\n")

    await asyncio.gather(*(release(lease) for lease in leases))
    os._exit(0)  # the end of the loop would wait for whatever a provider left running


async def _release(provider: Any, lease: dict[str, Any]) -> None:
    """Call the provider's `release`, which may be a coroutine function, a plain one, or return an awaitable."""
    if inspect.iscoroutinefunction(provider.release):
        await provider.release(lease["lease"], lease["handle"])
        return
    thread = ThreadPoolExecutor(1)  # one per release, so that a release that hangs delays no other
    loop = asyncio.get_running_loop()
    returned = await loop.run_in_executor(thread, provider.release, lease["lease"], lease["handle"])
    if inspect.isawaitable(returned):
        await returned
