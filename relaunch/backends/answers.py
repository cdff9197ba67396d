"""Parses the answers of nodes, against schemas with strict types and bounds.

Numbers are finite, and lists and texts are bounded. A node may lie. An answer that does not fit is
a fault of that node alone: `ProtocolError`, with one sentence. Fields that no schema names are
passed on, within the same bounds, because an agent may be newer than the controller.
docs/reference/agent-protocol.md, "What the controller accepts", lists the bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from relaunch.backends.base import ProtocolError
from relaunch.evidence.fields import text
from relaunch.generation import Token
from relaunch.text import printable

MAX_COUNT = 2**53
"""Limit of steps, ranks, numbers in tokens, and offsets: every JSON library and every database
holds it exactly."""
MAX_NUMBER = 2**64
MAX_SECONDS = 1e10
"""Limit of a clock that counts seconds from a boot: three centuries."""
MAX_DEPTH = 16
MAX_VALUES = 500_000
"""Most values in one line, so that 8 MiB of brackets do not become gigabytes of objects."""
UNCOUNTED_BYTES = 64 * 1024
"""Lines up to this length are not checked for MAX_VALUES: they cannot hold that many values."""
MAX_REASON = 2000
"""Characters kept of a node's reason."""
MAX_RANKS = 4096
"""Most ranks of one node."""
MAX_JOBS = 20_000
"""Most jobs that a node remembers. A node forgets none, and a busy node sees some thousands a
year."""
MAX_LIVE_GENERATIONS = 256
"""Most generations with live ranks on one node at a time: more than a node has GPUs or cores
for."""
MAX_OBSERVATIONS = 10_000
"""Most observations of one generation on one node: an exit for each rank, and a few others."""
MAX_OUTPUT_BYTES = 1_500_000
"""Most bytes of JSON for the output of a tool on the node. It becomes a payload, which must stay
below 2 MiB."""
MAX_PROBE_BYTES = 1_500_000
MAX_VALUES_REPORTED = 64
"""Most values that a rank reports beside its step."""
MAX_SIGNAL = 64
MAX_PROCESSES = 32
"""Most processes of one rank whose stacks are read: itself and, say, its data loader's workers."""
MAX_THREADS = 16
MAX_FRAMES = 64
MAX_KERNEL_FRAMES = 16
STOPPED_BY_USER = "StoppedByUser"

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

Json = Mapping[str, Any]


# --- bounds of any line


def has_too_many_values(line: bytes) -> bool:
    """Return whether a line of JSON holds more than MAX_VALUES values, without parsing it."""
    if len(line) <= UNCOUNTED_BYTES:
        return False
    outside = _STRINGS.sub(b"", line)
    return outside.count(b",") + outside.count(b"[") + outside.count(b"{") > MAX_VALUES


def find_unbounded(value: object) -> str | None:
    """Return why a decoded answer cannot be stored, or None if it can.

    A number that is not finite, for example, cannot be stored.
    """
    left: list[tuple[object, int]] = [(value, 0)]
    while left:
        one, depth = left.pop()
        if depth > MAX_DEPTH:
            return f"it is nested deeper than {MAX_DEPTH} levels"
        if isinstance(one, dict):
            left.extend((inner, depth + 1) for inner in one.values())
        elif isinstance(one, list):
            left.extend((inner, depth + 1) for inner in one)
        elif isinstance(one, float):
            if not math.isfinite(one):
                return f"it holds {one}, expected finite numbers"
        elif isinstance(one, int) and abs(one) > MAX_NUMBER:
            return f"it holds a whole number of {one.bit_length()} bits, expected at most 64"
    return None


# --- schemas


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class _Row(BaseModel):
    """An object that becomes evidence: fields that are not named here are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


def _cut(reason: str) -> str:
    return printable(reason, MAX_REASON)


def _replace_controls(line: str) -> str:
    return "".join(each if each.isprintable() else " " for each in line)


Item = TypeVar("Item")
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Port = Annotated[int, Field(ge=1, le=65535)]
Pid = Annotated[int, Field(ge=1, le=2**31)]
Word = Annotated[str, Field(min_length=1, max_length=64)]
Label = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""The name of a job, a namespace or a fleet."""
BootId = Annotated[str, Field(min_length=1, max_length=256)]
Reason = Annotated[str, Field(max_length=65536), AfterValidator(_cut)]
Pair = Annotated[list[Count], Field(min_length=2, max_length=2)]
"""[submission, generation]."""
RankNumber = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Ranks = Annotated[list[Count], Field(max_length=MAX_RANKS, fail_fast=True)]
PrintedLine = Annotated[str, Field(max_length=512), AfterValidator(_replace_controls)]
ShortLine = Annotated[str, Field(max_length=256), AfterValidator(_replace_controls)]
Bytes = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Lines = Annotated[list[str], Field(max_length=1024, fail_fast=True)]


