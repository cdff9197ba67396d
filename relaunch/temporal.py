"""How starter and worker reach Temporal: address, data converter, and required namespace setup.

The address is never guessed: without TEMPORAL_ADDRESS and without an `up` running on this state
folder, there is no connection. The server of an `up` is reached without TLS, API key or a namespace
of the configuration: it has none of them, and they are for another server.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from relaunch.config import ConfigError, Settings, read_settings
from relaunch.credentials import (
    CONFIG_FILE,
    Credentials,
    ServerUnavailable,
    explain_answer,
    explain_failure,
    read_credentials,
)

if TYPE_CHECKING:
    from temporalio.api.common.v1 import Payload
    from temporalio.client import Client
    from temporalio.converter import DataConverter
    from temporalio.runtime import Runtime
    from temporalio.service import RPCError

UP_FILE = "up.json"
CONNECT_TIMEOUT_S = 10.0
"""Seconds: more than a server needs to restart (under 1 s), less than a person would wait."""
CHECK_TIMEOUT = timedelta(seconds=5)
MAX_CALLS = 32
"""Most histories that are read at once."""
RETENTION = timedelta(days=30)
KEYWORD, INT, KEYWORD_LIST = "Keyword", "Int", "KeywordList"
SEARCH_ATTRIBUTES = {
    "Phase": KEYWORD,
    "Cause": KEYWORD,
    "Strategy": KEYWORD,
    "Nodes": KEYWORD_LIST,
    "Generation": INT,
}
_runtimes: list[Runtime] = []
"""The SDK's runtime of this process, once it is needed."""


@dataclass(frozen=True)
class UpProcess:
    """A running `relaunch up`, as it describes itself in its state folder."""

    address: str
    ui: str
    pid: int
    started: int
    """Start time of the process, from the kernel: the pid alone may have been reused."""
    backends: Mapping[str, str]
    """The kind of machine of each fleet of its worker, by the fleet's name; empty without one."""


def data_converter(settings: Settings | None = None) -> DataConverter:
    """Return the shared converter of clients, workers and tests.

    It encrypts if the settings name a key; by default those of the environment and the file.

    It is pydantic's, with type adapters cached for the whole process. The SDK makes a converter for
    each workflow instance, and its own keeps the type adapters for that instance only: it takes 70
    ms to build them for each job that is started or replayed, and memory holds a thousand copies
    (`benchmarks/many.py` failed workflow tasks because of it).

    Raises:
        ConfigError: the settings name keys that cannot be used.
    """
    from relaunch.converter import make_converter
    from relaunch.encryption import read_codec

    codec = read_codec(settings or read_settings(strict=False))
    return make_converter(codec, encrypts=codec.active is not None)


