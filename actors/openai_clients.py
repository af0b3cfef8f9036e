"""OpenAI clients of a model's endpoint. The package openai is an extra, imported when a client is created."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_es.events.errors import WorkflowError

if TYPE_CHECKING:
    import openai

__all__ = ["Endpoint", "async_client", "client", "is_openai_error"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and token at which OpenAI clients reach a model."""

    base_url: str
    token: str = field(repr=False)
    model: str
    """Name of the model at this endpoint."""


def client(endpoint: Endpoint, check: Callable[[], None]) -> openai.OpenAI:
    """Return a blocking client that calls `check` before each request, in the thread that sends it. Raises
    WorkflowError if openai can't be imported."""
    package = _import_openai()
    http = package.DefaultHttpxClient(**_OPTIONS, event_hooks={"request": [lambda request: check()]})
    return _build_client(package.OpenAI, http, endpoint)  # type: ignore[no-any-return]  # openai.OpenAI


def async_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    """Return an asyncio client of the endpoint. Raises WorkflowError if openai can't be imported."""
    package = _import_openai()
    return _build_client(package.AsyncOpenAI, package.DefaultAsyncHttpxClient(**_OPTIONS), endpoint)  # type: ignore[no-any-return]


def is_openai_error(error: BaseException) -> bool:
    """Return True if this error, or one in its chain of causes, comes from an OpenAI client."""
    current: BaseException | None = error
    while current is not None:
        if type(current).__module__.partition(".")[0] == "openai":
            return True
        current = current.__cause__ or current.__context__
    return False


_OPTIONS: dict[str, Any] = {
    "trust_env": False,  # no proxy: the endpoint is inside the system
    "verify": False,  # there is no TLS here, and loading the certificates takes 20 ms
    "timeout": None,  # the attempt's own timeout holds
}


def _build_client(client_class: Any, http: Any, endpoint: Endpoint) -> Any:
    # No retries: the engine would refuse the same request again, and the runner attempts a failed run again.
    client = client_class(
        http_client=http, base_url=endpoint.base_url, api_key=endpoint.token, max_retries=0, timeout=None
    )
    client.model_path = endpoint.model  # workflows written for Trinity-RFT read it
    return client


def _import_openai() -> Any:
    """Import the package openai and return it. Raises WorkflowError if that fails."""
    try:
        import openai
    except ImportError as e:
        raise WorkflowError(
            f'OpenAI clients need the package openai, which can\'t be imported ({e}): pip install "trinity-es[openai]"'
        ) from e
    return openai
