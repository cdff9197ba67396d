"""Defines what the rest of relaunch may ask of nodes, whatever kind of machine they are.

Outcomes are values (`Done`, `Refusal`). A missing answer is an exception, because it must not be
taken for either:

    BackendError
    └── Unreachable         no answer: whether the order was carried out is not known (ambiguous)
        └── ProtocolError   an answer that makes no sense: that node's fault, and as good as none
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from relaunch.generation import Token
from relaunch.job.places import AgentPlace
from relaunch.spec.fleet import FleetNode, FleetSpec
from relaunch.spec.job import EcsTask, OutputStream

PROTOCOL = 1
STACKS_WITHIN = 20.0
"""Seconds in which a node reads the stacks of its ranks, unless the caller says otherwise."""


def identity(namespace: str, fleet: str, server: str) -> str:
    """Return the identity by which nodes know a fleet.

    Two servers may each have a namespace, and two namespaces a fleet, of the same name.
    """
    return f"{server}/{namespace}/{fleet}" if server else f"{namespace}/{fleet}"


class BackendError(Exception):
    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"node {node}: {reason}")
        self.node = node
        self.reason = reason


class Unreachable(BackendError):
    pass


class ProtocolError(Unreachable):
    """The answer does not fit the protocol.

    Like no answer, it says nothing about the order's outcome.
    """


@dataclass(frozen=True, slots=True)
class Refusal:
    node: str
    why: str
    """The agent's code for the reason; docs/reference/agent-protocol.md lists them."""
    reason: str
    highest: tuple[int, int] | None = None
    boot_id: str | None = None
    """The node's current boot id, if `why` is boot_changed."""
    held_by: str | None = None
    """The id of the holder of the node, if `why` is held."""


@dataclass(frozen=True, slots=True)
class PrepareOrder:
    """Durations in seconds."""

    token: Token
    address: str
    ranks: tuple[int, ...]
    lease: float
    fence_after: float
    stop_grace: float
    valid_for: float
    heartbeat: float
    stuck_after: float = 30.0
    fleet: str = ""
    """The identity of the fleet that gives the order (see `identity`). A node on which ranks of
    another fleet are alive refuses it. Empty: not stated."""
    log_pattern: str | None = None
    """How steps are read from a rank's log, to know the last one of the generation before."""
    kills_older: bool = False
    """Whether ranks of older generations get SIGKILL without `stop_grace`, where an agent does it.
    An agent of 0.1.0 does not, nor does Amazon ECS."""


@dataclass(frozen=True, slots=True)
class Preparation:
    node: str
    boot_id: str
    master_port: int
    peer_port: int
    stamp: float
    """CLOCK_BOOTTIME of the node at the preparation."""
    nonce: str = field(repr=False)
    """The node's contribution to the secret of its generation. A repeated `prepare` returns the
    same one."""
    place: AgentPlace | None = None
    """Where the ranks will be started; None: this kind of node has no agent that outlives them."""
    step: int | None = None
    """The step that all ranks here had reached in the generation that reported steps here last, or
    None: not known."""
    step_generation: int | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    node: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class BelowLauncher:
    """Ranks that are started by `StartOrder.command`, their launcher, and not by the node.

    They must behave as if the node had started them.
    """

    command: tuple[str, ...]
    """The command of one rank. The node appends it to the launcher's command, after the wrapper
    that turns a process forked by the launcher into a rank."""
    ranks: tuple[int, ...]
    """The global ranks expected on this node, by local rank. A launcher that negotiates numbers
    with those of other nodes may assign others."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Overrides variables that the launcher gives each rank."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    token: Token
    node: str
    command: tuple[str, ...]
    workdir: str | None
    env: Mapping[str, str] = field(repr=False)
    """Does not include `secrets`."""
    rank_env: tuple[Mapping[str, str], ...] = field(repr=False)
    peers: tuple[Peer, ...]
    """Supervisors to ask, at most 16."""
    prepared: float
    """The stamp that `prepare` returned. A start for a different preparation is refused."""
    secret: str = field(repr=False)
    fences: bool
    log_pattern: str | None = None
    launched: BelowLauncher | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables like those of `env`, which the backend must keep from all other users, or
    refuse."""
    inherit_env: bool = True
    """Whether ranks also get the variables that the node itself has."""
    umask: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    """Soft resource limits by name, such as `nofile`; -1: unlimited."""
    """In octal; None: the node's."""
    unwatched: float | None = None
    """Seconds after which ranks that no controller watches stop; None: they do not."""
    separate_stderr: bool = False
    """Whether each rank's stderr has a separate log."""
    env_defaults: tuple[str, ...] = ()
    """Names of variables of `env` that give way to those that ranks inherit from the node."""
    warm: tuple[str, ...] = ()
    """Modules to import ahead, so that the next generation is forked from them."""
    redact: tuple[str, ...] = ()
    """Names of variables, `*` for any characters, whose values the node replaces in what ranks
    wrote before it sends that."""
    gpus: int = 0
    """The number of GPUs that its ranks use on this node."""
    ecs: EcsTask | None = None


