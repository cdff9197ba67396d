"""Secrets for the agent inside a container: keys with their certificates, as PEM text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_key(begins: timedelta = timedelta(days=-1), ends: timedelta = timedelta(days=365)) -> str:
    """Return a new secret that is valid between two times, from now on."""
    return "".join(make_parts(begins, ends))


def make_parts(
    begins: timedelta = timedelta(days=-1),
    ends: timedelta = timedelta(days=365),
    issuer: str | None = None,
) -> tuple[str, str]:
    """Return a new private key and its certificate, signed by itself or by another secret."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relaunch")]), datetime.now(UTC)
    signs = key if issuer is None else serialization.load_pem_private_key(issuer.encode(), None)
    assert isinstance(signs, ec.EllipticCurvePrivateKey)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signs.public_key()), False
        )
        .add_extension(x509.BasicConstraints(issuer is None, None), True)
        .sign(signs, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private.decode(), certificate.public_bytes(serialization.Encoding.PEM).decode()


@cache
def agent_key() -> str:
    """Return a secret for tests that are about something else."""
    return make_key()
