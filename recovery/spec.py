"""What users write: the job file and the fleet file, as validated values.

Reading the files (YAML, lines, paths) is the console's; what a policy means is `policy`'s.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from recovery.launchers import starts_ranks_itself

NAME_PATTERN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
DURATION_PATTERN = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
# The agent sets these itself, or they would let a job speak in the name of another.
RESERVED_VARIABLES = ("RELAUNCH_", "TORCHELASTIC_")


def parse_name(value: str) -> str:
    """Check a name of a job, a fleet or a node: it becomes a workflow id, a folder and a search attribute."""
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: 1 to 63 letters, digits, '.', '_' or '-', starting and ending with a letter or digit")
    return value


def parse_duration(value: Any) -> Any:
    """Read `90s`, `5m`, `1h30m`, `2d`; anything else is left for pydantic to refuse or accept (timedelta, ISO 8601)."""
    if isinstance(value, bool | int | float):
        raise ValueError(f"{value!r} has no unit: write a duration such as 30s, 5m or 1h30m")
    if isinstance(value, str) and value and not value.startswith("P"):
        match = DURATION_PATTERN.fullmatch(value)
        if not match or not any(match.groups()):
            raise ValueError(f"{value!r} is not a duration: write it like 30s, 5m or 1h30m")
        days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return value


def duration(value: timedelta) -> str:
    """Write a duration as users do: 90s, 5m, 1h30m, 2d."""
    seconds = value.total_seconds()
    if seconds % 1 or seconds < 60:
        return f"{seconds:g}s"
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(int(seconds), size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _not_negative(value: timedelta) -> timedelta:
    if value < timedelta(0):
        raise ValueError(f"{value} is negative: a duration is 0s or more")
    return value


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


Name = Annotated[str, AfterValidator(parse_name)]
Duration = Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(_not_negative)]


def parse_reason(text: str) -> str:
    """Refuse a reason that was given and says nothing.

    Raises:
        ValueError: it is empty or blank.
    """
    if not text.strip():
        raise ValueError("it is empty, expected a clause that says why")
    return text


Reason = Annotated[str, AfterValidator(parse_reason)]
"""Of what a person orders; left out where the message allows that, but never blank."""


class Strict(BaseModel):
    """An edge of the system: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeRange(Strict):
    min: int
    max: int


def parse_nodes(value: Any) -> Any:
    """Read how many nodes a job takes: `4`, `{min: 3, max: 4}`, and `3:4` as flags have it."""
    if isinstance(value, NodeRange) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    written = value
    if isinstance(value, str):
        low, colon, high = value.partition(":")
        if not colon and low.isdecimal():
            return int(low)
        if low.isdecimal() and high.isdecimal():
            value = {"min": int(low), "max": int(high)}
    if isinstance(value, dict) and set(value) == {"min", "max"} and all(type(one) is int for one in value.values()):
        if value["min"] < 1:
            raise ValueError(f"min is {value['min']}: at least 1")
        if value["min"] > value["max"]:
            raise ValueError(f"min is {value['min']} and max is {value['max']}: min must not exceed max")
        return NodeRange(**value)
    raise ValueError(f"{written!r} is not a number of nodes: write it like 4, or {{min: 3, max: 4}} (as a flag 3:4)")


