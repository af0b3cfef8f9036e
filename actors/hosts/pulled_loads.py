"""The head's orders to load weights and adapters, which wait until the folders are on this host.

Each folder is pulled once for all runners of the host. Meanwhile a runner's status says that it is loading, and its
heartbeats carry the progress of the pull. An order with a newer version cancels the pull of an older one. Folders that
no runner serves or has to load are deleted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trinity_es.actors import messages
from trinity_es.actors.hosts.folder_files import FolderName
from trinity_es.actors.hosts.folder_puller import FolderPuller
from trinity_es.actors.hosts.link import LoopThread
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError

__all__ = ["PulledLoads"]

HeadFolder = tuple[FolderName, str]
"""A folder of the head: its name in requests, and its path there."""


@dataclass(slots=True)
class _Pull:
    future: Future[Path]
    started_at: float
    progress: str = ""


@dataclass(slots=True)
class _Runner:

    weights_order: messages.LoadWeights | None = None
    """Order that waits for a pull, as does the next."""
    adapters_order: messages.LoadAdapters | None = None
    served_version: int = 0
    served_adapters: dict[str, int] = field(default_factory=dict)
    pulled_version: int = 0
    """Version of the weights that were last pulled for the runner, which took `pull_seconds`."""
    pull_seconds: float = 0.0


class PulledLoads:
    """Orders to load, with the pulls that they wait for. The agent's loop calls it; the pulls run in another thread."""

    def __init__(
        self, puller: FolderPuller, *, to_runner: Callable[[str, Any], None], to_head: Callable[[str, Any], None],
        post: Callable[[Callable[[], None]], None], log: logging.Logger,
    ) -> None:
        """`to_runner(name, message)` sends a message to a runner, `to_head(name, message)` a runner's to the head."""
        self._puller, self._to_runner, self._to_head, self._post, self._log = puller, to_runner, to_head, post, log
        self._pulls: dict[HeadFolder, _Pull] = {}
        self._runners: defaultdict[str, _Runner] = defaultdict(_Runner)
        self._adapter_folders: dict[HeadFolder, Path] = {}
        """The head's folder of an adapter -> its folder on this host."""
        self._errors: dict[tuple[str, int], str] = {}
        """Errors of adapters that could not be pulled, by name and version."""
        self._newest_version = 0
        self._ordered_adapters: frozenset[HeadFolder] = frozenset()
        self._thread = LoopThread("pulls")

    def stop(self) -> None:
        """Stop pulling; pulled folders stay."""
        self._thread.stop()

    # --- orders of the head -----------------------------------------------------------------------------------------
    def load_weights(self, name: str, order: messages.LoadWeights) -> None:
        """Pass an order to a runner once the weights are on this host. An order `from_group` is passed on at once."""
        if order.from_group:
            self._to_runner(name, order)
            return
        self._newest_version = max(self._newest_version, order.version)
        for (folder_name, path), pull in self._pulls.items():
            if folder_name.kind == "weights" and (folder_name.version, path) != (order.version, order.path):
                pull.future.cancel()  # a pull of an older order, or from an earlier path
        self._runners[name].weights_order = order
        self._begin_pull(_weights_folder(order))

    def load_adapters(self, name: str, order: messages.LoadAdapters) -> None:
        """Pass an order to a runner once each of its adapters is on this host or could not be pulled."""
        runner = self._runners[name]
        runner.adapters_order = order
        ordered = {(event.adapter, event.version) for event in order.adapters}
        self._errors = {adapter: error for adapter, error in self._errors.items() if adapter in ordered}
        self._ordered_adapters = frozenset(map(_adapter_folder, order.adapters))
        for event in order.adapters:
            if runner.served_adapters.get(event.adapter, -1) < event.version:
                self._errors.pop((event.adapter, event.version), None)
                self._begin_pull(_adapter_folder(event))
        self._pass_on_adapters(name, runner)

    # --- pulls ------------------------------------------------------------------------------------------------------
    def _begin_pull(self, source: HeadFolder) -> None:
        """Start to pull a folder of the head, unless that is under way."""
        if source in self._pulls and not self._pulls[source].future.cancelled():
            return
        name, path = source
        note_progress = lambda text: self._post(lambda: self._note_progress(source, text))  # noqa: E731
        future = asyncio.run_coroutine_threadsafe(self._puller.pull(name, Path(path), note_progress), self._thread.loop)
        self._pulls[source] = _Pull(future, time.monotonic())
        future.add_done_callback(lambda done: self._post(lambda: self._on_pull_ended(source, done)))

    def _note_progress(self, source: HeadFolder, text: str) -> None:
        pull = self._pulls.get(source)
        if pull is not None:
            pull.progress = text

    def _on_pull_ended(self, source: HeadFolder, future: Future[Path]) -> None:
        """Pass on the orders that waited for a pull, or report its error. A pull that was replaced is ignored."""
        pull = self._pulls.get(source)
        if pull is None or pull.future is not future:
            return
        del self._pulls[source]
        folder, error = _pull_result(future)
        seconds, name = time.monotonic() - pull.started_at, source[0]
        if folder is not None:
            self._log.info("%s is here after %.1f s: %s", name, seconds, folder)
        elif error:
            self._log.error("%s", error)
        if name.kind == "adapter":
            if folder is not None:
                self._adapter_folders[source] = folder
            elif error:
                self._errors[name.name, name.version] = error
            for runner_name, runner in self._runners.items():
                self._pass_on_adapters(runner_name, runner)
            return
        for runner_name, runner in self._runners.items():
            order = runner.weights_order
            if order is None or _weights_folder(order) != source:
                continue
            runner.weights_order = None
            runner.pulled_version, runner.pull_seconds = order.version, seconds
            if folder is not None:
                self._to_runner(runner_name, replace(order, path=str(folder)))
            elif error:
                result = messages.WeightsLoadResult(runner_name, order.incarnation, order.version, seconds, error)
                self._to_head(runner_name, result)

    def _pass_on_adapters(self, name: str, runner: _Runner) -> None:
        """Pass an order to load adapters to its runner when all its pulls have ended. An adapter that could not be
        pulled keeps the head's path, so the runner fails to load it.
        """
        order = runner.adapters_order
        if order is None or any(_adapter_folder(event) in self._pulls for event in order.adapters):
            return
        runner.adapters_order = None
        folders = self._adapter_folders
        adapters = (replace(e, path=str(folders.get(_adapter_folder(e), e.path))) for e in order.adapters)
        self._to_runner(name, replace(order, adapters=tuple(adapters)))

    # --- messages of runners ----------------------------------------------------------------------------------------
    def complete_message(self, message: Any) -> Any:
        """Record a message of a runner or the guardian, and return it in the form that goes to the head. That form adds
        the version that the runner waits for, and the progress, duration and errors of its pulls."""
        match message:
            case messages.RunnerDied():
                self._runners.pop(message.name, None)
            case messages.RunnerStatus():
                runner = self._runners[message.name]
                runner.served_version, runner.served_adapters = message.model_version, dict(message.adapters)
                order = runner.weights_order
                if order is not None and order.incarnation == message.incarnation:
                    return replace(message, loading=order.version)
            case messages.Heartbeat() if not message.waits_for:
                return replace(message, waits_for=self._pull_progress(message.name))
            case messages.WeightsLoadResult():
                runner = self._runners[message.name]
                if message.error is None:
                    runner.served_version = message.version
                    self._delete_unused_folders()
                if runner.pulled_version == message.version:
                    return replace(message, seconds=message.seconds + runner.pull_seconds)
            case messages.AdaptersLoadResult():
                self._runners[message.name].served_adapters = dict(message.adapters)
                self._delete_unused_folders()
                errors = [(name, version, self._errors.get((name, version), e)) for name, version, e in message.errors]
                return replace(message, errors=errors)
        return message

    def _pull_progress(self, name: str) -> str:
        """Return the progress of the pulls that this runner waits for; empty if it waits for none."""
        runner = self._runners.get(name)
        if runner is None:
            return ""
        sources = [] if runner.weights_order is None else [_weights_folder(runner.weights_order)]
        sources += [] if runner.adapters_order is None else map(_adapter_folder, runner.adapters_order.adapters)
        return "; ".join(
            pull.progress or f"{source[0]} is pulled from the head"
            for source in sources if (pull := self._pulls.get(source)) is not None
        )

    def _delete_unused_folders(self) -> None:
        runners = self._runners.values()
        versions = {self._newest_version} | {r.served_version for r in runners}
        versions |= {r.weights_order.version for r in runners if r.weights_order}
        used = {FolderName("weights", version=version) for version in versions}
        used |= {name for name, _ in (*self._ordered_adapters, *self._pulls)}
        used |= {FolderName("adapter", *adapter) for r in runners for adapter in r.served_adapters.items()}
        self._adapter_folders = {source: path for source, path in self._adapter_folders.items() if source[0] in used}
        self._thread.begin(self._puller.delete_all_but({name.label for name in used}))


def _weights_folder(order: messages.LoadWeights) -> HeadFolder:
    return FolderName("weights", version=order.version), order.path


def _adapter_folder(event: ev.AdapterPublished) -> HeadFolder:
    return FolderName("adapter", event.adapter, event.version), event.path


def _pull_result(future: Future[Path]) -> tuple[Path | None, str]:
    """Return (path, "") of a pulled folder, (None, error) if it could not be pulled, (None, "") after a cancel."""
    try:
        return future.result(), ""
    except CancelledError:
        return None, ""
    except SyncError as e:
        return None, e.message
    except Exception as e:
        return None, f"{type(e).__name__}: {e}"
