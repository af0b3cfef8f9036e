"""The section `hosts` of the config: other hosts that take part in the run; and the one that names a certificate."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from trinity_es.actors.config.section import Seconds, Section

__all__ = ["HostsConfig", "TlsConfig"]


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


class HostsConfig(Section):
    """Other hosts that take part in the run (`trinity-es join`, docs/DEPLOY.md)."""

    address: str = ""
    """Where this host takes others in while its coordinator leads, as ADDRESS:PORT of a network of your own; empty: it
    takes none. Needs a store in PostgreSQL. It speaks TLS there, and hears nobody without the key."""
    listen: str = Field(default="", json_schema_extra={"shown": "hosts.address"})
    """Where it listens, as ADDRESS:PORT, if others reach it elsewhere: 0.0.0.0:7700 behind a service's name."""
    timeout: Seconds = 15.0
    """A host that was not heard of for so many seconds is lost: what its runners had is attempted again elsewhere."""
    key_file: str = Field(default="", json_schema_extra={"shown": "the system's key"})
    """File with the key that head and hosts share, read whenever a host connects: so it can be replaced in a run
    (docs/DEPLOY.md). Goes before TRINITY_ES_KEY."""
    weights_dir: str = Field(default="", json_schema_extra={"shown": "/dev/shm"})
    """Folder in which a host keeps weights and adapters that it pulls from the head, as it can't read them where they
    were published: room for two versions. Each host may have another: `join --set hosts.weights_dir=...`."""
    engines_on_head: bool = True
    """Engines on the head, too; false: it only leads, and all engines are on hosts that join."""

    @model_validator(mode="after")
    def _has_a_port(self) -> Self:
        if not self.engines_on_head and not self.address:
            raise ValueError("has engines_on_head: false without hosts.address: no host could join, none has engines")
        for key, given in (("address", self.address), ("listen", self.listen)):
            host, _, port = given.rpartition(":")
            if given and not (host and port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError(f"has {key} {given!r}: give an address of this host and a port, as in 10.0.0.1:7700")
        return self
