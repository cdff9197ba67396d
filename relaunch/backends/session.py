"""Speaks the agent's protocol over one long-lived `session` process, however it was reached.

A session holds no state: when it breaks, every order in flight is ambiguous and the next call opens
another session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from relaunch.backends import answers, py_spy
from relaunch.backends.base import (
    PROTOCOL,
    STACKS_WITHIN,
    LinkListener,
    LogChunk,
    Logs,
    Preparation,
    PrepareOrder,
    ProtocolError,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
    WarmNode,
    WarmOrder,
)
from relaunch.backends.link import Inbox, Link, end
from relaunch.backends.pipe import Pipe
from relaunch.generation import Token
from relaunch.job.places import parse_place
from relaunch.spec.job import OutputStream

ANSWER_TIMEOUT = 5.0
"""Seconds for an answer that needs no waiting on the node; an unloaded node needs some
milliseconds."""
GPU_READ_TIMEOUT = 16.0
"""Seconds for a `list` with GPUs: the agent gives NVML ten, then kills the process, then looks up
user names."""
SEND_TIMEOUT = 30.0
"""Seconds for py-spy to reach a node: 3 MB, once for each version."""
BOUND_COMMANDS = ("prepare", "start", "stop", "warm", "diagnose", "reset-gpus", "reboot")
"""Those that the agent carries out only for the session that they were given to."""
TIMED_COMMANDS = ("prepare", "warm", "diagnose", "reset-gpus", "reboot")
"""Those of them that a node is not to carry out once their caller has given up. A `start` goes with
a preparation, which expires; a `stop` forbids for ever what it stops, and is right at any time."""
LATE_DELAY = 5.0
"""Seconds beyond the caller's own limit: the clocks of two machines are compared."""
NOT_AHEAD = "the agent there is of a release that cannot import ahead"
MAX_MISSING = 300
WATCH_LINES = ("hello", "observation", "heartbeat", "end", "outcome")
SILENT_BEATS = 3
"""Heartbeats that may be missing before a watch counts as broken."""

Connect = Callable[[], Awaitable[Pipe]]


