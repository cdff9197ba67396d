"""SSH keys of people, made by the real ssh-keygen, and orders that they sign."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relaunch.access.orders import Proof, SignedText, build_text
from relaunch.access.signatures import NAMESPACE, strip_armor


def make_key(folder: Path, name: str, kind: str = "ed25519", *more: str) -> Path:
    """Make a key without a passphrase; `<name>.pub` beside it is its public key."""
    path = folder / name
    words = ["ssh-keygen", "-q", "-t", kind, *more, "-N", "", "-C", f"{name}@laptop"]
    subprocess.run([*words, "-f", str(path)], check=True, timeout=100)
    return path


def read_public(key: Path) -> str:
    return key.with_name(f"{key.name}.pub").read_text().strip()


def sign(key: Path, text: str, namespace: str = NAMESPACE) -> str:
    words = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", namespace]
    done = subprocess.run(words, input=text.encode(), capture_output=True, check=True, timeout=100)
    return strip_armor(done.stdout.decode())


def sign_order(
    key: Path,
    receiver: str,
    order: str,
    fields: Mapping[str, Any],
    *,
    at: datetime | None = None,
    nonce: str = "n-1",
    namespace: str = "default",
) -> SignedText:
    """Return an order as its receiver would read it, signed by this key."""
    when = (at or datetime.now(UTC)).isoformat()
    text = build_text(namespace, receiver, order, fields, when, nonce)
    return SignedText(text, Proof(at=when, nonce=nonce, signature=sign(key, text)))
