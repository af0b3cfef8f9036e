"""OpenAI clients of the auxiliary models, for the operators of the pipeline.

The guardian sends the engines' addresses (`Endpoints`) to the actor's thread; operators use the clients in the
pipeline's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trinity_es.actors.openai_clients import Endpoint, async_client
from trinity_es.events.errors import EngineError

__all__ = ["OperatorModels"]

PATIENCE_SECONDS = 60.0
"""Maximum time that a pipeline waits for an engine of each auxiliary model; then its batch's finalize fails."""


class OperatorModels:
    """Clients by model, one per serving engine; `names` are the auxiliary models of the config."""

    def __init__(self, names: Iterable[str], token: str, *, patience: float = PATIENCE_SECONDS,
                 make: Callable[[Endpoint], Any] = async_client) -> None:
        self._token, self._patience, self._make = token, patience, make
        self._endpoints: dict[str, dict[str, str]] = {name: {} for name in names}
        self._changed = threading.Condition()
        self._clients: dict[tuple[str, str], Any] = {}

    def update(self, models: Mapping[str, Mapping[str, str]]) -> None:
        """Replace the engines' URLs, by runner, by model."""
        with self._changed:
            for name, runners in models.items():
                if name in self._endpoints:
                    self._endpoints[name] = dict(runners)
            self._changed.notify_all()

    def clients(self) -> dict[str, list[Any]]:
        """Wait for an engine of each model and return the clients; an engine keeps its client.

        Raises EngineError, which names the models, if one has no engine after `patience` seconds; WorkflowError if the
        package openai is not installed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: all(self._endpoints.values()), self._patience):
                missing = ", ".join(name for name, runners in self._endpoints.items() if not runners)
                raise EngineError(
                    f"no engine of auxiliary model {missing} serves after {self._patience:g} s, and an operator of the "
                    "pipeline needs it. `trinity-es status` shows its runners"
                )
            places = {name: [url for _, url in sorted(runners.items())] for name, runners in self._endpoints.items()}
        clients: dict[str, list[Any]] = {}
        for name, urls in places.items():
            for url in urls:
                if (name, url) not in self._clients:
                    self._clients[name, url] = self._make(Endpoint(f"{url}/v1", self._token, name))
            clients[name] = [self._clients[name, url] for url in urls]
        return clients
