"""Diagnose a fault: find the root cause in what was observed. `decide` chooses the response."""

from __future__ import annotations

import signal as signals
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import assert_never

from relaunch.evidence.catalog import Catalog, catalog
from relaunch.evidence.causes import HARDWARE_CAUSES, Cause
from relaunch.evidence.exits import read_ecs_stop, read_exit
from relaunch.evidence.findings import Finding, Role
from relaunch.evidence.kernel_log import read_kernel_log
from relaunch.evidence.last_words import LastWords
from relaunch.evidence.observations import Observation, RankExited, RanksFenced, RanksVanished
from relaunch.evidence.rank_log import (
    LogReading,
    choose_finding,
    find_words,
    is_echo_error,
    name_cause,
    read_rank_log,
)
from relaunch.evidence.reachability import CUT_OFF
from relaunch.job.copies import replace
from relaunch.job.events import FaultObserved, LaunchFailed, LaunchRefused, NodeRefusal, RanksHung
from relaunch.job.fencing import fences
from relaunch.job.rules import ALL_RULES, Rule, Rules
from relaunch.job.state import Certainty, Diagnosis, JobState
from relaunch.text import join_names

DO_NOT_RESTART = 93
"""Exit code by which a rank asks not to be restarted (nvidia-resiliency-ext's default for this)."""

NEVER_WATCHED = "never_watched"
"""Fence reason of a node that stopped its ranks because their lease was never renewed.

The node answered the launch, and a node that is silent afterwards is reported as lost. So the
controller was more likely late than the node at fault. The policy replaces a node to which it
happens again.
"""

DEVICE_COUNT = "log device_count"

UNWATCHED = "unwatched"
"""Fence reason of ranks that no controller has watched for as long as the policy allows."""

TERMINATED = "terminated"
"""Fence reason of ranks whose shim was asked to end by a signal, as when their node shuts down."""

BY_ITSELF = "EssentialContainerExited"
"""Stop code of an ECS task whose container ended by itself."""

NIC_EVENT = "log nic_event"
"""The code of a network card that failed: no peer's exit explains that."""

CLOCKS_AGREE = 0.5
"""Seconds. When two nodes' timestamps differ by less, their clocks do not show which was first.

Hosts that keep time by NTP differ by milliseconds.
"""
AHEAD, BEHIND = 2.0, 600.0
"""Seconds by which an error's timestamp may be after or before its receipt; beyond, it is ignored.

No error is written after it was received, and none long before its rank has ended (torch waits
ten minutes for a collective).
"""

LONG_AGO = datetime.min.replace(tzinfo=UTC)
"""The time of an end that is judged alone, so that nothing is compared with it."""

RIVALS = 8
"""Maximum number of different simultaneous errors that are compared.

A program that puts its rank into its messages has thousands.
"""
UNEXPLAINED = "no row of the catalog explains its last line"
SILENTLY_KILLED = "nothing in its last lines explains it"
"""Of a rank that was ended by SIGKILL, which lets it write nothing: its last line is that of a
healthy rank."""
MAX_UNKNOWN = 200
"""Characters of a line that nothing explains."""
NAMED = 16
"""Maximum number of suspects named in a diagnosis."""
MAX_STACKS = 4000
"""Characters kept of where the ranks of a hang were: fewer than an incident keeps of a traceback,
whose end it keeps."""
REFUSAL_CAUSES = {
    "command_not_found": Cause.USER_INPUT,
    "workdir_missing": Cause.USER_INPUT,
    "cannot_start": Cause.USER_INPUT,
    "secret_missing": Cause.USER_INPUT,
    "stuck": Cause.NODE_FAULT,
    "disk_full": Cause.NODE_FAULT,
    "address_not_ready": Cause.NODE_FAULT,
    "held": Cause.PLATFORM,
    "rebooting": Cause.PLATFORM,
    "other_fleet": Cause.PLATFORM,
}
"""The cause that an agent's refusal code indicates.

Any other code concerns only the controller and the agent, and counts as PLATFORM. What is
USER_INPUT here is the node's own fault once it has run, or if other nodes accept it.
"""
SECRET_MISSING = "secret_missing"
"""Of all workers that were asked, and of no node."""
UNPREPARED = ("command_not_found", "workdir_missing", "cannot_start", "address_not_ready")
"""Refusals of nodes whose mounts, container or network may not be there yet."""
MAX_REFUSALS = 16
"""Most refusals that a launch reports of one order. Where there are as many, others may have
refused as well."""

