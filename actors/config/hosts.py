"""Sections of the config about other hosts that take part in the run, and about TLS certificates."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from trinity_es.actors.config.section import Seconds, Section

__all__ = ["HostsConfig", "TlsConfig"]


class TlsConfig(Section):
    """Certificate of a server, with its private key."""

    cert: str = ""
    """PEM file with the certificate and the intermediate ones; empty: no TLS."""
    key: str = ""
    """PEM file with its private key, without a password."""

    @model_validator(mode="after")
    def _check_cert_has_key(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ValueError(f"has only {'cert' if self.cert else 'key'}: give the files of a certificate (cert) and "
                             "of its private key (key)")
        return self


class HostsConfig(Section):
    """Other hosts that take part in the run (`trinity-es join`, docs/DEPLOY.md)."""

    address: str = ""
    """ADDRESS:PORT in your own network at which other hosts join while this host's coordinator leads; empty: no other
    hosts. Needs a store in PostgreSQL. Connections use TLS, and are refused without the key."""
    listen: str = Field(default="", json_schema_extra={"shown": "hosts.address"})
    """ADDRESS:PORT to listen at, if others reach it by another one: 0.0.0.0:7700 behind a service's name."""
    timeout: Seconds = 15.0
    """Seconds of silence after which a host counts as lost. The units of its runners are then attempted elsewhere."""
    key_file: str = Field(default="", json_schema_extra={"shown": "the system's key"})
    """File with the key that head and hosts share. It is read whenever a host connects, so it can be replaced during a
    run (docs/DEPLOY.md). It takes precedence over TRINITY_ES_KEY."""
    weights_dir: str = Field(default="", json_schema_extra={"shown": "/dev/shm"})
    """Folder in which a host keeps weights and adapters that it pulls from the head, if it can't read the folder in
    which they were published. It needs room for two versions. Each host may have its own: `join --set
    hosts.weights_dir=...`."""
    engines_on_head: bool = True
    """Run engines on the head too; false: it only coordinates, and all engines are on hosts that join."""

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if not self.engines_on_head and not self.address:
            raise ValueError("has engines_on_head: false without an address, so no host with engines could join: set "
                             "hosts.address")
        # `error_sentence` puts the section's name before these messages: "hosts has address ...".
        for key, address in (("address", self.address), ("listen", self.listen)):
            host, _, port = address.rpartition(":")
            if address and not (host and port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError(f"has {key} {address!r}: give an address of this host and a port, as in 10.0.0.1:7700")
        return self
