"""Requests and responses of the proxy: JSON, with errors in OpenAI's or Anthropic's form, depending on the route."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from trinity_es.actors.server_addresses import is_loopback
from trinity_es.actors.serving.errors import ApiError, error_body, json_object
from trinity_es.actors.serving.http_server import json_response
from trinity_es.events.errors import AnswerDelivered, AnswerNotFound, EngineError, PipelineError, TrinityError
from trinity_es.events.json_values import with_single_keys

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["api_error", "conversation_keys", "error_response", "message_of", "read_object", "require_local"]

MOST_SESSION = 100
"""Maximum length of a session's name that is kept as it is; a longer one is replaced by its digest."""
_log = logging.getLogger(__name__)


def read_object(raw: bytes, fields: set[str] | None = None) -> dict[str, Any]:
    """Return a request's JSON object. With `fields`, refuses other fields and duplicates. Raises ApiError."""
    body = json_object(raw)
    if fields is None:
        return body
    try:
        json.loads(raw, object_pairs_hook=with_single_keys)
    except ValueError as e:
        raise ApiError(f"the body is ambiguous: {e}") from e
    unknown_fields = sorted(set(body) - fields)
    if unknown_fields:
        field = unknown_fields[0]
        raise ApiError(f"{field}: no such field is known here", param=field, code="unknown_parameter")
    return body


def require_local(request: Request) -> None:
    """Raise ApiError if the request's Origin or Host is not this machine: a browser sent it for a foreign page.

    The client itself is on this machine, since the proxy without a key listens on a loopback address.
    """
    for header, host in (("Host", request.url.hostname), ("Origin", _host(request.headers.get("origin")))):
        if host is not None and not is_loopback(host):
            raise ApiError(f"the header {header} names {host!r}, another machine, but this proxy asks for no key, so "
                           "it serves only this machine: set explorer.proxy_without_key to false and send the "
                           "key", status=403, code="not_local")
    if request.headers.get("sec-fetch-site") == "cross-site":
        raise ApiError("this proxy asks for no key, so it refuses requests from web pages of other sites: set "
                       "explorer.proxy_without_key to false and send the key", status=403, code="not_local")


def _host(origin: str | None) -> str | None:
    """Return the host name in an Origin header; the whole header if it has none, such as "null"."""
    return None if origin is None else urlsplit(origin).hostname or origin


def api_error(error: Exception) -> ApiError:
    """Return the error that a client gets for an exception."""
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
    if isinstance(error, TrinityError):  # the log or the whole system can't be reached
        return ApiError(f"not recorded: {error}", status=503, code="not_recorded")
    _log.error("a request failed", exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", status=500, code="proxy_failed")


def error_response(error: ApiError, path: str) -> Response:
    """Return an error in the form of this route's API."""
    response = json_response(error_body(error, path), error.status)
    if error.code == "engines_lost":
        response.headers["x-should-retry"] = "false"  # else openai's and Anthropic's clients retry twice
    return response


def message_of(data: bytes) -> str:
    """Return the message in the body of an error response; the first 200 bytes of another body."""
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        return str(orjson.loads(data)["error"]["message"])
    return data[:200].decode(errors="replace")


def conversation_keys(body: Mapping[str, Any], session: str | None) -> tuple[list[str], list[str]]:
    """Return the keys that an earlier request of the conversation may have left, and the keys that this one leaves.

    The key is the client's session if it names one, else a hash of the messages: those before the last answer were
    an earlier request.
    """
    if session:
        if len(session) > MOST_SESSION:
            session = hashlib.sha256(session.encode()).hexdigest()
        return [f"session/{session}"], [f"session/{session}"]
    messages = body.get("messages")
    if not isinstance(messages, list):
        return [], []
    answer_indices = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "assistant"]
    earlier_keys = [_messages_key(messages[:i]) for i in answer_indices[-1:]]
    return earlier_keys, [_messages_key(messages)]


def _messages_key(messages: list[Any]) -> str:
    return hashlib.sha256(orjson.dumps(messages)).hexdigest()