MAX_CLAIMS = 3
"""Maximum number of consecutive launches above a token that a node claims to have seen.

There may be several, because nodes that join later may have seen higher tokens.
"""
CLAIMED = "a node has seen a higher generation"
"""Recorded in place of a rung's label for such a launch."""

UNFINISHED = {
    "alive": (Role.WRAPPER, Cause.APPLICATION, "failed and has not ended yet"),
    "dumping": (Role.SYMPTOM, Cause.UNKNOWN, "is writing a core dump: a signal ended it"),
    "stopped": (Role.WRAPPER, Cause.APPLICATION, "failed and was stopped before it had ended"),
}
"""What is known of the end of a rank whose exit does not say how it failed, by
`RankExited.unfinished`."""

Fault = FaultObserved | RanksHung | LaunchFailed | LaunchRefused


def diagnose(job: JobState, fault: Fault, rules: Rules = ALL_RULES) -> Diagnosis:
    """Return the root cause of a fault by its own evidence, whichever nodes of the job are lost.

    A cascade is never the cause while there is a root. Among roots the earliest wins, and a node's
    own evidence outweighs a program's messages. This reads all evidence of the fault, so it is done
    once; `blame_lost_nodes` then takes the lost nodes into account.
    """
    match fault:
        case LaunchFailed():
            return Diagnosis(Cause.NODE_LOST, fault.reason, nodes=fault.unreachable)
        case LaunchRefused():
            claimed = _diagnose_claim(job, fault)
            return claimed or _diagnose_refusal(job, fault, Rule.NODE_REFUSES in rules)
        case RanksHung() if fault.silent and fences(job):
            # A gang that hangs while one of its nodes is silent is waiting for that node.
            nodes = tuple(node for node, _ in fault.silent)
            return Diagnosis(
                Cause.NODE_LOST,
                f"{', '.join(nodes[:4])}: no answer, and {fault.reason}",
                nodes=nodes,
            )
        case RanksHung():
            return Diagnosis(
                Cause.HANG,
                fault.reason,
                # A stack accuses: the examination and the ladder concern only these nodes. It is
                # what a program does, so alone it never costs a node.
                nodes=tuple(dict.fromkeys(one.node for one in fault.suspects))[:NAMED],
                ranks=tuple(one.rank for one in fault.suspects) or fault.ranks,
                code=CUT_OFF if fault.is_cut_off else "",
                traceback=_describe_stacks(fault),
                by_program=True,
            )
        case FaultObserved():
            known = _Readers(catalog(job.policy.catalog))
            diagnosis = _diagnose_observations(fault.observations, fault.more, known)
            diagnosis = _blame_early_exit(fault.finished, diagnosis)
            if Rule.FEWER_GPUS in rules:
                diagnosis = _blame_missing_gpu(job, diagnosis)
            if diagnosis.cause is Cause.NETWORK and fault.silent:
                nodes = tuple(node for node, _ in fault.silent)
                return Diagnosis(
                    Cause.NODE_LOST,
                    f"{', '.join(nodes[:4])}: no answer; {diagnosis.reason}",
                    nodes=nodes,
                )
            return diagnosis
        case _:
            assert_never(fault)


def _describe_stacks(fault: RanksHung) -> str:
    """Return where all ranks were, and the stacks of the suspects, as lines."""
    lines = [
        *fault.groups,
        *(
            line
            for one in fault.suspects
            if one.frames
            for line in (f"rank {one.rank} on {one.node}:", *(f"  {line}" for line in one.frames))
        ),
    ]
    kept: list[str] = []
    for line in lines:
        if sum(map(len, kept)) + len(kept) + len(line) > MAX_STACKS:
            break
        kept.append(line)
    return "\n".join(kept)


def diagnose_log(
    lines: Sequence[str], exit_code: int, tables: Catalog
) -> tuple[Diagnosis, LogReading]:
    """Return the root cause of a rank that failed alone, by its log and exit, and how it was read.

    Args:
        lines: Its log, of which a job knows the last `TAIL_LINES`.
        exit_code: Its exit code; negative for a signal.
        tables: The catalog with the user's overrides.
    """
    code, signal = (None, -exit_code) if exit_code < 0 else (exit_code, None)
    one = RankExited("", 0, 0, code, signal, LONG_AGO, log_tail=tuple(lines))
    known = _Readers(tables)
    diagnosis = _diagnose_observations((one,), 0, known)
    return replace(diagnosis, reason=diagnosis.reason.replace(_who(one), "it")), known.log(one)