@dataclass(frozen=True, slots=True)
class StartedRanks:
    node: str
    pids: Mapping[int, int]
    """Process id by global rank."""
    already: bool
    """Whether an earlier order had already started this generation."""
    cold: str | None = None
    """Why its ranks were started from nothing although modules were to be imported ahead; empty:
    they were forked; None: that was not asked for, or this is the first launch here."""


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """What a node needs to import ahead for a job that may come to it.

    The fields are those of `StartOrder`.
    """

    token: Token
    """Of the generation that runs elsewhere."""
    fleet: str
    keep: float
    """Seconds until what was started ends, unless this order is repeated."""
    command: tuple[str, ...]
    workdir: str | None
    env: Mapping[str, str] = field(repr=False)
    rank_env: tuple[Mapping[str, str], ...] = field(repr=False)
    modules: tuple[str, ...]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    inherit_env: bool = True
    env_defaults: tuple[str, ...] = ()
    redact: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmNode:
    """How far a node is that imports ahead."""

    node: str
    state: str
    """`waiting`, `importing`, `ready`, `ended`, or `cold`: it will not be ready."""
    reason: str
    """Why it is cold or has ended, or an empty text."""


@dataclass(frozen=True, slots=True)
class StopOrder:
    token: Token
    stop_grace: float
    stuck_after: float = 30.0
    log_pattern: str | None = None
    """How steps are read from a rank's log, to know the last one."""
    kills: bool = False
    """Whether ranks get SIGKILL without `stop_grace`. Amazon ECS does not do it."""


@dataclass(frozen=True, slots=True)
class StopProof:
    """Every rank of the token, and of those below it, is gone from `place` for ever.

    It can never be started there. This proves that the ranks are gone from the node if they were
    started at that place.
    """

    node: str
    place: AgentPlace | None = field(default=None, compare=False)
    step: int | None = field(default=None, compare=False)
    """The step that all ranks of the token had reached here, or None: not known."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    rank: int
    offset: int
    next: int
    """The offset from which to read on, in bytes."""
    data: str


@dataclass(frozen=True, slots=True)
class Logs:
    chunks: tuple[LogChunk, ...]
    ended: bool
    begins: Mapping[int, int] = field(default_factory=dict)
    """Where reading began, of ranks for which no offset was given."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """How long the logs of those ranks were then, in bytes."""
    missing: tuple[int, ...] = ()
    """Ranks that have ended and have no log there."""


class WatchStream(Protocol):
    """One connection to the supervisor of one generation on one node.

    The lines are those of docs/reference/agent-protocol.md, `watch`.
    """

    def lines(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield lines until `end`.

        Raises:
            Unreachable: the connection broke.
        """
        ...

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        """Renew the node's lease from the heartbeat that carried `stamp`.

        Delivery is not confirmed.

        `age`: seconds since that heartbeat was received, by the receiver's clock. The node compares
        it with its own clock, which may have been stopped in between.
        """
        ...