class Holder(_Answer):
    by: Annotated[str, Field(max_length=256)] = "another user"
    id: Annotated[str, Field(max_length=256)] = "unknown"


class RefusalAnswer(_Answer):
    why: Word
    reason: Reason
    highest: Pair | None = None
    boot_id: BootId | None = None
    held: Holder | None = None


class PrepareAnswer(_Answer):
    boot_id: BootId
    master_port: Port
    peer_port: Port
    stamp: Seconds
    nonce: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")]
    step: Count | None = None
    step_generation: Count | None = None


class WarmAnswer(_Answer):
    forked: bool
    reason: PrintedLine = ""


class StandbyAnswer(_Answer):
    state: Word
    reason: PrintedLine = ""


class StartAnswer(_Answer):
    pids: Annotated[dict[RankNumber, Pid], Field(max_length=MAX_RANKS)]
    already: bool
    warm: WarmAnswer | None = None


class StopAnswer(_Answer):
    stopped: Annotated[list[Pair], Field(max_length=MAX_JOBS, fail_fast=True)]
    step: Count | None = None


class ListedRank(_Answer):
    rank: Count
    pid: Pid | None = None
    alive: bool


class ListedGeneration(_Answer):
    submission: Count
    generation: Count
    state: Word = "unknown"
    ranks: Annotated[list[ListedRank], Field(max_length=MAX_RANKS, fail_fast=True)]
    fleet: Annotated[str, Field(max_length=256)] | None = None

    @property
    def is_live(self) -> bool:
        return any(rank.alive for rank in self.ranks)


class ListedJob(_Answer):
    namespace: Label
    job: Label
    prepared: Pair | None = None
    stopped: Pair | None = None
    generations: Annotated[list[ListedGeneration], Field(max_length=256, fail_fast=True)]


def _check_live(jobs: list[ListedJob]) -> list[ListedJob]:
    live = sum(one.is_live for job in jobs for one in job.generations)
    if live > MAX_LIVE_GENERATIONS:
        raise ValueError(
            f"ranks of {live} generations live there, expected at most {MAX_LIVE_GENERATIONS}"
        )
    return jobs


class ListedStandby(_Row):
    namespace: Label
    job: Label
    server: Annotated[str, Field(max_length=256)] = ""
    state: Word
    modules: Annotated[list[Label], Field(max_length=64, fail_fast=True)]
    bytes: Bytes | None = None


class ListAnswer(_Answer):
    boot_id: Annotated[str, Field(max_length=256)] = ""
    jobs: Annotated[
        list[ListedJob], Field(max_length=MAX_JOBS, fail_fast=True), AfterValidator(_check_live)
    ]
    held: Holder | None = None
    warm: Annotated[list[ListedStandby], Field(max_length=256, fail_fast=True)] = []


class LogChunkAnswer(_Answer):
    rank: Count
    offset: Count
    next: Count
    data: str


class LogsAnswer(_Answer):
    chunks: Annotated[list[LogChunkAnswer], Field(max_length=MAX_RANKS, fail_fast=True)]
    ended: bool
    begins: Annotated[dict[RankNumber, Count], Field(max_length=MAX_RANKS)] = {}
    sizes: Annotated[dict[RankNumber, Count], Field(max_length=MAX_RANKS)] = {}
    missing: Annotated[list[Count], Field(max_length=MAX_RANKS, fail_fast=True)] = []


class FrameRow(_Row):
    """One frame of a Python stack: what is a triple in the answer."""

    function: Annotated[str, Field(max_length=256), AfterValidator(_replace_controls)]
    file: Annotated[str, Field(max_length=512), AfterValidator(_replace_controls)]
    line: Annotated[int, Field(ge=0, le=2**31)]


