"""Checks of a node before it is trusted with ranks.

They cover its Python, state folder and tools, what it permits us as root, and which peers can reach
it. They change nothing and do not judge. `preflight` leaves a process that listens for a while:
after a new login it shows whether a logout ends what was started, and a neighbour sees whether it
can connect. `meet` checks both.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import List, Optional

from relaunch.agent import processes, tools
from relaunch.agent.folders import find_mount
from relaunch.agent.node import repairs
from relaunch.agent.protocol import Fields, Json, Refused, bad
from relaunch.agent.ranks.orders import hold_port
from relaunch.agent.ranks.peers import resolve
from relaunch.agent.state import boot_id

TOOL = 5.0
"""Seconds. `nvidia-smi` initialises every GPU first if there is no persistence mode; a hung host
engine never answers."""
STAY_MOST = 900.0
"""Seconds after which the process that was left behind ends in any case."""
SPOKEN = 2.0
"""Seconds for one line over the network that ranks will train over."""
LOOK = 0.02
SAMPLE = "00000000:00:00.0"
"""A bus id for asking sudo for permission: nothing is reset."""
SAID = 200
CGROUP = "/proc/self/cgroup"


def preflight(state: Path, order: Fields) -> Json:
    within = order.number("within", least=0.1)
    listen = None if order.order.get("listen") is None else order.text("listen")
    stay = min(STAY_MOST, order.number("stay"))
    with_gpus = order.flag("gpus")
    until = time.monotonic() + within
    return {
        "outcome": "done",
        "boot_id": boot_id(state),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "user": _user(),
        "uid": os.geteuid(),
        "state": {"path": str(state), **find_mount(state)},
        "session": _session(),
        "nvidia_smi": _tried(["nvidia-smi", "-L"], until) if with_gpus else None,
        "dcgmi": _tried(["dcgmi", "discovery", "-l"], until) if with_gpus else None,
        "reboot": _allowed_reboot(until),
        "gpu_reset": _allowed_reset(until) if with_gpus else None,
        "left": None if listen is None else _leave(listen, stay),
    }


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def _session() -> Optional[str]:
    """Return the logind session of this login; its end may end everything started in it."""
    try:
        with open(CGROUP) as file:
            parts = [part for text in file for part in text.strip().split("/")]
    except OSError:
        return None
    return next(
        (part for part in parts if part.startswith("session-") and part.endswith(".scope")), None
    )


def _tried(words: List[str], until: float) -> Json:
    """Run a tool that changes nothing, and return how it ended."""
    path = shutil.which(words[0])
    if path is None:
        return {"missing": f"{words[0]} is not on this node's PATH"}
    try:
        ran = tools.run([path, *words[1:]], max(0.1, min(TOOL, until - time.monotonic())))
    except OSError as error:
        return {"path": path, "exit_code": None, "said": str(error.strerror)}
    said = ran.last_words if ran.exit_code is not None else f"it did not end within {TOOL:g} s"
    return {"path": path, "exit_code": ran.exit_code, "said": said[-SAID:]}


def _allowed_reboot(until: float) -> Json:
    try:
        words = repairs.reboot_command()
    except Refused as refused:
        return {"command": "systemctl reboot", "cannot": refused.answer["reason"]}
    return _allowed(words, until)


def _allowed_reset(until: float) -> Json:
    path = shutil.which("nvidia-smi")
    if path is None:
        return {"command": "nvidia-smi --gpu-reset", "missing": "nvidia-smi"}
    words = [*repairs.by_root(), path, "--gpu-reset", "-i", SAMPLE]
    if os.geteuid() != 0 and words[0] != "sudo":
        return {"command": f"{path} --gpu-reset", "cannot": f"uid {os.geteuid()} may reset no GPU"}
    return _allowed(words, until)


def _allowed(words: List[str], until: float) -> Json:
    """Return whether a command could be run, without running it: sudo is asked for its rules."""
    sudo = words[:2] == ["sudo", "-n"]
    given = words[2:] if sudo else words
    answer: Json = {"command": " ".join(given), "sudo": sudo}
    if shutil.which(words[0]) is None:
        return {**answer, "missing": words[0]}
    if not sudo:
        return answer
    try:
        ran = tools.run(["sudo", "-n", "-l", *given], max(0.1, min(TOOL, until - time.monotonic())))
    except OSError as error:
        return {**answer, "cannot": f"sudo cannot be run: {error.strerror}"}
    if ran.exit_code == 0:
        return answer
    said = (
        ran.last_words[-SAID:]
        if ran.exit_code is not None
        else f"it did not answer within {TOOL:g} s"
    )
    return {**answer, "cannot": f"sudo -n does not allow it{f': {said}' if said else ''}"}


# --- the process that is left behind


def _leave(address: str, stay: float) -> Json:
    """Listen where ranks would, in a process that outlives this login if a shim would."""
    try:
        listener = hold_port(address)
        listener.listen(16)
    except Refused as refused:
        return {"cannot": refused.answer["reason"]}
    except OSError as error:
        return {"cannot": f"nothing can listen at {address}: {error.strerror}"}
    word = secrets.token_hex(16)
    reading, writing = os.pipe()

    def between() -> None:
        os.setsid()
        pid = processes.fork(lambda: _stay(listener, word, stay))
        os.write(writing, str(pid).encode())

    with listener:
        middle = processes.fork(between)
        os.close(writing)
        try:
            pid = int(os.read(reading, 32))
            os.waitpid(middle, 0)
            found = processes.look(pid)
        finally:
            os.close(reading)
        started = None if found is None else found.started
        return {
            "pid": pid,
            "started": started,
            "address": address,
            "port": listener.getsockname()[1],
            "word": word,
        }


def _stay(listener: socket.socket, word: str, stay: float) -> None:
    processes.set_name("relaunch-stay")
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    processes.close_all_but([listener.fileno()])
    processes.reset_signals()
    signal.setitimer(signal.ITIMER_REAL, max(0.1, stay))  # SIGALRM ends it
    while True:
        caller, _ = listener.accept()
        with caller:
            try:
                caller.settimeout(SPOKEN)
                caller.sendall(word.encode() + b"\n")
            except OSError:  # the caller disconnected
                continue


def meet(state: Path, order: Fields) -> Json:
    """Check whether the process that this node left behind lives, and connect to that of a peer."""
    wait, end = order.number("wait"), order.flag("end", False)
    answer: Json = {"outcome": "done", "boot_id": boot_id(state), "lives": None, "met": None}
    given = order.order.get("left")
    if given is not None:
        left = Fields(given, "left.")
        pid, started = left.whole("pid"), left.whole("started")
        deadline = time.monotonic() + wait
        while (lives := processes.lives(pid, started)) and time.monotonic() < deadline:
            time.sleep(LOOK)
        answer["lives"] = lives
        if end and lives:
            found = processes.look(pid)
            if found is not None and found.started == started:
                processes.kill(found, signal.SIGKILL)
    given = order.order.get("peer")
    if given is not None:
        peer = Fields(given, "peer.")
        port = peer.whole("port")
        if not 0 < port < 65536:
            bad("peer.port", port, "a port")
        answer["met"] = _met(peer.text("address"), port, peer.text("word"))
    return answer


def _met(address: str, port: int, word: str) -> Json:
    began = time.monotonic()
    try:
        family, target = resolve(address, port)
    except Refused as refused:
        return {"cannot": refused.answer["reason"]}
    with socket.socket(family, socket.SOCK_STREAM) as caller:
        caller.settimeout(SPOKEN)
        try:
            caller.connect(target)
            said = caller.recv(64)
        except socket.timeout:
            return {"cannot": f"no answer from {address} port {port} within {SPOKEN:g} s"}
        except OSError as error:
            return {"cannot": f"{address} port {port}: {error.strerror}"}
    if said.strip() != word.encode():
        return {
            "cannot": f"somebody else answers at {address} port {port}: two machines have this address, or something is between"
        }
    return {"took": time.monotonic() - began}
