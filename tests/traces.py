"""Traces as a collector gets them: OTLP's protobuf, as the protocol's own package decodes it."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.receivers import Webhook

GZIP = b"\x1f\x8b"
"""How a body begins that is compressed; a request in protobuf begins otherwise."""


@dataclass(frozen=True)
class ReceivedSpan:
    trace: str
    id: str
    parent: str
    """Empty: it is the root."""
    name: str
    begin: datetime
    end: datetime
    attributes: dict[str, Any]
    events: tuple[str, ...]
    failed: bool
    resource: dict[str, Any]


def decode(body: bytes) -> list[ReceivedSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        ReceivedSpan(
            one.trace_id.hex(),
            one.span_id.hex(),
            one.parent_span_id.hex(),
            one.name,
            _read_time(one.start_time_unix_nano),
            _read_time(one.end_time_unix_nano),
            _read_attributes(one.attributes),
            tuple(event.name for event in one.events),
            one.status.code == one.status.STATUS_CODE_ERROR,
            _read_attributes(resource.resource.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for one in scope.spans
    ]


def list_traces(received: Webhook) -> list[list[ReceivedSpan]]:
    """Return the traces that came, in their order, each with its root first."""
    return [
        decode(gzip.decompress(body) if body.startswith(GZIP) else body)
        for _, body in received.requests
    ]


def _read_time(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def _read_attributes(pairs: Any) -> dict[str, Any]:
    return {one.key: _read_value(one.value) for one in pairs}


def _read_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_read_value(one) for one in value.array_value.values]
    return getattr(value, kind)