def _serialize_frame(frame: FrameRow) -> list[Any]:
    return [frame.function, frame.file, frame.line]


def _read_frame(raw: object) -> object:
    if not isinstance(raw, list) or len(raw) != 3:
        raise ValueError("expected [function, file, line]")
    return dict(zip(("function", "file", "line"), raw, strict=True))


Frame = Annotated[FrameRow, BeforeValidator(_read_frame), PlainSerializer(_serialize_frame)]


Address = Annotated[str, Field(max_length=45, pattern=r"^[0-9a-fA-F.:]+$")]
"""Of IPv4 or IPv6, without a port."""
MAX_ADDRESSES, MAX_STUCK = 8, 16


class ThreadRow(_Row):
    tid: Annotated[int, Field(ge=0, le=2**31)]
    name: ShortLine = ""
    frames: Annotated[list[Frame], Field(max_length=MAX_FRAMES, fail_fast=True)]


class ProcessRow(_Row):
    pid: Pid
    parent: Annotated[int, Field(ge=0, le=2**31)]
    rank: Count | None = None
    command: ShortLine
    state: Annotated[str, Field(pattern=r"^[A-Za-z?]$")]
    blocked: Count = 0
    cpu_s: Seconds
    read_bytes: Bytes | None = None
    written_bytes: Bytes | None = None
    wchan: ShortLine | None = None
    kernel: Annotated[list[ShortLine], Field(max_length=MAX_KERNEL_FRAMES, fail_fast=True)] = []
    threads: Annotated[list[ThreadRow], Field(max_length=MAX_THREADS, fail_fast=True)] = []
    source: Literal["py-spy", "faulthandler"] | None = None
    unreadable: Reason | None = None


class StuckConnectionRow(_Row):
    local: Address
    remote: Address
    retries: Count
    unacknowledged: Bytes


class NetworkRow(_Row):
    addresses: Annotated[list[Address], Field(max_length=MAX_ADDRESSES, fail_fast=True)]
    stuck: Annotated[list[StuckConnectionRow], Field(max_length=MAX_STUCK, fail_fast=True)]


class StackRow(_Row):
    rank: Count
    pid: Pid | None = None
    unreadable: Reason | None = None
    processes: Annotated[list[ProcessRow], Field(max_length=MAX_PROCESSES, fail_fast=True)] = []
    flight: dict[str, Any] | None = None
    network: NetworkRow | None = None


class StacksAnswer(_Answer):
    stacks: Annotated[list[StackRow], Field(max_length=MAX_RANKS, fail_fast=True)]


class LastWordsRow(_Row):
    rank: Count
    local_rank: Count
    pid: Pid | None = None
    state: Word = "running"
    error: dict[str, Any] | None = None
    error_age: Seconds | None = None
    log_tail: Lines = []
    log_age: Seconds | None = None


class LastWordsAnswer(_Answer):
    ranks: Annotated[list[LastWordsRow], Field(max_length=MAX_RANKS, fail_fast=True)]


class CheckpointRow(_Answer):
    name: Annotated[str, Field(max_length=256)]
    format: Annotated[str, Field(max_length=32)]
    step: Count | None
    age: Seconds
    incomplete: Annotated[str, Field(max_length=256)] = ""


class CheckpointsAnswer(_Answer):
    newest: CheckpointRow | None = None
    incomplete: Annotated[list[CheckpointRow], Field(max_length=16, fail_fast=True)] = []
    unreadable: Annotated[str, Field(max_length=256)] | None = None


class BootAnswer(_Answer):
    """The answer to a command whose other fields are read one by one later.

    A field that makes no sense then counts as unreadable.
    """

    boot_id: BootId


class LeftProcess(_Answer):
    pid: Pid
    started: Count
    address: Annotated[str, Field(max_length=256)]
    port: Port
    word: Annotated[str, Field(max_length=256)]


class FailureAnswer(_Answer):
    cannot: Reason


class PreflightAnswer(BootAnswer):
    left: LeftProcess | FailureAnswer | None = None


class MeetingRow(_Answer):
    took: Seconds


class MeetAnswer(BootAnswer):
    lives: bool | None = None
    met: MeetingRow | FailureAnswer | None = None


