"""The sections of the config that name certificates."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from trinity_es.config.section import Section

__all__ = ["HostsTlsConfig", "TlsConfig"]


class TlsConfig(Section):
    """A certificate by which clients know who answers."""

    cert: str = ""
    """File with the certificate, PEM, and those between it and its CA's; empty: no TLS."""
    key: str = ""
    """File with its private key, PEM, without a password."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ValueError(f"has {'cert' if self.cert else 'key'} alone: give the files of a certificate (cert) and "
                             "of its private key (key)")
        return self


class HostsTlsConfig(TlsConfig):
    """TLS between hosts: without it tasks and prompts can be read on the wire. The certificate is the head's, for the
    name or the address in `hosts.address`; it is read again for each connection."""

    ca: str = Field(default="", json_schema_extra={"shown": "those of the operating system"})
    """File with the certificate of the CA that hosts believe, PEM."""