def read_start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot.

    Return None if there is no such process, or only a zombie.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # Field 2 is the name in parentheses and may contain anything, also half a letter; field 3 is
    # the state, 22 the start time.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def find_running_up(state: Path) -> UpProcess | None:
    """Return the `up` that runs on this state folder, if there is one."""
    try:
        up = UpProcess(**json.loads((state / UP_FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return up if read_start_time(up.pid) == up.started else None


def find_backend(state: Path, fleet: str) -> str | None:
    """Return what kind of machine a fleet's nodes are, if the `up` on this folder serves it.

    None: commands reach another server, whose worker may be on another machine, or none.

    Raises:
        ConfigError: Temporal's configuration cannot be used.
    """
    up = find_running_up(state)
    if up is None or read_configured_address() not in (None, up.address):
        return None
    return up.backends.get(fleet)


def read_configured_address() -> str | None:
    """Return the address that Temporal's configuration names, in the environment or in its file.

    Raises:
        ConfigError: It cannot be used.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if (
        not any(name.startswith("TEMPORAL_") for name in os.environ)
        and not Path(home, "temporalio", "temporal.toml").exists()
    ):
        return None  # without the import, which would delay the start of ranks
    return read_credentials().config.get("target_host") or None


def make_embedded_environment(address: str) -> dict[str, str]:
    """Return this process's environment with Temporal's configuration replaced, for children.

    They reach the server at that address, which is one of `up`, and nothing of the configuration
    for another server counts.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
    return {**ours, "TEMPORAL_ADDRESS": address, CONFIG_FILE: os.devnull}


def write_up(state: Path, address: str, ui: str, backends: Mapping[str, str]) -> None:
    pid = os.getpid()
    temporary = state / f"{UP_FILE}.{pid}"
    up = UpProcess(address, ui, pid, read_start_time(pid) or 0, backends)
    temporary.write_text(json.dumps(asdict(up)))
    temporary.replace(state / UP_FILE)


async def connect(state: Path, address: str | None = None, *, payloads: bool = True) -> Client:
    """Connect to the server of Temporal's own configuration, or to the `up` that runs on `state`.

    Args:
        state: The state folder.
        address: That of a server of `up`, instead.
        payloads: Whether any are read or written, which takes the keys of those that are there.

    Raises:
        ConfigError: no server is named, none answers, the configuration cannot be used, or the
            server refuses what it has. ServerUnavailable, if that may change by itself.
    """
    credentials = Credentials({}) if address else read_credentials()
    target = address or credentials.config.get("target_host")
    if not target:
        up = find_running_up(state)
        if up is None:
            raise ConfigError(
                f"no server: TEMPORAL_ADDRESS is not set and no `relaunch up` runs on {state};"
                " start one in another terminal"
            )
        target, credentials = up.address, Credentials({})
    client = await connect_with(credentials, target)
    if payloads:
        await check_keys(client)
    return client


def set_runtime(runtime: Runtime) -> None:
    """Set the SDK's runtime of this process, before the first connection. Only workers have one
    that differs."""
    from temporalio.runtime import Runtime

    Runtime.set_default(runtime)
    _runtimes.append(runtime)


def _get_runtime() -> Runtime:
    """Return the SDK's runtime of this process.

    By default it prints no log: the SDK would write that to standard output, among the results of
    commands, which say themselves what went wrong.
    """
    from temporalio.runtime import Runtime, TelemetryConfig

    if not _runtimes:
        _runtimes.append(Runtime(telemetry=TelemetryConfig(logging=None)))
    return _runtimes[0]


async def connect_with(credentials: Credentials, target: str) -> Client:
    """Connect to a server; raises as `connect` does."""
    from temporalio.client import Client

    config = credentials.config.copy()
    config["target_host"] = target
    try:
        return await asyncio.wait_for(
            Client.connect(**config, data_converter=data_converter(), runtime=_get_runtime()),
            CONNECT_TIMEOUT_S,
        )
    except TimeoutError:
        raise ServerUnavailable(
            f"the Temporal server at {target} did not answer within {CONNECT_TIMEOUT_S:g} s"
        ) from None
    except (RuntimeError, ValueError) as error:
        # the SDK raises these for refused, unresolvable and malformed addresses, and for TLS
        raise explain_failure(str(error), target, credentials, datetime.now(UTC)) from None


BROKEN_CONNECTION = ("transport error", "h2 protocol error", "error reading a body from connection")
"""Messages of the SDK's native part (tonic and hyper) for a call whose server was killed. They come
as UNKNOWN or INTERNAL, and not as UNAVAILABLE."""


def is_away(error: RPCError) -> bool:
    """Return whether a call failed because no server took it, or because the server ended."""
    from temporalio.service import RPCStatusCode

    return error.status is RPCStatusCode.UNAVAILABLE or any(
        one in error.message for one in BROKEN_CONNECTION
    )


def explain_refusal(error: RPCError) -> ConfigError:
    """Return the sentence for a call that the server, or a proxy before it, refused."""
    try:
        credentials = read_credentials()
    except ConfigError:  # its file was removed since this process connected
        credentials = Credentials({})
    code = error.status.name.title().replace("_", "")
    target = credentials.config.get("target_host")
    found = explain_answer(code, error.message, target, credentials) if target else None
    if found is None and any(one in error.message for one in BROKEN_CONNECTION):
        return ServerUnavailable(
            f"the connection to the Temporal server broke: {error.message}; expected a server that"
            " goes on"
        )
    return found or ConfigError(
        f"the Temporal server refused the request: {error.message} ({error.status.name})"
    )


async def check_keys(client: Client, workflows: int = 10, histories: int = 1) -> None:
    """Prove that this process can read what the namespace has, before it writes anything there.

    The running workflows come first, then those that ended last. Of each the memo is read, and of
    some the first event: it may have been written with an older key.

    Args:
        workflows: How many are looked at; each thousand is a call.
        histories: Of how many the first event is read, first of those without a memo; each is a
            call.

    Raises:
        UnreadablePayloadError: A key is missing, or another one has its id.
    """
    from temporalio.service import RPCError

    from relaunch.encryption import KEY_ID, UnreadablePayloadError

    codec = client.data_converter.payload_codec
    assert codec is not None
    proven = set()

    async def prove(id: str, payloads: Iterable[Payload]) -> None:
        for payload in payloads:
            key = payload.metadata.get(KEY_ID)
            if key is None or key in proven:
                continue
            try:
                await codec.decode([payload])
            except ConfigError as error:
                raise UnreadablePayloadError(
                    f"{id} cannot be read, so nothing is done: {error}"
                ) from None
            proven.add(key)

    found = []
    try:
        async for one in client.list_workflows(
            limit=workflows, page_size=min(workflows, 1000), rpc_timeout=CHECK_TIMEOUT
        ):
            memo = one.raw_info.memo.fields
            await prove(one.id, memo.values())
            found.append((bool(memo), one.id, one.run_id))
        found.sort(key=lambda one: one[0])
        for _, id, run_id in found[:histories]:
            await prove(id, await _read_first_input(client, id, run_id))
    except RPCError:
        return  # what is asked of the server next says why, and where


@dataclass(frozen=True, slots=True)
class RunKey:
    """How a run's input is encrypted."""

    id: str | None
    """The id of the key; None: it has none."""
    is_required: bool = False
    """Whether the run takes no message without a key."""


async def read_first_key(client: Client, id: str, run_id: str) -> RunKey | None:
    """Return how a run's input is encrypted; None: the run has ended meanwhile."""
    from temporalio.service import RPCError, RPCStatusCode

    from relaunch.encryption import KEY_ID, UnreadablePayloadError
    from relaunch.messages.seals import REQUIRED

    try:
        payloads = await _read_first_input(client, id, run_id)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return None
    keys = [payload.metadata.get(KEY_ID) for payload in payloads]
    if not keys or not all(keys):
        return RunKey(None)
    codec = client.data_converter.payload_codec
    assert codec is not None
    name = (keys[0] or b"").decode(errors="replace")
    try:
        read = await codec.decode(payloads)
    except UnreadablePayloadError:
        return RunKey(name)
    return RunKey(name, all(REQUIRED in one.metadata for one in read))


async def check_required(client: Client, running: Iterable[tuple[str, str]]) -> None:
    """Prove that all running workflows began with a key, so that none stops if that is required.

    Args:
        client: Reads their histories.
        running: Their ids and run ids.

    Raises:
        ConfigError: One did not.
    """
    gate = asyncio.Semaphore(MAX_CALLS)

    async def find_plain(id: str, run_id: str) -> str | None:
        async with gate:
            key = await read_first_key(client, id, run_id)
        return id if key is not None and key.id is None else None

    found = await asyncio.gather(*(find_plain(*one) for one in running))
    plain = [id for id in found if id is not None]
    if plain:
        more = f" and {len(plain) - 1} more" if plain[1:] else ""
        raise ConfigError(
            f"RELAUNCH_ENCRYPTION_REQUIRED is set, and {plain[0]}{more} began without a key, so"
            " nothing is done: leave it unset until `relaunch doctor` says that all began with one"
        )


async def _read_first_input(client: Client, id: str, run_id: str) -> list[Payload]:
    from temporalio.api.common.v1 import WorkflowExecution
    from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryRequest

    request = GetWorkflowExecutionHistoryRequest(
        namespace=client.namespace,
        execution=WorkflowExecution(workflow_id=id, run_id=run_id),
        maximum_page_size=1,
    )
    read = await client.workflow_service.get_workflow_execution_history(
        request, timeout=CHECK_TIMEOUT
    )
    return [
        payload
        for event in read.history.events
        for payload in event.workflow_execution_started_event_attributes.input.payloads
    ]


async def read_server_id(client: Client) -> str:
    """Return an id that distinguishes this server and namespace from all others.

    It is the id that the server's database gave the namespace at creation. It survives restarts of
    the server, and a namespace keeps it when it is replicated to another cluster.
    """
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

    request = DescribeNamespaceRequest(namespace=client.namespace)
    described = await client.workflow_service.describe_namespace(request)
    return described.namespace_info.id


async def ensure_namespace(client: Client) -> None:
    """Register our search attributes in the namespace and keep closed jobs for `RETENTION`.

    The call is idempotent.

    Raises:
        ConfigError: an attribute of that name exists with another type.
    """
    from google.protobuf.duration_pb2 import Duration
    from temporalio.api.enums.v1 import IndexedValueType
    from temporalio.api.namespace.v1 import NamespaceConfig
    from temporalio.api.operatorservice.v1 import (
        AddSearchAttributesRequest,
        ListSearchAttributesRequest,
    )
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, UpdateNamespaceRequest
    from temporalio.service import RPCError, RPCStatusCode

    types = {
        KEYWORD: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
        INT: IndexedValueType.INDEXED_VALUE_TYPE_INT,
        KEYWORD_LIST: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD_LIST,
    }
    listed = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    known = listed.custom_attributes
    for name, kind in SEARCH_ATTRIBUTES.items():
        if name in known and known[name] != types[kind]:
            raise ConfigError(
                f"search attribute {name} of namespace {client.namespace} is"
                f" {IndexedValueType.Name(known[name])}, expected {kind}: use another namespace"
            )
    if missing := {
        name: types[kind] for name, kind in SEARCH_ATTRIBUTES.items() if name not in known
    }:
        try:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
            )
        except RPCError as error:
            # Another worker has added them first.
            if error.status != RPCStatusCode.ALREADY_EXISTS:
                raise
    described = await client.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=client.namespace)
    )
    if described.config.workflow_execution_retention_ttl.ToTimedelta() < RETENTION:
        retention = Duration()
        retention.FromTimedelta(RETENTION)
        await client.workflow_service.update_namespace(
            UpdateNamespaceRequest(
                namespace=client.namespace,
                config=NamespaceConfig(workflow_execution_retention_ttl=retention),
            )
        )
