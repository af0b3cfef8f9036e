"""The head's TLS certificate. Each coordinator that admits hosts creates one, and names it in its lease of the log."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

__all__ = ["Certificate"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its private key, which is never written to disk."""

    context: ssl.SSLContext
    """Settings of the head's side of TLS."""
    digest: bytes
    """SHA-256 of the certificate, by which hosts recognise it."""

    @classmethod
    def create(cls) -> Certificate:
        """Create a self-signed certificate. Raises ImportError if the package cryptography is missing."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trinity-es head")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=36500))
            .sign(key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        pem = serialization.Encoding.PEM
        with os.fdopen(os.memfd_create("certificate"), "wb") as file:  # ssl reads only files
            file.write(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
            file.write(certificate.public_bytes(pem))
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return cls(context, certificate.fingerprint(hashes.SHA256()))
