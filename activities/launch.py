"""Activities of a job on its nodes: launching ranks, stopping ranks and proving them gone."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from relaunch.activities.stop import (
    StopRanksInput,
    StopRanksOutput,
    send_heartbeats,
    stop_everywhere,
)
from relaunch.backends.base import (
    Backend,
    BackendError,
    BelowLauncher,
    Fleets,
    Peer,
    Preparation,
    PrepareOrder,
    ProtocolError,
    Refusal,
    StartedRanks,
    StartOrder,
    identity,
)
from relaunch.generation import Token
from relaunch.job.events import NodeRefusal
from relaunch.job.fencing import peers_of
from relaunch.job.launchers import launcher_command
from relaunch.job.places import StartedPlaces, find_doubt
from relaunch.job.ranks import (
    common_environment,
    find_defaults,
    processes_of,
    rank_environments,
    ranks_of,
    restart_counts,
    tracker_environment,
)
from relaunch.job.state import Slot
from relaunch.spec.environment import parse_environment
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Timeouts
from relaunch.text import join_names

LAUNCH_ATTEMPTS = 3
"""Attempts at a launch while a node does not answer. More would only delay the replacement of the
node."""
LAUNCH_RETRY_DELAY = timedelta(seconds=1)
MAX_SECRET_BYTES = 128 * 1024
"""Of a secret's file: Linux gives a process no longer variable."""
MAX_ENVIRONMENT_BYTES = 8 << 20
"""Of an environment file: more than Linux gives a process, in the longest of its forms."""
MAX_CONCURRENT_CALLS = 256
"""Most calls at once, so that 2,048 nodes do not need 2,048 sockets at the same moment."""
MAX_GENERATIONS_AHEAD = 1000
"""How far ahead of a token's generation a node may be, where a reset of the workflow has set its
numbers back."""
MAX_WARM_NAMED = 3
"""Most nodes that are named whose ranks were started from nothing."""
FIRST_LAUNCH = "nothing had been imported ahead there"
"""Why ranks start from nothing on a node that the job comes to, unless the node has more to say."""
MAX_NAMED = 16
"""Most refusals that are returned; the rest would say the same."""


@dataclass(frozen=True, slots=True)
class LaunchRanksInput:
    token: Token
    spec: JobSpec
    slots: tuple[Slot, ...]
    """The slots of this shard, by group rank from `first_group_rank`."""
    timeouts: Timeouts
    max_restarts: int
    fences: bool
    first_group_rank: int = 0
    prepare_only: bool = False
    prepared: tuple[PreparedNode, ...] = ()
    """The nodes of this shard as they were prepared, if there are several shards: only start
    them."""
    gang: Gang | None = None
    """The gang of all shards, if there are several."""
    places: tuple[StartedPlaces, ...] = ()
    """Where older generations may be alive on these nodes, as far as that is known."""
    run: str = ""
    """The run of the workflow that launched or watched ranks last; empty: not known."""
    kills_older: bool = False
    """Whether ranks of older generations are killed without `stop_grace`."""


@dataclass(frozen=True, slots=True)
class PreparedNode:
    node: str
    address: str
    master_port: int
    peer_port: int
    stamp: float
    nonce: str = field(default="", repr=False)
    """The node's contribution to the secret; empty where this is stored in a workflow history."""
    place: str = ""
    """`Place.text`, if the node reports a place."""
    step: int | None = None
    """The step that all ranks here had reached in the generation that reported steps here last, or
    None: not known."""
    step_generation: int | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """What every node must know about the whole gang.

    One workflow task sends it to each of 8 shards, and must stay below 4 MiB.
    """

    master: tuple[str, int]
    """Address and port of rank 0."""
    members: tuple[tuple[str, str, int], ...]
    """Node, address and peer port, by group rank."""
    stamp: float
    """The stamp of the first node's preparation. That node's nonce gives the gang's secret only
    while this preparation is current."""


def make_gang(prepared: Sequence[PreparedNode]) -> Gang:
    members = tuple((node.node, node.address, node.peer_port) for node in prepared)
    return Gang((prepared[0].address, prepared[0].master_port), members, prepared[0].stamp)


