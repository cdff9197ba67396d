"""The fleet file as validated values.

The command line reads the file (YAML, lines, paths).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from relaunch.evidence.causes import Cause
from relaunch.fields import Duration, Name, StrictModel
from relaunch.spec.access import Access
from relaunch.spec.environment import check_redacted
from relaunch.spec.job import EcsTask, ModuleNames, SecretReference


def _check_share(value: int | str) -> int | str:
    """Validate a number of nodes, or a share of them such as 25%."""
    if isinstance(value, int):
        if value < 1:
            raise ValueError(
                f"{value} is not a limit: 1 or more nodes, or a share of them such as 25%"
            )
    elif not re.fullmatch(r"(100|[1-9]?[0-9])%", value):
        raise ValueError(f"{value!r} is not a share: write it like 25%")
    return value


def _check_address(value: str) -> str:
    if not re.fullmatch(r"[^\s@/\[\]\x00-\x1f-][^\s@/\[\]\x00-\x1f]*", value):
        raise ValueError(
            f"{value!r} is not an address: a host's name or IP address alone;"
            " the login name goes into `user`, the port into `port`"
        )
    return value


def _check_user(value: str) -> str:
    if not re.fullmatch(r"[^\s@:\x00-\x1f-][^\s:\x00-\x1f]*", value):
        raise ValueError(f"{value!r} is not a user: a login name of the nodes")
    return value


JUMP_PATTERN = re.compile(
    r"(?:(?P<user>[^\s@:,-][^\s:,]*)@)?"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s@:,/\[\]-][^\s@:,/\[\]]*)"
    r"(?::(?P<port>\d{1,5}))?"
)


def parse_jumps(value: str) -> tuple[tuple[str | None, str, int | None], ...]:
    """Return user, host and port of each host of a ProxyJump, in connection order.

    Raises:
        ValueError: The value is not a list of such hosts.
    """
    if value.lower() == "none":
        return ()
    found = []
    for part in value.split(","):
        match = JUMP_PATTERN.fullmatch(part.strip())
        port = None if match is None or match["port"] is None else int(match["port"])
        if match is None or port == 0 or (port or 0) > 65535:
            raise ValueError(
                f"{value!r} is not a list of jump hosts:"
                " hosts such as me@jump:22, separated by commas, or none"
            )
        found.append((match["user"], match["host"].strip("[]"), port))
    return tuple(found)


def _check_jumps(value: str) -> str:
    parse_jumps(value)
    return value


def _check_port(value: str) -> str:
    if not re.fullmatch(r"[!-~]{1,40}( port \d{1,3})?", value):
        raise ValueError(
            f"{value[:60]!r} is not a network port: write it as a finding names it,"
            " such as mlx5_3, mlx5_3 port 1 or eno2"
        )
    return value


class Power(StrictModel):
    cycle: tuple[str, ...] = Field(min_length=1)
    """A command on the worker's machine that cycles the node's power (docs/nodes.md)."""


class FleetNode(StrictModel):
    name: Name
    """Its name in all commands."""
    address: Annotated[str, AfterValidator(_check_address)]
    """Where its controller reaches it.

    For `ssh`: what one would type after `ssh`, which may be a Host of the SSH configuration. For
    `ecs`: the id of its EC2 instance.
    """
    network: Annotated[str, AfterValidator(_check_address)] | None = None
    """Its address on the network that ranks use among each other, where that is a different one."""
    user: Annotated[str, AfterValidator(_check_user)] | None = None
    """The login name there."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The port of sshd."""
    gpus: int = Field(default=0, ge=0)
    """How many GPUs it has; 0: none is expected."""
    spare: bool = False
    """Whether it is kept for jobs that have run."""
    power: Power | None = None
    """How its power is cycled, where it cannot be rebooted."""
    unused_ports: tuple[Annotated[str, AfterValidator(_check_port)], ...] = Field(
        default=(), max_length=64
    )
    """Network ports that say nothing about the node's health, for example because they are left
    unplugged on purpose: `mlx5_3` (all ports of that card), `mlx5_3 port 1`, `eno2`."""

    @property
    def login(self) -> str:
        """The user, address and port of its agent, as text for people: `train@10.0.0.7:2222`."""
        login = f"{self.user}@{self.address}" if self.user else self.address
        return f"{login}:{self.port}" if self.port else login


