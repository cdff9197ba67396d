"""Reads what a server keeps, whether or not this run of the tests encrypts it."""

from __future__ import annotations

import json

from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure

from relaunch.config import read_settings
from relaunch.encryption import read_codec


def decrypt(payload: Payload) -> Payload:
    return read_codec(read_settings(strict=False)).decrypt(payload)


def read_failure(failure: Failure) -> str:
    """Return the message of a failure, and the stack trace below it."""
    if not failure.HasField("encoded_attributes"):
        return f"{failure.message}\n{failure.stack_trace}"
    encoded = json.loads(decrypt(failure.encoded_attributes).data)
    return f"{encoded['message']}\n{encoded['stack_trace']}"
