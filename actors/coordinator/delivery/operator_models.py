"""OpenAI clients of the auxiliary models for the operators of the pipeline, which run where the coordinator does.

The guardian says where engines are (`Endpoints`), in the actor's thread; operators ask for clients in the pipeline's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trinity_es.actors.openai_clients import Endpoint, async_client
from trinity_es.events.errors import EngineError

__all__ = ["OperatorModels"]

PATIENCE_SECONDS = 60.0
"""How long a pipeline waits for an engine of each auxiliary model before its batch is given back, to be tried again."""


class OperatorModels:
    """Clients by model: a list with one an engine that serves. `names` are the models of the config."""

    def __init__(self, names: Iterable[str], token: str, *, patience: float = PATIENCE_SECONDS,
                 make: Callable[[Endpoint], Any] = async_client) -> None:
        self._token, self._patience, self._make = token, patience, make
        self._endpoints: dict[str, dict[str, str]] = {name: {} for name in names}
        self._changed = threading.Condition()
        self._clients: dict[tuple[str, str], Any] = {}

    def update(self, models: Mapping[str, Mapping[str, str]]) -> None:
        """Take in where the engines are now: URL by runner, by model."""
        with self._changed:
            for name, runners in models.items():
                if name in self._endpoints:
                    self._endpoints[name] = dict(runners)
            self._changed.notify_all()

    def clients(self) -> dict[str, list[Any]]:
        """Return the clients, which are the same as long as the engines are; wait for an engine of each model.

        Raises EngineError, naming the models, when one has none after `patience` seconds; WorkflowError where the
        package openai is not installed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: all(self._endpoints.values()), self._patience):
                missing = ", ".join(name for name, runners in self._endpoints.items() if not runners)
                raise EngineError(
                    f"no engine of auxiliary model {missing} serves after {self._patience:g} s: an operator of the "
                    "pipeline asks it. `trinity-es status` says what its runners do"
                )
            places = {name: [url for _, url in sorted(runners.items())] for name, runners in self._endpoints.items()}
        found: dict[str, list[Any]] = {}
        for name, urls in places.items():
            for url in urls:
                if (name, url) not in self._clients:
                    self._clients[name, url] = self._make(Endpoint(f"{url}/v1", self._token, name))
            found[name] = [self._clients[name, url] for url in urls]
        return found