class AgentSession:
    """The connection to one node, opened when it is first needed."""

    def __init__(
        self,
        node: str,
        connect: Connect,
        answer_within: float = ANSWER_TIMEOUT,
        silence_breaks: bool = False,
        server: str = "",
        started_within: Callable[[], float] | None = None,
        sends_py_spy: bool = False,
    ) -> None:
        """Create a session without opening it.

        Args:
            node: Its name.
            connect: Starts an agent's `session` there.
            answer_within: Seconds for an answer that needs no waiting on the node.
            silence_breaks: Whether a session that answers nothing at all is abandoned, so that the
                next call connects again.
            server: The id of the Temporal server that gives the orders, as tokens name it.
            started_within: Returns the seconds that a started agent has for its first line; None:
                twice `answer_within`.
            sends_py_spy: Whether py-spy is sent; an agent in a container does not accept it.
        """
        self._node = node
        self._server = server
        self._within = answer_within
        self._connect = connect
        self._started_within = started_within or (lambda: 2 * answer_within)
        self._silence_breaks = silence_breaks
        self._opening = asyncio.Lock()
        self._sends_py_spy = sends_py_spy
        self._sending = asyncio.Lock()
        self._sent_over: Link | None = None
        """The connection over which the node has said that py-spy is there."""
        self._link: Link | None = None
        self._is_before_keys = False
        """Whether the agent of the newest connection is of release 0.1.0."""
        self._is_retired = False
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """Whether the agent takes an order without being started, or logged in to, first."""
        return self._link is not None and self._link.alive

    async def prepare(self, order: PrepareOrder) -> Preparation | Refusal:
        body = {
            key: value
            for key, value in asdict(order).items()
            if key not in ("token", "kills_older")
        }
        if order.kills_older:
            body["older_grace"] = 0.0
        within = order.stop_grace + order.stuck_after + self._within
        answer = await self._call("prepare", {"token": self._token(order.token), **body}, within)
        if answer["outcome"] == "refused":
            return self._read_refusal("prepare", answer)
        prepared = answers.parse(self._node, "prepare", answers.PrepareAnswer, answer)
        return Preparation(
            self._node,
            boot_id=prepared.boot_id,
            master_port=prepared.master_port,
            peer_port=prepared.peer_port,
            stamp=prepared.stamp,
            nonce=prepared.nonce,
            place=parse_place(answer.get("place")),
            step=prepared.step,
            step_generation=prepared.step_generation,
        )

    async def start(self, order: StartOrder) -> StartedRanks | Refusal:
        body: dict[str, Any] = {
            "node": order.node,
            "command": order.command,
            "workdir": order.workdir,
            "env": {**order.env, **order.secrets},
            "rank_env": [dict(env) for env in order.rank_env],
            "peers": [asdict(peer) for peer in order.peers],
            "prepared": order.prepared,
            "secret": order.secret,
            "fences": order.fences,
            "log_pattern": order.log_pattern,
        }
        if order.unwatched is not None:
            body["unwatched"] = order.unwatched
        if not order.inherit_env:
            body["inherit_env"] = False
        if order.env_defaults:
            body["env_defaults"] = list(order.env_defaults)
        if order.separate_stderr:
            body["separate_stderr"] = True
        if order.warm:
            body["warm"] = list(order.warm)
        if order.redact:
            body["redact"] = order.redact
        if order.umask is not None:
            body["umask"] = order.umask
        if order.limits:
            body["limits"] = dict(order.limits)
        if order.launched is not None:
            launched = order.launched
            body["launched"] = {
                "command": launched.command,
                "ranks": launched.ranks,
                "env": dict(launched.env),
            }
        answer = await self._call(
            "start", {"token": self._token(order.token), **body}, 2 * self._within
        )
        if answer["outcome"] == "refused":
            return self._read_refusal("start", answer)
        started = answers.parse(self._node, "start", answers.StartAnswer, answer)
        warm = started.warm
        cold = None if warm is None else "" if warm.forked else warm.reason or "no reason was given"
        if order.warm and self._is_before_keys:
            cold = NOT_AHEAD
        pids = {int(rank): pid for rank, pid in started.pids.items()}
        return StartedRanks(self._node, pids, started.already, cold)

    async def stop(self, order: StopOrder) -> StopProof | Refusal:
        body = {
            "token": self._token(order.token),
            "stop_grace": 0.0 if order.kills else order.stop_grace,
            "stuck_after": order.stuck_after,
            "log_pattern": order.log_pattern,
        }
        answer = await self._call("stop", body, order.stop_grace + order.stuck_after + self._within)
        if answer["outcome"] == "refused":
            return self._read_refusal("stop", answer)
        stopped = answers.parse(self._node, "stop", answers.StopAnswer, answer)
        return StopProof(self._node, parse_place(answer.get("place")), stopped.step)

    async def warm(self, order: WarmOrder) -> WarmNode | Refusal:
        if (await self._open()).binder.is_before_keys:
            self._close_if_retired()
            return Refusal(self._node, "unknown_order", NOT_AHEAD)
        body: dict[str, Any] = {
            "keep": order.keep,
            "command": order.command,
            "workdir": order.workdir,
            "env": {**order.env, **order.secrets},
            "rank_env": [dict(env) for env in order.rank_env],
            "inherit_env": order.inherit_env,
            "env_defaults": list(order.env_defaults),
            "warm": list(order.modules),
            **({"redact": order.redact} if order.redact else {}),
            **_whose(order.fleet),
        }
        answer = await self._call(
            "warm", {"token": self._token(order.token), **body}, 2 * self._within
        )
        if answer["outcome"] == "refused":
            return self._read_refusal("warm", answer)
        warm = answers.parse(self._node, "warm", answers.StandbyAnswer, answer)
        return WarmNode(self._node, warm.state, warm.reason)

    async def list(self, gpus: bool = False) -> Mapping[str, Any]:
        if gpus:
            order = {"brief": True, "gpus": True}
            answer = await self._call("list", order, GPU_READ_TIMEOUT + self._within)
        else:
            answer = await self._call("list", {"brief": True}, self._within)
        if answer["outcome"] == "refused":
            refused = self._read_refusal("list", answer)
            raise ProtocolError(
                self._node, f"list changes nothing and was refused: {refused.reason}"
            )
        return answer

    async def logs(
        self,
        token: Token,
        offsets: Mapping[int, int] | None,
        max_bytes: int,
        wait: float,
        tail: int | None,
        since: float | None = None,
        stream: OutputStream = "stdout",
    ) -> Logs | Refusal:
        body = {
            "token": self._token(token),
            "offsets": None
            if offsets is None
            else {str(rank): offset for rank, offset in offsets.items()},
            "max_bytes": max_bytes,
            "wait": wait,
            "tail": tail,
            "since": since,
            "stream": stream,
        }
        answer = await self._call("logs", body, wait + self._within)
        if answer["outcome"] == "refused":
            return self._read_refusal("logs", answer)
        logs = answers.parse(self._node, "logs", answers.LogsAnswer, answer)
        chunks = tuple(LogChunk(one.rank, one.offset, one.next, one.data) for one in logs.chunks)
        return Logs(
            chunks,
            logs.ended,
            {int(rank): offset for rank, offset in logs.begins.items()},
            {int(rank): size for rank, size in logs.sizes.items()},
            tuple(logs.missing),
        )

    async def stacks(
        self,
        token: Token,
        rank: int | None = None,
        frames: bool = True,
        within: float = STACKS_WITHIN,
    ) -> Mapping[str, Any] | Refusal:
        order: dict[str, Any] = {
            "token": self._token(token),
            "rank": rank,
            "frames": frames,
            "within": within,
        }
        if frames and self._sends_py_spy:
            order["py_spy"] = await self._send_py_spy()
        answer = await self._call("stacks", order, within + self._within)
        if answer["outcome"] == "refused":
            return self._read_refusal("stacks", answer)
        return answers.parse_stacks(self._node, rank, answer)

    async def last_words(self, token: Token) -> Mapping[str, Any] | Refusal:
        answer = await self._call("last-words", {"token": self._token(token)}, self._within)
        if answer["outcome"] == "refused":
            return self._read_refusal("last-words", answer)
        return answers.parse_last_words(self._node, answer)

    async def _send_py_spy(self) -> Mapping[str, str]:
        """Send py-spy to the node unless it is there, and return what `stacks` says of it."""
        try:
            program = await asyncio.to_thread(py_spy.read_program)
        except py_spy.NoProgramError as error:
            return {"missing": str(error)}
        async with self._sending:
            if self._link is not None and self._link is self._sent_over:
                return {"sha256": program.sha256}
            order = {
                "sha256": program.sha256,
                "size": len(program.data),
                "machine": program.machine,
            }
            until = asyncio.get_running_loop().time() + SEND_TIMEOUT
            answer = await self._call("py-spy", order, self._within)
            parts = program.pack()
            while answer["outcome"] == "done" and answer.get("complete") is not True:
                part = await asyncio.to_thread(next, parts, None)
                if part is None or asyncio.get_running_loop().time() > until:
                    return {"missing": f"it was not received within {SEND_TIMEOUT:g} s"}
                order_of_part = {**order, "offset": part[0], "data": part[1]}
                answer = await self._call("py-spy", order_of_part, SEND_TIMEOUT)
            if answer["outcome"] == "refused":
                return {"missing": self._read_refusal("py-spy", answer).reason[:MAX_MISSING]}
            self._sent_over = self._link
            return {"sha256": program.sha256}

    async def checkpoints(
        self, directory: str, workdir: str | None, pattern: str | None
    ) -> Mapping[str, Any] | Refusal:
        order = {"directory": directory, "workdir": workdir, "pattern": pattern}
        answer = await self._call("checkpoints", order, self._within)
        if answer["outcome"] == "refused":
            return self._read_refusal("checkpoints", answer)
        return answers.parse(
            self._node, "checkpoints", answers.CheckpointsAnswer, answer
        ).model_dump()

    async def probe(self, within: float, kernel_since: float | None) -> Mapping[str, Any]:
        order = {"within": within, "kernel_since": kernel_since}
        answer = await self._ask("probe", order, within, answers.BootAnswer)
        return answers.check_size(self._node, "probe", answer, answers.MAX_PROBE_BYTES)

    async def preflight(self, order: Mapping[str, Any], within: float) -> Mapping[str, Any]:
        """Check a node before it gets ranks.

        The order and the answer are those of docs/reference/agent-protocol.md.
        """
        order = {**order, "within": within}
        return await self._ask("preflight", order, within, answers.PreflightAnswer)

    async def meet(self, order: Mapping[str, Any], within: float) -> Mapping[str, Any]:
        return await self._ask("meet", order, within, answers.MeetAnswer)

    async def listen_for_peers(self, address: str, stay: float) -> LinkListener | str:
        order = {"listen": address, "stay": stay}
        answer = await self._ask("reach", order, 0.0, answers.ListeningAnswer)
        read = answers.parse(self._node, "reach", answers.ListeningAnswer, answer)
        if read.cannot is not None:
            return read.cannot
        return LinkListener(self._node, address, tuple(read.ports), read.word)

    async def call_peers(self, peers: Sequence[LinkListener], within: float) -> Mapping[str, str]:
        listed = [
            {"node": one.node, "address": one.address, "ports": one.ports, "word": one.word}
            for one in peers
        ]
        order = {"peers": listed, "within": within}
        answer = await self._ask("reach", order, within, answers.ReachAnswer)
        read = answers.parse(self._node, "reach", answers.ReachAnswer, answer)
        asked = {one.node for one in peers}
        return {row.node: row.cannot or "" for row in read.reached if row.node in asked}

    async def _ask(
        self,
        command: str,
        order: Mapping[str, Any],
        within: float,
        schema: type[answers.BootAnswer],
    ) -> Mapping[str, Any]:
        answer = await self._call(command, order, within + self._within)
        if answer["outcome"] == "refused":
            reason = self._read_refusal(command, answer).reason
            raise ProtocolError(self._node, f"{command} changes nothing and was refused: {reason}")
        answers.parse(self._node, command, schema, answer)
        return answer

    async def diagnose(
        self, id: str, level: int, within: float, fleet: str = ""
    ) -> Mapping[str, Any] | Refusal:
        order = {"id": id, "level": level, "within": within, **_whose(fleet)}
        answer = await self._call("diagnose", order, within + self._within)
        if answer["outcome"] == "refused":
            return self._read_refusal("diagnose", answer)
        return answers.check_output(self._node, "diagnose", answer, "stdout")

    async def reset_gpus(
        self,
        id: str,
        boot_id: str,
        gpus: tuple[str, ...],
        within: float,
        fleet: str = "",
        reason: str = "",
        by: str = "",
    ) -> Mapping[str, Any] | Refusal:
        order = {"id": id, "boot_id": boot_id, "gpus": gpus, "within": within, **_whose(fleet)}
        order |= {key: text for key, text in (("reason", reason), ("by", by)) if text}
        answer = await self._call("reset-gpus", order, within + self._within)
        if answer["outcome"] == "refused":
            return self._read_refusal("reset-gpus", answer)
        return answers.check_output(self._node, "reset-gpus", answer, "output")

    async def reboot(
        self, id: str, boot_id: str, reason: str, fleet: str = "", by: str = ""
    ) -> Mapping[str, Any] | Refusal:
        asked = {"by": by} if by else {}
        answer = await self._call(
            "reboot",
            {"id": id, "boot_id": boot_id, "reason": reason, **asked, **_whose(fleet)},
            2 * self._within,
        )
        if answer["outcome"] == "refused":
            return self._read_refusal("reboot", answer)
        answers.parse(self._node, "reboot", answers.BootAnswer, answer)
        return answer

    @asynccontextmanager
    async def watch(
        self, token: Token, after_seq: int, heartbeat: float
    ) -> AsyncIterator[AgentWatch]:
        order = {"token": self._token(token), "after_seq": after_seq, "heartbeat": heartbeat}
        async with self._command("watch", order) as (link, id_, inbox):
            yield AgentWatch(
                link,
                id_,
                inbox,
                first=self._within,
                silence=SILENT_BEATS * heartbeat + self._within / 5,
            )

    async def close(self) -> None:
        """Close the session. Nothing on the node ends with it."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def retire(self) -> None:
        """Close the session as soon as no command runs in it, a watch included.

        Later commands are carried out all the same, each in a session that is closed after it.
        """
        self._is_retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._is_retired and self._link is not None and self._link.is_idle:
            # A command that begins before the task runs opens another session.
            link, self._link = self._link, None
            task = asyncio.create_task(link.close(), name=f"close session {self._node}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _call(
        self, command: str, order: Mapping[str, Any], within: float
    ) -> Mapping[str, Any]:
        """Send an order and return its answer.

        While it waits, it sends `list` at intervals: a long wait ends as soon as the node answers
        nothing at all.
        """
        answer = await self._call_once(command, order, within)
        if answer["outcome"] == "refused" and answer.get("why") == "late":
            # It was not carried out, and is wanted still: the two clocks have drifted apart since
            # the session began. Another session, where this one is closed, reads the clock again.
            if self._link is not None:
                self._link.binder.set_clock(answer.get("stamp"))
            answer = await self._call_once(command, order, within)
        return answer

    async def _call_once(
        self, command: str, order: Mapping[str, Any], within: float
    ) -> Mapping[str, Any]:
        async with self._command(command, order, within) as (link, _, inbox):
            waiting = asyncio.ensure_future(self._answer(link, inbox, within, command))
            try:
                while command != "list":
                    done, _pending = await asyncio.wait({waiting}, timeout=self._within)
                    if done:
                        break
                    await self.list()
                return await waiting
            finally:
                waiting.cancel()
                # Its outcome was taken above, or is not needed any more.
                await asyncio.gather(waiting, return_exceptions=True)

    async def _answer(
        self, link: Link, inbox: Inbox, within: float, command: str
    ) -> Mapping[str, Any]:
        last: Mapping[str, Any] | None = None
        until = asyncio.get_running_loop().time() + within
        while True:
            left = within if last is None else max(0.0, until - asyncio.get_running_loop().time())
            message = await link.receive(inbox, left, command)
            if "line" in message:
                last = message["line"]
            elif last is None:
                raise Unreachable(self._node, f"{command} ended without an answer")
            else:
                break
        if not isinstance(last, Mapping) or last.get("outcome") not in ("done", "refused"):
            raise ProtocolError(
                self._node, f"{command} answered {str(last)[:200]!r}, expected an outcome"
            )
        if last["outcome"] == "refused" and last.get("why") in ("bad_order", "protocol"):
            raise ProtocolError(self._node, self._read_refusal(command, last).reason)
        return last

    @asynccontextmanager
    async def _command(
        self, command: str, order: Mapping[str, Any], within: float = 0.0
    ) -> AsyncIterator[tuple[Link, int, Inbox]]:
        link = await self._open()
        id_, inbox = link.begin()
        bound: Mapping[str, Any] = {}
        if command in BOUND_COMMANDS:
            is_timed = command in TIMED_COMMANDS
            bound = link.binder.make_fields(within + LATE_DELAY if is_timed else None)
        try:
            await link.send(
                {"id": id_, "command": command, "order": {"protocol": PROTOCOL, **bound, **order}}
            )
            yield link, id_, inbox
        finally:
            link.over(id_)
            try:
                if command in ("watch", "diagnose"):
                    # A broken session has already closed the command on the node.
                    with contextlib.suppress(Unreachable):
                        await link.send({"id": id_, "close": True})
            finally:  # also where the caller is cancelled once more meanwhile
                self._close_if_retired()

    async def _open(self) -> Link:
        async with self._opening:
            if self._link is not None and self._link.alive:
                return self._link
            pipe = await self._connect()
            try:
                greeting = await self._read_greeting(pipe)
                version = greeting["protocol"]
                if version != PROTOCOL:
                    said = str(version)[:40]
                    raise ProtocolError(
                        self._node, f"the agent speaks protocol {said}, expected {PROTOCOL}"
                    )
            except Unreachable as error:
                pipe.kill(error.reason)
                raise
            except BaseException:
                # This also covers a cancelled caller: nothing else refers to this process.
                pipe.kill()
                raise
            self._link = Link(self._node, pipe, self._within, self._silence_breaks, greeting)
            self._is_before_keys = self._link.binder.is_before_keys
            return self._link

    async def _read_greeting(self, pipe: Pipe) -> Mapping[str, Any]:
        """Wait for the agent's first line and return it: its protocol version, key and clock."""
        line = b""
        clock, reading = asyncio.get_running_loop().time, asyncio.ensure_future(pipe.readline())
        begun = clock()
        try:
            # The limit is read again each second: whether the node is cut off may change meanwhile.
            while not reading.done() and clock() < begun + (within := self._started_within()):
                await asyncio.wait({reading}, timeout=min(1.0, within))
            if not reading.done():
                await end(pipe)
                raise Unreachable(
                    self._node,
                    f"the agent could not be started: it said nothing within {within:g} s",
                )
            line = reading.result()
            greeting: Mapping[str, Any] = json.loads(line)["session"]
            if not isinstance(greeting, Mapping) or "protocol" not in greeting:
                raise KeyError("protocol")
            return greeting
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            await end(pipe)
            said = _refusal(line) or pipe.last_words or (repr(line[:120]) if line else pipe.ended)
            raise Unreachable(
                self._node, "the agent could not be started" + (f": {said}" if said else "")
            ) from error
        finally:
            reading.cancel()

    def _token(self, token: Token) -> dict[str, Any]:
        return {**asdict(token), "server": self._server} if self._server else asdict(token)

    def _read_refusal(self, command: str, answer: Mapping[str, Any]) -> Refusal:
        refusal = answers.parse(self._node, command, answers.RefusalAnswer, answer)
        highest = refusal.highest
        return Refusal(
            self._node,
            refusal.why,
            refusal.reason,
            (highest[0], highest[1]) if highest else None,
            refusal.boot_id,
            refusal.held.id if refusal.held else None,
        )


def _whose(fleet: str) -> dict[str, str]:
    return {"fleet": fleet} if fleet else {}


class AgentWatch:
    """One `watch` command in a session."""

    def __init__(self, link: Link, id_: int, inbox: Inbox, first: float, silence: float) -> None:
        self._link = link
        self._id = id_
        self._inbox = inbox
        self._first = first
        self._silence = silence

    async def lines(self) -> AsyncIterator[Mapping[str, Any]]:
        clock = asyncio.get_running_loop().time
        within, heard_at = self._first, clock()
        while True:
            message = await self._link.receive(self._inbox, max(0.0, within), "watch")
            if "line" not in message:
                return
            line = message["line"]
            now = clock()
            # Lines of unknown kinds count as silence, however many arrive.
            is_known = isinstance(line, dict) and not line.keys().isdisjoint(WATCH_LINES)
            within, heard_at = self._silence if is_known else within - (now - heard_at), now
            yield line

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        await self._link.send({"id": self._id, "send": {"renew": {"stamp": stamp, "age": age}}})


def _refusal(line: bytes) -> str:
    """Return the reason from the line of an agent that cannot open a session, or ""."""
    try:
        reason = json.loads(line)["reason"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return str(reason)[:400]
