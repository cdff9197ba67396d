"""The data converter between Python values and JSON for everything sent through Temporal.

Clients get it from one place: `temporal.data_converter`.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultFailureConverter,
    DefaultFailureConverterWithEncodedAttributes,
    DefaultPayloadConverter,
    EncodingPayloadConverter,
    JSONPlainPayloadConverter,
    PayloadCodec,
)

MAX_PLAIN_BYTES = 256 * 1024
"""A longer payload is compressed. The web UI cannot show it then, but a person could not read it
there either. The server refuses payloads above 2 MiB: the state of 10,000 nodes and as many jobs is
10 MiB of JSON, or 0.6 compressed (docs/decisions/0050-one-workflow-per-fleet.md)."""
MAX_DECOMPRESSED_BYTES = 64 * 1024 * 1024
"""More is not read: a payload that claims to be larger was not written by relaunch."""
MAX_VALUES = 4_000_000
"""Most values of a payload, as a count of its commas and brackets: ten times those of the largest
state. 64 MiB of empty lists are 60 KiB compressed, and gigabytes of objects."""
MAX_MESSAGE_BYTES, MAX_MESSAGE_VALUES = 8 * 1024 * 1024, 500_000
"""The same for a payload whose type is not known before it is read, such as a signal's, which
anyone may have written. The claim of a job on 10,000 nodes has 2 MiB."""
COMPRESSED = b"json/zlib"


@cache
def _make_adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _is_message(type_hint: Any) -> bool:
    return type_hint is None or type_hint is Any


def _read(data: bytes, type_hint: Any) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It does not fit the type, or has more values than any that relaunch writes, as
            far as that is seen without reading it.
    """
    most = MAX_MESSAGE_VALUES if _is_message(type_hint) else MAX_VALUES
    if len(data) > most and data.count(b",") + data.count(b"[") + data.count(b"{") > most:
        raise ValueError(f"a payload has more than {most:,} values")
    # A newer release may have written it: fields that are not known here are left out, so that jobs
    # can return to this one. Files and messages of people are checked elsewhere.
    adapter = _make_adapter(Any if type_hint is None else type_hint)
    return adapter.validate_json(data, extra="ignore")


class _JsonConverter(PydanticJSONPlainPayloadConverter):
    def to_payload(self, value: Any) -> Payload | None:
        payload = super().to_payload(value)
        if payload is not None and len(payload.data) > MAX_PLAIN_BYTES:
            payload.metadata["encoding"] = COMPRESSED
            payload.data = zlib.compress(payload.data)
        return payload

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        return _read(payload.data, type_hint)


class _CompressedJsonConverter(EncodingPayloadConverter):
    """Reads what `_JsonConverter` has compressed."""

    @property
    def encoding(self) -> str:
        return COMPRESSED.decode()

    def to_payload(self, value: Any) -> Payload | None:
        return None

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        """Raises:
        ValueError: The payload is damaged, or longer than `MAX_DECOMPRESSED_BYTES`, or than
            `MAX_MESSAGE_BYTES` if its type is not known.
        """
        most = MAX_MESSAGE_BYTES if _is_message(type_hint) else MAX_DECOMPRESSED_BYTES
        return _JsonConverter().from_payload(expand(payload, most), type_hint)


def expand(payload: Payload, most: int = MAX_DECOMPRESSED_BYTES) -> Payload:
    """Return a compressed payload as plain JSON, and any other as it is.

    Args:
        payload: The payload.
        most: Maximum number of bytes of the JSON.

    Raises:
        ValueError: It is damaged, or longer.
    """
    if payload.metadata.get("encoding") != COMPRESSED:
        return payload
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(payload.data, most)
    except zlib.error as error:
        raise ValueError(f"a compressed payload cannot be read: {error}") from error
    if not decompressor.eof:
        raise ValueError(f"a compressed payload is cut off, or longer than {most >> 20} MiB")
    return Payload(metadata={"encoding": b"json/plain"}, data=data)


class SharedPayloadConverter(CompositePayloadConverter):
    def __init__(self) -> None:
        super().__init__(
            *(
                _JsonConverter() if isinstance(one, JSONPlainPayloadConverter) else one
                for one in DefaultPayloadConverter.default_encoding_payload_converters
            ),
            _CompressedJsonConverter(),
        )


shared_converter = DataConverter(payload_converter_class=SharedPayloadConverter)


def make_converter(codec: PayloadCodec, encrypts: bool) -> DataConverter:
    """Return the shared converter with a codec.

    With `encrypts`, messages and stack traces of failures go into a payload, too, and the server
    has "Encoded failure" in their place. Without, they stay readable in the web UI.
    """
    failures = DefaultFailureConverterWithEncodedAttributes if encrypts else DefaultFailureConverter
    return replace(shared_converter, payload_codec=codec, failure_converter_class=failures)
