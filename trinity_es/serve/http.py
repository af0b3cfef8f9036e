"""The proxy's requests and responses: JSON in, JSON out, errors as OpenAI's or Anthropic's, by their route."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from trinity_es.actors.addresses import is_loopback
from trinity_es.actors.serving.errors import ApiError, body_of, json_object
from trinity_es.actors.serving.http_server import json_response
from trinity_es.events.errors import AnswerDelivered, AnswerNotFound, EngineError, PipelineError, TrinityError
from trinity_es.events.json_values import with_single_keys

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["conversation_keys", "error_response", "message_of", "read_object", "refused", "require_local"]

MOST_SESSION = 100
"""Maximum length of a session's name that is remembered as it is; of a longer one its digest is."""
_log = logging.getLogger(__name__)


def read_object(raw: bytes, fields: set[str] | None = None) -> dict[str, Any]:
    """Return a request's JSON object; where `fields` are given, with no others, each once. Raises ApiError."""
    body = json_object(raw)
    if fields is None:
        return body
    try:
        json.loads(raw, object_pairs_hook=with_single_keys)
    except ValueError as e:
        raise ApiError(f"the body is not clear: {e}") from e
    if unknown := sorted(set(body) - fields):
        raise ApiError(f"{unknown[0]}: no such field is known here", param=unknown[0], code="unknown_parameter")
    return body


def require_local(request: Request) -> None:
    """Refuse what a browser sends for a page that is not of this machine: by its origin, or by the name it asked for.

    Who asks is on this machine all the same, since nobody else reaches a loopback address. Raises ApiError.
    """
    for header, host in (("Host", request.url.hostname), ("Origin", _host(request.headers.get("origin")))):
        if host is not None and not is_loopback(host):
            raise ApiError(f"{header} {host!r} is not this machine, and no key is asked for", status=403,
                          code="not_local")
    if request.headers.get("sec-fetch-site") == "cross-site":
        raise ApiError("a page of another site asks, and no key is asked for", status=403, code="not_local")


def _host(origin: str | None) -> str | None:
    return None if origin is None else urlsplit(origin).hostname or origin


def refused(error: Exception) -> ApiError:
    """Return what a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AnswerNotFound):
        return ApiError(str(error), status=404, param="msg_ids", code="message_not_found")
    if isinstance(error, AnswerDelivered):
        return ApiError(str(error), status=409, param="msg_ids", code="already_committed")
    if isinstance(error, EngineError):
        return ApiError(str(error), status=502, code="engine_failed")
    if isinstance(error, PipelineError):
        return ApiError(f"nothing was committed: {error}", status=500, code="pipeline_failed")
    if isinstance(error, TrinityError):  # the log is away, or the whole system
        return ApiError(f"not recorded: {error}", status=503, code="not_recorded")
    _log.error("a request failed", exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", status=500, code="proxy_failed")


def error_response(error: ApiError, path: str) -> Response:
    """Return an error in the form of this route's API."""
    response = json_response(body_of(error, path), error.status)
    if error.code == "engines_lost":
        response.headers["x-should-retry"] = "false"  # else openai's and Anthropic's clients ask twice again
    return response


def message_of(data: bytes) -> str:
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        return str(orjson.loads(data)["error"]["message"])
    return data[:200].decode(errors="replace")


def conversation_keys(body: Mapping[str, Any], session: str | None) -> tuple[list[str], list[str]]:
    """(by what an earlier request of this conversation may be known, by what a later one will know this one).

    A conversation is a session where the client names one; else it is known by its messages: those before the last
    answer in it were a request once.
    """
    if session:
        session = session if len(session) <= MOST_SESSION else hashlib.sha256(session.encode()).hexdigest()
        return [f"session/{session}"], [f"session/{session}"]
    messages = body.get("messages")
    if not isinstance(messages, list):
        return [], []
    answered = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "assistant"]
    return [_key(messages[:i]) for i in answered[-1:]], [_key(messages)]


def _key(messages: list[Any]) -> str:
    return hashlib.sha256(orjson.dumps(messages)).hexdigest()
