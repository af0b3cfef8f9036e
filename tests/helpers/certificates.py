"""A certificate authority for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Files:
    cert: Path
    key: Path


class Authority:
    """Certificate authority; its own certificate is the file `ca`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca, self._folder, self._name = trustme.CA(), folder, name
        self.ca = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def issue(self, *names: str) -> Files:
        """Make a certificate for these names and addresses, replacing an earlier one."""
        made = self._ca.issue_cert(*names)
        files = Files(self._folder / f"{self._name}-server.pem", self._folder / f"{self._name}-server.key")
        files.cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        files.key.touch(0o600)
        files.key.write_bytes(made.private_key_pem.bytes())
        return files
