"""Encrypts what passes through Temporal, so that its server stores what it cannot read.

The format is that of Temporal's own samples: AES-256-GCM, a nonce of 12 bytes before the text, and
the id of the key in the payload's metadata. Payloads without it were written without a key, and are
read as they are. Keys come from a folder or a variable: docs/encryption.md.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from temporalio.activity import _CompleteAsyncError
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadCodec
from temporalio.exceptions import ApplicationError

from relaunch.config import KEYRING_VARIABLE, NO_KEY, ConfigError, Settings
from relaunch.messages.seals import PLAIN_PAYLOAD, REQUIRED, SEALED

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from temporalio.client import Client

ENCODING = b"binary/encrypted"
KEY_ID = "encryption-key-id"
CIPHER = "encryption-cipher"
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_KEY_ID = 64
"""Bytes of an id that are looked at: one more than any has."""
MAX_KEY_FILE_BYTES = 1000
PLAIN_PROGRESS = (
    "its progress is not encrypted with a key of this worker, which takes no other"
    " (RELAUNCH_ENCRYPTION_REQUIRED): a worker without the keys wrote it"
)


class UnreadablePayloadError(ConfigError):
    """A payload whose key is not here. The message names the key, and where it was looked for."""


class KeyStore:
    """Keys by id. Those in a folder may be added or replaced while the process runs."""

    def __init__(
        self, folder: Path | None = None, given: Mapping[str, bytes] | None = None
    ) -> None:
        self._folder = folder
        self._given = dict(given or {})
        self._known: dict[str, tuple[bytes, AESGCM]] = {}

    @property
    def place(self) -> str:
        """Where keys are looked for, as in "it is not in …"."""
        if self._folder is not None:
            return f"folder {self._folder}"
        return KEYRING_VARIABLE

    def list_ids(self) -> list[str]:
        """Return the ids of all keys.

        Raises:
            ConfigError: The folder cannot be read.
        """
        if self._folder is None:
            return sorted(self._given)
        try:
            # A mounted Kubernetes secret has `..data` beside its keys.
            return sorted(
                one.name for one in self._folder.iterdir() if KEY_NAME.fullmatch(one.name)
            )
        except OSError as error:
            raise ConfigError(
                f"RELAUNCH_ENCRYPTION_KEYS is {self._folder}, which cannot be read:"
                f" {error.strerror}; expected a folder with a file for each key"
            ) from None

    def find(self, id: str) -> AESGCM | None:
        """Return a key, from memory if it was read before; None: it is not there.

        Raises:
            ConfigError: Its file cannot be used.
        """
        return self._known[id][1] if id in self._known else self.read_again(id)

    def read_again(self, id: str) -> AESGCM | None:
        """Return a key as it is now; None: it is not there, or it is the one that is known.

        Raises:
            ConfigError: Its file cannot be used.
        """
        if not KEY_NAME.fullmatch(id):
            return None  # an id is a file's name, and it comes from the server
        key = self._given.get(id) if self._folder is None else _read_key(self._folder / id)
        if key is None or (id in self._known and self._known[id][0] == key):
            return None
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher = AESGCM(key)
        self._known[id] = key, cipher
        return cipher


class EncryptionCodec(PayloadCodec):
    """Encrypts with one key, and decrypts with all of a ring.

    Args:
        ring: The keys; None: this process has none.
        active: The id of the key that encrypts; None: what is written is not encrypted.
        required: Whether payloads that are not encrypted are refused, where that is asked for.
    """

    def __init__(
        self, ring: KeyStore | None = None, active: str | None = None, required: bool = False
    ) -> None:
        self._ring = ring
        self.active = active
        self.required = required

    @property
    def has_keys(self) -> bool:
        return self._ring is not None

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self.encrypt(one) for one in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return payloads that say which of them were encrypted (`SEALED`).

        Raises:
            UnreadablePayloadError: A payload's key is not here, or is not the one it was written
                with.
        """
        return [_seal(self.decrypt(one), one) for one in payloads]

    def encrypt(self, payload: Payload) -> Payload:
        if self.active is None:
            return payload
        cipher = self._ring.find(self.active) if self._ring is not None else None
        if cipher is None:
            raise self._miss(self.active)
        if self.required:
            payload = Payload(metadata={**payload.metadata, REQUIRED: b"1"}, data=payload.data)
        nonce = os.urandom(NONCE_BYTES)
        return Payload(
            metadata={
                "encoding": ENCODING,
                KEY_ID: self.active.encode(),
                CIPHER: b"AES-256-GCM",
            },
            data=nonce + cipher.encrypt(nonce, payload.SerializeToString(), None),
        )

    def decrypt(self, payload: Payload) -> Payload:
        """Return what was encrypted; a payload that was not is returned as it is.

        Raises:
            UnreadablePayloadError: see `decode`.
        """
        if payload.metadata.get("encoding") != ENCODING:
            return payload
        id = payload.metadata.get(KEY_ID, b"")[:MAX_KEY_ID].decode(errors="replace")
        cipher = self._ring.find(id) if self._ring is not None else None
        if cipher is None:
            raise self._miss(id)
        text = _decrypt(cipher, payload.data)
        if text is None and self._ring is not None:
            cipher = self._ring.read_again(id)
            text = None if cipher is None else _decrypt(cipher, payload.data)
        if text is None:
            assert self._ring is not None
            raise UnreadablePayloadError(
                f"a payload cannot be decrypted with key {id!r} of {self._ring.place}: it was"
                " written with another key of this id, or is damaged; expected the key that the"
                " other workers and commands of this namespace have"
            )
        return Payload.FromString(text)

    def _miss(self, id: str) -> UnreadablePayloadError:
        if self._ring is None:
            return UnreadablePayloadError(
                f"a payload is encrypted with key {id!r}, and there are no keys here: set"
                f" RELAUNCH_ENCRYPTION_KEYS to the folder that has it, or {KEYRING_VARIABLE}"
            )
        return UnreadablePayloadError(
            f"a payload is encrypted with key {id!r}, which {self._ring.place} does not have:"
            " add that key there"
        )


