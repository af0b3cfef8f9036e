"""Payloads as objects in a bucket of S3, Google Cloud Storage or Azure, or of a server with one of their APIs.

An upload is one request, or parts that become an object at the end, so a reader never sees half a payload. Credentials
come only from the environment (AWS_..., GOOGLE_..., AZURE_...), and no error shows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

from trinity_es.events.errors import ConfigError, LogUnavailable
from trinity_es.events.store.database.database import Tell
from trinity_es.events.store.database.retry import patiently, without_repeats
from trinity_es.events.store.database.urls import scrubbed
from trinity_es.events.store.payloads.payload_store import (
    DIGEST,
    Buffer,
    PayloadStore,
    Unusable,
    digest_of,
    not_found,
    require_digest,
)

__all__ = ["Objects"]

T = TypeVar("T")

CONNECT_SECONDS, REQUEST_SECONDS = 5, 30
"""Time limits of a connection and of a request. A request that exceeds one is retried."""
MOST_REQUESTS = 16
"""Maximum number of payloads that one call reads in parallel."""
PART = 256
"""Number of payloads that one pool of threads reads in `check_all`."""

_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""URL scheme -> prefix of the environment variables with credentials."""
_STATUS = re.compile(r"status code: (\d{3})")
_DURATION = re.compile(r" in [\d.]+[nµm]?s\b")
"""Duration in a message, which is removed so that the same error has the same text."""
_PASSING_STATUSES = frozenset({408, 425, 429})
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_METADATA_SERVER = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")
"""Metadata servers of clouds, which the library asks for credentials if the environment has none."""


class Objects(PayloadStore):
    """Payload store with an object per payload, under the key `ab/abcdef...` below the URL. Not usable after a fork."""

    def __init__(self, url: str, patience: float, tell: Tell | None = None, store: Any = None) -> None:
        self._url, self._patience, self._tell = url, patience, tell
        self._pid = os.getpid()
        self._store = _library_store(url) if store is None else store

    def patient(self, seconds: float, tell: Tell) -> Objects:
        """Return this store with calls that retry passing errors for `seconds`. `tell` gets each new error."""
        return Objects(self._url, seconds, tell, self._store)

    def require_bucket(self) -> None:
        """Check that the bucket can be read. Raises LogUnavailable, also for a missing bucket and bad credentials."""
        next(self._keys(), None)

    def put(self, data: bytes) -> str:
        digest = digest_of(data)
        self._call(lambda api: api.put(self._store, _key(digest), data))
        return digest

    def get(self, digest: str) -> bytes:
        data = self._call(lambda api: bytes(api.get(self._store, _key(digest)).bytes())) if _is_digest(digest) else None
        if data is None:
            raise not_found(digest, self._url)
        return require_digest(digest, data, self._url)

    def get_all(self, digests: Sequence[str], *, mapped: bool = False) -> Iterator[Buffer]:
        return self._in_parallel(self.get, digests)

    def check_all(self) -> Iterator[tuple[str, Unusable | None]]:
        digests = self.digests()
        while part := list(islice(digests, PART)):
            yield from zip(part, self._in_parallel(self.reading_error, part), strict=True)

    @staticmethod
    def _in_parallel(read: Callable[[str], T], digests: Sequence[str]) -> Iterator[T]:
        """Yield the result of `read` for each digest, in order, with up to `MOST_REQUESTS` calls in parallel."""
        if len(digests) < 2:
            yield from map(read, digests)
            return
        with ThreadPoolExecutor(min(MOST_REQUESTS, len(digests)), thread_name_prefix="objects") as threads:
            try:
                yield from threads.map(read, digests)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)  # after an error or an early end

    def size(self, digest: str) -> int | None:
        if not _is_digest(digest):
            return None
        size = self._call(lambda api: api.head(self._store, _key(digest))["size"])
        return None if size is None else int(size)

    def delete(self, digest: str) -> None:
        if _is_digest(digest):
            self._call(lambda api: api.delete(self._store, _key(digest)))

    def digests(self) -> Iterator[str]:
        yield from (key[3:] for key in self._keys() if _is_payload(key))

    def strays(self) -> list[str]:
        return [key for key in self._keys() if not _is_payload(key)]

    def _keys(self) -> Iterator[str]:
        """Yield all keys below the URL, in order. After an error, the listing continues after the last key."""
        parts: Iterator[Any] | None = None
        last_key: str | None = None

        def next_part(api: Any) -> list[str]:
            nonlocal parts
            if parts is None:
                parts = iter(api.list(self._store, offset=last_key, chunk_size=1000))
            try:
                return [item["path"] for item in next(parts, [])]
            except BaseException:
                parts = None
                raise

        while keys := self._call(next_part):
            yield from keys
            last_key = keys[-1]

    def _call(self, request: Callable[[Any], T]) -> T | None:
        """Make a request, with retries of passing errors. Return its result, or None if the object does not exist.

        Raises LogUnavailable, without a retry for a missing bucket or refused credentials.
        """
        if os.getpid() != self._pid:
            raise LogUnavailable(f"{self._url} was opened in process {self._pid}; open it again in this one")
        import obstore

        def attempt() -> T | None:
            try:
                return request(obstore)
            except (obstore.exceptions.BaseError, OSError) as e:
                if isinstance(e, FileNotFoundError) and not _NO_BUCKET.search(str(e)):
                    return None
                raise self._converted_error(e) from None  # its text may hold credentials

        tell = (lambda error: None) if self._tell is None else without_repeats(self._tell)
        return patiently(attempt, seconds=self._patience, tell=tell)

    def _converted_error(self, error: Exception) -> Exception:
        """Convert an error of the library to ours. Its detail `passing` is true if a retry may succeed."""
        scheme = self._url.partition(":")[0]
        text = _short_message(error, scheme)
        variables = f"{_VARIABLES[scheme]}_..."
        status = int(match[1]) if (match := _STATUS.search(text)) else 0
        store = f"the payload store {self._url}"
        if _NO_BUCKET.search(text):
            return LogUnavailable(f"{store} has no such bucket: make the bucket, or name another")
        if _METADATA_SERVER.search(text):
            return LogUnavailable(f"{store} needs credentials, and this process has none in its environment: set "
                                  f"{variables} ({text})")
        if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
            return LogUnavailable(f"{store} refuses the credentials: check {variables} in the environment of this "
                                  f"process, and what they may do ({text})")
        if "builder error" in text:
            return LogUnavailable(f"{store} has an address without https://. To allow http://, set "
                                  f"{_VARIABLES[scheme]}_ALLOW_HTTP=true ({text})")
        if status and status < 500 and status not in _PASSING_STATUSES:
            return LogUnavailable(f"{store} refuses a request: {text}")
        return LogUnavailable(f"{store} does not answer: {text}", passing=True)


