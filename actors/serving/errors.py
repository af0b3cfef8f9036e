"""Errors as clients of an engine's HTTP server get them: OpenAI's JSON and statuses. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from trinity_es.events.errors import DataError, EngineError, TrinityError, WorkflowError

__all__ = ["ApiError", "event", "refusal"]


class ApiError(Exception):
    """A request that gets an error: OpenAI's status, type, `param` and `code`."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal(error: Exception) -> ApiError:
    """Return the answer to a client for an error of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WorkflowError | DataError):
        return ApiError(str(error))
    if isinstance(error, EngineError):
        if error.details.get("refused"):
            return ApiError(str(error), code="engine_refused")
        return ApiError(str(error), status=503 if error.details.get("dead") else 500, code="engine_failed")
    what = str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"
    return ApiError(what, status=500)


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