class Backend(Protocol):
    """The calls that relaunch makes to nodes.

    The backend bounds each call in time. Calls are idempotent, and none retries.
    """

    @property
    def fences(self) -> bool:
        """Whether its nodes stop ranks by themselves when their lease is not renewed.

        If not, silence is never proof that ranks are gone.
        """
        ...

    server: str
    """The id of the Temporal server that gives the orders: nodes may serve several. Empty: not
    known."""

    def node(self, name: str) -> FleetNode: ...

    async def prepare(self, node: str, order: PrepareOrder) -> Preparation | Refusal: ...

    async def start(self, node: str, order: StartOrder) -> StartedRanks | Refusal: ...

    async def stop(self, node: str, order: StopOrder) -> StopProof | Refusal: ...

    def watch(
        self, node: str, token: Token, after_seq: int, heartbeat: float
    ) -> AbstractAsyncContextManager[WatchStream]:
        """Connect to a generation.

        Raises:
            Unreachable: the node did not answer.
        """
        ...

    async def list(self, node: str, gpus: bool = False) -> Mapping[str, Any]:
        """Ask which generations are alive there, and which was the newest of each job.

        With `gpus`, ask also for its GPUs and the processes on them, its disk and its network
        ports, in the form of `probe`. That costs the node a process, and some ten seconds if a
        driver hangs. It is skipped while the node is held.
        """
        ...

    async def logs(
        self,
        node: str,
        token: Token,
        offsets: Mapping[int, int] | None,
        max_bytes: int,
        wait: float,
        tail: int | None,
        since: float | None = None,
        stream: OutputStream = "stdout",
    ) -> Logs | Refusal:
        """Read what ranks have printed.

        Args:
            node: Its name.
            token: The generation.
            offsets: Offset in bytes to continue from, by rank.
            max_bytes: Limit for the answer.
            wait: Seconds to wait for new output.
            tail: Begin with this many last lines; only for ranks that have no offset.
            since: Begin with what was printed in this many last seconds, and at most some more;
                only for ranks that have no offset.
            stream: Which of a rank's logs; "stdout" has both streams, unless they are separate.
        """
        ...

    async def stacks(
        self,
        node: str,
        token: Token,
        rank: int | None = None,
        frames: bool = True,
        within: float = STACKS_WITHIN,
    ) -> Mapping[str, Any] | Refusal:
        """Ask what the processes of a generation's ranks do, and where their Python code is.

        The answer is that of docs/reference/agent-protocol.md, `stacks`.

        Args:
            node: Its name.
            token: The generation.
            rank: One rank; None: all of them on this node, which are read in parallel.
            frames: Whether Python's stacks are read, which costs the node a process for each
                process of a rank; without them it is a cheap look into /proc.
            within: Seconds that the node may take. What it has not read by then says so.
        """
        ...

    async def last_words(self, node: str, token: Token) -> Mapping[str, Any] | Refusal:
        """Ask what the ranks of a generation that have not ended wrote last.

        The answer is that of docs/reference/agent-protocol.md, `last-words`.
        """
        ...

    async def checkpoints(
        self, node: str, directory: str, workdir: str | None, pattern: str | None = None
    ) -> Mapping[str, Any] | Refusal:
        """Ask which checkpoints a folder has: the newest complete one, and newer incomplete ones.

        The answer is that of docs/reference/agent-protocol.md, `checkpoints`.

        Args:
            node: Its name.
            directory: The folder.
            workdir: What a relative path begins at; None: where the ranks are started.
        """
        ...

    async def probe(
        self, node: str, within: float, kernel_since: float | None
    ) -> Mapping[str, Any]:
        """Ask for the state of a machine.

        Changes nothing on it. The answer is that of docs/reference/agent-protocol.md, `probe`.

        Args:
            node: Its name.
            within: Seconds that the node may take.
            kernel_since: How many seconds back its kernel log is read; None: all that the kernel
                has kept.
        """
        ...

    async def diagnose(
        self, node: str, id: str, level: int, within: float, fleet: str = ""
    ) -> Mapping[str, Any] | Refusal:
        """Run `dcgmi diag -r LEVEL -j` on a node with unused GPUs, and hold the node meanwhile.

        Args:
            node: Its name.
            id: The id of the repair, shown to a person who finds the node held.
            level: 1 to 3.
            within: Seconds after which the node kills it.
            fleet: The identity of the fleet that gives the order, as in `PrepareOrder`.
        """
        ...

    async def reset_gpus(
        self,
        node: str,
        id: str,
        boot_id: str,
        gpus: tuple[str, ...],
        within: float,
        fleet: str = "",
        reason: str = "",
        by: str = "",
    ) -> Mapping[str, Any] | Refusal:
        """Reset GPUs by bus id, or all GPUs if none is named.

        Only if the node still has this boot id and no process uses them. The node's own journal
        notes why, and by whose order.
        """
        ...

    async def reboot(
        self, node: str, id: str, boot_id: str, reason: str, fleet: str = "", by: str = ""
    ) -> Mapping[str, Any] | Refusal:
        """Order the node to reboot, if it still has this boot id and no ranks are alive there.

        A different boot id afterwards is the only proof that it rebooted. The node's own journal
        notes why, and by whose order.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SeesPeople(Protocol):
    """A backend whose platform knows which ranks people stopped.

    It reports that in the lines of a watch (`StoppedByUser`).
    """

    sees_people: bool


@dataclass(frozen=True, slots=True)
class LinkListener:
    """A process that a node has left for a while, to be called over the job's network."""

    node: str
    address: str
    ports: tuple[int, ...]
    word: str
    """What it says to each caller."""