class ProgressSpec(Strict):
    log_pattern: str | None = None
    """A regular expression with a group named `step`, searched in every line a rank prints; a group named `checkpoint` tells the step of
    a checkpoint that is finished, on a line with a step or on one of its own."""

    @field_validator("log_pattern")
    @classmethod
    def _has_step(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            groups = re.compile(value).groupindex
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        if "step" not in groups:
            raise ValueError(f"{value!r} has no group named step: write it like 'step (?P<step>\\d+)'")
        return value


class CheckpointSpec(Strict):
    directory: str


class SecretReference(Strict):
    """Where the worker reads a secret at launch; the secret itself is never stored."""

    file: str | None = None
    env: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise ValueError("a secret has exactly one source: file: PATH or env: NAME")
        return self


class EcsTask(Strict):
    """What a fleet of Amazon ECS runs as one rank: RunTask lays the job's command, environment and GPUs over it."""

    task_definition: Annotated[str, Field(min_length=1)] | None = None
    """Family, family:revision, or ARN; None: the fleet file's."""
    container: Annotated[str, Field(min_length=1)] | None = None
    """Which of its containers trains; None: the only essential one."""


class Metadata(Strict):
    annotations: dict[str, str] = {}


class JobSpec(Strict):
    """A job file."""

    name: Name
    command: tuple[str, ...] = Field(min_length=1)
    nodes: int | NodeRange = 1
    nproc_per_node: int = Field(default=1, ge=1, le=1024)
    gpus_per_node: int = Field(default=0, ge=0)
    launcher: Literal["none", "torchrun", "ft_launcher"] = "none"
    """What starts the ranks of a node: relaunch itself, or one process a node that does, its own restarts turned off."""
    gang: Literal["lockstep", "independent"] = "lockstep"
    """lockstep: no rank advances without all others (the usual data or model parallel job)."""
    fleet: Name = "default"
    env: dict[str, str] = {}
    secrets: dict[str, SecretReference] = {}
    workdir: str | None = None
    progress: ProgressSpec = ProgressSpec()
    checkpoint: CheckpointSpec | None = None
    policy: str | dict[str, Any] = "default"
    """A preset's name, a file, or a mapping; whoever submits resolves it."""
    priority: int = 0
    ecs: EcsTask | None = None
    """Only for fleets of Amazon ECS, and only where it differs from what the fleet file says."""
    metadata: Metadata = Metadata()

    @field_validator("command", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"{value!r} is one string: write a list, one item per argument, such as [python, train.py]")
        return value

    @field_validator("nodes", mode="before")
    @classmethod
    def _number_or_range(cls, value: Any) -> Any:
        return parse_nodes(value)

    @field_validator("nodes")
    @classmethod
    def _at_least_one(cls, value: int | NodeRange) -> int | NodeRange:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is not a number of nodes: at least 1")
        return value

    @field_validator("env", mode="before")
    @classmethod
    def _plain_values(cls, value: Any) -> Any:
        # YAML turns `DEBUG: 1` into a number and everybody means the string.
        if isinstance(value, dict):
            return {key: str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for key, item in value.items()}
        return value

    @field_validator("env", "secrets")
    @classmethod
    def _not_reserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key.startswith(RESERVED_VARIABLES) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
                raise ValueError(f"{key!r} cannot be set: a variable's name, not starting with RELAUNCH_ or TORCHELASTIC_")
        return value

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not PurePosixPath(value).is_absolute():
            raise ValueError(f"{value!r} is a relative path: a folder's absolute path on the nodes")
        return value

    @property
    def node_count(self) -> int:
        """At most. How many a generation has, its slots say."""
        return self.nodes if isinstance(self.nodes, int) else self.nodes.max

    @property
    def fewest_nodes(self) -> int:
        """With which it still runs."""
        return self.nodes if isinstance(self.nodes, int) else self.nodes.min

    @property
    def is_elastic(self) -> bool:
        return self.fewest_nodes < self.node_count

    @model_validator(mode="after")
    def _one_launcher(self) -> Self:
        if self.launcher != "none" and (found := starts_ranks_itself(self.command)) is not None:
            told = f"launcher: {self.launcher} puts {self.launcher} before it"
            raise ValueError(f"command: {found} starts ranks itself: give the command of one rank; {told}")
        return self

    @property
    def ranks_per_node(self) -> int:
        return self.nproc_per_node

    @property
    def processes_per_node(self) -> int:
        """That relaunch starts itself, and whose exits it sees: where there is a launcher, that one."""
        return self.nproc_per_node if self.launcher == "none" else 1

    @property
    def world_size(self) -> int:
        """At most."""
        return self.node_count * self.ranks_per_node

    @property
    def size(self) -> str:
        """For people: `8 ranks on 4 nodes`, `4 to 8 ranks on 2 to 4 nodes`."""
        if not self.is_elastic:
            return f"{self.world_size} ranks on {self.node_count} nodes"
        fewest = self.fewest_nodes
        return f"{fewest * self.ranks_per_node} to {self.world_size} ranks on {fewest} to {self.node_count} nodes"


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
    leave_within: Duration = timedelta(hours=2)
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
