"""How a workflow reaches its model by OpenAI clients: the clients of one run, and the endpoint that they ask."""

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
    """See the module. The clients are made when they are asked for, and closed with the run."""

    def __init__(self) -> None:
        super().__init__()
        self._client: openai.OpenAI | None = None
        self._async_client: openai.AsyncOpenAI | None = None
        self.failed: EngineError | None = None
        """What the engine said to the last request of this run's OpenAI clients, where that was an error."""

    def openai_endpoint(self) -> Endpoint:
        """Return where OpenAI clients of this run reach the model. Raises WorkflowError where it has no endpoint."""
        raise NotImplementedError

    def _must_not_block(self) -> None:
        """Raise WorkflowError where a blocking call would never be answered."""

    def get_openai_client(self) -> openai.OpenAI:
        """Return an `openai.OpenAI` that asks this model, for this run alone.

        `client.model_path` is the name to ask for. What a request does not say is as in the task's `rollout_args`. It
        speaks vLLM's API, whose answers have their token ids here. Not for the engine's loop, which they come from.
        Raises WorkflowError without the package openai, and where the model has no endpoint.
        """
        if self._client is None:
            self._client = openai_clients.client(self.openai_endpoint(), self._must_not_block)
        return self._client

    def get_openai_async_client(self) -> openai.AsyncOpenAI:
        """Return the same as an `openai.AsyncOpenAI`, for any event loop."""
        if self._async_client is None:
            self._async_client = openai_clients.async_client(self.openai_endpoint())
        return self._async_client

    @property
    def model_name(self) -> str:
        """The name by which OpenAI clients ask this model: `create(model=model.model_name)`."""
        return self.openai_endpoint().model

    @property
    def model_path(self) -> str:
        """The same as `model_name`."""
        return self.model_name

    def served_error(self) -> EngineError | None:
        return self.failed

    def cause(self, error: Exception) -> Exception:
        """Return the engine's own error where a client raised it as one of openai's."""
        return (self.served_error() if openai_clients.from_openai(error) else None) or error

    async def aclose(self) -> None:
        self._close_client()
        if self._async_client is not None:
            with contextlib.suppress(Exception):  # it may be another loop's
                await self._async_client.close()
        self.forget()

    def _close_client(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()
