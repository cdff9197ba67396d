"""The data converter between Python values and JSON for everything sent through Temporal.

Clients get it from one place: `temporal.data_converter`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter
from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultPayloadConverter,
    JSONPlainPayloadConverter,
)


@cache
def _make_adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


class _JsonConverter(PydanticJSONPlainPayloadConverter):
    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        # A newer release may have written it: fields that are not known here are left out, so that
        # jobs can return to this one. Files and messages of people are checked elsewhere.
        adapter = _make_adapter(Any if type_hint is None else type_hint)
        return adapter.validate_json(payload.data, extra="ignore")


class SharedPayloadConverter(CompositePayloadConverter):
    def __init__(self) -> None:
        super().__init__(
            *(
                _JsonConverter() if isinstance(one, JSONPlainPayloadConverter) else one
                for one in DefaultPayloadConverter.default_encoding_payload_converters
            )
        )


shared_converter = DataConverter(payload_converter_class=SharedPayloadConverter)