def _library_store(url: str) -> Any:
    """Return the library's store object for a URL, without opening a connection. Raises ConfigError."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(f"payloads in {url} need the package obstore: pip install 'trinity-es[objects]'") from None
    scheme = url.partition(":")[0]
    allow_http = os.environ.get(f"{_VARIABLES[scheme]}_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    try:
        return from_url(
            url, retry_config={"max_retries": 0},  # `_call` repeats requests
            client_options={
                "allow_http": allow_http, "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
        )
    except (BaseError, ValueError) as e:
        raise ConfigError(f"the payload store {url} can't be used: {_short_message(e, scheme)}. Check "
                          f"{_VARIABLES[scheme]}_... in the environment of this process") from None


def _short_message(error: Exception, scheme: str) -> str:
    """Return the message of a library's error without secrets, durations and debug output."""
    message = _DURATION.sub("", str(error).partition("\n\nDebug source")[0])
    return scrubbed(message, _secrets(scheme))[:500]


def _secrets(scheme: str) -> list[str]:
    """Return the values of environment variables that no error may show."""
    secret = re.compile(rf"{_VARIABLES[scheme]}_.*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|SAS|ACCOUNT$)", re.IGNORECASE)
    return [value for name, value in os.environ.items() if secret.match(name) and len(value) > 3]


def _is_digest(digest: str) -> bool:
    return DIGEST.fullmatch(digest) is not None


def _is_payload(key: str) -> bool:
    return _is_digest(key[3:]) and key[:3] == f"{key[3:5]}/"


def _key(digest: str) -> str:
    return f"{digest[:2]}/{digest}"
