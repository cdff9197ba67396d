"""The watch command: relays the messages of a generation's supervisor.

When the supervisor is gone, the command reports the observations in the journal instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path

from relaunch.agent import processes, tools
from relaunch.agent.loop import parse, take_line
from relaunch.agent.node import kernel_log, links
from relaunch.agent.protocol import Fields, Json, Refusal, line, make_sender, now
from relaunch.agent.ranks import evidence, journal
from relaunch.agent.ranks.stop import await_records
from relaunch.agent.state import Generation, JobState, read_boot_id, read_json

LOCK_TIMEOUT = 120.0
"""Seconds to wait for the job's lock. A stop holds it for its grace period and its proof."""
HELLO_TIMEOUT = 15.0
"""Seconds to wait for the first message of a supervisor.

Longer than a shim waits before it replaces a supervisor that does not respond.
"""
PORTS_TIMEOUT = links.READ_TIMEOUT + 2.0
"""Seconds to read the network ports and to write down how they are."""
RETRY_INTERVAL = 0.02


class DisconnectError(Exception):
    """The watching client has closed its connection."""


class Watch:
    def __init__(self, state: Path, order: Fields, reading: int, writing: int) -> None:
        self.token = order.token()
        self.after = order.whole("after_seq", 0)
        self.heartbeat = order.number("heartbeat", 10.0, least=0.01)
        self.job = JobState.from_token(state, self.token)
        self.generation: Generation = self.job.generation(self.token.order)
        self.reading = reading
        self.writing = writing
        self.greeted = False
        self._in = bytearray()
        await_records(self.generation)
        prepared = self.generation.prepared_order
        if prepared is None or not self._is_ours(prepared):
            reason = f"generation {self.token.generation} was never prepared on this node"
            sender = make_sender(self.token, None, None)
            raise Refusal("no_such_generation", reason, place=self.job.place, sender=sender)
        self.ranks: list[int] = prepared["ranks"]
        shim = read_json(self.generation.path / "shim.json") or {}
        self.boot: str | None = shim.get("boot_id") or prepared["answer"].get("boot_id")
        """In which the generation was prepared; None: not known."""

    def _is_ours(self, prepared: Json) -> bool:
        return bool(prepared["token"] == self.token.json)

    def run(self) -> None:
        try:
            while True:
                supervisor = self.generation.connect("sock", timeout=5.0)
                if supervisor is not None:
                    with supervisor:
                        if self._relay(supervisor):
                            return
                await_records(self.generation)
                if not self.generation.has_live_shim() and not self._supervisor_serves():
                    self._report_from_disk()
                    return
                self._pause()
        except DisconnectError:
            return

    def _supervisor_serves(self) -> bool:
        """Return whether a supervisor outlived its shim.

        The socket accepts connections as long as any process listens on it.
        """
        connection = self.generation.connect("sock", timeout=1.0)
        if connection is None:
            return False
        connection.close()
        return True

    def _pause(self) -> None:
        ready, _, _ = select.select([self.reading], [], [], RETRY_INTERVAL)
        if ready:
            self._take_input(None)

    # --- from the supervisor ---

    def _relay(self, supervisor: socket.socket) -> bool:
        """Relay lines in both directions; return whether the supervisor announced the end."""
        try:
            supervisor.sendall(
                line({"watch": {"after_seq": self.after, "heartbeat": self.heartbeat}})
            )
        except OSError:  # it died just now: the caller tries again
            return False
        received = bytearray()
        silent_until: float | None = time.monotonic() + HELLO_TIMEOUT
        while True:
            timeout = None if silent_until is None else max(0.0, silent_until - time.monotonic())
            ready, _, _ = select.select([supervisor.fileno(), self.reading], [], [], timeout)
            if not ready:
                self._continue_shim()
                return False
            if self.reading in ready:
                self._take_input(supervisor)
            if supervisor.fileno() in ready:
                try:
                    data = supervisor.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    return False
                silent_until = None
                received += data
                while True:
                    text = take_line(received)
                    if text is None:
                        break
                    if self._forward(text):
                        return True

    def _continue_shim(self) -> None:
        """Continue a stopped shim: without a supervisor, no other process does.

        It is the one that starts the next supervisor.
        """
        shim = self.generation.find_shim()
        if shim is not None and shim.state == "T":
            processes.kill(shim, signal.SIGCONT)

    def _forward(self, text: bytes) -> bool:
        if text.startswith(b'{"hello"'):
            if self.greeted:  # the supervisor was replaced: do not repeat the hello
                return False
            self.greeted = True
        elif text.startswith(b'{"observation"'):
            value = parse(text)
            if value is None or value["observation"]["seq"] <= self.after:
                return False
            self.after = value["observation"]["seq"]
        self._write(text + b"\n")
        return text.startswith(b'{"end"')

    def _take_input(self, supervisor: socket.socket | None) -> None:
        """Relay renewals to the supervisor. While there is none, they are dropped.

        Raises:
            Closed: The watching client has closed its connection.
        """
        data = os.read(self.reading, 65536)
        if not data:
            raise DisconnectError
        self._in += data
        while True:
            text = take_line(self._in)
            if text is None:
                return
            value = parse(text)
            if supervisor is not None and value is not None and "renew" in value:
                try:
                    supervisor.sendall(line({"renew": value["renew"]}))
                except OSError:  # the read in _relay fails as well
                    return

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.writing, data) :]
        except BrokenPipeError:
            raise DisconnectError from None

    # --- from the disk ---

    def _report_from_disk(self) -> None:
        with self.job.hold_lock(LOCK_TIMEOUT):
            observations = journal.read(self.generation.journal)
            vanished = self._describe_vanished(observations)
            if vanished is not None:
                record = journal.Journal(self.generation.journal)
                record.append(("RanksVanished", vanished))
                # On a full disk, report it all the same: the next watch derives the same
                # observation with the same number.
                record.close()
                observations = [*journal.read(self.generation.journal), *record.pending]
        sender = self._read_sender()
        if not self.greeted:
            boot = read_boot_id(self.generation.state)
            hello = {
                "token": self.token.json,
                "boot_id": boot,
                "state": "gone",
                "ranks": self.ranks,
                "stamp": now(),
            }
            self._tell({"hello": {**hello, "place": self.job.place}}, sender)
        reading = (
            kernel_log.read_generation(self.generation, None)
            if kernel_log.may_explain(observations[self.after :])
            else None
        )
        for observation in observations[self.after :]:
            told = evidence.add_evidence(self.generation, observation, reading)
            self._tell({"observation": told}, sender)
        self._tell({"end": {"seq": len(observations)}}, sender)

    def _read_sender(self) -> Json:
        """Return whose word the journal is: that of the shim that wrote it."""
        node = (self.generation.launch or {}).get("node")
        return make_sender(self.token, node, read_json(self.generation.path / "shim.json"))

    def _tell(self, said: Json, sender: Json) -> None:
        self._write(line({**said, "sender": sender}))

    def _describe_vanished(self, observations: list[Json]) -> Json | None:
        """Return the fields of a RanksVanished observation if exits are missing, else None."""
        started = self.generation.launch
        rebooted = self.boot not in (None, read_boot_id(self.generation.state))
        # A launch of which a loss of power has left no record looks as if there had been none.
        was_launched = rebooted if started is None else not started.get("refused")
        if not was_launched or journal.explains_missing_exits(observations):
            return None
        missing = sorted(set(self.ranks) - journal.list_exited(observations))
        if not missing:
            return None
        cause = "the node rebooted" if rebooted else "the shim and its supervisor died"
        return {
            "reason": f"{cause}; the exits of ranks {missing} are not known",
            "rebooted": rebooted,
        }


def watch(state: Path, order: Fields, reading: int, writing: int) -> None:
    watching = Watch(state, order, reading, writing)
    # How the network ports are now: an examination after a fault compares them with it. Not in the
    # shim, whose children are taken for ranks: a reader of a card that hangs cannot be killed.
    # Without a limit, a disk that hangs would keep the node silent.
    with contextlib.suppress(OSError):  # no process can be started
        tools.run_bounded(lambda: links.read_ports(state), PORTS_TIMEOUT)
    watching.run()
