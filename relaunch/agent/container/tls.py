"""TLS between a controller and the agent inside a container: what both sides load, and check.

Each side has a private key and its self-signed certificate, presents that certificate, and accepts
only the certificates in its own secret. No certificate authority and no host name is trusted. The
controller imports this module, too; it uses the standard library only.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
from typing import BinaryIO, Optional

_BLOCK = "-----BEGIN {0}-----.*?-----END {0}-----"
_KEY = re.compile(_BLOCK.format("(?:[A-Z]+ )?PRIVATE KEY"), re.DOTALL)
_CERTIFICATE = re.compile(_BLOCK.format("CERTIFICATE"), re.DOTALL)


class SecretError(Exception):
    """A secret that cannot be used. The text continues a sentence that begins with its name."""


class AuthenticationError(Exception):
    """The other side has no accepted certificate, or sent what does not belong to the protocol."""


class Secret:
    """A private key, its certificate, and the certificates that are accepted."""

    def __init__(self, text: str) -> None:
        """Read a secret.

        Args:
            text: PEM text: one private key and its certificate, then any number of further
                certificates that are accepted from the other side while keys are exchanged.

        Raises:
            SecretError: The text has no key, several keys, or no certificate.
        """
        keys, self._certificates = _KEY.findall(text), _CERTIFICATE.findall(text)
        if not text.strip():
            raise SecretError("is not set")
        if len(keys) != 1:
            raise SecretError(f"has {len(keys) or 'no'} private keys in PEM, expected one")
        if not self._certificates:
            raise SecretError("has no certificate in PEM, expected the certificate of its key")
        self._key = keys[0]
        try:
            self._accepted = [ssl.PEM_cert_to_DER_cert(one) for one in self._certificates]
        except ValueError as error:
            raise SecretError(f"has a certificate that cannot be read: {error}") from error

    def server_context(self) -> ssl.SSLContext:
        """Return the settings of the side that listens.

        Raises:
            SecretError: The key or a certificate cannot be read, they do not belong together, or
                this Python has no TLS 1.3.
        """
        context = self._load(ssl.PROTOCOL_TLS_SERVER)
        # Each connection proves the key again: nothing is resumed, and nothing is sent early.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the settings of the side that connects; raise as `server_context` does."""
        return self._load(ssl.PROTOCOL_TLS_CLIENT)

    def check_peer(self, certificate: Optional[bytes]) -> None:
        """Check that the certificate of the other side (DER) is one of those accepted.

        OpenSSL would also accept a certificate that was signed with the key of an accepted one.

        Raises:
            AuthenticationError: It is none of them.
        """
        if certificate not in self._accepted:
            raise AuthenticationError

    def _load(self, protocol: int) -> ssl.SSLContext:
        if not ssl.HAS_TLSv1_3:
            raise SecretError(f"needs TLS 1.3, which {ssl.OPENSSL_VERSION} of this Python lacks")
        context = ssl.SSLContext(protocol)
        # Addresses change with every task. The certificate is pinned, whatever its name.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(cadata="\n".join(self._certificates))
            # OpenSSL reads keys from files only.
            with _open_hidden_file() as file:
                file.write(f"{self._key}\n{self._certificates[0]}\n".encode())
                file.flush()
                # An empty password, because OpenSSL would ask for one on the terminal.
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
        except (OSError, ValueError) as error:
            if getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
                raise SecretError(
                    "has a first certificate that is not that of its private key"
                ) from error
            raise SecretError(f"has a key or certificate that cannot be read: {error}") from error
        return context


def _open_hidden_file() -> BinaryIO:
    """Open a file that has no name, in memory where this Python can."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("relaunch-agent-key"), "w+b")
    return tempfile.TemporaryFile()
