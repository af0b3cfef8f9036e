"""Base class of `HTTPEngine` that identifies and changes the weights of an external vLLM server.

The engine puts a label on the server's weights to recognize them; it is lost when the server's process ends. A server
without labels is identified by its process's start time and model.
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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from trinity_es.actors.engines.checkpoints import resolve_model, why_unloadable
from trinity_es.actors.engines.http.vllm_api import DEV_MODE, UNLABELLED, ServerFacts, ServerGone, VLLMServer
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.events.errors import EngineError, SyncError

__all__ = ["WATCH_SECONDS", "ServerWeights", "run_command"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

WATCH_SECONDS = 1.0
"""Interval between two checks of a server."""
_BROKEN, _CHANGING = "trinity-es/broken", "trinity-es/changing"
"""Prefixes of labels: after a change of weights that failed half-way; during a change, or after its runner died."""


class LabelLost(EngineError):
    """The server did not restart, but lost the label of its weights."""


class ServerWeights:
    """The part of `HTTPEngine` that identifies, labels and changes the server's weights."""

    model_version: int
    version: str
    dead: str | None
    _require_alive: Callable[[], None]
    _die: Callable[[str], None]

    def __init__(self, config: EngineConfig, server: VLLMServer) -> None:
        self.config, self.server = config, server
        self.model_version = config.initial_version
        options = config.options
        self._restart_command = str(options.get("restart_command", ""))
        self._restart_after = float(options.get("restart_after", 60.0))
        self._restart_timeout = float(options.get("restart_timeout", 600.0))
        self._model = self._served_path = resolve_model(config.model_path)
        version, path = options.get("weights") or (0, "")
        self._current_weights = (version, path) if path else (config.initial_version, self._model)
        """Version and path of the newest weights when this engine was made; a restart loads them."""
        self._started_by_command = False
        """True if the restart command started the server with these weights."""
        self._facts: ServerFacts | None = None
        self._process_start = ""
        """Start time of the server's process (Unix, as text); empty if the server does not report it."""
        self._engine_id = uuid4().hex[:12]
        self._label: str | None = None
        """Label of the served weights; None for a server without labels."""
        self._labels: dict[str, int] = {}
        """Model version of each label that this engine has given."""
        self.waits_for = ""
        """External action that this engine waits for, such as a restart; empty if it waits for nothing."""
        self._is_restarting = False
        self._shapes: dict[str, list[int]] | None = None  # of the model's tensors; None: unknown
        self._has_tied_head = False
        self._change_lock = asyncio.Lock()
        self._is_changing = False
        """True while the server's weights, or the server itself, are being replaced."""
        self._gate = asyncio.Event()
        """Set while requests may begin."""
        self._open_requests = 0
        self._changes: set[asyncio.Task[None]] = set()
        self._died = asyncio.Event()

    async def _unless_dead(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a call. Raises EngineError if the engine dies first."""
        call_task = asyncio.ensure_future(call)
        death_task = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({call_task, death_task}, return_when=asyncio.FIRST_COMPLETED)
            if not call_task.done():
                self._require_alive()
            return call_task.result()
        finally:
            for task in (call_task, death_task):
                task.cancel()

    def _server_facts(self) -> ServerFacts:
        assert self._facts is not None
        return self._facts

    # --- the server ---------------------------------------------------------------------------------------------------
    async def _wait_until_reachable(self) -> None:
        """Wait until the server answers. After `restart_after` seconds, run the user's restart command once."""
        begun_at = time.monotonic()
        was_commanded = False
        reported = ""
        while True:
            try:
                problem = await self.server.unhealthy()
                if not problem:
                    if self.waits_for == reported:  # otherwise it says why the last attempt to connect failed
                        self.waits_for = ""
                    return
            except ServerGone as e:
                problem = str(e)
            self.waits_for = reported = problem
            waited = time.monotonic() - begun_at
            if self._restart_command and not was_commanded and waited >= self._restart_after:
                was_commanded = True
                _log.warning("%s: %s after %.0f s: running the restart command", self.server.url, problem, waited)
                await self._run_restart_command(*self._current_weights)
                self._started_by_command = True
            elif not was_commanded and int(waited) % 30 == 29:
                _log.warning("waiting for %s: %s", self.server.url, problem)
            await asyncio.sleep(WATCH_SECONDS)

    async def _read_facts(self) -> None:
        """Read the server's facts. Raises EngineError if it reports nothing by which a restart can be noticed."""
        facts = self._facts = await self.server.facts()
        self._process_start = await self.server.start_time()
        if not facts.loads_weights and not self._process_start:
            raise EngineError(
                f"a restart of {self.server.url} can't be noticed (no /weight_info, no process_start_time_seconds in "
                f"/metrics): start the server with {DEV_MODE} in its environment"
            )
        self.version = f"vllm {facts.version or '?'} at {self.server.url}"

    # --- its weights ------------------------------------------------------------------------------------------------
    async def _first_weights(self) -> None:
        """Have the server serve the initial or the current version, and label it."""
        facts = self._server_facts()
        label = await self.server.label() if facts.loads_weights else UNLABELLED
        started_weights = await self._started_with() if label == UNLABELLED else None
        if started_weights is not None:
            version, path = started_weights
            if facts.loads_weights:
                await self._label_weights(version)
                if await self.server.is_paused():  # by a runner that ended before it changed a weight
                    await self.server.resume()
            self.model_version, self._served_path = version, path
            return
        version, path = self.config.initial_version, self._model
        is_broken = str(label).startswith(_BROKEN)
        is_half_changed = is_broken or str(label).startswith(_CHANGING)
        # If only the runner ended during the change, nothing may be wrong with the server, so it may load again.
        may_load = facts.has_extension or not is_half_changed or not (is_broken or self._restart_command)
        if facts.loads_weights and may_load:
            if is_half_changed and facts.has_extension:
                await self._forget_half_a_change()
            await self._load_in_place(version, path)
        elif self._restart_command:
            version, path = self._current_weights
            await self._restart(version, path)
        else:
            problem = f"it serves {facts.root or 'an unknown model'}"
            other_way = f", or with {DEV_MODE} in its environment so that weights can be loaded into it"
            if is_broken:
                problem, other_way = "a change of its weights failed half-way", ""
            raise EngineError(
                f"{self.server.url} can't be used: {problem}. Start it with `vllm serve {self._model}`{other_way}, or "
                "give explorer.rollout_model.servers.restart_command"
            )
        self.model_version, self._served_path = version, path

    async def _started_with(self) -> tuple[int, str] | None:
        """Return version and path of the weights that the server was started with; None if unknown.

        The path alone proves nothing, since versions may share a path, such as that of the newest checkpoint.
        """
        root = self._server_facts().root
        initial, current = (self.config.initial_version, self._model), self._current_weights
        if current != initial and _is_same_model(root, current[1]):
            is_proven = self._started_by_command or await asyncio.to_thread(
                _is_unchanged_since, current[1], self._process_start)
            return current if is_proven else None
        return initial if _is_same_model(root, initial[1]) else None

    async def _label_weights(self, version: int) -> None:
        """Label the server's weights as this version, and note the label to recognize them."""
        label = f"trinity-es/{version}/{self._engine_id}-{len(self._labels)}"
        await self._set_label(label)
        self._labels[label], self._label = version, label

    async def _set_label(self, label: str) -> None:
        await self.server.set_label(label)
        await self._check_label(label)

    async def _check_label(self, label: str) -> None:
        """Raise ServerGone if the server restarted, LabelLost if it has another label without a restart."""
        url, server_label = self.server.url, await self.server.label()
        started = await self.server.start_time()
        if self._process_start != started:
            raise ServerGone(f"{url} restarted while its weights changed (start {self._process_start} -> {started})")
        if server_label != label:
            error_class = LabelLost if self._process_start else ServerGone  # it may have restarted unnoticed
            raise error_class(
                f"{url} does not keep the label of its weights: after /update_weight_version, /weight_info says "
                f"{server_label!r}. Give the URL of a single server with one API process, which no other run uses"
            )

    async def load_weights(self, version: int, path: str) -> None:
        """Serve the checkpoint at `path`, as `Engine` says. If the caller is cancelled, the change goes on."""
        self._require_alive()
        change = asyncio.ensure_future(self._load(version, path))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        change.add_done_callback(lambda task: task.cancelled() or task.exception())  # for a caller that is cancelled
        await asyncio.shield(change)

    async def _load(self, version: int, path: str) -> None:
        async with self._change_lock:
            self._require_alive()
            facts = self._server_facts()
            if Path(path).is_dir():
                problem = await asyncio.to_thread(why_unloadable, path, self._shapes, self._has_tied_head)
                if problem:
                    raise SyncError(
                        f"version {version} was not loaded: {problem}; still serving version {self.model_version}"
                    )
            if not facts.loads_weights and not self._restart_command:
                raise SyncError(
                    f"version {version} was not loaded: {self.server.url} can't load weights. Start it with {DEV_MODE} "
                    "in its environment, or give explorer.rollout_model.servers.restart_command"
                )
            if facts.loads_weights:
                self._refuse_stale_head(version)
            try:
                # An answer without labels must have one version, so no request may be open during the change.
                labels_all = facts.labels_tokens and facts.loads_weights
                async with contextlib.nullcontext() if labels_all else self._without_requests():
                    self._is_changing = True
                    change = self._change(version, path) if facts.loads_weights else self._restart(version, path)
                    await self._unless_dead(change)
            except SyncError:
                raise
            except Exception as e:
                self._die(f"loading version {version} into it failed: {e}")
                self._require_alive()
            finally:
                self._is_changing = False
            self.model_version, self._served_path = version, path

    def _refuse_stale_head(self, version: int) -> None:
        """Raise SyncError if the server would keep the old output head when it loads weights, as vLLM on a CPU does."""
        facts = self._server_facts()
        if facts.on_cpu and self._has_tied_head and not facts.has_extension:
            raise SyncError(
                f"version {version} was not loaded: vLLM on a CPU does not update an output head that is tied to "
                "the embedding. Start the server with --worker-extension-cls "
                "trinity_es.actors.engines.vllm.weights.WorkerExtension, or give "
                "explorer.rollout_model.servers.restart_command"
            )

    async def _change(self, version: int, path: str) -> None:
        """Load weights into the running server. If that fails, load the old ones again and raise SyncError."""
        try:
            await self._load_in_place(version, path)
        except (ServerGone, LabelLost):
            raise
        except EngineError as e:
            try:
                await self._forget_half_a_change()
                await self._load_in_place(self.model_version, self._served_path)
            except Exception as second_error:
                with contextlib.suppress(Exception):
                    await self.server.set_label(f"{_BROKEN}/{self._engine_id}")
                raise EngineError(f"{e}; the weights before, {self._served_path}, could not be loaded again either: "
                                  f"restart the server ({second_error})") from e
            raise SyncError(
                f"version {version} was not loaded: {path}: {e}; {self._served_path} was loaded again; still serving "
                f"version {self.model_version}"
            ) from e

    async def _load_in_place(self, version: int, path: str) -> None:
        """Pause the server, have it load a path, check and label the weights, and resume it. Raises EngineError."""
        server, facts = self.server, self._server_facts()
        interim_label = f"{_CHANGING}/{self._engine_id}-{uuid4().hex[:8]}"
        await server.pause()
        await self._set_label(interim_label)  # shows a later engine that these weights are unknown
        self.waits_for = ""  # loading may take long, and counts as starting time
        if "False" in await server.in_workers("reload_weights", weights_path=path):
            raise EngineError(f"{server.url} could not load {path}: see the server's log")
        if facts.has_extension:
            await server.in_workers("trinity_pack_again")
            if not all(finite == "True" for finite in await server.in_workers("trinity_weights_finite")):
                raise EngineError(f"{path} holds NaN or infinite weights: publish another checkpoint")
        await self._check_label(interim_label)
        await self._label_weights(version)
        await server.resume()

    async def _forget_half_a_change(self) -> None:
        """Have the server's workers discard a half-loaded checkpoint. Raises EngineError if they can't."""
        if not self._server_facts().has_extension:
            raise EngineError(f"{self.server.url} can't discard a half-loaded checkpoint: restart it")
        await self.server.in_workers("trinity_forget_half_reload")

    async def _restart(self, version: int, path: str) -> None:
        """Change the weights by the user's restart command, and label them. Raises EngineError."""
        self._is_restarting, self.waits_for = True, f"the restart command of {self.server.url}"
        try:
            await self._run_and_wait(version, path)
        finally:
            self._is_restarting, self.waits_for = False, ""
        if self._server_facts().loads_weights:
            await self._label_weights(version)

    async def _run_and_wait(self, version: int, path: str) -> None:
        """Run the restart command and wait until a new process of the server serves `path`. Raises EngineError."""
        old_start = self._process_start
        await self._run_restart_command(version, path)
        until = time.monotonic() + self._restart_timeout
        while True:
            try:
                problem = await self.server.unhealthy()
                if not problem and await self.server.start_time() != old_start:
                    await self._read_facts()
                    if not _is_same_model(self._server_facts().root, path):
                        raise EngineError(
                            f"servers.restart_command started a server of {self._server_facts().root}, not of {path}: "
                            "it must start one with {path}, or $TRINITY_ES_PATH, as its model"
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
    async def _without_requests(self) -> AsyncIterator[None]:
        """Hold new requests back, and enter the context once the open ones have ended."""
        self._gate.clear()
        try:
            while self._open_requests:
                await asyncio.sleep(0.02)
            yield
        finally:
            self._gate.set()


async def run_command(command: str, values: Mapping[str, str], *, seconds: float) -> None:
    """Run a shell command and wait for its end; its background processes live on.

    In the command, `{name}` is replaced by the value of this name, quoted for the shell. The environment has each value
    as `TRINITY_ES_<NAME>`. Raises EngineError if the command fails, or had to be killed after `seconds`.
    """
    command = re.sub(r"\{(\w+)\}", lambda m: shlex.quote(values[m[1]]) if m[1] in values else m[0], command)
    environment = {**os.environ, **{f"TRINITY_ES_{name.upper()}": value for name, value in values.items()}}
    # A session of its own, since its background processes must not end with the runner's process group.
    process = await asyncio.create_subprocess_shell(
        command, env=environment, start_new_session=True, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        status = await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        raise EngineError(f"servers.restart_command had not ended after {seconds:g} s: let it start the server in the "
                          "background, or raise servers.restart_timeout") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if status != 0:
        raise EngineError(f"servers.restart_command failed (exit status {status}): run it by hand to see why")


def _is_same_model(root: str, model: str) -> bool:
    """Return True if a server's `root` and a model are one hub id or one folder."""
    return root == model or (os.path.isabs(model) and os.path.realpath(root) == os.path.realpath(model))


def _is_unchanged_since(path: str, started: str) -> bool:
    """Return True if the files at a path are older than `started` (Unix time, as text); False if that is unknown."""
    folder = Path(path)
    try:
        links = [link.lstat() for link in (folder, *folder.parents) if link.is_symlink()]
        stats = [folder.stat(), *links, *(file.stat() for file in folder.rglob("*"))]  # ctime also shows a moved folder
        return max(max(stat.st_mtime, stat.st_ctime) for stat in stats) < float(started)
    except (OSError, ValueError):
        return False
