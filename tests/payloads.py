"""Reads what a server keeps, whether or not this run of the tests encrypts it."""

from __future__ import annotations

from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client

from relaunch.config import read_settings
from relaunch.encryption import read_codec


def decrypt(payload: Payload) -> Payload:
    return read_codec(read_settings()).decrypt(payload)


async def read_failure(client: Client, failure: Failure) -> str:
    """Return the message of a failure, and the stack trace below it."""
    copy = Failure()
    copy.CopyFrom(failure)
    await client.data_converter.decode_failure(copy)  # which writes into it
    return f"{copy.message}\n{copy.stack_trace}"
