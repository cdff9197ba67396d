"""What the rest of relaunch may ask of nodes, whatever kind of machine they are.

Outcomes are values (`Done`, `Refused`); a missing answer is an exception, because nobody may take it for either:

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
from relaunch.job.places import Place
from relaunch.spec.fleet import FleetNode, FleetSpec
from relaunch.spec.job import EcsTask

PROTOCOL = 1


def identity(namespace: str, fleet: str, server: str) -> str:
    """Return what a node knows a fleet by.

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
    """An answer that does not fit the protocol. Of the order it says as little as no answer."""


@dataclass(frozen=True, slots=True)
class Refused:
    node: str
    why: str
    """The agent's word for it; docs/reference/agent-protocol.md has the list."""
    reason: str
    highest: tuple[int, int] | None = None
    boot_id: str | None = None
    """Where `why` is boot_changed: the present one."""
    held_by: str | None = None
    """Where `why` is held: the id of whoever holds the node."""


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
    """Whose order it is, as `identity` has it: a node on which ranks of another one live refuses it. Empty: nobody said."""


@dataclass(frozen=True, slots=True)
class Prepared:
    node: str
    boot_id: str
    master_port: int
    peer_port: int
    stamp: float
    """CLOCK_BOOTTIME of the node when it prepared."""
    nonce: str = field(repr=False)
    """What the node contributes to the secret of its generation; a repeated `prepare` answers the same one."""
    place: Place | None = None
    """Where ranks will be started; None: this kind of node has no agent that outlives them."""


@dataclass(frozen=True, slots=True)
class Peer:
    node: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class BelowLauncher:
    """Ranks that `StartOrder.command`, their launcher, starts and not the node. They are to be as if it had."""

    command: tuple[str, ...]
    """Of one rank. The node appends it to the launcher's, behind what makes a process that the launcher forked a rank."""
    ranks: tuple[int, ...]
    """Expected here, global, by local rank. A launcher that agrees upon numbers with those of other nodes may give others."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Laid over what the launcher gives each."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    token: Token
    node: str
    command: tuple[str, ...]
    workdir: str | None
    env: Mapping[str, str] = field(repr=False)
    """Without `secrets`."""
    rank_env: tuple[Mapping[str, str], ...] = field(repr=False)
    peers: tuple[Peer, ...]
    """Supervisors to ask, at most 16."""
    prepared: float
    """The stamp that `prepare` answered: a start that belongs to another preparation is refused."""
    secret: str = field(repr=False)
    fences: bool
    log_pattern: str | None = None
    launched: BelowLauncher | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables like those of `env`, for a backend to keep from everybody else, or to refuse."""
    gpus: int = 0
    """That its ranks use on this node."""
    ecs: EcsTask | None = None


@dataclass(frozen=True, slots=True)
class Started:
    node: str
    pids: Mapping[int, int]
    """Global rank to process id."""
    already: bool
    """This generation was started by an earlier order."""


@dataclass(frozen=True, slots=True)
class StopOrder:
    token: Token
    stop_grace: float
    stuck_after: float = 30.0


@dataclass(frozen=True, slots=True)
class Gone:
    """Every rank of the token and of those below is gone from `place`, and can never be started there.

    That it is gone from the node is proven where the ranks were started at that place.
    """

    node: str
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LogChunk:
    rank: int
    offset: int
    next: int
    """Where to read on, in bytes."""
    data: str


@dataclass(frozen=True, slots=True)
class Logs:
    chunks: tuple[LogChunk, ...]
    ended: bool