def derive_secret(token: Token, nonce: str) -> str:
    """Return the secret of a generation, made from the nonce of the node of group rank 0.

    A repeated launch has the same secret.
    """
    return hashlib.sha256(f"{token}|{nonce}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LaunchRanksOutput:
    """The result of a launch: exactly one of refusals, unreachable nodes, success, or nothing
    because the workflow was reset."""

    prepared: tuple[PreparedNode, ...] = ()
    stopped_at: datetime | None = None
    started_at: datetime | None = None
    refusals: tuple[NodeRefusal, ...] = ()
    unreachable: tuple[str, ...] = ()
    reason: str = ""
    start_sent: bool = False
    elsewhere: tuple[str, ...] = ()
    """Those of `unreachable` that answer, but not from where older generations were started."""
    places: dict[str, str] = field(default_factory=dict)
    """`Place.text` by node, once `start` was sent to some nodes."""
    step: int | None = None
    """The step that all ranks had reached in the last generation that nodes know a step of."""
    step_generation: int | None = None
    run: str = ""
    """The run of the workflow that ordered it; empty: not known, or it has not started ranks."""
    warm: str = ""
    """How the ranks began, if modules were to be imported ahead; a clause for people."""
    was_reset: bool = False
    """Another run than that of `LaunchRanksInput` ordered it, so no node was called: the nodes may
    be another job's by now."""


def find_last_step(
    known: Sequence[PreparedNode] | Sequence[LaunchRanksOutput],
) -> tuple[int | None, int | None]:
    """Return the step that all ranks had reached in the newest generation, and that generation.

    A node that was not in the last generations knows of an older one only. Its ranks had reached
    less then, which says nothing about where the others have got to since.
    """
    newest = max(
        (one.step_generation for one in known if one.step_generation is not None), default=None
    )
    steps = [one.step for one in known if one.step is not None and one.step_generation == newest]
    return (min(steps), newest) if steps else (None, None)


class JobActivities:
    def __init__(self, fleets: Fleets, client: Client | None) -> None:
        self._fleets = fleets
        self._client = client

    @activity.defn
    async def launch_ranks(self, input: LaunchRanksInput) -> LaunchRanksOutput:
        """Prepare every node and, when all have answered, start every node. Idempotent."""
        run = activity.info().workflow_run_id or ""
        if input.run and run != input.run:
            return LaunchRanksOutput(was_reset=True, run=run)
        backend = self._fleets.backend(input.spec.fleet)
        async with send_heartbeats() as handover:
            handover.extend(activity.info().heartbeat_details)
            try:
                return await self._launch(backend, input, handover)
            except asyncio.CancelledError:
                details = activity.cancellation_details()
                if details is None or not details.cancel_requested:
                    raise  # this worker shuts down, and another one continues
                # The job cancelled the launch, and must know where its ranks may be alive.
                return LaunchRanksOutput(
                    reason="cancelled", start_sent=bool(handover), places=_read_places(handover)
                )

    async def _launch(
        self, backend: Backend, input: LaunchRanksInput, handover: list[Any]
    ) -> LaunchRanksOutput:
        """Prepare and start the ranks.

        `handover` holds the stamps and places of nodes on which a previous attempt may have started
        ranks.
        """
        try:
            if input.prepared:
                prepared, stopped_at = input.prepared, datetime.now(UTC)
            else:
                prepared = await self._prepare(backend, input)
                stopped_at = datetime.now(UTC)
                if input.prepare_only:
                    # The result is stored in the workflow history, where a secret must not be.
                    return LaunchRanksOutput(
                        prepared=tuple(replace(node, nonce="") for node in prepared),
                        stopped_at=stopped_at,
                    )
        except NodesRefused as error:
            return LaunchRanksOutput(refusals=error.refusals, start_sent=bool(handover))
        except NodesUnreachable as error:
            given_up = LaunchRanksOutput(
                unreachable=error.nodes, reason=str(error), elsewhere=error.elsewhere
            )
            if handover:  # a previous attempt may have started ranks
                given_up = replace(given_up, start_sent=True, places=_read_places(handover))
            return _retry_or_return(error, given_up)
        stamps = {node.node: node.stamp for node in prepared}
        places = {node.node: node.place for node in prepared if node.place}
        if handover and (
            prepared_again := [
                node for node, stamp in stamps.items() if handover[0].get(node) != stamp
            ]
        ):
            # Such a node has new ports and a new nonce, while the others may run with the old ones:
            # the gang would be split in two.
            reason = "it was prepared again after other nodes may have been started"
            refusals = tuple(
                NodeRefusal(node, "prepared_again", reason) for node in prepared_again[:MAX_NAMED]
            )
            return LaunchRanksOutput(
                refusals=refusals, places=_read_places(handover), start_sent=True
            )
        handover[:] = [stamps, places]
        await self._confirm_attempt(stamps, places)
        try:
            warm = await self._start(backend, input, prepared)
        except NodesRefused as error:
            return LaunchRanksOutput(refusals=error.refusals, places=places, start_sent=True)
        except NodesUnreachable as error:
            given_up = LaunchRanksOutput(
                unreachable=error.nodes, reason=str(error), start_sent=True, places=places
            )
            return _retry_or_return(error, given_up)
        step, step_generation = find_last_step(prepared)
        return LaunchRanksOutput(
            stopped_at=stopped_at,
            started_at=datetime.now(UTC),
            places=places,
            step=step,
            step_generation=step_generation,
            warm=warm,
            run=activity.info().workflow_run_id or "",
        )

    async def _confirm_attempt(self, stamps: dict[str, float], places: dict[str, str]) -> None:
        """Confirm with the server that this attempt is current, between prepare and start.

        The heartbeat also stores what the attempt is about to start. A launcher that was frozen
        since `prepare` may have been replaced meanwhile, and its preparation may be obsolete.

        Raises:
            RPCError: it is not current, or the server does not answer; the current attempt repeats
                the launch.
        """
        # Heartbeat through the SDK as well: a failure carries the details that the SDK has, and
        # they replace those that the server received.
        activity.heartbeat(stamps, places)
        if self._client is not None:
            await self._client.get_async_activity_handle(
                task_token=activity.info().task_token
            ).heartbeat(stamps, places)

    async def _prepare(self, backend: Backend, input: LaunchRanksInput) -> tuple[PreparedNode, ...]:
        orders = {
            slot.node: _prepare_order(
                input, find_address(backend, slot), input.first_group_rank + index, backend.server
            )
            for index, slot in enumerate(input.slots)
        }
        answers = await _call_each(
            input.token,
            [slot.node for slot in input.slots],
            lambda node: backend.prepare(node, orders[node]),
        )
        _refuse_elsewhere(input.places, answers)
        return tuple(
            PreparedNode(
                slot.node,
                find_address(backend, slot),
                answer.master_port,
                answer.peer_port,
                answer.stamp,
                answer.nonce,
                answer.place.text if answer.place else "",
                answer.step,
                answer.step_generation,
            )
            for slot, answer in zip(input.slots, answers, strict=True)
            if isinstance(answer, Preparation)
        )

    async def _start(
        self, backend: Backend, input: LaunchRanksInput, prepared: tuple[PreparedNode, ...]
    ) -> str:
        """Start all ranks; return how they began, as `LaunchRanksOutput.warm`."""
        spec = input.spec
        gang = input.gang or make_gang(prepared)
        secret = await _read_secret(backend, input, gang, prepared)
        stamps = {node.node: node.stamp for node in prepared}
        environment, secrets = make_environment(
            input.token, spec, len(gang.members), input.max_restarts, gang.master
        )
        given = {*environment, *secrets}
        of_fleet = self._fleets.spec(spec.fleet)
        redact = list_redacted(spec, of_fleet)
        warm = of_fleet.warm if spec.launcher == "none" else ()
        unwatched = input.timeouts.unwatched
        orders = {}
        for index, slot in enumerate(input.slots):
            group_rank = input.first_group_rank + index
            peers = tuple(
                Peer(*gang.members[peer]) for peer in peers_of(group_rank, len(gang.members))
            )
            command, launched = _make_command(input, gang, group_rank, backend.server, given)
            orders[slot.node] = StartOrder(
                token=input.token,
                node=slot.node,
                command=command,
                workdir=spec.workdir,
                env=environment,
                rank_env=_make_rank_environments(input, backend.server, group_rank, slot, given),
                peers=peers,
                prepared=stamps[slot.node],
                secret=secret,
                fences=input.fences,
                unwatched=None if unwatched is None else unwatched.total_seconds(),
                log_pattern=spec.progress.pattern,
                launched=launched,
                secrets=secrets,
                gpus=spec.gpus_per_node,
                ecs=spec.ecs,
                inherit_env=spec.inherit_env,
                env_defaults=find_defaults(spec, environment, secrets),
                umask=spec.umask,
                limits=spec.soft_limits,
                separate_stderr=spec.output == "separate",
                warm=warm if spec.warm is None else spec.warm,
                redact=redact,
            )
        started = await _call_each(
            input.token,
            [slot.node for slot in input.slots],
            lambda node: backend.start(node, orders[node]),
        )
        return _describe_warmth([one for one in started if isinstance(one, StartedRanks)])

    @activity.defn
    async def stop_ranks(self, input: StopRanksInput) -> StopRanksOutput:
        """Stop the token and all below it on every node.

        Return when each is proven gone, or must have fenced itself.
        """
        return await stop_everywhere(self._fleets.backend(input.fleet), input)


def _describe_warmth(started: Sequence[StartedRanks]) -> str:
    """Return how ranks began where modules were to be imported ahead, or an empty text."""
    if all(one.cold is None for one in started):
        return ""
    cold = [
        (one.node, FIRST_LAUNCH if one.cold is None else one.cold)
        for one in started
        if one.cold != ""
    ]
    if not cold:
        return "its ranks were forked from a Python that had imported ahead"
    nodes = join_names([node for node, _ in cold], MAX_WARM_NAMED)
    return f"its ranks on {nodes} were started from nothing: {cold[0][1]}"


class NodesUnreachable(Exception):
    def __init__(
        self, nodes: tuple[str, ...], reason: str, elsewhere: tuple[str, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.nodes = nodes
        self.elsewhere = elsewhere
        """Those of `nodes` that answer, but not from where older generations were started."""


class NodesRefused(Exception):
    def __init__(self, refusals: tuple[NodeRefusal, ...]) -> None:
        super().__init__("; ".join(f"{refusal.node}: {refusal.reason}" for refusal in refusals[:4]))
        self.refusals = refusals


Answer = TypeVar("Answer")


def _check_highest(refused: Refusal, token: Token) -> Refusal:
    """Return the refusal if its `highest` is plausible: it becomes the number of the next launch.

    Raises:
        ProtocolError: the job cannot have had that number.
    """
    if refused.highest is None:
        return refused
    submission, generation = refused.highest
    own = f"submission {token.submission} generation {token.generation}"
    claim = f"it refuses {own} of job {token.job} because of submission {submission}"
    if submission > token.submission:
        # A server runs one submission of a job at a time and ends it before the next. While this
        # one runs, it is the newest.
        raise ProtocolError(
            refused.node, f"{claim}, and the server has had none after {token.submission}"
        )
    if submission == token.submission and generation > token.generation + MAX_GENERATIONS_AHEAD:
        raise ProtocolError(
            refused.node,
            f"{claim} generation {generation}, more than {MAX_GENERATIONS_AHEAD} ahead of it",
        )
    if refused.highest < (token.submission, token.generation):
        raise ProtocolError(refused.node, f"{claim} generation {generation}, which is below it")
    return refused


async def _call_each(
    token: Token, nodes: Sequence[str], call: Callable[[str], Awaitable[Answer | Refusal]]
) -> list[Answer]:
    """Call all nodes in parallel and return the answers in order.

    Raises:
        NodesRefused: some refused; what the others did is known and repeatable.
        NodesUnreachable: some did not answer, or sent an invalid answer; none refused.
    """
    gate = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def one(node: str) -> Answer | Refusal | BackendError:
        async with gate:
            try:
                answer = await call(node)
                return answer if not isinstance(answer, Refusal) else _check_highest(answer, token)
            except BackendError as error:
                return error

    results = await asyncio.gather(*(one(node) for node in nodes))
    if refusals := tuple(
        NodeRefusal(r.node, r.why, r.reason, r.highest) for r in results if isinstance(r, Refusal)
    ):
        raise NodesRefused(refusals[:MAX_NAMED])
    if silent := [r for r in results if isinstance(r, BackendError)]:
        raise NodesUnreachable(
            tuple(r.node for r in silent),
            join_names(silent, 1),
        )
    return [r for r in results if not isinstance(r, Refusal | BackendError)]


def _prepare_order(
    input: LaunchRanksInput, address: str, group_rank: int, server: str
) -> PrepareOrder:
    timeouts = input.timeouts
    return PrepareOrder(
        token=input.token,
        address=address,
        ranks=processes_of(group_rank, input.spec),
        lease=timeouts.lease.total_seconds(),
        fence_after=timeouts.fence_after.total_seconds(),
        stop_grace=timeouts.stop_grace.total_seconds(),
        valid_for=timeouts.valid_for.total_seconds(),
        heartbeat=timeouts.heartbeat.total_seconds(),
        fleet=identity(input.token.namespace, input.spec.fleet, server),
        log_pattern=input.spec.progress.pattern,
        kills_older=input.kills_older,
    )


async def _read_secret(
    backend: Backend, input: LaunchRanksInput, gang: Gang, prepared: Sequence[PreparedNode]
) -> str:
    """Return the secret of the generation.

    If there are several shards, the first node's nonce is not in the history: each shard asks that
    node for it by repeating its prepare order, which returns the same answer as before.

    Raises:
        NodesRefused: the first node was prepared again since, so that others may have another
            secret.
        NodesUnreachable: it does not answer.
    """
    if input.gang is None:
        return derive_secret(input.token, prepared[0].nonce)
    if not backend.fences:
        return ""
    node, address, _ = gang.members[0]
    order = _prepare_order(input, address, 0, backend.server)
    [answer] = await _call_each(input.token, [node], lambda name: backend.prepare(name, order))
    assert isinstance(answer, Preparation), "a refusal is raised"
    if answer.stamp != gang.stamp:
        reason = "it was prepared again after other nodes may have been started"
        raise NodesRefused((NodeRefusal(node, "prepared_again", reason),))
    return derive_secret(input.token, answer.nonce)


def _read_places(handover: list[Any]) -> dict[str, str]:
    """Return the places in the heartbeat of a previous attempt; empty if it has none."""
    return dict(handover[1]) if handover[1:] else {}


def _refuse_elsewhere(places: tuple[StartedPlaces, ...], answers: Sequence[Preparation]) -> None:
    """Treat a preparation that proves nothing about the node's older ranks as a missing answer.

    Raises:
        NodesUnreachable: a node was prepared at another place than where older generations were
            started.
    """
    doubts = {one.node: find_doubt(places, one.node, one.place) for one in answers}
    elsewhere = tuple(node for node, doubt in doubts.items() if doubt is not None)
    if elsewhere:
        more = f"; and {len(elsewhere) - 1} more" if elsewhere[1:] else ""
        raise NodesUnreachable(elsewhere, f"{doubts[elsewhere[0]]}{more}", elsewhere)


def _make_rank_environments(
    input: LaunchRanksInput, server: str, group_rank: int, slot: Slot, given: Collection[str]
) -> tuple[dict[str, str], ...]:
    spec = input.spec
    environments = rank_environments(group_rank, slot, spec)
    if spec.launcher != "none":
        return environments  # each rank below it gets its own, see `_make_command`
    return tuple(
        {**environment, **tracker_environment(input.token, server, rank, given)}
        for rank, environment in zip(ranks_of(group_rank, spec), environments, strict=True)
    )


def _make_command(
    input: LaunchRanksInput, gang: Gang, group_rank: int, server: str, given: Collection[str]
) -> tuple[tuple[str, ...], BelowLauncher | None]:
    """Return the command that a node starts, and the ranks below it if it is a launcher."""
    spec, token = input.spec, input.token
    if spec.launcher == "none":
        return spec.command, None
    _, address, _ = gang.members[group_rank]
    # The run id differs by generation, so that ranks of two generations never join, even if an
    # older one were still alive.
    run_id = f"{token.job}-{token.submission}-{token.generation}"
    commands = launcher_command(spec, group_rank, len(gang.members), gang.master, address, run_id)
    env = {
        **restart_counts(token, input.max_restarts),
        "TORCHELASTIC_RUN_ID": f"{token.job}-{token.submission}",
        # Rank 0's: only the launcher knows which rank it starts, and the agent adds its number.
        **tracker_environment(token, server, 0, given),
    }
    return commands.launcher, BelowLauncher(commands.rank, ranks_of(group_rank, spec), env)


def find_address(backend: Backend, slot: Slot) -> str:
    """Return the address at which other ranks find a node.

    It is the node's address on the ranks' network if it has one, else the address that the
    controller uses.
    """
    try:
        return backend.node(slot.node).network or slot.address
    except KeyError:  # no longer in the fleet file, as the first call to it will say
        return slot.address


def _retry_or_return(error: NodesUnreachable, give_up: LaunchRanksOutput) -> LaunchRanksOutput:
    if activity.info().attempt < LAUNCH_ATTEMPTS:
        raise ApplicationError(
            str(error), type="NodesUnreachable", next_retry_delay=LAUNCH_RETRY_DELAY
        ) from error
    return give_up


def list_redacted(spec: JobSpec, fleet: FleetSpec) -> tuple[str, ...]:
    """Return the names of the variables whose values are replaced in what leaves a node."""
    return tuple(dict.fromkeys((*spec.secrets, *spec.redact, *fleet.redact)))


def make_environment(
    token: Token, spec: JobSpec, nodes: int, max_restarts: int, master: tuple[str, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of all ranks: those that others may see, and those to keep from them.

    Raises:
        ApplicationError: The environment file or a secret cannot be read.
    """
    from_file = _read_environment_file(spec.env_file) if spec.env_file is not None else {}
    given = spec.model_copy(update={"env": {**from_file, **spec.env}})
    environment = common_environment(token, given, nodes, max_restarts, *master)
    private = {
        name: value
        for name, value in from_file.items()
        if name not in spec.env and environment[name] == value
    }
    public = {name: value for name, value in environment.items() if name not in private}
    return public, {**private, **_read_secrets(spec)}


def _read_environment_file(name: str) -> dict[str, str]:
    """Read the environment file of a job, on the worker.

    Raises:
        ApplicationError: It is missing, others may read it, or it is not an environment file. The
            job fails: with another environment it could silently train something else.
    """
    try:
        # Without O_NONBLOCK a named pipe would block the worker.
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                problem = "is not a file"
            elif found.st_uid != os.geteuid():
                problem = (
                    f"belongs to user {found.st_uid}, expected user {os.geteuid()}, as whom the "
                    "worker runs"
                )
            elif found.st_mode & 0o077:
                mode = f"{stat.S_IMODE(found.st_mode):04o}"
                problem = f"has mode {mode}, expected 0600: it may hold secrets"
            else:
                content = file.read(MAX_ENVIRONMENT_BYTES + 1)
                if len(content) <= MAX_ENVIRONMENT_BYTES:
                    return parse_environment(content)
                problem = f"has more than {MAX_ENVIRONMENT_BYTES >> 20} MiB"
    except FileNotFoundError:
        problem = "is missing"
    except OSError as error:
        problem = f"cannot be read by the worker: {error.strerror}"
    except ValueError as error:
        problem = f"cannot be used: {error}"
    raise ApplicationError(
        f"environment file {name} {problem}; no rank was started, because another environment "
        "could change what is trained: restore the file and retry, or submit the job again",
        type="SecretMissing",
        non_retryable=True,
    )


def _read_secrets(spec: JobSpec) -> dict[str, str]:
    """Read the secrets that a job refers to.

    They are read on the worker and are in no workflow history.

    Raises:
        ApplicationError: one cannot be read.
    """
    values = {}
    for name, reference in spec.secrets.items():
        try:
            values[name] = (
                _read_secret_file(reference.file)
                if reference.file
                else os.environ[reference.env or ""]
            )
        except (OSError, KeyError, ValueError) as error:
            where = f"file {reference.file}" if reference.file else f"variable {reference.env}"
            raise ApplicationError(
                f"secret {name}: {where} cannot be read by the worker",
                type="SecretMissing",
                non_retryable=True,
            ) from error
    return values


def _read_secret_file(name: str) -> str:
    """Return the text of a file that a job names: it may be any file of the worker's machine.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a file, not UTF-8, or longer than a variable can be.
    """
    path = Path(name).expanduser()
    # Without O_NONBLOCK a named pipe would block the worker.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a file")
        content = file.read(MAX_SECRET_BYTES + 1)
    if len(content) > MAX_SECRET_BYTES:
        raise ValueError("too long")
    return content.decode().strip()