def blame_lost_nodes(job: JobState, fault: Fault, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of a fault that came while nodes were lost: their loss is the cause.

    Args:
        job: The job, whose `lost` may be empty.
        fault: The fault.
        diagnosis: The root cause by the fault's own evidence; the result if no node is lost.
    """
    if not job.lost or isinstance(fault, LaunchFailed | LaunchRefused):
        return diagnosis
    silent = join_names(job.lost_names, 4)
    then = fault.reason if isinstance(fault, RanksHung) else _first_words(fault.observations)
    return Diagnosis(
        Cause.NODE_LOST,
        f"{silent}: no answer ({job.lost[0].reason}); then {then}",
        nodes=job.lost_names,
    )


def is_broken_beside_lost(job: JobState, fault: Fault, diagnosis: Diagnosis) -> bool:
    """Return whether a fault shows broken hardware of a node that is not lost, while others are."""
    return (
        bool(job.lost)
        and isinstance(fault, FaultObserved)
        and diagnosis.cause in HARDWARE_CAUSES
        and not diagnosis.by_program
        and bool(diagnosis.nodes)
        and not set(diagnosis.nodes) & set(job.lost_names)
    )


def is_root(observation: Observation, known: Catalog | None = None) -> bool:
    """Return whether an observation may be a root cause, not the echo of a failure elsewhere."""
    match observation:
        case RankExited():
            if not observation.failed or observation.stopped:
                return False
            readers = _Readers(known or catalog())
            if not readers.is_echo(observation):
                return True
            # A kernel also reports other processes of its node, such as one that was killed in a
            # container of another user: that explains no echo.
            return any(
                (found.role is Role.ROOT or _is_lost_link(found)) and _is_ours(found, observation)
                for found in readers.kernel(observation.kernel)
            )
        case RanksFenced():
            return observation.why != "superseded"
        case RanksVanished():
            return True
        case _:
            assert_never(observation)


@dataclass(frozen=True, slots=True)
class _Readers:
    """A cache of parsed logs.

    All ranks of a node report the same kernel log, and thousands of ranks may end with the same
    log lines, so each text is parsed only once.
    """

    catalog: Catalog
    logs: dict[Hashable, LogReading] = field(default_factory=dict)
    echoes: dict[Hashable, bool] = field(default_factory=dict)
    kernels: dict[tuple[str, ...], tuple[Finding, ...]] = field(default_factory=dict)
    faults: dict[tuple[str, ...], tuple[Finding, ...]] = field(default_factory=dict)

    def log(self, one: RankExited) -> LogReading:
        key = (one.error, one.log_tail, one.exit_code, one.signal)
        if key not in self.logs:
            self.logs[key] = read_rank_log(
                one.log_tail, one.exit_code, one.signal, self.catalog, one.error
            )
        return self.logs[key]

    def is_echo(self, one: RankExited) -> bool:
        """Return whether a rank's last words blame a peer and name no fault of this rank."""
        if one.echo:
            return True
        if one.error is None:
            return self.log(one).is_echo
        key = (one.error.message, one.error.traceback)
        known = self.echoes.get(key)
        if known is None:
            known = self.echoes[key] = is_echo_error(one.error, self.catalog)
        return known

    def kernel(self, lines: tuple[str, ...]) -> tuple[Finding, ...]:
        if lines not in self.kernels:
            self.kernels[lines] = read_kernel_log(lines, self.catalog)
        return self.kernels[lines]

    def hardware(self, lines: tuple[str, ...]) -> tuple[Finding, ...]:
        """Return the hardware faults that a kernel log reports, the gravest cause first."""
        if lines not in self.faults:
            roots = [
                found
                for found in self.kernel(lines)
                if found.role is Role.ROOT and found.cause in HARDWARE_CAUSES
            ]
            self.faults[lines] = tuple(sorted(roots, key=_gravity))
        return self.faults[lines]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One failed rank with what its log and its node's kernel log say."""

    exit: RankExited
    ending: Finding
    log: LogReading
    kernel: tuple[Finding, ...]


def _diagnose_observations(
    observations: tuple[Observation, ...], more: int, known: _Readers
) -> Diagnosis:
    # A gang of thousands fails as one, so what is done for each exit is little, and nothing is
    # sorted that is not used: a sort of all takes longer than the rest.
    failed: list[RankExited] = []
    vanished: list[RanksVanished] = []
    fenced: list[RanksFenced] = []
    for observation in observations:
        if isinstance(observation, RankExited):
            if observation.exit_code != 0 and not observation.stopped:
                failed.append(observation)
        elif isinstance(observation, RanksVanished):
            vanished.append(observation)
        elif is_root(observation):
            fenced.append(observation)
    if (hardware := _diagnose_hardware([*failed, *vanished], more, known)) is not None:
        return hardware
    if vanished:
        gone = min(vanished, key=_order)
        return Diagnosis(
            Cause.NODE_FAULT,
            f"{gone.node}: {gone.reason}",
            nodes=(gone.node,),
            certainty=Certainty.CERTAIN,
            by_program=not gone.rebooted,  # a program can kill its shim
        )
    ended = [one for one in failed if one.ecs is not None and one.ecs.stop_code != BY_ITSELF]
    for one in sorted(ended, key=_order):
        # ECS stopped a container or could not start it: the other ranks failed because of that.
        if (reading := _read(one, known)).ending.role is Role.ROOT:
            return _diagnose_exit(reading, _more(len(failed) - 1 + more))
    if fenced:
        taken = sorted((each for each in fenced if each.why == TERMINATED), key=_order)
        if taken:
            return Diagnosis(
                Cause.PREEMPTED,
                f"{taken[0].node} stopped its own ranks: {taken[0].reason}",
                nodes=tuple(dict.fromkeys(each.node for each in taken))[:NAMED],
                code=TERMINATED,
                certainty=Certainty.LIKELY,
                by_program=True,  # a program can signal its shim
            )
        # A node that lost its peers was cut off. One whose lease was never renewed, or that was not
        # watched any more, may have been waiting for relaunch.
        waited = (NEVER_WATCHED, UNWATCHED)
        first = min(fenced, key=lambda each: (each.why in waited, _order(each)))
        late = first.why in waited
        return Diagnosis(
            Cause.PLATFORM if late else Cause.NODE_LOST,
            f"{first.node} stopped its own ranks: "
            f"{first.reason}{'; the node answers, so relaunch was late' if late else ''}",
            nodes=(first.node,),
            code=NEVER_WATCHED if late else "",
            certainty=Certainty.LIKELY if late else Certainty.CERTAIN,
        )
    if not failed:
        return Diagnosis(Cause.PLATFORM, _first_words(observations), certainty=Certainty.GUESS)
    return _diagnose_exits(failed, more, known)


def _order(one: Observation) -> tuple[datetime, str, int]:
    """Return the key by which observations are in order, however they arrived."""
    return one.at, one.node, one.rank if isinstance(one, RankExited) else -1


def _diagnose_hardware(
    witnesses: list[RankExited | RanksVanished], more: int, known: _Readers
) -> Diagnosis | None:
    """Return the diagnosis for hardware faults in the nodes' kernel logs; None: there are none.

    They outweigh the messages of programs, which are consequences of the hardware fault.
    """
    heard: dict[tuple[str, int, str], RankExited | RanksVanished] = {}
    for one in witnesses:
        if one.kernel:
            # The ranks of a node report the same log, or more of it where they ended later.
            key = (one.node, len(one.kernel), one.kernel[-1])
            before = heard.get(key)
            if before is None or (one.at <= before.at and _order(one) < _order(before)):
                heard[key] = one
    found = [(one, faults) for one in heard.values() if (faults := known.hardware(one.kernel))]
    if not found:
        return None
    # The gravest first: an NVLink error on one node is often a consequence of a GPU that fell off
    # the bus of another.
    root, faults = min(found, key=lambda each: (_gravity(each[1][0]), each[0].at, each[0].node))
    finding = faults[0]
    assert finding.cause is not None
    alike = [(one, others) for one, others in found if others[0].cause is finding.cause]
    gpus = (
        each.gpu
        for one, others in alike
        if one.node == root.node
        for each in others
        if each.cause is finding.cause
    )
    rank = root if isinstance(root, RankExited) else None
    return Diagnosis(
        finding.cause,
        f"{root.node}: {finding.reason}{_more(len(witnesses) - 1 + more)}",
        nodes=tuple(dict.fromkeys((root.node, *(one.node for one, _ in alike))))[:NAMED],
        gpus=tuple(dict.fromkeys(gpu for gpu in gpus if gpu)),
        ranks=_numbers([rank]) if rank else (),
        code=finding.code,
        certainty=Certainty.CERTAIN,
        exit_code=_exit_code(rank) if rank else None,
        traceback=_find_traceback(rank) if rank else "",
    )


def _diagnose_exits(failed: list[RankExited], more: int, known: _Readers) -> Diagnosis:
    own = [one for one in failed if not known.is_echo(one)]
    if not own:
        return _diagnose_cascades(failed, more, known)
    first = min(own, key=_order)
    others = _more(len(failed) - 1 + more)
    if _find_write_time(first) is None:
        return _diagnose_exit(_read(_find_speaker(first, own, known), known), others)
    # The first exit that arrived has an error file. Then the error with the smallest timestamp is
    # the root (torchelastic's rule).
    written = [_find_write_time(one) for one in own]
    when, at = min(
        (when, own[at].rank, own[at].node, at)
        for at, when in enumerate(written)
        if when is not None
    )[::3]
    root = own[at]
    diagnosis = _diagnose_exit(_read(root, known), others)
    if diagnosis.cause is Cause.UNKNOWN:
        return diagnosis
    near = [
        (other, one.rank, one.node, one)
        for other, one in zip(written, own, strict=True)
        if other is not None and other - when < CLOCKS_AGREE and _differs(one, root)
    ]
    for rival in _rivals(each[-1] for each in sorted(near)):
        other = _diagnose_exit(_read(rival, known), "")
        if other.cause in (diagnosis.cause, Cause.UNKNOWN):
            continue
        return Diagnosis(
            Cause.UNKNOWN,
            f"{diagnosis.reason}; and at the same moment {other.reason}: their clocks do not tell "
            "which was first",
            nodes=(root.node, rival.node),
            ranks=_numbers([root, rival]),
            certainty=Certainty.GUESS,
            exit_code=diagnosis.exit_code,
            do_not_restart=diagnosis.do_not_restart,
            traceback=diagnosis.traceback,
            by_program=True,
            error=diagnosis.error,
        )
    return diagnosis


def _find_speaker(first: RankExited, own: list[RankExited], known: _Readers) -> RankExited:
    """Return the rank to read: not one that left without a word where another names a cause.

    Args:
        first: The rank whose exit arrived first.
        own: The ranks that are no echoes, `first` among them.
    """
    if first.error is not None or (first.exit_code or 0) <= 0 or known.log(first).last_line:
        return first
    speaking = (
        one
        for one in own
        if (one.at - first.at).total_seconds() < CLOCKS_AGREE
        and (said := known.log(one).decisive) is not None
        and said.role is Role.ROOT
    )
    return min(speaking, key=_order, default=first)


def _blame_missing_gpu(job: JobState, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of a rank that asks for a GPU which its node does not have: once the job
    has trained, what the user wrote was right, and the node has fewer GPUs than before, as after a
    reboot that did not bring one back."""
    if diagnosis.code != DEVICE_COUNT or job.furthest_step is None:
        return diagnosis
    return replace(
        diagnosis,
        cause=Cause.NODE_FAULT,
        reason=f"{diagnosis.reason}; the job has trained up to step {job.furthest_step}, so its "
        "node may have lost a GPU",
    )


def _blame_early_exit(finished: tuple[RankExited, ...], diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of ranks that lost or waited for a peer which had exited with 0.

    Args:
        finished: The ranks that had exited with 0, the earliest first.
        diagnosis: The root cause by what failed; the result if that explains itself.
    """
    is_by_words = diagnosis.code == "" or diagnosis.code.startswith("log ")
    if (
        not finished
        or diagnosis.cause not in (Cause.NETWORK, Cause.HANG)
        or not is_by_words
        or diagnosis.code == NIC_EVENT
    ):
        return diagnosis
    first = finished[0]
    others = f" (as {len(finished) - 1} more did)" if len(finished) > 1 else ""
    return replace(
        diagnosis,
        cause=Cause.APPLICATION,
        reason=f"{_who(first)} exited with 0 before the others were done{others}; "
        f"then {diagnosis.reason}",
        nodes=(first.node,),
        ranks=_numbers([first]),
        code="exit 0",
        certainty=Certainty.LIKELY,
    )


def _differs(one: RankExited, root: RankExited) -> bool:
    """Return whether a rank of another node than the root's wrote a different error message."""
    return (
        one.node != root.node
        and one.error is not None
        and root.error is not None
        and one.error.message != root.error.message
    )


def _rivals(near: Iterable[RankExited]) -> list[RankExited]:
    """Return the earliest exits with different messages, at most `RIVALS`.

    They came so shortly after the root that the clocks do not show which was first.
    """
    rivals: list[RankExited] = []
    heard: set[str] = set()
    for one in near:
        message = one.error.message if one.error else ""
        if message in heard:
            continue
        heard.add(message)
        rivals.append(one)
        if len(rivals) == RIVALS:
            break
    return rivals


def _gravity(finding: Finding) -> int:
    assert finding.cause is not None
    return HARDWARE_CAUSES.index(finding.cause)


def _find_write_time(one: RankExited) -> float | None:
    """Return when a rank wrote its error, by its node's clock, in Unix seconds.

    None: it wrote none, or its clock cannot be right.
    """
    if one.error is None or one.error.timestamp is None:
        return None
    late = one.at.timestamp() - one.error.timestamp
    return one.error.timestamp if -AHEAD <= late <= BEHIND else None


def _read(one: RankExited, known: _Readers) -> _Reading:
    kernel = known.kernel(one.kernel)
    if one.unfinished:
        role, cause, reason = UNFINISHED[one.unfinished]
        ending = Finding("exit", f"unfinished {one.unfinished}", role, reason, cause, pid=one.pid)
    elif one.ecs is not None:
        ending = read_ecs_stop(one.ecs.stop_code, one.ecs.reason, one.exit_code, known.catalog)
    else:
        ending = read_exit(
            one.exit_code,
            one.signal,
            stopped=one.stopped,
            kernel=kernel,
            pid=one.pid,
            catalog=known.catalog,
        )
    return _Reading(one, ending, known.log(one), kernel)


def _diagnose_exit(reading: _Reading, others: str) -> Diagnosis:
    root, ending = reading.exit, reading.ending
    # What the kernel reports of a program, the network or the disks is closer to the fault than
    # the program's own messages.
    seen = next(
        (
            f
            for f in reading.kernel
            if f.role is Role.ROOT and f.cause is not None and _is_ours(f, root)
        ),
        None,
    )
    if ending.cause is Cause.OUT_OF_MEMORY:
        seen = ending
    finding = seen or choose_finding(reading.log, ending)
    cause = name_cause(reading.log, finding)
    words = _find_words(root)
    return Diagnosis(
        cause,
        f"{_describe_end(root, ending)}{_detail(root, ending, finding, words)}"
        f"{_name_unknown(cause, reading)}{others}",
        # A rank that times out while it waits reports first, but is rarely the one at fault.
        nodes=(root.node,) if cause is not Cause.HANG else (),
        gpus=(seen.gpu,) if seen is not None and seen.gpu else (),
        ranks=_numbers([root]),
        code=finding.code if finding is not None else ending.code,
        certainty=Certainty.CERTAIN
        if root.error or seen
        else Certainty.GUESS
        if cause is Cause.UNKNOWN
        else Certainty.LIKELY,
        exit_code=_exit_code(root),
        do_not_restart=root.exit_code == DO_NOT_RESTART,
        traceback=words.text if words is not None else "",
        by_program=root.ecs is None or root.ecs.stop_code == BY_ITSELF,
        error=_name_error(reading.log, words, root),
    )


def _is_lost_link(finding: Finding) -> bool:
    """Return whether a kernel finding explains lost connections."""
    return finding.role in (Role.ROOT, Role.CONFIRMATION) and finding.cause is Cause.NETWORK


def _is_ours(finding: Finding, root: RankExited) -> bool:
    """Return whether a kernel finding may be about this rank.

    It may where it names no pid, or where the rank's own pid is not known.
    """
    return finding.pid is None or root.pid is None or finding.pid == root.pid


def _describe_end(root: RankExited, ending: Finding) -> str:
    return f"{_who(root)} {'was ' if root.signal is not None else ''}{ending.reason}"


def _who(one: RankExited) -> str:
    return f"the launcher on {one.node}" if one.launcher else f"rank {one.rank} on {one.node}"


def _numbers(exits: Iterable[RankExited]) -> tuple[int, ...]:
    """Return the rank numbers of the exits that are not of launchers."""
    return tuple(one.rank for one in exits if not one.launcher)


def _detail(
    root: RankExited, ending: Finding, finding: Finding | None, words: LastWords | None
) -> str:
    """Return what is known beyond how the rank ended, as a clause to append."""
    if root.error:
        message = (
            root.error.message.splitlines()[0]
            if root.error.message
            else "an error without a message"
        )
        kernel = (
            f" ({finding.reason})" if finding is not None and finding.source == "kernel" else ""
        )
        return f": {message[:300]}{kernel}"
    if finding is not None and finding is not ending:
        return f": {finding.reason[:300]}"
    if ending.role is not Role.WRAPPER:
        return ""
    if root.error_unreadable:
        return f": its error file is unreadable: {root.error_unreadable}"
    return f": {words.error if words is not None else 'it said nothing'}"


def _name_error(log: LogReading, words: LastWords | None, root: RankExited) -> str:
    """Return the line that names a rank's error; empty: none does.

    The last line of a message may be advice that many errors share, and a launcher's exception is
    the same whatever failed below it.
    """
    if not log.is_wrapper:
        if words is not None:
            return words.error
        # An error file may have a message and no traceback.
        return root.error.message.partition("\n")[0][:MAX_UNKNOWN] if root.error else ""
    found = log.decisive
    return found.reason if found is not None and found.role is Role.ROOT else ""


def _name_unknown(cause: Cause, reading: _Reading) -> str:
    """Return what a rank wrote that nothing explains, as a clause to append."""
    line = reading.log.last_line
    if cause is not Cause.UNKNOWN or reading.log.decisive is not None or not line:
        return ""
    if reading.ending.code == "SIGKILL":
        return f"; {SILENTLY_KILLED} (the last one: {line[:MAX_UNKNOWN]})"
    return f"; {UNEXPLAINED}: {line[:MAX_UNKNOWN]}"


def _find_words(one: RankExited) -> LastWords | None:
    return find_words(one.error, one.log_tail, one.exit_code, one.signal)


def _find_traceback(one: RankExited) -> str:
    words = _find_words(one)
    return words.text if words is not None else ""


def _diagnose_cascades(failed: list[RankExited], more: int, known: _Readers) -> Diagnosis:
    """Return the diagnosis when all failed ranks are echoes: no rank saw what broke connections."""
    failed = sorted(failed, key=_order)
    first = failed[0]
    for one in failed:
        lost = next((f for f in known.kernel(one.kernel) if _is_lost_link(f)), None)
        if lost is not None:
            return Diagnosis(
                Cause.NETWORK,
                f"{lost.code} on {one.node}: {lost.reason}{_more(len(failed) - 1 + more)}",
                nodes=(one.node,),
                ranks=_numbers([one]),
                code=lost.code,
                exit_code=_exit_code(one),
            )
    # A watchdog logs first and ends its process seconds later, so peers that lose their connections
    # to it may be gone before.
    for one in failed:
        late = known.log(one).first
        if late is not None and late.cause is Cause.HANG:
            return Diagnosis(
                Cause.HANG,
                f"{_who(one)} ended what waited too long, and no rank failed by itself: "
                f"{late.reason}{_more(len(failed) - 1 + more)}",
                ranks=_numbers(failed[:NAMED]),
                code=late.code,
                exit_code=_exit_code(one),
                traceback=_find_traceback(one),
                by_program=True,
            )
    return Diagnosis(
        Cause.NETWORK,
        f"{_who(first)} lost a connection and no rank failed by itself: "
        f"{known.log(first).last_line[:200]}",
        nodes=tuple(dict.fromkeys(one.node for one in failed))[:NAMED],
        ranks=_numbers(failed[:NAMED]),
        certainty=Certainty.GUESS,
        exit_code=first.exit_code,
        traceback=_find_traceback(first),
        by_program=True,
    )


def find_highest(job: JobState, fault: LaunchRefused) -> NodeRefusal | None:
    """Return the refusal that names the highest token, where that is above the job's own."""
    named = [
        one
        for one in fault.refusals
        if one.highest and one.highest > (job.submission, job.generation)
    ]
    return max(named, key=lambda one: one.highest or (0, 0), default=None)


def has_gone_above(job: JobState) -> bool:
    """Return whether the newest `MAX_CLAIMS` launches all went above a token that a node claimed.

    That is as many as a reset of the workflow can explain.
    """
    newest = job.tries[-MAX_CLAIMS:]
    return len(newest) == MAX_CLAIMS and all(one.rung == CLAIMED for one in newest)


def _diagnose_claim(job: JobState, fault: LaunchRefused) -> Diagnosis | None:
    """Return the diagnosis for a node that keeps claiming higher tokens; None: no such node.

    A reset of the workflow sets the generation numbers back only once, so it does not explain this.
    """
    claim = find_highest(job, fault)
    if claim is None or not has_gone_above(job):
        return None
    reason = (
        f"{claim.node} refused {MAX_CLAIMS + 1} launches in a row, each for a higher "
        "generation that it claims to have seen"
    )
    return Diagnosis(Cause.NODE_LOST, reason, nodes=(claim.node,), certainty=Certainty.LIKELY)


def _diagnose_refusal(job: JobState, fault: LaunchRefused, may_be_node: bool) -> Diagnosis:
    for refusal in fault.refusals:
        if cause := REFUSAL_CAUSES.get(refusal.why):
            code = 127 if refusal.why == "command_not_found" else 1
            alike: tuple[str, ...] = (refusal.node,)
            is_input, why = cause is Cause.USER_INPUT, ""
            if is_input and may_be_node and (why := _exonerate_input(job, fault, refusal)):
                is_input = False
                if refusal.why != SECRET_MISSING:
                    cause = Cause.NODE_FAULT
                    alike = tuple(one.node for one in fault.refusals if one.why == refusal.why)
            return Diagnosis(
                cause,
                f"{refusal.node}: {refusal.reason}{why}",
                nodes=tuple(dict.fromkeys(alike))[:NAMED],
                code=refusal.why,
                certainty=Certainty.CERTAIN,
                exit_code=code,
                # Why its disk is full, or what is not there yet, an examination cannot say.
                by_program=cause is Cause.NODE_FAULT and refusal.why != "stuck",
                # No rank was started, and a retry would be refused in the same way.
                do_not_restart=is_input,
            )
    first = fault.refusals[0]
    return Diagnosis(
        Cause.PLATFORM,
        f"{first.node} refused to launch: {first.reason}",
        certainty=Certainty.CERTAIN,
    )


def _exonerate_input(job: JobState, fault: LaunchRefused, refusal: NodeRefusal) -> str:
    """Return why a refusal cannot be due to what the user wrote, as a clause to append; empty: it
    may be."""
    if job.has_run:
        return "; this job has run before"
    if refusal.why == SECRET_MISSING or len(fault.refusals) >= MAX_REFUSALS:
        return ""
    refusing = {one.node for one in fault.refusals}
    others = tuple(slot.node for slot in job.slots if slot.node not in refusing)
    return f"; {join_names(others, 4)} did not refuse it" if others else ""


def _exit_code(one: RankExited) -> int:
    """Return the exit code as a shell reports it: 128 + signal for a signal."""
    return (
        128 + one.signal
        if one.signal is not None
        else one.exit_code
        if one.exit_code is not None
        else 1
    )


def _more(count: int) -> str:
    return f" ({count} more failed)" if count > 0 else ""


def _first_words(observations: tuple[Observation, ...]) -> str:
    if not observations:
        return "nothing was observed"
    first = min(observations, key=lambda o: o.at)
    match first:
        case RankExited(unfinished=unfinished) if unfinished:
            return f"{_who(first)} {UNFINISHED[unfinished][2]}"
        case RankExited():
            end = (
                signal_name(first.signal) if first.signal is not None else f"code {first.exit_code}"
            )
            return f"{_who(first)} ended with {end}"
        case RanksFenced() | RanksVanished():
            return f"{first.node}: {first.reason}"
        case _:
            assert_never(first)


def signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
