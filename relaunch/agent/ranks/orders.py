"""The orders that change a job on this node: prepare, start and stop.

Each order is idempotent, and may be killed at any point and repeated.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence, Union

from relaunch.agent import disk
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.locks import HeldLock, try_lock
from relaunch.agent.loop import parse
from relaunch.agent.node import hold
from relaunch.agent.protocol import (
    Fields,
    Json,
    NoAnswer,
    ProcessHandover,
    Refusal,
    Token,
    line,
    now,
    parse_environment,
    refuse_field,
    refuse_if_late,
)
from relaunch.agent.ranks import master_port, peers, retention, shim, spawn, standby
from relaunch.agent.ranks.progress import read_last_step
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.ranks.stop import await_records, find_living, stop_all
from relaunch.agent.state import (
    MAX_GENERATIONS,
    Generation,
    JobState,
    read_boot_id,
    write_json,
)

LOCK_TIMEOUT = 120.0
"""Seconds to wait for another command on the same job.

Longer than any stop, including its grace period and the proof that no process is left.
"""
WARM_LOCK_TIMEOUT = 1.0
"""The same for `warm`, which is repeated, and is worth no wait."""
MAX_PEERS = 16
SHIM_LOCK_TIMEOUT = 0.2
"""Seconds to retry taking a shim's lock.

