"""The user's command that starts a server again, with the weights that it is to serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
from collections.abc import Mapping

from trinity_es.events.errors import EngineError

__all__ = ["run_command"]


async def run_command(command: str, values: Mapping[str, str], *, seconds: float) -> None:
    """Run a shell command and wait for its end; what it starts in the background goes on without it.

    `{name}` in it is replaced by the value of this name, quoted for the shell, and the environment has it as
    `TRINITY_ES_<NAME>`. Raises EngineError where it fails, or has not ended after `seconds`; then it is ended.
    """
    command = re.sub(r"\{(\w+)\}", lambda m: shlex.quote(values[m[1]]) if m[1] in values else m[0], command)
    environment = {**os.environ, **{f"TRINITY_ES_{name.upper()}": value for name, value in values.items()}}
    # A session of its own: what it starts in the background is not to be ended with the runner's process group.
    process = await asyncio.create_subprocess_shell(
        command, env=environment, start_new_session=True, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        status = await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        raise EngineError(f"servers.restart_command had not ended after {seconds:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if status != 0:
        raise EngineError(f"servers.restart_command failed (exit status {status})")
