"""The orders that change a job on this node: prepare, start and stop.

Each order is idempotent, and may be killed at any point and repeated.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Sequence, Union

from relaunch.agent import disk
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.loop import parse
from relaunch.agent.node import hold
from relaunch.agent.protocol import (
    Becoming,
    Fields,
    Json,
    NoAnswer,
    Refused,
    Token,
    bad,
    environment,
    line,
    now,
)
from relaunch.agent.ranks import peers, retention, shim, spawn
from relaunch.agent.ranks.stop import await_records, find_living, stop_all
from relaunch.agent.state import (
    KEPT_GENERATIONS,
    Generation,
    JobState,
    boot_id,
    try_lock,
    write_json,
)

LOCK_PATIENCE = 120.0
"""Seconds to wait for another command on the same job.

Longer than any stop, including its grace period and the proof that no process is left.
"""
MOST_PEERS = 16
ASKED = 0.2
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
        Refused: The generation was stopped, or a higher one was prepared here.
    """
    highest = job.highest()
    stopped = highest.stopped
    prepared = max(filter(None, (highest.prepared, *(each.order for each in living))), default=None)
    if stopped is not None and token.order <= stopped:
        raise Refused(
            "stopped", f"generation {token.generation} was stopped for ever", highest=list(stopped)
        )
    if prepared is not None and token.order < prepared:
        raise _not_above(token, prepared, "this node has seen a higher one")
    return prepared == token.order


def _not_above(token: Token, highest: tuple[int, int], reason: str) -> Refused:
    text = f"generation {token.generation} of submission {token.submission}: {reason}"
    return Refused("not_above", text, highest=list(highest))