class ListeningAnswer(BootAnswer):
    cannot: Reason | None = None
    ports: Annotated[list[Port], Field(max_length=8)] = []
    word: Annotated[str, Field(max_length=256)] = ""


class ReachedRow(_Answer):
    node: Annotated[str, Field(max_length=256)]
    took: Seconds = 0.0
    cannot: Reason | None = None


class ReachAnswer(BootAnswer):
    reached: Annotated[list[ReachedRow], Field(max_length=256, fail_fast=True)]


class MissingTool(_Answer):
    missing: Reason


class DiagnoseAnswer(_Answer):
    exit_code: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None
    stdout: str


class ResetAnswer(_Answer):
    exit_code: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None
    output: str


# --- schemas of the lines of a watch


class Hello(_Answer):
    boot_id: Annotated[str, Field(max_length=256)]
    state: Word
    ranks: Ranks
    stamp: Seconds


class SenderToken(_Row):
    """The token in a line of a watch. The server is not in it where an order names none."""

    namespace: Label
    job: Label
    submission: Count
    generation: Count

    @property
    def token(self) -> Token:
        return Token(self.namespace, self.job, self.submission, self.generation)


class ShimRow(_Row):
    """The process that holds the generation on its node, of which no two are ever alike."""

    pid: Pid
    started: Count
    boot_id: BootId

    @property
    def text(self) -> str:
        return f"shim {self.pid} of boot {self.boot_id[:8]}"


class Sender(_Row):
    """Who speaks in a line of a watch."""

    token: SenderToken
    node: Label | None
    shim: ShimRow | None


class End(_Answer):
    seq: Count = 0


class RankProgress(_Answer):
    unreadable: Reason | None = None
    step: Count | None = None
    age: Seconds = 0.0
    values: Annotated[
        dict[Annotated[str, Field(max_length=256)], float | Word],
        Field(max_length=MAX_VALUES_REPORTED),
    ] = {}
    phase: Annotated[str, Field(max_length=256)] | None = None
    checkpoint: Count | None = None


class LastOutput(_Answer):
    """What a rank printed last, on a node where no rank reports progress."""

    rank: Count
    lines: Annotated[list[PrintedLine], Field(max_length=16, fail_fast=True)] = []


class Heartbeat(_Answer):
    stamp: Seconds
    alive: Ranks = []
    lease_left: Seconds | None = None
    shim_silent: Seconds | None = None
    progress: Annotated[dict[RankNumber, RankProgress], Field(max_length=MAX_RANKS)] = {}
    unmatched: LastOutput | None = None


class ObservationHead(_Answer):
    seq: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    kind: Word


class BelowExit(_Answer):
    rank: Count
    local_rank: Count = 0
    pid: Pid
    log_tail: Lines = []


class WrittenBefore(_Answer):
    """What a rank had written before its node stopped it."""

    error_age: Seconds | None = None
    log_tail: Lines = []
    log_age: Seconds | None = None


class RankExitedLine(ObservationHead):
    rank: Count
    local_rank: Count
    pid: Pid | None = None
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    signal: Annotated[int, Field(ge=1, le=MAX_SIGNAL)] | None = None
    stopped: bool = False
    launcher: bool = False
    log_tail: Lines = []
    kernel: Lines | None = None
    kernel_unreadable: Reason | None = None
    launched: Annotated[list[BelowExit], Field(max_length=MAX_RANKS, fail_fast=True)] | None = None
    before_stop: WrittenBefore | None = None


class FencedLine(ObservationHead):
    why: Word
    reason: Reason = ""


class ReasonLine(ObservationHead):
    reason: Reason = ""
    kernel: Lines | None = None
    kernel_unreadable: Reason | None = None


_OBSERVATIONS: Mapping[str, type[ObservationHead]] = {
    "RankExited": RankExitedLine,
    "Fenced": FencedLine,
    "Stopped": ReasonLine,
    "ShimDied": ReasonLine,
    "RanksVanished": ReasonLine,
}
"""The schema of each kind of observation. A kind that is not listed says nothing that a job acts
on: an agent may be newer."""

_SPOKEN: Mapping[str, str] = {
    "hello": "its hello",
    "heartbeat": "its heartbeat",
    "observation": "an observation of it",
    "end": "its end",
    "outcome": "its refusal of a watch",
}
"""How sentences call each kind of line of a watch."""

