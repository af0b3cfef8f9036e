"""Requests and responses of the proxy: JSON, and errors in OpenAI's or Anthropic's form, depending on the route."""

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

__all__ = ["api_error", "conversation_keys", "error_message", "error_response", "read_object", "require_local"]

MAX_SESSION_LENGTH = 100
"""Maximum length of a session's name in characters. A longer name is replaced by its digest."""
_log = logging.getLogger(__name__)


def read_object(raw: bytes, fields: set[str] | None = None) -> dict[str, Any]:
    """Parse a request's JSON object. If `fields` is given, other fields and duplicates are refused. Raises ApiError."""
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
        raise ApiError(f"there is no field {field!r}: the fields of this request are {', '.join(sorted(fields))}",
                       param=field, code="unknown_parameter")
    return body


def require_local(request: Request) -> None:
    """Raise ApiError if the request's Origin or Host header names another machine: then it is from another site's page.

    The browser that sent it is on this machine, because a proxy without a key listens on a loopback address only.
    """
    origin = request.headers.get("origin")
    origin_host = None if origin is None else urlsplit(origin).hostname or origin  # it may have no host, such as "null"
    for header, host in (("Host", request.url.hostname), ("Origin", origin_host)):
        if host is not None and not is_loopback(host):
            raise ApiError(f"the header {header} names another machine, {host!r}, and this proxy without a key serves "
                           "only its own machine: set explorer.proxy_without_key to false and send the key",
                           status=403, code="not_local")
    if request.headers.get("sec-fetch-site") == "cross-site":
        raise ApiError("this proxy without a key refuses requests from web pages of other sites: set "
                       "explorer.proxy_without_key to false and send the key", status=403, code="not_local")


def api_error(error: Exception) -> ApiError:
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
    """Return the response for an error, in the form of the API of this path (OpenAI's or Anthropic's)."""
    response = json_response(error_body(error, path), error.status)
    if error.code == "engines_lost":
        response.headers["x-should-retry"] = "false"  # else OpenAI's and Anthropic's clients retry twice
    return response


def error_message(data: bytes) -> str:
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        return str(orjson.loads(data)["error"]["message"])
    return data[:200].decode(errors="replace")


def conversation_keys(body: Mapping[str, Any], session: str | None) -> tuple[list[str], list[str]]:
    """Return keys for routing a conversation to one engine: (keys to look up, keys to store for the next request).

    If the client names a session, the key is the session. Otherwise it is a hash of the messages. The messages before
    the last answer are those of the previous request, so their hash is looked up.
    """
    if session:
        if len(session) > MAX_SESSION_LENGTH:
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
