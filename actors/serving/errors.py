"""Error responses for clients of an HTTP server, in OpenAI's form, and in Anthropic's form on its routes. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

from trinity_es.actors.engines.sampling_checks import excerpt
from trinity_es.events.errors import DataError, EngineError, TrinityError, WorkflowError

__all__ = ["ApiError", "StreamPlace", "as_api_error", "error_body", "invalid_field", "json_object", "sse_event"]

_ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}
"""Anthropic's error types by HTTP status; all others are `api_error`."""
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d+)')


class ApiError(Exception):
    """Exception that becomes an error response with OpenAI's status, type, `param` and `code`."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None,
                 code: str | int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the response's JSON in OpenAI's form."""
        error_type = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}


def invalid_field(name: str, value: Any, wanted: str, param: str | None = None) -> ApiError:
    """Return the error for an invalid `value` of the field `name`. `wanted` describes the allowed values."""
    return ApiError(f"{name} is {excerpt(value)}: give {wanted}", param=param or name, code="invalid_value")


def json_object(raw: bytes) -> dict[str, Any]:
    """Return a request's body as a JSON object. Raises ApiError if it is none."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise ApiError(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise ApiError(f"the body is JSON of type {type(body).__name__}: give an object")
    return body


def as_api_error(error: Exception) -> ApiError:
    """Return the ApiError for an exception that ended a request: status 400 if the request caused it, else 5xx."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WorkflowError | DataError):
        return ApiError(str(error))
    if isinstance(error, EngineError):
        if error.details.get("refused"):
            return ApiError(str(error), code="engine_refused")
        return ApiError(str(error), status=503 if error.details.get("dead") else 500, code="engine_failed")
    message = str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"
    return ApiError(message, status=500)


def sse_event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return an error's JSON in the form of the route `path`: Anthropic's under `/v1/messages`, else OpenAI's."""
    if not path.startswith("/v1/messages"):
        return error.body()
    error_type = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": error_type, "message": str(error)}}


class StreamPlace:
    """Counter of the events of a stream on the route `path`. An error that ends the stream needs the next number."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.next_number = 0

    def note_event_number(self, part: bytes) -> None:
        """Read the number of the last event in a part of the stream. Only `/v1/responses` numbers its events."""
        numbers = _NUMBER.findall(part) if self.path == "/v1/responses" else []
        if numbers:
            self.next_number = int(numbers[-1]) + 1

    def last_event(self, error: ApiError) -> bytes:
        """Return an error as the event that ends the stream.

        In Anthropic's form the event has a name: without one, the client ignores it and takes the end for a normal one.
        """
        body = error_body(error, self.path)
        if self.path == "/v1/responses":
            # OpenAI's event is flat, but its Python client raises only if there is an `error` too.
            body |= {"type": "error", "code": error.code, "message": str(error), "param": error.param,
                     "sequence_number": self.next_number}
        return (b"event: error\n" if "type" in body else b"") + sse_event(body)
