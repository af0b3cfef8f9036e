"""OpenAI clients for a workflow's model, for one run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trinity_es.actors import openai_clients
from trinity_es.actors.openai_clients import Endpoint
from trinity_es.actors.rollout.conversation.history import Remembering
from trinity_es.events.errors import EngineError

if TYPE_CHECKING:
    import openai

__all__ = ["OpenAIAccess"]


class OpenAIAccess(Remembering):
    """Base of models that gives OpenAI clients, which are created on first use and closed at the end of the run."""

    def __init__(self) -> None:
        super().__init__()
        self._client: openai.OpenAI | None = None
        self._async_client: openai.AsyncOpenAI | None = None
        self.engine_error: EngineError | None = None
        """The engine's error at the last request of this run's OpenAI clients; None if it succeeded."""

    def openai_endpoint(self) -> Endpoint:
        """Return the endpoint for OpenAI clients of this run. Raises WorkflowError if the model has none."""
        raise NotImplementedError

    def _must_not_block(self) -> None:
        """Raise WorkflowError if a blocking call would deadlock."""

    def get_openai_client(self) -> openai.OpenAI:
        """Return an `openai.OpenAI` for this model and this run.

        `client.model_path` is the model's name. Requests default to the task's `rollout_args`. The API is vLLM's, and
        answers have their token ids. Don't call the client on the engine's event loop, which must answer it. Raises
        WorkflowError without the package openai, or for a model without an endpoint.
        """
        if self._client is None:
            self._client = openai_clients.client(self.openai_endpoint(), self._must_not_block)
        return self._client

    def get_openai_async_client(self) -> openai.AsyncOpenAI:
        """Return an `openai.AsyncOpenAI` for this model and this run, for any event loop."""
        if self._async_client is None:
            self._async_client = openai_clients.async_client(self.openai_endpoint())
        return self._async_client

    @property
    def model_name(self) -> str:
        """Name of the model in requests of OpenAI clients: `create(model=model.model_name)`."""
        return self.openai_endpoint().model

    @property
    def model_path(self) -> str:
        return self.model_name

    def served_error(self) -> EngineError | None:
        return self.engine_error

    def cause(self, error: Exception) -> Exception:
        """Return the engine's error behind an exception of openai's client; any other exception unchanged."""
        return (self.served_error() if openai_clients.is_openai_error(error) else None) or error

    async def aclose(self) -> None:
        """Close the clients, and drop the answers of the run."""
        self._close_client()
        if self._async_client is not None:
            with contextlib.suppress(Exception):
                await self._async_client.close()
        self.forget()

    def _close_client(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()