@runtime_checkable
class CallsPeers(Protocol):
    """A backend whose nodes can check whether they reach each other."""

    async def listen_for_peers(self, node: str, address: str, stay: float) -> LinkListener | str:
        """Have a node listen at an address for `stay` seconds.

        Return a clause instead where the node cannot use that address.

        Raises:
            Unreachable: the node did not answer.
        """
        ...

    async def call_peers(
        self, node: str, peers: Sequence[LinkListener], within: float
    ) -> Mapping[str, str]:
        """Have a node call others for at most `within` seconds.

        Return by node why it was not reached; empty: it was.

        Raises:
            Unreachable: the node that is to call did not answer.
        """
        ...


@runtime_checkable
class ImportsAhead(Protocol):
    """A backend whose nodes can import for a job that may come to them."""

    async def warm(self, node: str, order: WarmOrder) -> WarmNode | Refusal:
        """Have a node import ahead, or go on with it. It is refused where it would be in the way.

        Raises:
            Unreachable: the node did not answer.
            ProtocolError: its agent is older than this order.
        """
        ...


@runtime_checkable
class CyclesPower(Protocol):
    """A backend that can power-cycle its nodes without a command from the fleet file."""

    async def cycle_power(self, node: str, id: str, within: float) -> Mapping[str, Any]:
        """Cycle a node's power and return the answer in the form of a power command's.

        That is `{"outcome": "done", "program", "exit_code", "output", "took"}`; exit code 0: the
        power was cycled.

        Raises:
            Unreachable: it is not known what the call did.
        """
        ...


@runtime_checkable
class ReportsLate(Protocol):
    """A backend that may report the exits of one fault some time after each other."""

    exit_delay: float
    """Seconds by which the exit of one rank may be reported later than that of another."""


@runtime_checkable
class RefusesResets(Protocol):
    """A backend that cannot reset GPUs: every such order would be refused."""

    no_reset: str
    """Why, as a sentence without its period."""


@runtime_checkable
class TellsPeople(Protocol):
    """A backend that can notify people who are not looking at a screen."""

    @property
    def has_topic(self) -> bool:
        """Whether it is configured to."""
        ...

    async def tell_people(self, subject: str, text: str) -> str:
        """Notify people. Return how they were notified, as a clause, or that there is no way to.

        Raises:
            Unreachable: it is not known whether they were notified.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaskEvent:
    what: str
    version: int
    token: Token | None
    """The generation of the rank; None: not one of ours."""
    ended: bool
    """Whether the event says that the rank has ended, other than by our own stop order."""


@dataclass(frozen=True, slots=True)
class TaskMessage:
    receipt: str
    event: TaskEvent | None
    """None: nothing that a job needs to look at."""


class EventQueue(Protocol):
    async def receive(self) -> Sequence[TaskMessage]:
        """Wait for messages, some seconds at most.

        A message that cannot be read stays in the queue, whose dead-letter queue takes it.

        Raises:
            BackendError: the queue does not answer.
        """
        ...

    async def delete(self, messages: Sequence[TaskMessage]) -> None: ...

    def hint(self, what: str) -> bool:
        """Ask a watch of this process to look at it. Return False if no watch follows it."""
        ...


class Fleets(Protocol):
    """The fleets that this worker serves, by name."""

    def spec(self, fleet: str) -> FleetSpec:
        """Return the fleet's specification.

        Raises:
            KeyError: there is no such fleet; its message is one sentence.
        """
        ...

    def backend(self, fleet: str) -> Backend: ...
