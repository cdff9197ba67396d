"""What is to happen to simulated nodes, as data.

Which rank ends how, which node goes away, which message is lost.

`None` for generation, node or rank means every one. Seconds count from the moment that `when`
names. Nothing here acts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

Command = Literal[
    "prepare",
    "start",
    "stop",
    "watch",
    "renew",
    "list",
    "logs",
    "stacks",
    "last-words",
    "probe",
    "reach",
    "diagnose",
    "reset-gpus",
    "reboot",
]
RepairCommand = Literal["diagnose", "reset-gpus", "reboot"]
"""Those that hold the whole node and carry the id of a repair instead of a token."""
When = Literal["first_call", "prepare", "start", "running"]
"""The first call to any node; as that order is on its way to the node (and may be lost by it); as
soon as its ranks run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matches:
    generation: int | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MatchesRank(_Matches):
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(_MatchesRank):
    """The rank ends by itself, `after` seconds from its start, or from the time that a watch has
    first read its steps."""

    exit_code: int | None = 1
    signal: int | None = None
    """Instead of an exit code."""
    error: Mapping[str, Any] | None = None
    """What it wrote into its error file; `error_file` makes one."""
    log_tail: tuple[str, ...] = ()
    """Where nothing is given or printed, a rank that exits with a code has said that the script
    says so."""
    kernel: tuple[str, ...] = ()
    """What the node's kernel had logged by then. Reported only where the rank failed and its stop
    had not begun."""
    kernel_unreadable: str | None = None
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(_MatchesRank):
    """The rank reports steps: those listed as (seconds, step), then `rate` more a second.

    Flat after the last with rate 0.
    """

    steps: tuple[tuple[float, int], ...] = ((0.0, 0),)
    each_read: bool = False
    """A step waits until the one before it was read: a watch on a busy machine misses none."""
    rate: float = 0.0
    hangs: bool = False
    """It goes on running at its last step, also where ranks without a script succeed."""
    phase: str | None = None
    busy: float | None = None
    """Seconds of work in a step, as it reports them."""
    checkpoints: tuple[tuple[float, int], ...] = ()
    """Finished ones, as (seconds, step)."""
    unreadable: str | None = None
    """Instead of any step: why the report could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prints(_MatchesRank):
    text: str
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(_MatchesRank):
    """What a look at the rank finds from `after` seconds after its start, until a later one."""

    frames: tuple[tuple[str, str, int], ...] = (
        ("forward", "model.py", 30),
        ("<module>", "train.py", 20),
    )
    """Of the main thread, the innermost first."""
    state: str = "R"
    cpu: float = 1.0
    """Cores that it keeps busy meanwhile."""
    written: float = 0.0
    """Bytes that it writes a second meanwhile."""
    wchan: str | None = None
    kernel: tuple[str, ...] = ()
    unreadable: str | None = None
    """Why there are no Python frames."""
    children: tuple[Mapping[str, Any], ...] = ()
    """Processes below it, as rows of the answer; what they leave out is filled in."""
    flight: Mapping[str, Any] | None = None
    address: str | None = None
    """Of its end of its connections to other ranks."""
    stuck: tuple[str, ...] = ()
    """Addresses of other ranks that acknowledge nothing any more."""
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lingers(_MatchesRank):
    """The rank takes this long to obey SIGTERM.

    Infinity: not even SIGKILL ends it (stuck in the kernel).
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes(_MatchesRank):
    """The rank has written its last words, and has not ended: that takes until its `Exit`."""

    error: Mapping[str, Any] | None = None
    log_tail: tuple[str, ...] = ()
    state: str = "running"
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(_Matches):
    command: Literal["prepare", "start", "stop"] | RepairCommand
    """What carries no token is of no generation: for a repair's order leave `generation` out."""
    why: str
    reason: str = "so the script says"
    times: int | None = None
    """None: always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(_Matches):
    """The node loses the network; its ranks run on."""

    when: When = "running"
    after: float = 0.0
    lasts: float | None = None
    words: tuple[str, ...] = ("controller-in", "controller-out", "peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot(_Matches):
    when: When = "running"
    after: float = 0.0
    down_for: float = 0.0
    forgets: bool = False
    """The disk has lost that ranks were launched: as an agent of 0.1.0, the node says nothing of
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimDies(_Matches):
    """The shim is killed, and its ranks with it."""

    kernel: tuple[str, ...] = ()
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sick(_Matches):
    """From this moment on something is wrong with the machine, which a probe and DCGM find.

    GPUs are named by their index.
    """

    gpu_lost: int | None = None
    """Fallen off the bus. `nvidia-smi` cannot reset it, unless `until` says so."""
    remap_pending: int | None = None
    """An uncorrectable error whose row is replaced at the next reset."""
    remap_failed: int | None = None
    recovery_action: tuple[int, int] | None = None
    """What the driver asks for, as NVML numbers it, of this GPU; DCGM sees nothing."""
    dcgm_error: tuple[int, int] | None = None
    """The error id that `dcgmi diag` finds, at any level, on this GPU; NVML sees nothing."""
    nvml_unreadable: str | None = None
    """Why NVML says nothing of any GPU."""
    disk_read_only: bool = False
    kernel: tuple[str, ...] = ()
    """What the kernel says as it begins."""
    until: Literal["reset", "reboot"] | None = None
    """A reboot also cures what a reset does; None: nothing cures it."""
    when: When = "first_call"
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger(_Matches):
    """A program that relaunch did not start computes on a GPU of the node."""

    gpu: int
    pid: int = 4242
    user: str | None = "alice"
    program: str | None = "python"
    when: When = "first_call"
    after: float = 0.0
    lasts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes(_Matches):
    """How long the node needs for this; without one, no time at all.

    A reboot that takes time is down for it, once its answer has left.
    """

    command: Literal["probe", "gpus"] | RepairCommand
    """gpus: what a look at the node reads of them."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagHangs(_Matches):
    """`dcgmi diag` does not come to an end: the node kills it when its time is over."""

    times: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetFails(_Matches):
    exit_code: int = 255
    output: str = "GPU Reset couldn't run because GPU is in use"
    times: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootFails(_Matches):
    """The command that is to reboot the node fails, and the node says so."""

    reason: str = "sudo: a password is required"
    times: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootHangs(_Matches):
    """The node obeys, goes down and does not come up again.

    With `answers` it hangs on the way down and is reached as before.
    """

    answers: bool = False
    times: int | None = None


Befalls = Cut | Reboot | Sick | Stranger
Fails = DiagHangs | ResetFails | RebootFails | RebootHangs
Happening = (
    Exit
    | Progress
    | Prints
    | Stack
    | Lingers
    | Writes
    | Refuse
    | ShimDies
    | Takes
    | Befalls
    | Fails
)
T = TypeVar("T", bound=Happening)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(_Matches):
    """What the network does to one message."""

    kind: Literal["delay", "lose_order", "lose_answer", "double", "break"]
    """lose_answer: the order was carried out. double: it arrives again later. break: a watch ends
    after `lines`."""
    command: Command
    nth: int | None = 1
    """The first, second, … message that matches; None: each."""
    seconds: float = 0.0
    """Of delay, or until the copy arrives."""
    after_orders: int = 0
    """The copy waits until the node has obeyed so many more orders of this job."""
    lines: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Faults by chance.

    Probabilities are per message; the same seed and the same messages to a node give the same
    faults.
    """

    seed: int
    lose_order: float = 0.0
    lose_answer: float = 0.0
    double: float = 0.0
    break_watch: float = 0.0
    delay: float = 0.0
    seconds: float = 0.0
    """The longest delay, and the longest time until a copy arrives."""
    after_orders: int = 2
    """The most orders that a copy lets pass."""

    def draw(self, node: str, number: int, command: Command) -> tuple[Fault, ...]:
        dice = random.Random(f"{self.seed}/{node}/{number}")
        drawn: list[Fault] = []
        if dice.random() < self.delay:
            drawn.append(Fault(kind="delay", command=command, seconds=dice.random() * self.seconds))
        if dice.random() < self.lose_order:
            drawn.append(Fault(kind="lose_order", command=command))
        if dice.random() < self.lose_answer:
            drawn.append(Fault(kind="lose_answer", command=command))
        if dice.random() < self.double:
            later, orders = dice.random() * self.seconds, dice.randint(0, self.after_orders)
            drawn.append(Fault(kind="double", command=command, seconds=later, after_orders=orders))
        if command == "watch" and dice.random() < self.break_watch:
            drawn.append(Fault(kind="break", command=command, lines=dice.randint(1, 5)))
        return tuple(drawn)


