"""Which weights a vLLM server of somebody else's has, and how others get into it: the half of `HTTPEngine` for them.

A label of ours on the server's weights says which they are, and is lost with the process that holds them; without
labels, when that process was started, and with which model, says it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from trinity_es.actors.engines.checkpoints import resolve_model, unloadable
from trinity_es.actors.engines.http.vllm_api import DEV_MODE, UNLABELLED, ServerFacts, ServerGone, VLLMServer
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.events.errors import EngineError, SyncError

__all__ = ["WATCH_SECONDS", "ServerWeights", "run_command"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

WATCH_SECONDS = 1.0
"""Interval between two looks at a server."""
_BROKEN, _CHANGING = "trinity-es/broken", "trinity-es/changing"
"""Beginnings of labels: a change of weights failed half-way; one goes on, or its runner ended in it."""


class LabelLost(EngineError):
    """The server runs on, and its weights have another label than it was given."""


class ServerWeights:
    """The weights of a server: met, labelled, changed. See `Engine.load_weights`."""

    model_version: int
    version: str
    """Of vLLM, and where it is."""
    dead: str | None
    """Why it will never answer again; None while it serves."""

    def __init__(self, config: EngineConfig, server: VLLMServer) -> None:
        self.config, self.server = config, server
        self.model_version = config.initial_version
        options = config.options
        self._restart_command = str(options.get("restart_command", ""))
        self._restart_after = float(options.get("restart_after", 60.0))
        self._restart_timeout = float(options.get("restart_timeout", 600.0))
        self._model = self._served = resolve_model(config.model_path)
        version, path = options.get("weights") or (0, "")
        self._current = (version, path) if path else (config.initial_version, self._model)
        """The weights that were current when this engine was made: what the server is restarted with."""
        self._commanded = False
        """The server was away, and was started with these by the restart command."""
        self._facts: ServerFacts | None = None
        self._process = ""
        """When the server's process was started."""
        self._life = uuid4().hex[:12]
        self._label: str | None = None
        """That of the weights served now; None where the server has none."""
        self._labels: dict[str, int] = {}
        """Every label that this engine gave -> its version."""
        self.waits_for = ""
        """What it waits for that others do, a restart say, however long: nothing is wrong with it."""
        self._restarting = False
        """The restart command is waited for."""
        self._shapes: dict[str, list[int]] | None = None
        self._tied = False
        self._swapping = asyncio.Lock()
        self._changing = False
        """Who the server is and what it has is being changed now."""
        self._open = asyncio.Event()
        """Requests may go out."""
        self._asking = 0
        """Requests that are on their way."""
        self._changes: set[asyncio.Task[None]] = set()
        self._died = asyncio.Event()

    def _alive(self) -> None:
        """Raise EngineError when the engine is gone."""
        raise NotImplementedError

    def _die(self, reason: str) -> None:
        """Take note that the engine will never answer again."""
        raise NotImplementedError

    async def _or_death(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Return what a call gives, unless the engine ends first. Cancelled, it ends the request."""
        asking = asyncio.ensure_future(call)
        death = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({asking, death}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                self._alive()
            return asking.result()
        finally:
            for task in (asking, death):
                task.cancel()

    def _met(self) -> ServerFacts:
        assert self._facts is not None
        return self._facts

    # --- the server ---------------------------------------------------------------------------------------------------
    async def _reach(self) -> None:
        """Wait until the server answers. The user's command is run once for one that has not for long."""
        began, asked, told = time.monotonic(), False, ""
        while True:
            try:
                problem = await self.server.unhealthy()
                if not problem:
                    if self.waits_for == told:  # else it could not be met before, and that may still be so
                        self.waits_for = ""
                    return
            except ServerGone as e:
                problem = str(e)
            self.waits_for = told = problem
            waited = time.monotonic() - began
            if self._restart_command and not asked and waited >= self._restart_after:
                asked = True
                _log.warning("%s: %s after %.0f s: the restart command is run", self.server.url, problem, waited)
                await self._run_restart_command(*self._current)
                self._commanded = True
            elif not asked and int(waited) % 30 == 29:
                _log.warning("waiting for %s: %s", self.server.url, problem)
            await asyncio.sleep(WATCH_SECONDS)

    async def _meet(self) -> None:
        facts = self._facts = await self.server.facts()
        self._process = await self.server.started()
        if not facts.loads and not self._process:
            raise EngineError(
                f"{self.server.url} tells nothing by which it would be known again after a restart (no /weight_info, "
                f"no process_start_time_seconds in /metrics): start it with {DEV_MODE} in its environment"
            )
        self.version = f"vllm {facts.version or '?'} at {self.server.url}"

    # --- which weights it has ---------------------------------------------------------------------------------------
    async def _first_weights(self) -> None:
        """Have the server serve the initial version, or the current one, under a label of this engine's."""
        facts = self._met()
        label = await self.server.label() if facts.loads else UNLABELLED
        started = await self._started_with() if label == UNLABELLED else None
        if started is not None:
            if facts.loads:
                await self._give_label(started[0])
                if await self.server.paused():  # whoever paused it ended before a weight was changed
                    await self.server.resume()
            self.model_version, self._served = started
            return
        version, path = self.config.initial_version, self._model
        broken, half = str(label).startswith(_BROKEN), str(label).startswith((_BROKEN, _CHANGING))
        # Of one whose runner ended in a change it is not known that the load failed: it is tried again.
        if facts.loads and (facts.extension or not half or not (broken or self._restart_command)):
            if half and facts.extension:
                await self._forget_half_a_change()
            await self._bring(version, path)
        elif self._restart_command:
            version, path = self._current
            await self._restart(version, path)
        else:
            what = f"it serves {facts.root or 'who knows what'}"
            what = "a change of its weights failed half-way" if broken else what
            raise EngineError(
                f"{self.server.url} can't be used: {what}. Start it with `vllm serve {self._model}`"
                f"{'' if broken else f', or with {DEV_MODE} in its environment so that weights can be loaded into it'}"
                ", or give explorer.rollout_model.servers.restart_command"
            )
        self.model_version, self._served = version, path

    async def _started_with(self) -> tuple[int, str] | None:
        """Return the version that the server was started with, and its path; None where that is not known.

        The path alone does not tell it: two versions may be published from one, as the newest checkpoint.
        """
        root, initial, current = self._met().root, (self.config.initial_version, self._model), self._current
        if current != initial and _same(root, current[1]):
            proven = self._commanded or await asyncio.to_thread(_unchanged_since, current[1], self._process)
            return current if proven else None
        return initial if _same(root, initial[1]) else None

    async def _give_label(self, version: int) -> None:
        label = f"trinity-es/{version}/{self._life}-{len(self._labels)}"
        await self._put_label(label)
        self._labels[label], self._label = version, label

    async def _put_label(self, label: str) -> None:
        """Label the server's weights, and see that they are labelled so."""
        await self.server.set_label(label)
        await self._see_label(label)

    async def _see_label(self, label: str) -> None:
        """Raise ServerGone where the server restarted since it was met, LabelLost where it did not and has another."""
        url, found = self.server.url, await self.server.label()
        if self._process != (now := await self.server.started()):
            raise ServerGone(f"{url} restarted while its weights changed ({self._process} -> {now})")
        if found != label:
            kind = LabelLost if self._process else ServerGone  # else it may have restarted
            raise kind(
                f"{url} does not keep the label of its weights: it took another (/update_weight_version), and tells "
                f"{found!r} (/weight_info): give the URL of one server, not of several behind one address, with one "
                "API process, that no other run uses"
            )

    async def load_weights(self, version: int, path: str) -> None:
        """See `Engine`. A caller that is cancelled does not stop it: half a change of weights is none.

        Raises SyncError when the checkpoint can't be loaded, EngineError (`dead=True`) when it ended the engine.
        """
        self._alive()
        change = asyncio.ensure_future(self._load(version, path))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        change.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(change)

    async def _load(self, version: int, path: str) -> None:
        async with self._swapping:
            self._alive()
            facts = self._met()
            if Path(path).is_dir():  # else it may be there for the server alone
                problem = await asyncio.to_thread(unloadable, path, self._shapes, self._tied)
                if problem:
                    raise SyncError(f"version {version} was not loaded: {problem}; still serving {self.model_version}")
            if not facts.loads and not self._restart_command:
                raise SyncError(
                    f"version {version} was not loaded: {self.server.url} takes no weights. Start it with {DEV_MODE} "
                    "in its environment, or give explorer.rollout_model.servers.restart_command"
                )
            if facts.loads:
                self._refuse_stale_head(version)
            try:
                # An answer that does not say which weights made it is of one version: it is waited for.
                async with contextlib.nullcontext() if facts.spans and facts.loads else self._held():
                    self._changing = True
                    change = self._change(version, path) if facts.loads else self._restart(version, path)
                    await self._or_death(change)
            except SyncError:
                raise
            except Exception as e:
                self._die(f"version {version} did not get into it: {e}")
                self._alive()
            finally:
                self._changing = False
            self.model_version, self._served = version, path

    def _refuse_stale_head(self, version: int) -> None:
        facts = self._met()
        if facts.on_cpu and self._tied and not facts.extension:
            raise SyncError(
                f"version {version} was not loaded: vLLM on a CPU would keep the old head of a model whose head is its "
                "embedding. Start the server with --worker-extension-cls "
                "trinity_es.actors.engines.vllm.weights.WorkerExtension, or give "
                "explorer.rollout_model.servers.restart_command"
            )

    async def _change(self, version: int, path: str) -> None:
        """Bring weights into a server that runs; what it served before where they can't be loaded."""
        try:
            await self._bring(version, path)
        except (ServerGone, LabelLost):
            raise
        except EngineError as e:
            try:
                await self._forget_half_a_change()
                await self._bring(self.model_version, self._served)
            except Exception as again:
                with contextlib.suppress(Exception):
                    await self.server.set_label(f"{_BROKEN}/{self._life}")
                raise EngineError(f"{e}; and {self._served} could not be loaded again: {again}") from e
            raise SyncError(
                f"version {version} was not loaded: {path}: {e}; {self._served} was loaded again and version "
                f"{self.model_version} is served on"
            ) from e

    async def _bring(self, version: int, path: str) -> None:
        server, facts = self.server, self._met()
        changing = f"{_CHANGING}/{self._life}-{uuid4().hex[:8]}"
        await server.pause()
        await self._put_label(changing)  # from here on, whoever meets it knows that its weights are nobody's
        self.waits_for = ""  # it may take long, and its time to start goes on
        if "False" in await server.in_workers("reload_weights", weights_path=path):
            raise EngineError(f"{server.url} says that it could not load {path}")
        if facts.extension:
            await server.in_workers("trinity_pack_again")
            if not all(told == "True" for told in await server.in_workers("trinity_weights_finite")):
                raise EngineError("it holds NaN or infinite weights")
        await self._see_label(changing)
        await self._give_label(version)
        await server.resume()

    async def _forget_half_a_change(self) -> None:
        if not self._met().extension:
            raise EngineError("what a load that failed left in the server can't be taken out of it")
        await self.server.in_workers("trinity_forget_half_reload")

    async def _restart(self, version: int, path: str) -> None:
        """Have the user's command start the server with these weights."""
        self._restarting, self.waits_for = True, f"the restart command of {self.server.url}"
        try:
            await self._restarted(version, path)
        finally:
            self._restarting, self.waits_for = False, ""
        if self._met().loads:
            await self._give_label(version)

    async def _restarted(self, version: int, path: str) -> None:
        before = self._process
        await self._run_restart_command(version, path)
        until = time.monotonic() + self._restart_timeout
        while True:
            try:
                problem = await self.server.unhealthy()
                if not problem and await self.server.started() != before:
                    await self._meet()
                    if not _same(self._met().root, path):
                        raise EngineError(
                            f"the restart command gave a server of {self._met().root}, not of {path}: it must start "
                            "one with {path}, or $TRINITY_ES_PATH, as its model"
                        )
                    return
                problem = problem or "it still is the same process"
            except ServerGone as e:
                problem = str(e)
            if time.monotonic() > until:
                raise EngineError(f"{self.server.url} did not come back after the restart command: {problem}")
            await asyncio.sleep(WATCH_SECONDS)

    async def _run_restart_command(self, version: int, path: str) -> None:
        await run_command(
            self._restart_command, {"url": self.server.url, "path": path, "version": str(version)},
            seconds=self._restart_timeout,
        )

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Let no request out inside, and have none on its way."""
        self._open.clear()
        try:
            while self._asking:
                await asyncio.sleep(0.02)
            yield
        finally:
            self._open.set()


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


def _same(root: str, model: str) -> bool:
    """Return True if a server that was started with `root` has this model: the same folder, or hub id."""
    return root == model or (os.path.isabs(model) and os.path.realpath(root) == os.path.realpath(model))


def _unchanged_since(path: str, started: str) -> bool:
    """Return True if what lies at a path was there before a process started, by the clock of either's host.

    `started`: seconds since 1970, as text. False where that can't be told from here.
    """
    folder = Path(path)
    try:
        links = [link.lstat() for link in (folder, *folder.parents) if link.is_symlink()]
        found = [folder.stat(), *links, *(file.stat() for file in folder.rglob("*"))]  # a folder that was moved, too
        return max(max(stat.st_mtime, stat.st_ctime) for stat in found) < float(started)
    except (OSError, ValueError):
        return False
