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
COMPRESSED = b"json/zlib"


@cache
def _make_adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


class _JsonConverter(PydanticJSONPlainPayloadConverter):
    def to_payload(self, value: Any) -> Payload | None:
        payload = super().to_payload(value)
        if payload is not None and len(payload.data) > MAX_PLAIN_BYTES:
            payload.metadata["encoding"] = COMPRESSED
            payload.data = zlib.compress(payload.data)
        return payload

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        # A newer release may have written it: fields that are not known here are left out, so that
        # jobs can return to this one. Files and messages of people are checked elsewhere.
        adapter = _make_adapter(Any if type_hint is None else type_hint)
        return adapter.validate_json(payload.data, extra="ignore")


class _CompressedJsonConverter(EncodingPayloadConverter):
    """Reads what `_JsonConverter` has compressed."""

    @property
    def encoding(self) -> str:
        return COMPRESSED.decode()

    def to_payload(self, value: Any) -> Payload | None:
        return None

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        """Raises:
        ValueError: The payload is damaged, or longer than `MAX_DECOMPRESSED_BYTES`.
        """
        return _JsonConverter().from_payload(expand(payload), type_hint)


def expand(payload: Payload) -> Payload:
    """Return a compressed payload as plain JSON, and any other as it is.

    Raises:
        ValueError: It is damaged, or longer than `MAX_DECOMPRESSED_BYTES`.
    """
    if payload.metadata.get("encoding") != COMPRESSED:
        return payload
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(payload.data, MAX_DECOMPRESSED_BYTES)
    except zlib.error as error:
        raise ValueError(f"a compressed payload cannot be read: {error}") from error
    if not decompressor.eof:
        raise ValueError(
            f"a compressed payload is cut off, or longer than {MAX_DECOMPRESSED_BYTES >> 20} MiB"
        )
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
