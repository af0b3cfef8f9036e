"""OpenAI clients of the auxiliary models, for the operators of the pipeline.

The actor's thread gets the engines' addresses from the guardian (`Endpoints`). Operators use the clients in the
pipeline's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from trinity_es.actors.openai_clients import Endpoint, async_client
from trinity_es.events.errors import EngineError

__all__ = ["OperatorModels"]

PATIENCE_SECONDS = 60.0
"""How long a pipeline waits until each auxiliary model has an engine. After that it fails."""


class OperatorModels:
    """Clients of the auxiliary models, one per serving engine."""

    def __init__(self, names: Iterable[str], token: str, *, patience: float = PATIENCE_SECONDS,
                 make_client: Callable[[Endpoint], Any] = async_client) -> None:
        """`names` are the auxiliary models of the config; `token` is the API key of their engines."""
        self._patience = patience
        self._client = cache(lambda name, url: make_client(Endpoint(f"{url}/v1", token, name)))
        """Returns the client of the engine of a model at a URL."""
        self._urls: dict[str, dict[str, str]] = {name: {} for name in names}
        """Model -> runner -> URL of its serving engine."""
        self._urls_changed = threading.Condition()

    def update(self, urls_by_model: Mapping[str, Mapping[str, str]]) -> None:
        """Replace the engines' URLs by these: model -> runner -> URL."""
        with self._urls_changed:
            for name, urls_by_runner in urls_by_model.items():
                if name in self._urls:
                    self._urls[name] = dict(urls_by_runner)
            self._urls_changed.notify_all()

    def clients(self) -> dict[str, list[Any]]:
        """Wait until each model has an engine, and return model -> clients. An engine keeps its client.

        Raises EngineError, which names the models without an engine after `patience` seconds, and WorkflowError if the
        package openai is not installed.
        """
        with self._urls_changed:
            if not self._urls_changed.wait_for(lambda: all(self._urls.values()), self._patience):
                missing = ", ".join(name for name, urls in self._urls.items() if not urls)
                raise EngineError(
                    f"no engine of auxiliary model {missing}, which a pipeline operator needs, was ready within "
                    f"{self._patience:g} s. `trinity-es status` shows its runners"
                )
            sorted_urls = {name: [url for _, url in sorted(urls.items())] for name, urls in self._urls.items()}
        return {name: [self._client(name, url) for url in urls] for name, urls in sorted_urls.items()}
