"""Register the server's namespace with our retention, and our search attributes in it.

Repeating it changes nothing. It starts no worker and changes nothing else in a namespace.
"""

from __future__ import annotations

import asyncio
import sys
import time

from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from relaunch.config import ConfigError, read_settings
from relaunch.interpreter import leave
from relaunch.temporal import RETENTION, connect, ensure_namespace

REGISTRATION_TIMEOUT = 60.0
"""Seconds; the server's services look every ten seconds whether there are new namespaces."""
AGAIN_AFTER = 0.5
FAILED = 1


async def prepare(client: Client, known_within: float = REGISTRATION_TIMEOUT) -> str:
    """Return, in words, whether the client's namespace was there.

    Raises:
        ConfigError: it has a search attribute of another type, or the server learns of it too late.
        RPCError: the server refuses.
    """
    request = RegisterNamespaceRequest(namespace=client.namespace, description="relaunch")
    request.workflow_execution_retention_period.FromTimedelta(RETENTION)
    found = "registered"
    try:
        await client.workflow_service.register_namespace(request)
    except RPCError as error:
        if error.status != RPCStatusCode.ALREADY_EXISTS:
            raise
        found = "there already"
    deadline = time.monotonic() + known_within
    while True:
        try:
            await ensure_namespace(client)
            return found
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"namespace {client.namespace} is registered, "
                    f"but the server did not know it within {known_within:g} s"
                ) from None
        await asyncio.sleep(AGAIN_AFTER)


async def main() -> int:
    try:
        client = await connect(read_settings().state, payloads=False)
        found = await prepare(client)
    except ConfigError as mistake:
        sys.stderr.write(f"namespace.py: {mistake}\n")
    except RPCError as error:
        sys.stderr.write(
            f"namespace.py: the Temporal server refuses: {error.message} ({error.status.name})\n"
        )
    else:
        sys.stdout.write(
            f"namespace {client.namespace} {found}, it knows relaunch's search attributes\n"
        )
        return 0
    return FAILED


if __name__ == "__main__":
    leave(asyncio.run(main()))