class FleetLimits(StrictModel):
    """Limits that keep one mistake from taking a whole fleet down.

    A share is of the fleet's nodes, rounded down, and at least one node.
    """

    repairs_at_once: Annotated[int | str, AfterValidator(_check_share)] = 2
    """Maximum number of nodes in repair at once."""
    nodes_out: Annotated[int | str, AfterValidator(_check_share)] = "25%"
    """Maximum number of nodes suspect, in repair or quarantined by relaunch.

    One more opens the breaker. Nodes that a person quarantined do not count.
    """
    reboots_per_hour: int = Field(default=10, ge=1)
    """Maximum number of reboots per hour; one more opens the breaker."""
    replacement_wait: Duration = timedelta(minutes=10)
    """How long two jobs that each hold nodes and wait for more may block each other.

    After that, one gives way.
    """
    cool_down: Duration = timedelta(days=1)
    """How long the fleet repeats no repair of a node that an examination then found healthy.

    What fails again within that time gets the next step: after a reset of these GPUs a reboot,
    after a reboot a person. 0s: off.
    """
    drain_within: Duration = timedelta(hours=2)
    """How long a job may stay on a node to be examined because of another job that was there.

    The default is longer than most jobs take from one checkpoint to the next, and than most
    evaluations.
    """

    def resolve(self, limit: Literal["repairs_at_once", "nodes_out"], nodes: int) -> int:
        """Return the limit as a number of nodes, for a fleet of `nodes` nodes."""
        value = self.repairs_at_once if limit == "repairs_at_once" else self.nodes_out
        return (
            value if isinstance(value, int) else max(1, nodes * int(value.removesuffix("%")) // 100)
        )


class SshOptions(StrictModel):
    """How to log in to the nodes.

    Options not given here come from ~/.ssh/config, or else are OpenSSH's defaults.
    """

    user: Annotated[str, AfterValidator(_check_user)] | None = None
    """The login name there."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The port of sshd."""
    key: str | None = None
    """The file of a private key; if given, no other key is tried."""
    known_hosts: str | None = None
    """The file with the hosts' keys, instead of ~/.ssh/known_hosts."""
    config: str | None = None
    """The file to read instead of ~/.ssh/config."""
    proxy_jump: Annotated[str, AfterValidator(_check_jumps)] | None = None
    """Hosts to connect through, in order, as in OpenSSH's ProxyJump.

    `none`: connect directly, regardless of ~/.ssh/config.
    """
    python: str = "python3"
    """The Python interpreter on the nodes. It becomes part of a command line there."""
    sudo: bool = False
    """Whether to reboot a node and reset its GPUs by `sudo -n`, where its user is not root."""

    @field_validator("python")
    @classmethod
    def _check_python(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*|(/[A-Za-z0-9._+-]+)+", value):
            raise ValueError(
                f"{value!r} is not a Python of the nodes: a name such as python3.11,"
                " or an absolute path of plain letters"
            )
        return value


class EcsTables(StrictModel):
    """DynamoDB tables that mirror the state for dashboards: written, never read."""

    task: str | None = None
    """With a row for each task."""
    job: str | None = None
    """With a row for each job."""
    node: str | None = None
    """With a row for each node."""
    training_job: str | None = None
    """With a row for each rank of a job, as the first release of that system had it."""
    container_instance: str | None = None
    """With a row for each container instance, as the first release of that system had it."""


class EcsOptions(EcsTask):
    """The cluster of a fleet of container instances, and the AWS resources relaunch may use.

    An option that is None may be set in the worker's environment, by the name that the settings
    reference lists.
    """

    cluster: str | None = None
    """Name or ARN."""
    region: str | None = None
    """The AWS region; default: as boto3 finds it."""
    node_task: str | None = None
    """Task definition that examines a node: the node image, with its output in CloudWatch Logs."""
    health_check: str | None = None
    """The user's own task definition that examines a node by its exit code.

    0: healthy, 1: faulty, any other: inconclusive.
    """
    queue: str | None = None
    """URL of the SQS queue that receives the cluster's events."""
    topic: str | None = None
    """ARN of the SNS topic to notify when a person is needed."""
    tables: EcsTables = EcsTables()
    """Tables that dashboards read."""
    agent_key: SecretReference | None = None
    """Where the worker reads the private key and certificate (PEM) for TLS with the agents inside
    the ranks' containers.

    Task definitions have the same text as the secret RELAUNCH_AGENT_KEY.
    """
    poll: Duration = timedelta(seconds=10)
    """Interval between two polls of the tasks of running jobs; events cause earlier ones."""


MIN_HEARTBEAT_INTERVAL = timedelta(seconds=10)
"""Services ask for a minute or more; each request costs the Temporal server one, too."""

NoticeEvent = Literal["question", "failed", "quarantine", "breaker", "waiting", "slow_node"]
"""What people are notified of; docs/notifications.md describes each."""
Severity = Literal["critical", "warning", "info"]
"""The gravest first."""
SEVERITIES: Mapping[str, Severity] = {
    "question": "critical",
    "breaker": "critical",
    "failed": "warning",
    "quarantine": "warning",
    "waiting": "warning",
    "slow_node": "info",
}
"""The same as those of the alerts in deploy/prometheus/rules.yml; before any reminder."""
EVENTS_REMINDED_OF: tuple[NoticeEvent, ...] = ("question", "waiting")
"""What is sent again, as a reminder, each time `answer_within` has passed."""
EVENTS_OF_JOBS: tuple[NoticeEvent, ...] = ("question", "failed", "waiting", "slow_node")
"""What always has a job, except that a question may be that of a repair alone."""
EVENTS_WITH_CAUSE: tuple[NoticeEvent, ...] = ("question", "failed", "quarantine", "waiting")
"""What may have a cause."""


def find_severity(event: str, reminders: int = 0) -> Severity:
    """Return the severity of a matter: of which people had to be reminded, critical.

    Args:
        event: What it is; one that no channel can name, such as a test, is only information.
        reminders: How many times people have been reminded of it.
    """
    return "critical" if reminders else SEVERITIES.get(event, "info")


def _check_job_pattern(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._*?\[\]!-]{1,100}", value):
        raise ValueError(
            f"{value[:60]!r} matches no name of a job: expected letters, digits, '.', '_' and '-',"
            " with * for any characters, ? for one and [ab] for one of these, such as llama-*"
        )
    return value


class Channel(StrictModel):
    """One way to notify people: a webhook, or an address of the library `apprise`.

    An address may contain a password or a token, so no sentence repeats it.
    """

    webhook: str | SecretReference | None = Field(default=None, repr=False)
    """The URL that gets a JSON object for each notice."""
    secret: SecretReference | None = None
    """Where the worker reads the key that signs what is sent to the webhook."""
    apprise: str | SecretReference | None = Field(default=None, repr=False)
    """An address of apprise, such as `mailto://…`."""
    events: tuple[NoticeEvent, ...] = Field(default=get_args(NoticeEvent), min_length=1)
    """What is sent here (docs/notifications.md)."""
    severities: tuple[Severity, ...] = Field(default=get_args(Severity), min_length=1)
    """Only events of these severities (docs/notifications.md)."""
    causes: tuple[Cause, ...] = ()
    """Only matters with one of these causes, and those that have none; empty: all."""
    jobs: tuple[Annotated[str, AfterValidator(_check_job_pattern)], ...] = Field(
        default=(), max_length=64
    )
    """Only matters of jobs whose name matches one of these, such as `llama-*`, and none that belong
    to no job; empty: all."""
    from_reminder: int = Field(default=0, ge=0, le=100)
    """Only matters of which people have been reminded so many times, such as 1 for those who are
    asked when the others have not answered; 0: all."""

    @field_validator("webhook", "apprise", mode="before")
    @classmethod
    def _check_address(cls, value: Any) -> Any:
        return _check_address_or_reference(value)

    @field_validator("webhook")
    @classmethod
    def _check_webhook(cls, value: str | SecretReference | None) -> str | SecretReference | None:
        if isinstance(value, str):
            check_http_address(value)
        return value

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.webhook is None) == (self.apprise is None):
            raise ValueError("a channel has exactly one address: webhook or apprise")
        if self.secret is not None and self.webhook is None:
            raise ValueError("secret signs what is sent to a webhook, and this channel has none")
        if not self.list_events() and not self.list_events(max(1, self.from_reminder)):
            events = ", ".join(f"{one} ({SEVERITIES[one]})" for one in self.events)
            reminded = " and ".join(EVENTS_REMINDED_OF)
            late = f", and people are reminded of {reminded} only" if self.from_reminder else ""
            jobs = ", and jobs matches none without a job" if self.jobs else ""
            raise ValueError(
                f"it takes nothing: its events are {events}, its severities"
                f" {', '.join(self.severities)}{late}{jobs}"
            )
        return self

    def list_events(self, reminders: int = 0) -> tuple[NoticeEvent, ...]:
        """Return the events of which it takes some matters at least.

        Args:
            reminders: How many times people have been reminded of these matters.
        """
        if reminders < self.from_reminder:
            return ()
        return tuple(
            one
            for one in self.events
            if (not reminders or one in EVENTS_REMINDED_OF)
            # A reminder is for those who know of the matter, too.
            and {find_severity(one), find_severity(one, reminders)} & {*self.severities}
            and (not self.jobs or one in EVENTS_OF_JOBS)
        )

    def takes(self, event: str, cause: Cause | None, job: str, reminders: int = 0) -> bool:
        """Whether a matter is sent here.

        Args:
            event: What it is.
            cause: Its cause; None: it has none.
            job: The name of its job; empty: it has none.
            reminders: How many times people have been reminded of it.
        """
        return (
            event in self.list_events(reminders)
            and (not self.causes or cause is None or cause in self.causes)
            and (not self.jobs or any(bool(job) and fnmatchcase(job, one) for one in self.jobs))
        )

    @property
    def name(self) -> str:
        """The channel as people read it, without what may be secret: `webhook hooks.example.com`.

        Of an address of apprise only the scheme, because its host may be a token.
        """
        kind = "apprise" if self.webhook is None else "webhook"
        address = self.apprise if self.webhook is None else self.webhook
        if isinstance(address, SecretReference):
            return f"{kind} {address.file or address.env}"
        url = urlsplit(address or "")
        return f"{kind} {url.scheme if kind == 'apprise' else url.hostname}"


def name_channels(channels: tuple[Channel, ...]) -> dict[str, Channel]:
    """Return channels by name; the second one of a name has a 2 after it."""
    named: dict[str, Channel] = {}
    for channel in channels:
        same = sum(one.name == channel.name for one in named.values())
        named[f"{channel.name} {same + 1}" if same else channel.name] = channel
    return named


def find_untaken(channels: tuple[Channel, ...]) -> dict[str, str]:
    """Return the events that no channel takes, each with which of its matters, as a clause.

    The clause is empty where no channel takes any of them.
    """
    found: dict[str, str] = {}
    for event in SEVERITIES:
        able = [one for one in channels if event in one.list_events()]
        clauses = []
        patterns = dict.fromkeys(job for one in able for job in one.jobs)
        unbound = [one for one in able if not one.jobs]
        if patterns and "*" not in patterns:
            # Of a job that no pattern matches.
            others = f"of jobs other than {', '.join(patterns)}"
            clauses.append(_describe_causes(event, unbound, others))
        else:
            clauses.append(_describe_causes(event, able, ""))
        if event == "question" and able and not unbound:
            clauses.append("of repairs that no job has ordered")
        if missed := [one for one in clauses if one is not None]:
            found[event] = ", and ".join(missed)
            if not able and any(event in one.list_events(one.from_reminder) for one in channels):
                found[event] = "before people are reminded"
    return found


def _describe_causes(event: str, able: list[Channel], whose: str) -> str | None:
    """Return which matters of an event these channels do not take; None: they take all."""
    if not able:
        return whose
    if event not in EVENTS_WITH_CAUSE or not all(one.causes for one in able):
        return None
    taken = {cause for one in able for cause in one.causes}
    if len(taken) == len(Cause):
        return None
    names = ", ".join(one for one in Cause if one in taken)
    return f"{whose} with a cause other than {names}".strip()


def describe_untaken(untaken: Mapping[str, str]) -> str:
    """Return what no channel takes, as a clause."""
    groups: dict[str, list[str]] = {}
    for event, which in untaken.items():
        groups.setdefault(which, []).append(event)
    return "; ".join(f"{', '.join(events)} {which}".strip() for which, events in groups.items())


class DeadManSwitch(StrictModel):
    """A dead man's switch: an outside service that raises an alarm when requests cease."""

    url: str | SecretReference = Field(repr=False)
    """The URL that is requested (GET) while a worker watches the fleet; or where the worker reads
    it."""
    every: Duration = timedelta(minutes=5)
    """The time between two requests, 10 s or more."""

    @field_validator("url", mode="before")
    @classmethod
    def _check_url(cls, value: Any) -> Any:
        value = _check_address_or_reference(value)
        if isinstance(value, str):
            check_http_address(value)
        return value

    @field_validator("every")
    @classmethod
    def _check_every(cls, value: timedelta) -> timedelta:
        if value < MIN_HEARTBEAT_INTERVAL:
            raise ValueError(
                f"{value.total_seconds():g} s is too often: expected 10s or more, such as 5m"
            )
        return value

    @property
    def name(self) -> str:
        """The service as people read it, without what may be secret: `hc-ping.com`."""
        if isinstance(self.url, SecretReference):
            return self.url.file or self.url.env or ""
        return urlsplit(self.url).hostname or ""


def _check_address_or_reference(value: Any) -> Any:
    """Check that a value is a URL, or says where to read one; no sentence repeats it."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://\S+", value):
        return value
    if isinstance(value, SecretReference) or (
        isinstance(value, dict)
        and set(value) in ({"file"}, {"env"})
        and all(isinstance(one, str) and one for one in value.values())
    ):
        return value
    raise ValueError(
        "it is not an address: expected a URL, {file: PATH} or {env: NAME} with a URL in it"
    )


def check_http_address(url: str) -> None:
    """Check an address that is requested by HTTP.

    Raises:
        ValueError: it is no address; the sentence does not repeat it.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("it is not an HTTP address: expected http:// or https:// and a host")


class FleetSpec(StrictModel):
    """A fleet file."""

    name: Name
    """Its name; jobs use `default` unless they name another."""
    backend: Literal["local", "ssh", "ecs", "simulated"]
    """How nodes are reached; `simulated` is for tests."""
    repairs: Literal["act", "ask", "observe"] = "ask"
    """Whether resets and reboots are done, wait for a person, or are only recorded."""
    nodes: tuple[FleetNode, ...] = Field(min_length=1)
    """Its nodes."""
    limits: FleetLimits = FleetLimits()
    """What keeps one mistake from taking all nodes down."""
    notify: tuple[Channel, ...] = Field(default=(), max_length=16)
    """Whom to notify, and how."""
    heartbeat: DeadManSwitch | None = None
    """The dead man's switch that notices when nothing watches this fleet any more."""
    redact: Annotated[
        tuple[str, ...], Field(max_length=64, repr=False), AfterValidator(check_redacted)
    ] = ()
    """The same as `redact` of a job file, for all jobs of this fleet."""
    warm: ModuleNames = ()
    """The same as `warm` of a job file, for jobs of this fleet that do not say; not for those with
    a launcher."""
    access: Access | None = None
    """Who may do what; without it everyone who reaches the server may do everything."""
    ssh: SshOptions = SshOptions()
    """For `backend: ssh`."""
    ecs: EcsOptions = EcsOptions()
    """For `backend: ecs`."""

    @field_validator("heartbeat", mode="before")
    @classmethod
    def _check_heartbeat(cls, value: Any) -> Any:
        """Refuse an address alone without repeating it, as pydantic would."""
        if value is None or isinstance(value, dict | DeadManSwitch):
            return value
        raise ValueError("an address alone is not enough: expected {url: …, every: 5m}")

    @field_validator("nodes")
    @classmethod
    def _check_distinct(cls, value: tuple[FleetNode, ...]) -> tuple[FleetNode, ...]:
        for field in ("name", "address", "network"):
            seen: dict[tuple[str, int | None], str] = {}
            for node in value:
                text = getattr(node, field)
                # Several nodes may share one address, each with a separate port.
                key = (text, node.port if field == "address" else None)
                if text is not None and key in seen:
                    raise ValueError(
                        f"nodes {seen[key]} and {node.name} have the same {field} {text!r}:"
                        f" expected a different {field} for each node"
                    )
                seen[key] = node.name
        return value
