"""How starter and worker reach Temporal: address, data converter, and what a namespace must know before jobs run in it.

It refuses to guess: with no TEMPORAL_ADDRESS and no `up` that runs on this state folder, there is no connection.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from relaunch.config import ConfigError

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.converter import DataConverter

UP_FILE = "up.json"
CONNECT_WITHIN = 10.0
"""Seconds: more than a server needs to restart (under 1 s), less than a person waits without asking."""
RETENTION = timedelta(days=30)
KEYWORD, INT, KEYWORD_LIST = "Keyword", "Int", "KeywordList"
SEARCH_ATTRIBUTES = {"Phase": KEYWORD, "Cause": KEYWORD, "Strategy": KEYWORD, "Nodes": KEYWORD_LIST, "Generation": INT}


@dataclass(frozen=True)
class Up:
    """A running `relaunch up`, as it describes itself in its state folder."""

    address: str
    ui: str
    pid: int
    started: int
    """Of the process, by the kernel: a process id alone may belong to somebody else by now."""


def data_converter() -> DataConverter:
    """Return the converter that clients, workers and tests share: pydantic's, with the readers of all types kept for the whole process.

    The SDK makes a converter for each workflow instance, and its own keeps the readers for that instance only: 70 ms of building them
    for each job that is started or replayed, and a thousand copies in memory (`benchmarks/many.py` failed workflow tasks by it).
    """
    from relaunch.converter import shared_converter

    return shared_converter


def process_started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when there is no such process, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 2 is the name in parentheses and may hold anything; 3 is the state, 22 the start.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def running_up(state: Path) -> Up | None:
    """The `up` that runs on this state folder, if there is one."""
    try:
        up = Up(**json.loads((state / UP_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return up if process_started(up.pid) == up.started else None


def write_up(state: Path, address: str, ui: str) -> None:
    pid = os.getpid()
    temporary = state / f"{UP_FILE}.{pid}"
    temporary.write_text(json.dumps(asdict(Up(address, ui, pid, process_started(pid) or 0))))
    temporary.replace(state / UP_FILE)


async def connect(state: Path, address: str | None = None) -> Client:
    """Connect to the server that Temporal's own configuration names, or to the `up` that runs on `state`.

    Raises:
        Mistake: no server is named, none answers, or the configuration cannot be used.
    """
    from temporalio.client import Client
    from temporalio.envconfig import ClientConfig

    try:
        config = ClientConfig.load_client_connect_config()
    except Exception as error:  # the SDK's ConfigError is a bare Exception subclass of its native part
        raise ConfigError(f"the Temporal configuration cannot be used: {error}") from None
    target = address or config.get("target_host")
    if not target:
        up = running_up(state)
        if up is None:
            raise ConfigError(f"no server: TEMPORAL_ADDRESS is not set and no `relaunch up` runs on {state}; start one in another terminal")
        target = up.address
    config["target_host"] = target
    try:
        return await asyncio.wait_for(Client.connect(**config, data_converter=data_converter()), CONNECT_WITHIN)
    except TimeoutError:
        raise ConfigError(f"the Temporal server at {target} did not answer within {CONNECT_WITHIN:g} s") from None
    except (RuntimeError, ValueError) as error:  # what the SDK raises for refused, unresolvable and malformed addresses
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"the Temporal server at {target} cannot be reached: {cause}; expected the host:port of a running server"
        ) from None


async def read_server_id(client: Client) -> str:
    """Return what tells this server, and this namespace of it, from all others.

    It is the id that the server's database gave the namespace when it was made: it outlives restarts
    of the server, and a namespace that is replicated to another cluster keeps it there.
    """
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

    request = DescribeNamespaceRequest(namespace=client.namespace)
    described = await client.workflow_service.describe_namespace(request)
    return described.namespace_info.id


async def ensure_namespace(client: Client) -> None:
    """Make the namespace know our search attributes, and keep closed jobs for `RETENTION`. Repeating it changes nothing.

    Raises:
        Mistake: an attribute of that name exists with another type.
    """
    from google.protobuf.duration_pb2 import Duration
    from temporalio.api.enums.v1 import IndexedValueType
    from temporalio.api.namespace.v1 import NamespaceConfig
    from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, UpdateNamespaceRequest
    from temporalio.service import RPCError, RPCStatusCode

    types = {
        KEYWORD: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
        INT: IndexedValueType.INDEXED_VALUE_TYPE_INT,
        KEYWORD_LIST: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD_LIST,
    }
    listed = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=client.namespace))
    known = listed.custom_attributes
    for name, kind in SEARCH_ATTRIBUTES.items():
        if name in known and known[name] != types[kind]:
            raise ConfigError(
                f"search attribute {name} of namespace {client.namespace} is {IndexedValueType.Name(known[name])}, "
                f"expected {kind}: use another namespace"
            )
    if missing := {name: types[kind] for name, kind in SEARCH_ATTRIBUTES.items() if name not in known}:
        try:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
            )
        except RPCError as error:
            # Another worker was faster.
            if error.status != RPCStatusCode.ALREADY_EXISTS:
                raise
    described = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    if described.config.workflow_execution_retention_ttl.ToTimedelta() < RETENTION:
        retention = Duration()
        retention.FromTimedelta(RETENTION)
        await client.workflow_service.update_namespace(
            UpdateNamespaceRequest(namespace=client.namespace, config=NamespaceConfig(workflow_execution_retention_ttl=retention))
        )