Schema = TypeVar("Schema", bound=BaseModel)


# --- parsing


def parse(node: str, command: str, schema: type[Schema], answer: object) -> Schema:
    """Parse the answer of a node to a command.

    Raises:
        ProtocolError: it does not fit the schema.
    """
    if (wrong := find_unbounded(answer)) is not None:
        raise ProtocolError(node, f"its answer to {command} makes no sense: {wrong}")
    return _parse(node, f"its answer to {command}", schema, answer)


def parse_list(node: str, answer: object) -> dict[str, Any]:
    """Return the answer to `list`, with the fields that a fleet reads checked.

    The GPUs are read field by field later.

    Raises:
        ProtocolError: it does not fit.
    """
    return parse(node, "list", ListAnswer, answer).model_dump()


def parse_stacks(node: str, rank: int | None, answer: object) -> dict[str, Any]:
    """Return the answer to `stacks`, all of it checked, and with nothing that is not named.

    Args:
        node: The node that sent it.
        rank: The rank that was asked for; None: all of the node.
        answer: The answer as decoded from JSON.

    Raises:
        ProtocolError: It does not fit, or is of other ranks.
    """
    parsed = parse(node, "stacks", StacksAnswer, answer)
    ranks = [row.rank for row in parsed.stacks]
    if len(set(ranks)) != len(ranks) or (rank is not None and ranks != [rank]):
        expected = "each rank once" if rank is None else f"rank {rank} alone"
        raise ProtocolError(
            node, f"its answer to stacks is of ranks {_shorten(ranks)}, expected {expected}"
        )
    rows = parsed.model_dump()
    for row in rows["stacks"]:
        if not row["processes"] and row["unreadable"] is None:
            row["unreadable"] = "the agent of the node is too old to say"
    return rows


def parse_last_words(node: str, answer: object) -> dict[str, Any]:
    """Return the answer to `last-words`, all of it checked, and with nothing that is not named.

    Raises:
        ProtocolError: It does not fit, or names a rank twice.
    """
    if isinstance(answer, dict) and isinstance(rows := answer.get("ranks"), list):
        # The error file is the rank's: a number in it that cannot be stored is no node's fault.
        answer = {**answer, "ranks": [_reduce_row(row) for row in rows[: MAX_RANKS + 1]]}
    parsed = parse(node, "last-words", LastWordsAnswer, answer)
    ranks = [row.rank for row in parsed.ranks]
    if len(set(ranks)) != len(ranks):
        raise ProtocolError(
            node, f"its answer to last-words is of ranks {_shorten(ranks)}, expected each once"
        )
    return parsed.model_dump()


def check_output(node: str, command: str, answer: Json, name: str) -> Json:
    """Check the answer to a command that runs a program on the node.

    It says that the program is missing, or gives its exit code and output.

    Raises:
        ProtocolError: it does not fit.
    """
    if "missing" in answer:
        parse(node, command, MissingTool, answer)
        return answer
    parse(node, command, DiagnoseAnswer if name == "stdout" else ResetAnswer, answer)
    return check_size(node, command, answer, MAX_OUTPUT_BYTES)


def check_size(node: str, command: str, answer: Json, limit: int) -> Json:
    """Check that an answer that becomes a payload has at most `limit` bytes of JSON.

    Raises:
        ProtocolError: it has more.
    """
    size = _size(answer)
    if size > limit:
        raise ProtocolError(
            node, f"its answer to {command} makes no sense: {size} bytes, expected at most {limit}"
        )
    return answer