@dataclass(frozen=True)
class Script:
    happenings: tuple[Happening, ...] = ()
    faults: tuple[Fault, ...] = ()
    chaos: Chaos | None = None
    then: Literal["run", "succeed"] = "run"
    """What ranks do for whom nothing else is scripted: run until stopped, or exit with 0 at once
    (after their last listed step). In a generation for which an exit, a cut, a reboot, a hang or
    the death of a shim is scripted they run until stopped."""
    broken_links: tuple[tuple[str, str], ...] = ()
    """Caller and target of calls between nodes that get no answer; ranks do not notice."""
    timeout: float = 30.0
    """A delay beyond this is a missing answer, and the order arrives nevertheless. No caller waits
    for a message that is lost."""

    @cached_property
    def _index(self) -> dict[tuple[type, int | None, str | None], list[Happening]]:
        index: dict[tuple[type, int | None, str | None], list[Happening]] = {}
        for happening in self.happenings:
            index.setdefault((type(happening), happening.generation, happening.node), []).append(
                happening
            )
        return index

    def of(self, kind: type[T], generation: int, node: str) -> Iterator[T]:
        """Return what is scripted, the most particular first."""
        for key in ((generation, node), (generation, None), (None, node), (None, None)):
            for happening in self._index.get((kind, *key), ()):
                assert isinstance(happening, kind)
                yield happening

    def succeeds(self, generation: int) -> bool:
        if self.then != "succeed":
            return False
        for happening in self.happenings:
            if happening.generation in (None, generation):
                if isinstance(happening, Exit | Cut | Reboot | ShimDies):
                    return False
                if isinstance(happening, Progress) and (happening.hangs or happening.rate > 0):
                    return False
        return True


def error_file(message: str, traceback: str = "", timestamp: float | None = None) -> dict[str, Any]:
    """Return an error file as torch.distributed.elastic writes it."""
    extra: dict[str, Any] = {"py_callstack": traceback}
    if timestamp is not None:
        extra["timestamp"] = str(timestamp)
    return {"message": {"message": message, "extraInfo": extra}}