class ActivityCodec(PayloadCodec):
    """The codec of a worker's activities: one that cannot be read is left to another worker.

    The SDK fails an activity whose input cannot be decoded, and a failed activity may fail a job.
    This one says to the server that the activity is completed later, so the server offers it again
    after its time-out, as if this worker had been killed. So it does with one that is not encrypted
    where that is required.
    """

    def __init__(self, codec: EncryptionCodec, report: Callable[[str], None]) -> None:
        self._codec, self._report = codec, report

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return await self._codec.encode(payloads)

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        try:
            read = await self._codec.decode(payloads)
            if self._codec.required and not all(SEALED in one.metadata for one in read):
                raise UnreadablePayloadError(
                    "its input is not encrypted, and this worker takes only encrypted ones"
                    " (RELAUNCH_ENCRYPTION_REQUIRED)"
                )
            return read
        except ConfigError as error:
            self._report(f"an activity is left to another worker: {error}")
            raise _CompleteAsyncError from error

    async def check_progress(self, details: Sequence[Payload]) -> None:
        """Prove that an earlier attempt of an activity wrote what it has left, where that is
        required. Left to its time-out, it would have the same details for ever.

        Raises:
            ApplicationError: Someone without the keys wrote it. The activity is ordered again.
        """
        if not self._codec.required:
            return
        try:
            read = await self._codec.decode(details)
        except ConfigError:
            read = list(details)
        if not all(SEALED in one.metadata for one in read):
            self._report(f"an activity is ordered again: {PLAIN_PROGRESS}")
            raise ApplicationError(PLAIN_PROGRESS, type=PLAIN_PAYLOAD, non_retryable=True)


def has_proof(client: Client, read: Payload) -> bool:
    """Return whether what a client has read was encrypted, where that is required.

    What other workers answer to a query, or end a workflow with, may be anyone's.
    """
    codec = client.data_converter.payload_codec
    return not (isinstance(codec, EncryptionCodec) and codec.required) or SEALED in read.metadata