class WatchStream(Protocol):
    """One connection to the supervisor of one generation on one node. Lines as docs/reference/agent-protocol.md, `watch`, has them."""

    def lines(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield until `end`.

        Raises:
            Unreachable: the connection broke.
        """
        ...

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        """Renew the node's lease from the heartbeat that carried `stamp`. Delivery is not confirmed.

        `age`: seconds since that heartbeat was received, by a clock of the receiver. The node compares it with its own clock,
        which may have stood still.
        """
        ...


class Backend(Protocol):
    """Each call is bounded in time by the backend itself, and idempotent; none retries."""

    @property
    def fences(self) -> bool:
        """Whether its nodes stop ranks by themselves once nobody renews their lease. Where not, silence is never proof."""
        ...

    server: str
    """The id of the Temporal server whose orders these are: nodes may serve several. Empty: not known."""

    def node(self, name: str) -> FleetNode: ...

    async def prepare(self, node: str, order: PrepareOrder) -> Prepared | Refused: ...

    async def start(self, node: str, order: StartOrder) -> Started | Refused: ...

    async def stop(self, node: str, order: StopOrder) -> Gone | Refused: ...

    def watch(self, node: str, token: Token, after_seq: int, heartbeat: float) -> AbstractAsyncContextManager[WatchStream]:
        """Connect to a generation.

        Raises:
            Unreachable: the node did not answer.
        """
        ...

    async def list(self, node: str, gpus: bool = False) -> Mapping[str, Any]:
        """Ask which generations live there; with `gpus` also what its GPUs are and who computes on them, as `probe` has them.

        That costs the node a process, and some ten seconds where a driver hangs. It is left out while somebody holds the node.
        """
        ...

    async def logs(
        self, node: str, token: Token, offsets: Mapping[int, int] | None, max_bytes: int, wait: float, tail: int | None
    ) -> Logs | Refused: ...

    async def stacks(self, node: str, token: Token, rank: int) -> Mapping[str, Any] | Refused:
        """Ask where a rank is at the moment. Answers as docs/reference/agent-protocol.md, `stacks`, has it."""
        ...

    async def probe(self, node: str, within: float, kernel_since: float | None) -> Mapping[str, Any]:
        """Ask what there is to know of a machine; changes nothing on it. Answers as docs/reference/agent-protocol.md, `probe`, has them.

        Args:
            node: Its name.
            within: Seconds that the node may take.
            kernel_since: How many seconds back its kernel's log is read; None: all that the kernel has kept.
        """
        ...

    async def diagnose(self, node: str, id: str, level: int, within: float, fleet: str = "") -> Mapping[str, Any] | Refused:
        """Run `dcgmi diag -r LEVEL -j` on a node where nothing uses the GPUs, and hold the node for so long.

        Args:
            node: Its name.
            id: Of the repair for which this is done; a person who finds the node held reads it.
            level: 1 to 3.
            within: Seconds after which the node kills it.
            fleet: Whose order it is, as in `PrepareOrder`.
        """
        ...

    async def reset_gpus(
        self, node: str, id: str, boot_id: str, gpus: tuple[str, ...], within: float, fleet: str = ""
    ) -> Mapping[str, Any] | Refused:
        """Reset GPUs, by bus id, or all of them where none is named, if the node still has this boot id and nothing uses them."""
        ...

    async def reboot(self, node: str, id: str, boot_id: str, reason: str, fleet: str = "") -> Mapping[str, Any] | Refused:
        """Tell the node to reboot, if it still has this boot id and nothing lives there. Another boot id afterwards is the only proof."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SeesPeople(Protocol):
    """A backend whose platform knows which ranks people stopped, and says so in the lines of a watch (`StoppedByUser`)."""

    sees_people: bool


@runtime_checkable
class CyclesPower(Protocol):
    """A backend that can take the power of its nodes away and give it back, without a command of the fleet file."""

    async def cycle_power(self, node: str, id: str, within: float) -> Mapping[str, Any]:
        """Return `{"outcome": "done", "program", "exit_code", "output", "took"}` as a power command's end is told; 0: it was cycled.

        Raises:
            Unreachable: nobody knows what it did.
        """
        ...


@runtime_checkable
class TellsPeople(Protocol):
    """A backend that has a way to tell people something where nobody looks at a screen."""

    async def tell_people(self, subject: str, text: str) -> str:
        """Return how they were told, a clause; or that there is no way to.

        Raises:
            Unreachable: nobody knows whether they were told.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaskEvent:
    what: str
    version: int
    token: Token | None
    """Whose rank it is; None: none of ours."""
    ended: bool
    """Whether it says that the rank has ended, and not because it was told to by us."""


@dataclass(frozen=True, slots=True)
class TaskMessage:
    receipt: str
    event: TaskEvent | None
    """None: nothing that a job would look for."""


class EventQueue(Protocol):
    async def receive(self) -> Sequence[TaskMessage]:
        """Wait for messages, some seconds at most. What cannot be read is left where it is: the queue has a place for those.

        Raises:
            BackendError: the queue does not answer.
        """
        ...

    async def delete(self, messages: Sequence[TaskMessage]) -> None: ...

    def hint(self, what: str) -> bool:
        """Have it looked at by a watch of this process; False: none follows it."""
        ...


class Fleets(Protocol):
    """The fleets this worker serves, by name."""

    def spec(self, fleet: str) -> FleetSpec:
        """Raises KeyError with one sentence when there is no such fleet."""
        ...

    def backend(self, fleet: str) -> Backend: ...
