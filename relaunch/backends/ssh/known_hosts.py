"""Checks a host's key against OpenSSH's known_hosts files, read as OpenSSH reads them.

paramiko's reader is not used: it has no patterns, revoked keys or line numbers, and one bad line
makes the whole file fail.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

STANDARD_PORT = 22


class KeyStatus(StrEnum):
    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line that holds a key."""

    file: str
    """As the user wrote it."""
    line: int
    patterns: tuple[str, ...]
    algorithm: str
    blob: bytes
    revoked: bool

    def applies_to(self, name: str) -> bool:
        """Return whether the line applies to this host.

        A matching pattern that begins with `!` excludes the whole line.
        """
        found = False
        for pattern in self.patterns:
            if pattern.startswith("!"):
                if _matches(pattern[1:], name):
                    return False
            elif _matches(pattern, name):
                found = True
        return found


@dataclass(frozen=True, slots=True)
class Judgement:
    standing: KeyStatus
    entry: Entry | None = None
    """The line that decides; for a changed key, the line with the expected key."""


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        try:
            _, _, salt, wanted = pattern.split("|")
            digest = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(digest, base64.b64decode(wanted))
        except (ValueError, binascii.Error):
            return False
    # `[` begins no character class here: `[host]:port` is literal.
    return fnmatch.fnmatchcase(name, pattern.lower().replace("[", "[[]"))


def read(files: Iterable[str]) -> tuple[Entry, ...]:
    """Read all files. Skip a missing file, and skip a malformed line as OpenSSH does.

    Raises:
        OSError: a file exists and cannot be read.
    """
    found = []
    for file in files:
        try:
            text = Path(file).expanduser().read_bytes().decode(errors="replace")
        except FileNotFoundError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", "@revoked"):
                continue  # @cert-authority: host certificates are not supported
            try:
                blob = base64.b64decode(fields[2], validate=True)
            except (ValueError, binascii.Error):
                continue
            found.append(
                Entry(
                    file, number, tuple(fields[0].split(",")), fields[1], blob, marker == "@revoked"
                )
            )
    return tuple(found)


def name_of(host: str, port: int) -> str:
    """Return the name that known_hosts uses for a host and port."""
    return host.lower() if port == STANDARD_PORT else f"[{host.lower()}]:{port}"


def algorithms(entries: Iterable[Entry], name: str) -> tuple[str, ...]:
    """Return the algorithms of a host's known keys, in the order of the lines."""
    return tuple(
        dict.fromkeys(
            entry.algorithm for entry in entries if not entry.revoked and entry.applies_to(name)
        )
    )


def judge(entries: Iterable[Entry], host: str, port: int, blob: bytes) -> Judgement:
    name = name_of(host, port)
    named = [entry for entry in entries if entry.applies_to(name)]
    # OpenSSH also accepts a key that is known for the host on the standard port.
    plain = [entry for entry in entries if port != STANDARD_PORT and entry.applies_to(host.lower())]
    for entry in (*named, *plain):
        if entry.revoked and entry.blob == blob:
            return Judgement(KeyStatus.REVOKED, entry)
    for entry in (*named, *plain):
        if not entry.revoked and entry.blob == blob:
            return Judgement(KeyStatus.KNOWN, entry)
    expected = [entry for entry in named if not entry.revoked]
    if not expected:
        return Judgement(KeyStatus.UNKNOWN)
    # Prefer a line of the same algorithm: a person compares the new key with it.
    same = [entry for entry in expected if kind(entry.blob) == kind(blob)]
    return Judgement(KeyStatus.CHANGED, (same or expected)[0])


def kind(blob: bytes) -> str:
    """Return the common name of a public key blob's algorithm: ED25519, RSA, ECDSA."""
    size = int.from_bytes(blob[:4], "big")
    text = blob[4 : 4 + size].decode(errors="replace")
    return text.removeprefix("ssh-").removeprefix("sk-").split("-")[0].upper()


def fingerprint(blob: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def line_for(host: str, port: int, algorithm: str, blob: bytes, hashed: bool) -> str:
    name = name_of(host, port)
    if hashed:
        salt = os.urandom(hashlib.sha1().digest_size)
        digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    return f"{name} {algorithm} {base64.b64encode(blob).decode()}"


def append(file: str, line: str) -> None:
    """Append a line to a file. A new file and folder are accessible to this user only.

    The file's last line may lack its newline.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(file).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "r+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        torn = b"\n" if size and os.pread(handle, 1, size - 1) != b"\n" else b""
        stream.write(torn + line.encode() + b"\n")
        os.fsync(handle)