def _seal(read: Payload, stored: Payload) -> Payload:
    """Return a payload that says whether it was encrypted, whatever is written in it."""
    if read is not stored:
        read.metadata[SEALED] = b"1"
    elif SEALED in read.metadata:
        read = Payload(metadata=dict(read.metadata), data=read.data)
        del read.metadata[SEALED]
    return read


def _decrypt(cipher: AESGCM, data: bytes) -> bytes | None:
    from cryptography.exceptions import InvalidTag

    if len(data) < NONCE_BYTES + TAG_BYTES:
        return None
    try:
        return cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], None)
    except InvalidTag:
        return None


def read_codec(settings: Settings) -> EncryptionCodec:
    """Return the codec that the settings describe; without keys, one that only says so.

    Raises:
        ConfigError: A key that the settings name is not there, or cannot be used.
    """
    folder, active = settings.encryption_keys, settings.encryption_key
    required = settings.encryption_required
    if required and active in (None, NO_KEY):
        raise ConfigError(
            "RELAUNCH_ENCRYPTION_REQUIRED is set, and nothing is encrypted: expected"
            " RELAUNCH_ENCRYPTION_KEY to be the id of a key"
        )
    variable = os.environ.get(KEYRING_VARIABLE, "")
    if folder is not None and variable:
        raise ConfigError(
            f"RELAUNCH_ENCRYPTION_KEYS and {KEYRING_VARIABLE} are both set: expected one of them"
        )
    if folder is None and not variable:
        if active in (None, NO_KEY):
            return EncryptionCodec()
        raise ConfigError(
            f"RELAUNCH_ENCRYPTION_KEY is {active!r}, and there are no keys: set"
            f" RELAUNCH_ENCRYPTION_KEYS to the folder that has it, or {KEYRING_VARIABLE}"
        )
    ring = KeyStore(folder, _parse_keyring(variable))
    ids = ring.list_ids()
    if active is None:
        raise ConfigError(
            f"{ring.place} has keys, and RELAUNCH_ENCRYPTION_KEY does not say which one encrypts:"
            f" expected one of {', '.join([*ids, NO_KEY])}"
        )
    if active == NO_KEY:
        return EncryptionCodec(ring)
    if ring.find(active) is None:
        raise ConfigError(
            f"RELAUNCH_ENCRYPTION_KEY is {active!r}, which {ring.place} does not have: expected"
            f" one of {', '.join([*ids, NO_KEY])}"
        )
    return EncryptionCodec(ring, active, required)


def _parse_keyring(variable: str) -> dict[str, bytes]:
    keys = {}
    for number, word in enumerate(variable.split(), 1):
        id, colon, text = word.partition(":")
        if not colon or not KEY_NAME.fullmatch(id):
            # Not the word: it may be a key.
            raise ConfigError(
                f"{KEYRING_VARIABLE}: word {number} is not ID:KEY; expected words such as"
                " 2026-11:KEY, with a KEY of `openssl rand -base64 32`"
            )
        keys[id] = _parse_key(text, f"key {id!r} of {KEYRING_VARIABLE}")
    return keys


def _read_key(path: Path) -> bytes | None:
    try:
        # Without O_NONBLOCK a named pipe would block the worker.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"key file {path} is not a file")
            if found.st_uid not in (0, os.geteuid()):
                raise ConfigError(
                    f"key file {path} belongs to user {found.st_uid}, expected user"
                    f" {os.geteuid()} or root"
                )
            if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise ConfigError(
                    f"key file {path} has mode {stat.S_IMODE(found.st_mode):04o}, expected 0600:"
                    " others must not read it"
                )
            content = file.read(MAX_KEY_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from None
    return _parse_key(content.decode(errors="replace").strip(), f"key file {path}")


def _parse_key(text: str, name: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{name} is not a key: expected {KEY_BYTES} bytes in base64, as"
            f" `openssl rand -base64 {KEY_BYTES}` writes them"
        )
    return key
