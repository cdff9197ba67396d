"""Large payloads are compressed, small ones stay readable in the web UI."""

from __future__ import annotations

import zlib

import pytest
from temporalio.api.common.v1 import Payload

from relaunch.converter import (
    MAX_DECOMPRESSED_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_VALUES,
    MAX_PLAIN_BYTES,
    shared_converter,
)
from relaunch.evidence.observations import RankError

CONVERTER = shared_converter.payload_converter


def test_a_small_payload_stays_readable_in_the_web_ui() -> None:
    (payload,) = CONVERTER.to_payloads([RankError("bad", "line", 1.0)])
    assert payload.metadata["encoding"] == b"json/plain"
    assert b'"bad"' in payload.data


def test_a_large_payload_is_compressed_and_read_again() -> None:
    error = RankError("bad", "line\n" * MAX_PLAIN_BYTES, 1.0)
    (payload,) = CONVERTER.to_payloads([error])
    assert payload.metadata["encoding"] == b"json/zlib"
    assert len(payload.data) < MAX_PLAIN_BYTES / 8
    assert CONVERTER.from_payloads([payload], [RankError]) == [error]
    (untyped,) = CONVERTER.from_payloads([payload])
    assert untyped["traceback"] == error.traceback


def compressed(data: bytes) -> Payload:
    return Payload(metadata={"encoding": b"json/zlib"}, data=data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"not zlib", "cannot be read"),
        (zlib.compress(b"[1, 2, 3]")[:-6], "cut off"),
        (zlib.compress(b" " * (MAX_MESSAGE_BYTES + 1)), "longer than 8 MiB"),
        (zlib.compress(b"[" + b"[]," * MAX_MESSAGE_VALUES + b"1]"), "more than 500,000 values"),
    ],
)
def test_a_damaged_payload_is_refused_in_a_sentence(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CONVERTER.from_payloads([compressed(data)])


def test_a_state_may_be_longer_than_a_message() -> None:
    state = compressed(zlib.compress(b'"' + b" " * MAX_MESSAGE_BYTES + b'"'))
    assert len(CONVERTER.from_payloads([state], [str])[0]) == MAX_MESSAGE_BYTES
    endless = compressed(zlib.compress(b" " * (MAX_DECOMPRESSED_BYTES + 1)))
    with pytest.raises(ValueError, match="longer than 64 MiB"):
        CONVERTER.from_payloads([endless], [str])
