"""OpenAI clients of a model's endpoint. The package openai is an extra, imported when a client is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_es.events.errors import WorkflowError

if TYPE_CHECKING:
    import openai

__all__ = ["Endpoint", "async_client", "client", "from_openai"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where OpenAI clients reach a model."""

    base_url: str
    token: str = field(repr=False)
    model: str
    """Its name there."""


def client(endpoint: Endpoint, check: Callable[[], None]) -> openai.OpenAI:
    """Return a blocking client; `check` is called, in its thread, before each request.

    Raises WorkflowError without openai.
    """
    package = _package()
    http = package.DefaultHttpxClient(**_OPTIONS, event_hooks={"request": [lambda request: check()]})
    return _made(package.OpenAI, http, endpoint)  # type: ignore[no-any-return]  # openai.OpenAI


def async_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    """Return a client for an event loop. Raises WorkflowError without openai."""
    package = _package()
    return _made(package.AsyncOpenAI, package.DefaultAsyncHttpxClient(**_OPTIONS), endpoint)  # type: ignore[no-any-return]


def from_openai(error: BaseException) -> bool:
    """Return True if an OpenAI client raised this error, or what it came of."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__.partition(".")[0] == "openai":
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_OPTIONS: dict[str, Any] = {
    "trust_env": False,  # a proxy is for the world outside
    "verify": False,  # there is no TLS here, and to load the certificates takes 20 ms
    "timeout": None,  # the attempt's own timeout holds
}


def _made(kind: Any, http: Any, endpoint: Endpoint) -> Any:
    # No retries: what the engine refuses once it refuses again, and a failed run is attempted again.
    made = kind(http_client=http, base_url=endpoint.base_url, api_key=endpoint.token, max_retries=0, timeout=None)
    made.model_path = endpoint.model  # as users of such clients know it
    return made


def _package() -> Any:
    try:
        import openai
    except ImportError as e:
        raise WorkflowError(
            f'OpenAI clients need the package openai, which can\'t be imported ({e}): pip install "trinity-es[openai]"'
        ) from e
    return openai
