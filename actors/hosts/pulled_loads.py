"""Orders of the head to load weights and adapters, held until their folders are on this host, once for all its runners.

For the coordinator a waiting runner is loading: each status says so, and each heartbeat has the progress of the pull.
An order with a newer version ends the pull of an older one. Folders that no runner serves or is to load are removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
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

Wanted = tuple[FolderName, str]
"""The folder to ask the head for, and its path there."""


@dataclass(slots=True)
class _Pull:
    future: Future[Path]
    began: float
    progress: str = ""


@dataclass(slots=True)
class _Runner:

    weights: messages.LoadWeights | None = None
    adapters: messages.LoadAdapters | None = None
    serves: int = 0
    serves_adapters: dict[str, int] = field(default_factory=dict)
    waited: tuple[int, float] = (0, 0.0)
    """Latest version that was handed on, and the seconds that its pull took."""


class PulledLoads:
    """Holder of orders, for the agent's loop; pulls run in a loop of their own."""

    def __init__(
        self, puller: FolderPuller, *, to_runner: Callable[[str, Any], None], to_head: Callable[[str, Any], None],
        post: Callable[[Callable[[], None]], None], log: logging.Logger,
    ) -> None:
        """`to_runner(name, message)` sends to a runner, `to_head(name, message)` to the head in a runner's name."""
        self._puller, self._to_runner, self._to_head, self._post, self._log = puller, to_runner, to_head, post, log
        self._pulls: dict[Wanted, _Pull] = {}
        self._runners: dict[str, _Runner] = {}
        self._places: dict[Wanted, Path] = {}
        """Folders of adapters, found or pulled."""
        self._errors: dict[tuple[str, int], str] = {}
        """Errors of adapters that could not be pulled, by name and version."""
        self._newest = 0
        self._adapters: frozenset[Wanted] = frozenset()
        self._thread = LoopThread("pulls")

    def stop(self) -> None:
        """Stop pulling; pulled folders stay."""
        self._thread.stop()

    # --- orders of the head -----------------------------------------------------------------------------------------
    def load_weights(self, name: str, order: messages.LoadWeights) -> None:
        """Have a runner load weights once they are here."""
        if order.from_group:
            self._to_runner(name, order)
            return
        self._newest = max(self._newest, order.version)
        for (wanted, path), pull in self._pulls.items():
            if wanted.kind == "weights" and (wanted.version, path) != (order.version, order.path):
                pull.future.cancel()  # a pull of an older order, or from an earlier path
        self._runner(name).weights = order
        self._begin(_weights(order))

    def load_adapters(self, name: str, order: messages.LoadAdapters) -> None:
        """Have a runner load adapters once all of them are here."""
        runner = self._runner(name)
        runner.adapters = order
        named = {(event.adapter, event.version) for event in order.adapters}
        self._errors = {key: error for key, error in self._errors.items() if key in named}
        self._adapters = frozenset(map(_adapter, order.adapters))
        for event in order.adapters:
            if runner.serves_adapters.get(event.adapter, -1) < event.version:
                self._errors.pop((event.adapter, event.version), None)
                self._begin(_adapter(event))
        self._give_adapters(name, runner)

    # --- pulls ------------------------------------------------------------------------------------------------------
    def _begin(self, wanted: Wanted) -> None:
        if wanted in self._pulls and not self._pulls[wanted].future.cancelled():
            return
        name, path = wanted
        tell = lambda text: self._post(lambda: self._note_progress(wanted, text))  # noqa: E731
        future = asyncio.run_coroutine_threadsafe(self._puller.pull(name, Path(path), tell), self._thread.loop)
        self._pulls[wanted] = _Pull(future, time.monotonic())
        future.add_done_callback(lambda done: self._post(lambda: self._ended(wanted, done)))

    def _note_progress(self, wanted: Wanted, text: str) -> None:
        pull = self._pulls.get(wanted)
        if pull is not None:
            pull.progress = text

    def _ended(self, wanted: Wanted, future: Future[Path]) -> None:
        pull = self._pulls.get(wanted)
        if pull is None or pull.future is not future:
            return
        del self._pulls[wanted]
        place, error = _outcome(future)
        seconds, name = time.monotonic() - pull.began, wanted[0]
        if place is not None:
            self._log.info("%s is here after %.1f s: %s", name, seconds, place)
        elif error:
            self._log.error("%s", error)
        if name.kind == "adapter":
            if place is not None:
                self._places[wanted] = place
            elif error:
                self._errors[name.name, name.version] = error
            for name_of_runner, runner in self._runners.items():
                self._give_adapters(name_of_runner, runner)
            return
        for name_of_runner, runner in self._runners.items():
            order = runner.weights
            if order is None or _weights(order) != wanted:
                continue
            runner.weights, runner.waited = None, (order.version, seconds)
            if place is not None:
                self._to_runner(name_of_runner, replace(order, path=str(place)))
            elif error:
                result = messages.WeightsLoadResult(name_of_runner, order.incarnation, order.version, seconds, error)
                self._to_head(name_of_runner, result)

    def _give_adapters(self, name: str, runner: _Runner) -> None:
        """Hand on an order whose pulls are over. An adapter that could not be pulled keeps the head's path, and fails.
        """
        order = runner.adapters
        if order is None or any(_adapter(event) in self._pulls for event in order.adapters):
            return
        runner.adapters = None
        adapters = (replace(e, path=str(self._places.get(_adapter(e), e.path))) for e in order.adapters)
        self._to_runner(name, replace(order, adapters=tuple(adapters)))

    # --- messages of runners ----------------------------------------------------------------------------------------
    def forwarded(self, message: Any) -> Any:
        """Note what a message says of runners, and return it as it goes to the head, with this host's pulls added."""
        match message:
            case messages.RunnerDied():
                self._runners.pop(message.name, None)
            case messages.RunnerStatus():
                runner = self._runner(message.name)
                runner.serves, runner.serves_adapters = message.model_version, dict(message.adapters)
                if runner.weights is not None and runner.weights.incarnation == message.incarnation:
                    return replace(message, loading=runner.weights.version)
            case messages.Heartbeat() if (progress := self._waits_for(message.name)) and not message.waits_for:
                return replace(message, waits_for=progress)
            case messages.WeightsLoadResult():
                runner = self._runner(message.name)
                if message.error is None:
                    runner.serves = message.version
                    self._tidy()
                version, seconds = runner.waited
                return replace(message, seconds=message.seconds + seconds) if version == message.version else message
            case messages.AdaptersLoadResult():
                self._runner(message.name).serves_adapters = dict(message.adapters)
                self._tidy()
                errors = [(a, v, self._errors.get((a, v), error)) for a, v, error in message.errors]
                return replace(message, errors=errors)
        return message

    def _runner(self, name: str) -> _Runner:
        return self._runners.setdefault(name, _Runner())

    def _waits_for(self, name: str) -> str:
        """Return the progress of the pulls that this runner waits for; empty if no order is held."""
        runner = self._runners.get(name)
        if runner is None:
            return ""
        held = [] if runner.weights is None else [_weights(runner.weights)]
        held += [] if runner.adapters is None else map(_adapter, runner.adapters.adapters)
        return "; ".join(
            pull.progress or f"{wanted[0]} is pulled from the head"
            for wanted in held if (pull := self._pulls.get(wanted)) is not None
        )

    def _tidy(self) -> None:
        """Remove everything that no runner serves or is to load."""
        runners = self._runners.values()
        versions = {self._newest} | {r.serves for r in runners} | {r.weights.version for r in runners if r.weights}
        used = {FolderName("weights", version=version) for version in versions}
        used |= {name for name, _ in (*self._adapters, *self._pulls)}
        used |= {FolderName("adapter", *named) for r in runners for named in r.serves_adapters.items()}
        self._places = {wanted: place for wanted, place in self._places.items() if wanted[0] in used}
        self._thread.begin(self._puller.forget_but({name.label for name in used}))


def _weights(order: messages.LoadWeights) -> Wanted:
    return FolderName("weights", version=order.version), order.path


def _adapter(event: ev.AdapterPublished) -> Wanted:
    return FolderName("adapter", event.adapter, event.version), event.path


def _outcome(future: Future[Path]) -> tuple[Path | None, str]:
    """Return the place of a folder, or the reason why it could not be pulled; neither if the pull was cancelled."""
    try:
        return future.result(), ""
    except CancelledError:
        return None, ""
    except SyncError as e:
        return None, e.message
    except Exception as e:
        return None, f"{type(e).__name__}: {e}"
