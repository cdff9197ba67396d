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
    """Return the message of a failure, the stack trace below it, and the same of its causes."""
    message, trace = failure.message, failure.stack_trace
    if failure.HasField("encoded_attributes"):
        encoded = json.loads(decrypt(failure.encoded_attributes).data)
        message, trace = encoded["message"], encoded["stack_trace"]
    cause = f"\n{read_failure(failure.cause)}" if failure.HasField("cause") else ""
    return f"{message}\n{trace}{cause}"