A command that checks whether the shim lives holds the lock for an instant, possibly while the
generation is prepared again.
"""


def _refuse_lower(job: JobState, token: Token, living: Sequence[Generation] = ()) -> bool:
    """Refuse a token below the highest seen here; return whether this token was prepared here.

    Args:
        job: The job on this node.
        token: The token of the order.
        living: Generations that live here although their records were removed. They count as
            prepared.

    Raises:
        Refusal: The generation was stopped, or a higher one was prepared here.
    """
    highest = job.read_highest()
    stopped = highest.stopped
    prepared = max(filter(None, (highest.prepared, *(each.order for each in living))), default=None)
    if stopped is not None and token.order <= stopped:
        raise Refusal(
            "stopped", f"generation {token.generation} was stopped for ever", highest=list(stopped)
        )
    if prepared is not None and token.order < prepared:
        raise _make_not_above(token, prepared, "this node has seen a higher one")
    return prepared == token.order


def _make_not_above(token: Token, highest: tuple[int, int], reason: str) -> Refusal:
    text = f"generation {token.generation} of submission {token.submission}: {reason}"
    return Refusal("not_above", text, highest=list(highest))


def prepare(state: Path, order: Fields) -> Union[Json, ProcessHandover]:
    token = order.token()
    fields: Json = {
        "token": token.json,
        "address": order.text("address"),
        "ranks": order.items("ranks"),
        **{name: order.number(name) for name in ("stop_grace", "stuck_after")},
        **{
            name: order.number(name, least=0.001)
            for name in ("lease", "fence_after", "valid_for", "heartbeat")
        },
        "fleet": order.fleet(),
    }
    older_grace = order.number("older_grace", fields["stop_grace"])
    pattern = _parse_pattern(order)
    if not fields["ranks"] or not all(
        isinstance(rank, int) and not isinstance(rank, bool) for rank in fields["ranks"]
    ):
        refuse_field("ranks", fields["ranks"], "a list of global ranks")
    if min(fields["ranks"]) < 0 or len(set(fields["ranks"])) < len(fields["ranks"]):
        refuse_field("ranks", fields["ranks"], "global ranks of at least 0, each once")
    job = JobState.from_token(state, token)
    generation = job.generation(token.order)
    # What holds the lock may be a stop, for the grace of the policy of then.
    with job.hold_lock(LOCK_TIMEOUT + older_grace):
        refuse_if_late("prepare", order.order.get("until"))
        living = find_living(job)
        for each in living:
            await_records(each)
        again = _refuse_lower(job, token, living)
        prepared = generation.prepared_order
        if again:
            if job.read_highest().boot_id not in (None, read_boot_id(state)):
                raise _make_not_above(
                    token,
                    token.order,
                    "it was prepared before this node rebooted, and may have been launched",
                )
            if generation.has_live_shim() and prepared is not None:
                return dict(prepared["answer"])
            if generation.has_live_shim() and not generation.is_recorded():
                raise NoAnswer(
                    f"generation {token.generation} lives, "
                    "and its shim has not written its records again"
                )
            if generation.launch is not None or any(each.order == token.order for each in living):
                raise _make_not_above(
                    token, token.order, "it was launched before, and a generation is launched once"
                )
        with hold.hold_shared(state, fields["fleet"]):
            hold.refuse_other_fleet(state, fields["fleet"], job.path)
            disk.refuse_if_full(state, "nothing was prepared, and nothing was stopped")
            disk.make_ballast(state)
            job.make_spare()
            job.reserve(prepared=token.order)
            reach_failpoint(state, "prepare.reserved")
            others = _select_up_to(token.order, job.list_generations(), living)
            reason = (
                f"generation {token.generation} of submission {token.submission} takes its place"
            )
            stopped = stop_all(job, others, token.order, older_grace, fields["stuck_after"], reason)
            reach_failpoint(state, "prepare.stopped")
            step, reached_in = read_last_step(_list_launched(job, token), pattern)
            gone: Json = {
                "stopped": [list(other) for other in stopped if other != token.order],
                "step": step,
                "step_generation": None if reached_in is None else reached_in[1],
            }
            until = order.order.get("until")
            return _prepare_shim(job, generation, token, fields, gone, until)


def _list_launched(job: JobState, token: Token) -> list[Generation]:
    """Return the generations of this submission that ranks were started of here, newest first.

    The one before the token may not be one of them: where a node refuses a launch, or does not
    answer, the others have stopped their ranks for nothing.
    """
    return [
        each
        for each in reversed(job.list_generations())
        if (token.submission, 0) <= each.order < token.order
        and (launch := each.launch) is not None
        and not launch.get("refused")
    ]


def _select_up_to(
    order: tuple[int, int], recorded: list[Generation], living: list[Generation]
) -> list[Generation]:
    """Return the generations up to an order, oldest first, each once."""
    generations = {each.order: each for each in (*living, *recorded) if each.order <= order}
    return [generations[each] for each in sorted(generations)]


def _parse_pattern(order: Fields) -> Optional[str]:
    """Return how steps are read from logs, or None.

    `start` has validated it. Invalid, it stands in the way of nothing here.
    """
    if order.get("log_pattern", "a regular expression or null", None) is None:
        return None
    return order.text("log_pattern")


def _prepare_shim(
    job: JobState, generation: Generation, token: Token, fields: Json, gone: Json, until: Any
) -> Union[Json, ProcessHandover]:
    """Create the folder, lock, sockets and records of a shim.

    `gone`: what the answer says of older generations; `until`: when its caller gives up.

    Either the standby of the job has become the shim, or the returned handover turns this process
    into it once the answer was sent.
    """
    generation.make_folders()
    retention.remove_older(job, MAX_GENERATIONS)
    retention.make_room(job.state, job.path)
    deadline = time.monotonic() + SHIM_LOCK_TIMEOUT
    lock = try_lock(generation.path / "shim.lock")
    while lock is None and time.monotonic() < deadline:
        time.sleep(0.005)
        lock = try_lock(generation.path / "shim.lock")
    if lock is None:
        raise Refusal("stuck", f"generation {token.generation} still has a shim", pids=[])
    try:
        with hold.claim_for_fleet(job.state, fields["fleet"], job.path):
            refuse_if_late("prepare", until)
            return _bind_sockets(job, generation, token, fields, gone, lock)
    except BaseException:
        os.close(lock)  # this process goes on with other orders and is not the shim
        raise


def _bind_sockets(
    job: JobState,
    generation: Generation,
    token: Token,
    fields: Json,
    gone: Json,
    lock: int,
) -> Union[Json, ProcessHandover]:
    listener = peers.listen(fields["address"])
    sockets = shim.ShimSockets(
        generation.listen("orders"),
        generation.listen("sock"),
        listener,
        master_port.hold_port(fields["address"]),
    )
    stamp = now()
    answer: Json = {
        "outcome": "done",
        "boot_id": read_boot_id(job.state),
        "master_port": sockets.master.getsockname()[1],
        "peer_port": listener.getsockname()[1],
        "nonce": secrets.token_hex(16),
        **gone,
        "stamp": stamp,
        "place": job.place,
    }
    record = {**fields, "valid_until": stamp + fields["valid_for"], "answer": answer}
    write_json(generation.path / "order.json", record, durable=False)
    generation.make_spares(len(fields["ranks"]))
    shim.record_identity(generation)
    if standby.hand_over(job, generation, token, record, sockets, lock):
        for each in (sockets.orders, sockets.watch, sockets.peers, sockets.master):
            each.close()
        os.close(lock)
        return answer
    shim.record_identity(generation)  # a standby that hung may have written its own
    reach_failpoint(job.state, "prepare.forked")
    return ProcessHandover(answer, lambda: shim.become(generation, token, record, sockets, lock))


def _parse_program(order: Fields) -> Json:
    """Validate the part of an order that says what ranks run, and what they import ahead."""
    command = order.strings("command")
    if not command or not command[0]:
        refuse_field("command", command, "a program and its arguments")
    workdir = order.get("workdir", "a folder or null")
    return {
        "command": command,
        "workdir": None if workdir is None else order.text("workdir"),
        "env": parse_environment(order.get("env", "an object"), "env"),
        "rank_env": [
            parse_environment(variables, f"rank_env[{index}]")
            for index, variables in enumerate(order.items("rank_env"))
        ],
        "inherit_env": order.flag("inherit_env", True),
        "env_defaults": order.strings("env_defaults", []),
        "warm": order.strings("warm", []),
        "redact": _parse_names(order),
    }


def _parse_start_order(order: Fields, count: int | None) -> Json:
    """Validate a start order; `count` is the number of prepared ranks, None if unknown."""
    own = order.items("rank_env")
    if count is not None and len(own) != count:
        raise Refusal(
            "bad_order",
            f"rank_env has {len(own)} entries; expected {count}, one for each prepared rank",
        )
    others = []
    for index, peer in enumerate(order.items("peers")):
        fields = Fields(peer, f"peers[{index}].")
        port = fields.whole("port")
        _, target = peers.resolve(fields.text("address"), port)
        others.append({"node": fields.text("node"), "address": target[0], "port": port})
    if len(others) > MAX_PEERS:
        raise Refusal("bad_order", f"peers has {len(others)} entries; expected at most {MAX_PEERS}")
    secret = order.text("secret")
    if not re.fullmatch("([0-9a-fA-F]{2})+", secret):
        raise Refusal("bad_order", "secret is not hex")
    umask = order.get("umask", "octal digits or null", None)
    if umask is not None and not re.fullmatch("[0-7]{3,4}", order.text("umask")):
        refuse_field("umask", umask, "three octal digits")
    unwatched = order.get("unwatched", "seconds or null", None)
    if unwatched is not None:
        unwatched = order.number("unwatched", least=0.001)
    pattern = order.get("log_pattern", "a regular expression or null")
    if pattern is not None:
        order.text("log_pattern")
        try:
            groups = re.compile(pattern).groupindex
        except re.error as error:
            refuse_field("log_pattern", pattern, f"a regular expression ({error})")
        if "step" not in groups:
            refuse_field("log_pattern", pattern, "a regular expression with a group named step")
    started: Json = {
        **_parse_program(order),
        "peers": others,
        "prepared": order.number("prepared"),
        "node": order.text("node"),
        "secret": secret,
        "fences": order.flag("fences"),
        "unwatched": unwatched,
        "log_pattern": pattern,
        "separate_stderr": order.flag("separate_stderr", False),
        "umask": umask,
        "limits": _parse_limits(order),
    }
    if order.order.get("launched") is not None:
        started["launched"] = _parse_launched(Fields(order.order["launched"], "launched."))
    return started


def _parse_names(order: Fields) -> list[str]:
    """Return the names of the variables whose values are replaced in what leaves this node."""
    names = order.items("redact", [])
    if not all(isinstance(name, str) for name in names):
        refuse_field("redact", names, "a list of names of variables")
    return names


def _parse_limits(order: Fields) -> Json:
    """Return the soft limits by name; -1: unlimited."""
    limits = order.get("limits", "numbers by name", {})
    if not isinstance(limits, dict):
        refuse_field("limits", limits, "numbers by name")
    for name, value in limits.items():
        if name not in spawn.LIMITS:
            refuse_field("limits", name, f"one of {', '.join(spawn.LIMITS)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            refuse_field(f"limits.{name}", value, "a whole number, or -1 for unlimited")
    return limits


def _parse_launched(order: Fields) -> Json:
    """Validate the part of a start order that says which ranks a launcher is to start."""
    command, ranks_below = order.strings("command"), order.items("ranks")
    if not command or not command[0]:
        refuse_field("launched.command", command, "a program and its arguments")
    if not all(
        isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks_below
    ):
        refuse_field("launched.ranks", ranks_below, "global ranks of at least 0")
    return {
        "command": command,
        "ranks": ranks_below,
        "env": parse_environment(order.get("env", "an object"), "launched.env"),
    }


def start(state: Path, order: Fields) -> Json:
    token = order.token()
    job = JobState.from_token(state, token)
    generation = job.generation(token.order)
    with job.hold_lock(LOCK_TIMEOUT):
        for each in find_living(job):
            await_records(each)
        prepared = generation.prepared_order
        launch_order = _parse_start_order(order, len(prepared["ranks"]) if prepared else None)
        if not _refuse_lower(job, token) or prepared is None:
            raise Refusal(
                "not_prepared", f"generation {token.generation} was not prepared on this node"
            )
        launch = generation.launch
        if launch is None and generation.has_live_shim():
            answer = _ask_shim(generation, launch_order)
            return _keep_warm(job, generation, launch_order, answer)
        if launch is None:
            if (
                prepared["answer"]["boot_id"] == read_boot_id(state)
                and now() > prepared["valid_until"]
            ):
                raise Refusal(
                    "expired", f"it was prepared more than {prepared['valid_for']:g} s ago"
                )
            raise Refusal(
                "not_prepared",
                f"generation {token.generation} was prepared, but its shim is gone",
            )
        if launch.get("refused"):
            return dict(launch["refused"])
        if launch["pids"] is None:
            if generation.has_live_shim():
                return _ask_shim(generation, launch_order)
            raise Refusal(
                "cannot_start",
                "its shim died while it was starting ranks; a generation is launched once",
            )
        return {
            "outcome": "done",
            "pids": {rank: pid for rank, (pid, _) in launch["pids"].items()},
            "already": True,
        }


def _keep_warm(job: JobState, generation: Generation, order: Json, answer: Json) -> Json:
    """Leave a standby behind for the next generation; return the answer with how this one began.

    A failure of it is no failure of the launch.
    """
    if answer["outcome"] != "done" or not order["warm"]:
        return answer
    if "launched" in order:
        reason = "their launcher starts them"
        return {**answer, "warm": {"forked": False, "reason": reason}}
    known = standby.read_state(job)
    began = answer.get("warm")
    if began is None and known is not None:
        began = {"forked": False, "reason": known.reason or "its Python was not ready yet"}
    if began is not None:
        # Also here: the standby knew the names of the launch that it was left behind by.
        reason = Redactor.read(generation).redact(began["reason"])
        answer = {**answer, "warm": {**began, "reason": reason}}
    try:
        standby.leave_behind(job, order)
    except (OSError, Refusal) as error:
        disk.log(f"no Python imports ahead for the next launch: {error}")
    return answer


def warm(state: Path, order: Fields) -> Json:
    """Import ahead for a job that has no generation here, and may be given this node next.

    Nothing is launched, stopped or reserved. Whatever this node is used for comes first: the order
    is refused then, and the standby ends.
    """
    token, fleet = order.token(), order.fleet()
    seconds = order.number("keep", least=0.001)
    program = _parse_program(order)
    if not program["warm"] or not program["rank_env"]:
        raise Refusal("bad_order", "warm and rank_env are to have at least one entry each")
    job = JobState.from_token(state, token)
    _refuse_launched(job, token)
    try:
        with hold.hold_shared(state, fleet):
            hold.refuse_if_busy(state, fleet=fleet)
            disk.refuse_if_full(state, "nothing imports ahead")
            with job.hold_lock(WARM_LOCK_TIMEOUT):
                _refuse_launched(job, token)
                return {"outcome": "done", **standby.keep(job, program, seconds)}
    except Refusal as refused:
        if refused.answer["why"] != "not_above" and standby.read_state(job) is not None:
            with job.hold_lock(WARM_LOCK_TIMEOUT):
                _refuse_launched(job, token)
                standby.end(job)
        raise


def _refuse_launched(job: JobState, token: Token) -> None:
    """Refuse a generation that is, or was, launched here: its standby is for `start` to keep.

    Raises:
        Refusal: It is so, or a higher one is, or this one was stopped.
    """
    if _refuse_lower(job, token):
        reason = f"generation {token.generation} was launched here"
        raise _make_not_above(token, token.order, reason)


def _ask_shim(generation: Generation, order: Json) -> Json:
    caller = generation.connect("orders", timeout=spawn.EXEC_TIMEOUT + 5)
    if caller is not None:
        with caller:
            try:
                caller.sendall(line({"start": order}))
                with caller.makefile("rb") as answers:
                    answer = parse(answers.readline())
            except OSError:
                answer = None
        if answer is not None:
            return answer
    raise NoAnswer("the shim did not answer")


def stop(state: Path, order: Fields) -> Json:
    try:
        return _stop(state, order)
    except HeldLock as error:
        raise Refusal("stuck", str(error), pids=[]) from error


def _stop(state: Path, order: Fields) -> Json:
    token = order.token()
    grace, stuck_after = order.number("stop_grace"), order.number("stuck_after")
    pattern = _parse_pattern(order)
    job = JobState.from_token(state, token)

    def carry_out() -> Json:
        # Not longer: its caller does not wait longer, and is to be told who holds the lock.
        with job.hold_lock(grace + stuck_after):
            covered = _find_covered(job, token)
            job.reserve(stopped=token.order)
            reach_failpoint(state, "stop.reserved")
            stopped = stop_all(
                job, covered, token.order, grace, stuck_after, "an order to stop came"
            )
            reach_failpoint(state, "stop.killed")
            return {
                "outcome": "done",
                "stopped": [list(stopped_order) for stopped_order in stopped],
                "step": read_last_step([job.generation(token.order)], pattern)[0],
                "place": job.place,
            }

    try:
        return carry_out()
    except OSError as error:
        if not disk.has_failed(error):
            raise
        failure = error
    try:
        if disk.is_full(failure) and disk.release_ballast(state):
            return carry_out()
    except OSError as error:
        if not disk.has_failed(error):
            raise
    # Even with the space of the spare file and the ballast, or on a disk that became read-only,
    # the stop could not be recorded. Stop the ranks anyway.
    with _hold_lock_if_possible(job, grace + stuck_after):
        stop_all(
            job, _find_covered(job, token), token.order, grace, stuck_after, "an order to stop came"
        )
    consequence = (
        f"generation {token.generation} of job {token.job} is stopped and nothing of it is left, "
        "but that it may not start again could not be written"
    )
    if disk.is_full(failure):
        raise disk.make_refusal(state, consequence)
    raise Refusal(
        "disk_failed",
        f"the disk of the state folder {state} takes no write ({failure.strerror}): {consequence}",
    )


@contextmanager
def _hold_lock_if_possible(job: JobState, timeout: float) -> Iterator[None]:
    """Hold the job's lock, unless the disk refuses to have one made.

    Raises:
        HeldLock: Another command holds it.
    """
    with ExitStack() as held:
        try:
            held.enter_context(job.hold_lock(timeout))
        except OSError as error:
            if not disk.has_failed(error):
                raise
        yield


def _find_covered(job: JobState, token: Token) -> list[Generation]:
    """Return the generations that a stop order covers: those recorded and those still alive."""
    living = find_living(job)
    for each in living:
        await_records(each)
    return _select_up_to(token.order, job.list_generations(), living)
