"""The connection between hosts in TLS, where `hosts.tls` names a certificate of the head.

The head says first that it speaks TLS, so that a side whose config says something else is told so. Then the host sees
that the certificate is one for the address that it asked. What is spoken inside is what it would be without: who has no
key is not heard either.
"""

from __future__ import annotations

import asyncio
import ssl

from trinity_es.actors.config.hosts import HostsTlsConfig
from trinity_es.actors.hosts.sealed_stream import MAGIC, MAGIC_TLS, NONCE, NotOurs

__all__ = ["begin_at_head", "begin_at_host"]


async def begin_at_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: HostsTlsConfig) -> None:
    """Go on in TLS: the head's side. Nothing where there is no certificate. Raises NotOurs, OSError."""
    if not tls.cert:
        return
    context = await asyncio.to_thread(_head_context, tls)
    writer.write(MAGIC_TLS)
    try:
        await writer.start_tls(context)
    except ssl.SSLError as e:
        raise NotOurs(f"it does not go on in TLS: {_said(e)}") from e


async def begin_at_host(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: HostsTlsConfig, host: str
) -> None:
    """Go on in TLS: the host's side; `host` is the head's name or address. Raises NotOurs, OSError, EOFError."""
    if not tls.cert:
        return
    context = await asyncio.to_thread(_host_context, tls)
    begun = await reader.readexactly(len(MAGIC_TLS))
    if begun.startswith(MAGIC):
        raise NotOurs("the head speaks no TLS, and hosts.tls.cert is set here: set it in the head's config, too")
    if begun != MAGIC_TLS:
        raise NotOurs("no head answers there")
    try:
        await writer.start_tls(context, server_hostname=host)
    except ssl.SSLCertVerificationError as e:
        raise NotOurs(
            f"the head's certificate is not believed: {e.verify_message}: hosts.tls.ca has to name the CA that signed "
            f"it, and it has to be one for {host}"
        ) from e
    except ssl.SSLError as e:
        raise NotOurs(f"the head does not go on in TLS: {_said(e)}") from e


def _head_context(tls: HostsTlsConfig) -> ssl.SSLContext:
    """Return the head's side of TLS. Raises OSError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except (OSError, ValueError) as e:
        raise OSError(f"hosts.tls.cert {tls.cert} and hosts.tls.key {tls.key} can't be used: {_said(e)}") from e
    return context


def _host_context(tls: HostsTlsConfig) -> ssl.SSLContext:
    """Return a host's side of TLS. Raises OSError."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.ca or None)
    except OSError as e:
        raise OSError(f"hosts.tls.ca {tls.ca} can't be used: {_said(e)}") from e
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _said(e: Exception) -> str:
    return str(getattr(e, "reason", None) or getattr(e, "strerror", None) or e)


assert len(MAGIC_TLS) == len(MAGIC) + NONCE
