"""The fleet file, as validated values.

Reading the file (YAML, lines, paths) is the command line's.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from relaunch.fields import Duration, Name, Strict
from relaunch.spec.job import EcsTask, SecretReference


def _share(value: int | str) -> int | str:
    """A number of nodes, or a share of them such as 25%."""
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{value} is not a limit: 1 or more nodes, or a share of them such as 25%")
    elif not re.fullmatch(r"(100|[1-9]?[0-9])%", value):
        raise ValueError(f"{value!r} is not a share: write it like 25%")
    return value


def _address(value: str) -> str:
    if not re.fullmatch(r"[^\s@/\[\]\x00-\x1f-][^\s@/\[\]\x00-\x1f]*", value):
        raise ValueError(f"{value!r} is not an address: a host's name or IP address alone; who logs in is `user`, and where is `port`")
    return value


def _user(value: str) -> str:
    if not re.fullmatch(r"[^\s@:\x00-\x1f-][^\s:\x00-\x1f]*", value):
        raise ValueError(f"{value!r} is not a user: a login name of the nodes")
    return value


JUMP_PATTERN = re.compile(
    r"(?:(?P<user>[^\s@:,-][^\s:,]*)@)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s@:,/\[\]-][^\s@:,/\[\]]*)(?::(?P<port>\d{1,5}))?"
)


def parse_jumps(value: str) -> tuple[tuple[str | None, str, int | None], ...]:
    """User, host and port of each host of a ProxyJump, in the order in which they are gone through."""
    if value.lower() == "none":
        return ()
    found = []
    for part in value.split(","):
        match = JUMP_PATTERN.fullmatch(part.strip())
        port = None if match is None or match["port"] is None else int(match["port"])
        if match is None or port == 0 or (port or 0) > 65535:
            raise ValueError(f"{value!r} is no way to a node: hosts such as me@jump:22, separated by commas, or none")
        found.append((match["user"], match["host"].strip("[]"), port))
    return tuple(found)


def _jumps(value: str) -> str:
    parse_jumps(value)
    return value


class Power(Strict):
    cycle: tuple[str, ...] = Field(min_length=1)


class FleetNode(Strict):
    name: Name
    address: Annotated[str, AfterValidator(_address)]
    """Where its controller reaches it: of `ssh`, what one would type after that word, also a Host of the SSH configuration; of `ecs`, the
    id of its EC2 instance."""
    network: Annotated[str, AfterValidator(_address)] | None = None
    """Its address on the network that ranks talk over, where that is another."""
    user: Annotated[str, AfterValidator(_user)] | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    gpus: int = Field(default=0, ge=0)
    spare: bool = False
    power: Power | None = None

    @property
    def login(self) -> str:
        """Where and as whom its agent is reached, for people: `train@10.0.0.7:2222`."""
        login = f"{self.user}@{self.address}" if self.user else self.address
        return f"{login}:{self.port}" if self.port else login


class FleetLimits(Strict):
    """What keeps one mistake from taking a whole fleet down. A share is of the fleet's nodes, rounded down, and at least one."""

    repairs_at_once: Annotated[int | str, AfterValidator(_share)] = 2
    nodes_out: Annotated[int | str, AfterValidator(_share)] = "25%"
    """Suspect, in repair or quarantined by relaunch itself; one more opens the breaker. What a person quarantined does not count."""
    reboots_per_hour: int = Field(default=10, ge=1)
    """One more opens the breaker."""
    replacement_wait: Duration = timedelta(minutes=10)
    """How long two jobs that each hold nodes and wait for more may stand in each other's way, before one gives way."""
    drain_within: Duration = timedelta(hours=2)
    """How long a job may stay on a node that has to be examined because of another one that was there: longer than most take from one
    checkpoint to the next, and than most evaluations."""

    def of(self, limit: Literal["repairs_at_once", "nodes_out"], nodes: int) -> int:
        """The limit as a number of nodes, for a fleet of so many."""
        value = self.repairs_at_once if limit == "repairs_at_once" else self.nodes_out
        return value if isinstance(value, int) else max(1, nodes * int(value.removesuffix("%")) // 100)


class SshOptions(Strict):
    """How nodes are logged in to. What is not said here is as ~/.ssh/config has it, and else as OpenSSH does it."""

    user: Annotated[str, AfterValidator(_user)] | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    key: str | None = None
    """A private key's file, and no other is tried then."""
    known_hosts: str | None = None
    config: str | None = None
    """Read instead of ~/.ssh/config."""
    proxy_jump: Annotated[str, AfterValidator(_jumps)] | None = None
    """Hosts to go through, in order, as OpenSSH's ProxyJump has them; none: directly, whatever ~/.ssh/config says."""
    python: str = "python3"
    """Of the nodes. It becomes part of a command line there."""
    sudo: bool = False
    """Whether a node is rebooted and its GPUs are reset by `sudo -n`, where its user is not root."""

    @field_validator("python")
    @classmethod
    def _of_harmless_letters(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*|(/[A-Za-z0-9._+-]+)+", value):
            raise ValueError(f"{value!r} is not a Python of the nodes: a name such as python3.11, or an absolute path of plain letters")
        return value


class EcsTables(Strict):
    """DynamoDB tables that mirror what goes on, for dashboards: written, never read."""

    task: str | None = None
    job: str | None = None
    node: str | None = None


class EcsOptions(EcsTask):
    """The cluster of a fleet whose nodes are container instances, and what relaunch may use of its account. What is None may be in the
    worker's environment, by the names that the settings reference lists."""

    cluster: str | None = None
    """Name or ARN."""
    region: str | None = None
    """None: as boto3 finds it."""
    node_task: str | None = None
    """Task definition that examines a node: the node image, with its output in CloudWatch Logs."""
    health_check: str | None = None
    """Task definition of one's own that examines a node by exit code: 0 healthy, 1 faulty, anything else tells nothing."""
    queue: str | None = None
    """URL of the SQS queue that has the cluster's events."""
    topic: str | None = None
    """ARN of the SNS topic that is told when a person is needed."""
    tables: EcsTables = EcsTables()
    agent_key: SecretReference | None = None
    """Where the worker reads the key of the agents inside ranks' containers: what task definitions have as secret RELAUNCH_AGENT_KEY."""
    poll: Duration = timedelta(seconds=10)
    """Between two looks at the tasks of running jobs; events make it quicker."""


class FleetSpec(Strict):
    """A fleet file."""

    name: Name
    backend: Literal["local", "ssh", "ecs", "simulated"]
    repairs: Literal["act", "ask", "observe"] = "ask"
    nodes: tuple[FleetNode, ...] = Field(min_length=1)
    limits: FleetLimits = FleetLimits()
    ssh: SshOptions = SshOptions()
    ecs: EcsOptions = EcsOptions()

    @field_validator("nodes")
    @classmethod
    def _distinct(cls, value: tuple[FleetNode, ...]) -> tuple[FleetNode, ...]:
        for field in ("name", "address", "network"):
            seen: dict[tuple[str, int | None], str] = {}
            for node in value:
                text = getattr(node, field)
                # Behind one address there may be several, each on a port of its own.
                key = (text, node.port if field == "address" else None)
                if text is not None and key in seen:
                    raise ValueError(f"nodes {seen[key]} and {node.name} have the same {field} {text!r}: each node has its own")
                seen[key] = node.name
        return value