def hold_port(address: str) -> socket.socket:
    """Bind a free port for MASTER_PORT, preferably below the kernel's ephemeral port range.

    Raises:
        Refused: No port is free.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    candidates = random.sample(range(20000, lowest), 20) if lowest > 20100 else []
    for port in [*candidates, 0]:
        family, target = peers.resolve(address, port)
        holder = socket.socket(family, socket.SOCK_STREAM)
        try:
            holder.bind(target)
        except OSError:
            holder.close()
            continue
        return holder
    raise Refused("cannot_start", f"no port is free on {address}")


def prepare(state: Path, order: Fields) -> Union[Json, Becoming]:
    token = order.token()
    given: Json = {
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
    if not given["ranks"] or not all(
        isinstance(rank, int) and not isinstance(rank, bool) for rank in given["ranks"]
    ):
        bad("ranks", given["ranks"], "a list of global ranks")
    if min(given["ranks"]) < 0 or len(set(given["ranks"])) < len(given["ranks"]):
        bad("ranks", given["ranks"], "global ranks of at least 0, each once")
    job = JobState.of(state, token)
    generation = job.generation(token.order)
    with job.locked(LOCK_PATIENCE):
        living = find_living(job)
        for each in living:
            await_records(each)
        again = _refuse_lower(job, token, living)
        known = generation.given
        if again:
            if job.highest().boot_id not in (None, boot_id(state)):
                raise _not_above(
                    token,
                    token.order,
                    "it was prepared before this node rebooted, and may have been launched",
                )
            if generation.shim_lives() and known is not None:
                return dict(known["answer"])
            if generation.shim_lives() and not generation.is_recorded():
                raise NoAnswer(
                    f"generation {token.generation} lives, and its shim has not written its records again"
                )
            if generation.started is not None or any(each.order == token.order for each in living):
                raise _not_above(
                    token, token.order, "it was launched before, and a generation is launched once"
                )
        with hold.shared(state, given["fleet"]):
            hold.refuse_other_fleet(state, given["fleet"], job.path)
            disk.refuse_if_full(state, "nothing was prepared, and nothing was stopped")
            disk.make_ballast(state)
            job.make_spare()
            job.reserve(prepared=token.order)
            reach_failpoint(state, "prepare.reserved")
            others = _up_to(token.order, job.generations(), living)
            reason = (
                f"generation {token.generation} of submission {token.submission} takes its place"
            )
            stopped = stop_all(
                job, others, token.order, given["stop_grace"], given["stuck_after"], reason
            )
            reach_failpoint(state, "prepare.stopped")
            return _make_shim(
                job,
                generation,
                token,
                given,
                [list(other) for other in stopped if other != token.order],
            )


def _up_to(
    order: tuple[int, int], recorded: list[Generation], living: list[Generation]
) -> list[Generation]:
    """Return the generations up to an order, oldest first, each once."""
    found = {each.order: each for each in (*living, *recorded) if each.order <= order}
    return [found[each] for each in sorted(found)]


def _make_shim(
    job: JobState, generation: Generation, token: Token, given: Json, stopped: list[list[int]]
) -> Becoming:
    """Create the folder, lock, sockets and records of a shim.

    The returned `Becoming` turns this process into the shim once the answer was sent.
    """
    generation.make()
    for old in job.generations()[:-KEPT_GENERATIONS]:
        shutil.rmtree(old.path)
    retention.make_room(job.state, job.path)
    deadline = time.monotonic() + ASKED
    lock = try_lock(generation.path / "shim.lock")
    while lock is None and time.monotonic() < deadline:
        time.sleep(0.005)
        lock = try_lock(generation.path / "shim.lock")
    if lock is None:
        raise Refused("stuck", f"generation {token.generation} still has a shim", pids=[])
    try:
        with hold.of_one_fleet(job.state, given["fleet"], job.path):
            return _born(job, generation, token, given, stopped, lock)
    except BaseException:
        os.close(lock)  # this process goes on with other orders and is not the shim
        raise


def _born(
    job: JobState,
    generation: Generation,
    token: Token,
    given: Json,
    stopped: list[list[int]],
    lock: int,
) -> Becoming:
    listener = peers.listen(given["address"])
    sockets = shim.Sockets(
        generation.listen("orders"),
        generation.listen("sock"),
        listener,
        hold_port(given["address"]),
    )
    stamp = now()
    answer: Json = {
        "outcome": "done",
        "boot_id": boot_id(job.state),
        "master_port": sockets.master.getsockname()[1],
        "peer_port": listener.getsockname()[1],
        "nonce": secrets.token_hex(16),
        "stopped": stopped,
        "stamp": stamp,
        "place": job.place,
    }
    known = {**given, "valid_until": stamp + given["valid_for"], "answer": answer}
    write_json(generation.path / "order.json", known, durable=False)
    generation.make_spares(len(given["ranks"]))
    shim.sign(generation)
    reach_failpoint(job.state, "prepare.forked")
    return Becoming(answer, lambda: shim.become(generation, token, known, sockets, lock))


def _start_order(order: Fields, count: int | None) -> Json:
    """Validate a start order; `count` is the number of prepared ranks, None if unknown."""
    command = order.strings("command")
    if not command or not command[0]:
        bad("command", command, "a program and its arguments")
    own = order.items("rank_env")
    if count is not None and len(own) != count:
        raise Refused(
            "bad_order",
            f"rank_env has {len(own)} entries; expected {count}, one for each prepared rank",
        )
    others = []
    for index, peer in enumerate(order.items("peers")):
        fields = Fields(peer, f"peers[{index}].")
        port = fields.whole("port")
        _, target = peers.resolve(fields.text("address"), port)
        others.append({"node": fields.text("node"), "address": target[0], "port": port})
    if len(others) > MOST_PEERS:
        raise Refused(
            "bad_order", f"peers has {len(others)} entries; expected at most {MOST_PEERS}"
        )
    secret = order.text("secret")
    if not re.fullmatch("([0-9a-fA-F]{2})+", secret):
        raise Refused("bad_order", "secret is not hex")
    workdir = order.get("workdir", "a folder or null")
    pattern = order.get("log_pattern", "a regular expression or null")
    if pattern is not None:
        order.text("log_pattern")
        try:
            groups = re.compile(pattern).groupindex
        except re.error as error:
            bad("log_pattern", pattern, f"a regular expression ({error})")
        if "step" not in groups:
            bad("log_pattern", pattern, "a regular expression with a group named step")
    started: Json = {
        "command": command,
        "workdir": None if workdir is None else order.text("workdir"),
        "env": environment(order.get("env", "an object"), "env"),
        "rank_env": [
            environment(variables, f"rank_env[{index}]") for index, variables in enumerate(own)
        ],
        "peers": others,
        "prepared": order.number("prepared"),
        "node": order.text("node"),
        "secret": secret,
        "fences": order.flag("fences"),
        "log_pattern": pattern,
    }
    if order.order.get("launched") is not None:
        started["launched"] = _launched(Fields(order.order["launched"], "launched."))
    return started


def _launched(order: Fields) -> Json:
    """Validate the part of a start order that says which ranks a launcher is to start."""
    command, ranks_below = order.strings("command"), order.items("ranks")
    if not command or not command[0]:
        bad("launched.command", command, "a program and its arguments")
    if not all(
        isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks_below
    ):
        bad("launched.ranks", ranks_below, "global ranks of at least 0")
    return {
        "command": command,
        "ranks": ranks_below,
        "env": environment(order.get("env", "an object"), "launched.env"),
    }


def start(state: Path, order: Fields) -> Json:
    token = order.token()
    job = JobState.of(state, token)
    generation = job.generation(token.order)
    with job.locked(LOCK_PATIENCE):
        for each in find_living(job):
            await_records(each)
        known = generation.given
        given = _start_order(order, len(known["ranks"]) if known else None)
        if not _refuse_lower(job, token) or known is None:
            raise Refused(
                "not_prepared", f"generation {token.generation} was not prepared on this node"
            )
        launch = generation.started
        if launch is None and generation.shim_lives():
            return _ask_shim(generation, given)
        if launch is None:
            if known["answer"]["boot_id"] == boot_id(state) and now() > known["valid_until"]:
                raise Refused("expired", f"it was prepared more than {known['valid_for']:g} s ago")
            raise Refused(
                "not_prepared",
                f"generation {token.generation} was prepared, but its shim is gone",
            )
        if launch.get("refused"):
            return dict(launch["refused"])
        if launch["pids"] is None:
            if generation.shim_lives():
                return _ask_shim(generation, given)
            raise Refused(
                "cannot_start",
                "its shim died while it was starting ranks; a generation is launched once",
            )
        return {
            "outcome": "done",
            "pids": {rank: pid for rank, (pid, _) in launch["pids"].items()},
            "already": True,
        }


def _ask_shim(generation: Generation, order: Json) -> Json:
    caller = generation.connect("orders", timeout=spawn.EXEC_PATIENCE + 5)
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
    token = order.token()
    grace, stuck_after = order.number("stop_grace"), order.number("stuck_after")
    job = JobState.of(state, token)

    def carry_out() -> Json:
        with job.locked(LOCK_PATIENCE):
            known = _find_known(job, token)
            job.reserve(stopped=token.order)
            reach_failpoint(state, "stop.reserved")
            stopped = stop_all(job, known, token.order, grace, stuck_after, "an order to stop came")
            reach_failpoint(state, "stop.killed")
            return {
                "outcome": "done",
                "stopped": [list(one) for one in stopped],
                "place": job.place,
            }

    try:
        return carry_out()
    except OSError as error:
        if not disk.is_full(error):
            raise
    try:
        if disk.release_ballast(state):
            return carry_out()
    except OSError as error:
        if not disk.is_full(error):
            raise
    # Even with the space of the spare file and the ballast, the stop could not be recorded. Stop
    # the ranks anyway.
    stop_all(job, _find_known(job, token), token.order, grace, stuck_after, "an order to stop came")
    raise disk.refuse(
        state,
        f"generation {token.generation} of job {token.job} is stopped and nothing of it is left, "
        "but that it may not start again could not be written",
    )


def _find_known(job: JobState, token: Token) -> list[Generation]:
    """Return the generations that a stop order covers: those recorded and those still alive."""
    living = find_living(job)
    for each in living:
        await_records(each)
    return _up_to(token.order, job.generations(), living)