def parse_watch_line(
    node: str, token: Token, line: object, *, is_platform: bool = False
) -> dict[str, Any]:
    """Return one line of a watch with its fields checked and converted.

    Args:
        node: The node that sent it.
        token: The generation that is watched: a hello of another generation is an error.
        line: The line as decoded from JSON.
        is_platform: Whether it may come from the platform that runs the ranks (ECS), which knows
            who stopped them. A node itself may not report actions of people.

    Raises:
        ProtocolError: it does not fit.
    """
    if not isinstance(line, dict):
        raise ProtocolError(
            node, f"a line of its watch makes no sense: {_shorten(line)}, expected an object"
        )
    if "observation" in line:
        return {"observation": _parse_observation(node, line["observation"], is_platform)}
    if (wrong := find_unbounded(line)) is not None:
        raise ProtocolError(node, f"a line of its watch makes no sense: {wrong}")
    if "heartbeat" in line:
        return {
            "heartbeat": _parse(node, "its heartbeat", Heartbeat, line["heartbeat"]).model_dump()
        }
    if "hello" in line:
        return {"hello": _parse_hello(node, token, line["hello"])}
    if "end" in line:
        return {"end": _parse(node, "its end", End, line["end"]).model_dump()}
    if line.get("outcome") == "refused":
        return _parse(node, "its refusal of a watch", RefusalAnswer, line).model_dump()
    return line


class WatchParser:
    """Parses the lines of a watch over one connection, and checks that all have the same sender.

    An agent names the sender of each line: the token, its node, and its shim. A line is a fault of
    the node, and neither progress nor an end, if its sender has another token or node, or another
    shim than the hello; if it has no sender although the hello had one; or if it comes before the
    hello. An agent of an earlier version names no sender: its lines count as its connection's.
    """

    def __init__(self, node: str, token: Token, *, is_platform: bool = False) -> None:
        """Begin with a connection.

        Args:
            node: The node that is watched.
            token: The generation that is watched.
            is_platform: As in `parse_watch_line`. A platform's stream is our own reading of it, and
                lines of an agent in a container were checked before they became part of that.
        """
        self.node = node
        self.token = token
        self._is_platform = is_platform
        self._is_greeted = self._names_sender = False
        self._shim: ShimRow | None = None

    def parse(self, line: object) -> dict[str, Any]:
        """Return one line with its fields checked and converted.

        Raises:
            ProtocolError: It does not fit, or is not the word of the node's supervisor.
        """
        if not self._is_platform and isinstance(line, dict):
            self._check_sender(line)
        return parse_watch_line(self.node, self.token, line, is_platform=self._is_platform)

    def _check_sender(self, line: Mapping[str, Any]) -> None:
        kind = next((name for name in _SPOKEN if name in line), None)
        what = _SPOKEN.get(kind or "", "a line of its watch")
        if line.get("sender") is not None:
            if (wrong := find_unbounded(line["sender"])) is not None:
                raise ProtocolError(self.node, f"{what} makes no sense: {wrong}")
            self._compare(what, _parse(self.node, what, Sender, line["sender"]))
        elif self._names_sender and kind is not None:
            raise ProtocolError(self.node, f"{what} names no sender, expected that of its hello")
        if kind == "hello":
            self._is_greeted, self._names_sender = True, line.get("sender") is not None
        elif kind == "outcome" and self._is_greeted:
            raise ProtocolError(self.node, "it refuses a watch that it has begun")
        elif kind is not None and kind != "outcome" and not self._is_greeted:
            raise ProtocolError(self.node, f"{what} comes before its hello")

    def _compare(self, what: str, sender: Sender) -> None:
        """Compare a sender with what is watched, and with the lines before."""
        if sender.token.token != self.token:
            raise ProtocolError(
                self.node,
                f"{what} is of generation {sender.token.token}, expected generation {self.token}",
            )
        if sender.node is not None and sender.node != self.node:
            raise ProtocolError(
                self.node, f"{what} is of node {text(sender.node, 60)}, expected node {self.node}"
            )
        if sender.shim is not None:
            if self._shim is not None and sender.shim != self._shim:
                raise ProtocolError(
                    self.node, f"{what} is of {sender.shim.text}, expected {self._shim.text}"
                )
            self._shim = sender.shim


def _parse_hello(node: str, token: Token, raw: object) -> dict[str, Any]:
    hello = _parse(node, "its hello", Hello, raw)
    named = (hello.model_extra or {}).get("token")
    own = (token.namespace, token.job, token.submission, token.generation)
    names = ("namespace", "job", "submission", "generation")
    if not isinstance(named, Mapping) or tuple(named.get(name) for name in names) != own:
        raise ProtocolError(node, f"its hello is of {_shorten(named)}, expected generation {token}")
    return hello.model_dump()


