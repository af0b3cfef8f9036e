"""The sections of the config that name a certificate."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from trinity_es.config.section import Section

__all__ = ["TlsConfig"]


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
