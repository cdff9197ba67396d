"""Reads and verifies signatures as `ssh-keygen -Y sign` makes them (OpenSSH's PROTOCOL.sshsig).

The format names what a signature is for, so that none that a person gives for something else, such
as for a login or a commit, is one of an order.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

NAMESPACE = "relaunch"
"""What `ssh-keygen -Y sign -n` is given."""
MAGIC = b"SSHSIG"
MAX_LENGTH = 4096
"""Characters of a signature; one of RSA with 8192 bits takes 3,000."""
HASHES = ("sha256", "sha512")


class SignatureError(Exception):
    """A signature that proves nothing; the message is a clause that says why."""


def strip_armor(text: str) -> str:
    """Return a signature without the lines around it."""
    lines = [line.strip() for line in text.splitlines()]
    return "".join(line for line in lines if line and not line.startswith("-----"))


def verify(signature: str, message: bytes) -> str:
    """Return the public key that has signed a message, as `ssh-ed25519 AAAA…`.

    Args:
        signature: Base64 of a signature of `ssh-keygen -Y sign`, without the lines around it.
        message: What was signed.

    Raises:
        SignatureError: It is no signature, one for another purpose, or one of another message.
    """
    if len(signature) > MAX_LENGTH:
        raise SignatureError(f"it has more than {MAX_LENGTH} characters")
    try:
        data = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        raise SignatureError("it is not base64") from None
    reader = _WireReader(data)
    if reader.take(6) != MAGIC or int.from_bytes(reader.take(4), "big") != 1:
        raise SignatureError("it is not one of ssh-keygen -Y sign")
    key, namespace, reserved, name, signed = (reader.string() for _ in range(5))
    reader.end()
    if namespace != NAMESPACE.encode():
        raise SignatureError(f"it was not made for relaunch (ssh-keygen -n {NAMESPACE})")
    hash_name = name.decode("ascii", "replace")
    if hash_name not in HASHES:
        raise SignatureError("it uses an unknown hash")
    digest = hashlib.new(hash_name, message).digest()
    blob = MAGIC + b"".join(_string(one) for one in (namespace, reserved, name, digest))
    return _verify_blob(key, signed, blob)


def _verify_blob(key: bytes, signed: bytes, blob: bytes) -> str:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    reader = _WireReader(signed)
    algorithm, raw = reader.string().decode("ascii", "replace"), reader.string()
    reader.end()
    kind = _WireReader(key).string().decode("ascii", "replace")
    text = f"{kind} {base64.b64encode(key).decode()}"
    try:
        public = load_ssh_public_key(text.encode())
        match public:
            case ed25519.Ed25519PublicKey() if algorithm == kind:
                public.verify(raw, blob)
            case ec.EllipticCurvePublicKey() if algorithm == kind:
                numbers = _WireReader(raw)
                r, s = (int.from_bytes(numbers.string(), "big") for _ in range(2))
                numbers.end()
                sizes = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
                hash_ = sizes[public.curve.key_size]
                public.verify(encode_dss_signature(r, s), blob, ec.ECDSA(hash_))
            case rsa.RSAPublicKey() if algorithm in ("rsa-sha2-256", "rsa-sha2-512"):
                is_long = algorithm == "rsa-sha2-512"
                digest = hashes.SHA512() if is_long else hashes.SHA256()
                public.verify(raw, blob, padding.PKCS1v15(), digest)
            case _:
                raise SignatureError(f"its key is of type {kind[:40]}, which is not supported")
    except InvalidSignature:
        raise SignatureError("it is not one of this order") from None
    except (ValueError, UnsupportedAlgorithm, KeyError):
        raise SignatureError("its key cannot be read") from None
    return text


class _WireReader:
    """Reads the strings of SSH's wire format, and nothing beyond the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise SignatureError("it is cut")
        self._at += count
        return self._data[self._at - count : self._at]

    def string(self) -> bytes:
        return self.take(int.from_bytes(self.take(4), "big"))

    def end(self) -> None:
        if self._at != len(self._data):
            raise SignatureError("something follows its end")


def _string(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value