def _parse_observation(node: str, raw: object, is_platform: bool) -> dict[str, Any]:
    what = "an observation of it"
    if not isinstance(raw, dict):
        raise ProtocolError(node, f"{what} makes no sense: {_shorten(raw)}, expected an object")
    # The error file is the rank's: a number in it that cannot be stored is not the node's fault.
    bare = {key: value for key, value in raw.items() if key not in ("error", "launched")}
    before, launched = raw.get("before_stop"), raw.get("launched")
    if "before_stop" in raw:
        bare["before_stop"] = _strip_error(before)
    if isinstance(launched, list):
        bare["launched"] = [_strip_error(one) for one in launched[: MAX_RANKS + 1]]
    elif launched is not None:
        bare["launched"] = launched
    if (wrong := find_unbounded(bare)) is not None:
        raise ProtocolError(node, f"{what} makes no sense: {wrong}")
    head = _parse(node, what, ObservationHead, bare)
    if not is_platform:
        bare.pop("ecs", None)
        if head.kind == STOPPED_BY_USER:
            raise ProtocolError(
                node,
                f"{what} says {STOPPED_BY_USER}:"
                " only a platform that runs the ranks knows what people did",
            )
        if head.seq > MAX_OBSERVATIONS:
            raise ProtocolError(
                node,
                f"{what} has number {head.seq},"
                f" expected at most {MAX_OBSERVATIONS} of one generation",
            )
    schema = _OBSERVATIONS.get(head.kind)
    if schema is None:
        return bare
    parsed = _parse(node, what, schema, bare).model_dump(exclude_unset=True)
    if "error" in raw:
        parsed["error"] = reduce_error(raw["error"])
    if schema is RankExitedLine and isinstance(before, dict) and "error" in before:
        parsed["before_stop"]["error"] = reduce_error(before["error"])
    if schema is RankExitedLine and isinstance(launched, list):
        parsed["launched"] = [
            {**one, "error": reduce_error(whole.get("error"))}
            for one, whole in zip(parsed["launched"], launched, strict=True)
        ]
    return parsed


def _strip_error(value: object) -> object:
    return {k: v for k, v in value.items() if k != "error"} if isinstance(value, dict) else value


def _reduce_row(row: object) -> object:
    if not isinstance(row, dict) or "error" not in row:
        return row
    return {**row, "error": reduce_error(row["error"])}


def reduce_error(raw: object) -> dict[str, Any] | None:
    """Return the fields that are read of a rank's error file.

    Anything else in the file is left out.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        return {"unreadable": f"expected an object, found {type(raw).__name__}"}
    if "unreadable" in raw:
        return {"unreadable": text(raw["unreadable"]) or "the node does not say why"}
    message = raw.get("message")
    if isinstance(message, str):
        return {"message": message, "timestamp": _moment(raw.get("timestamp"))}
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return {"unreadable": "it has no message"}
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = extra.get("py_callstack")
    stack = stack if isinstance(stack, str) else ""
    info = {"timestamp": _moment(extra.get("timestamp")), "py_callstack": stack}
    return {"message": {"message": message["message"], "extraInfo": info}}


def _moment(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None


def _parse(node: str, what: str, schema: type[Schema], value: object) -> Schema:
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise ProtocolError(node, f"{what} makes no sense: {_first_error(error)}") from None


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    where = text(".".join(str(part) for part in first["loc"]), 100)
    if first["type"] == "missing":
        return f"{where} is missing"
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    if first["type"] in ("too_long", "string_too_long", "value_error"):
        return f"{where}: {expected}"
    return f"{where} is {_shorten(first['input'])}, {expected}"


def _shorten(value: object) -> str:
    """Return at most 60 characters of a value, which may be as long as a line."""
    if isinstance(value, str):
        value = value[:60]
    elif isinstance(value, list | dict) and len(value) > 8:
        return f"{type(value).__name__} of {len(value)} values"
    elif isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return text(repr(value), 60)


def _size(value: object) -> int:
    """Return about how many bytes a value takes as JSON, without writing it."""
    size, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left.extend(one)
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
        elif isinstance(one, str):
            size += len(one.encode("utf-8", "replace")) + one.count("\n") + one.count('"')
            size += one.count("\\") + 5 * sum(map(one.count, _CONTROLS))
        size += 4
    return size


_CONTROLS = tuple(chr(code) for code in range(32) if chr(code) not in "\n\r\t\b\f")
