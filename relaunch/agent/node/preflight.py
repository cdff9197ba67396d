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
from relaunch.agent.protocol import Fields, Json, Refusal, refuse_field
from relaunch.agent.ranks.master_port import hold_port
from relaunch.agent.ranks.peers import is_loopback_name, resolve
from relaunch.agent.state import read_boot_id

TOOL_TIMEOUT = 5.0
"""Seconds. `nvidia-smi` initialises every GPU first if there is no persistence mode; a hung host
engine never answers."""
MAX_STAY = 900.0
"""Seconds after which the process that was left behind ends in any case."""
PEER_TIMEOUT = 2.0
"""Seconds for one line over the network that ranks will train over."""
POLL_INTERVAL = 0.02
SAMPLE_BUS_ID = "00000000:00:00.0"
"""A bus id for asking sudo for permission, where the node's own cannot be read."""
MAX_OUTPUT = 200
CGROUP = "/proc/self/cgroup"


def check_node(state: Path, order: Fields) -> Json:
    timeout = order.number("within", least=0.1)
    listen = None if order.order.get("listen") is None else order.text("listen")
    stay = min(MAX_STAY, order.number("stay"))
    with_gpus = order.flag("gpus")
    until = time.monotonic() + timeout
    return {
        "outcome": "done",
        "boot_id": read_boot_id(state),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "user": _read_user(),
        "uid": os.geteuid(),
        "state": {"path": str(state), **find_mount(state)},
        "session": _find_session(),
        "host": _resolve_host(),
        "nvidia_smi": _try_tool(["nvidia-smi", "-L"], until) if with_gpus else None,
        "dcgmi": _try_tool(["dcgmi", "discovery", "-l"], until) if with_gpus else None,
        "reboot": _check_reboot(until),
        "gpu_reset": _check_gpu_reset(until) if with_gpus else None,
        "left": None if listen is None else _leave_listener(listen, stay),
    }


def _read_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def _find_session() -> Optional[str]:
    """Return the logind session of this login; its end may end everything started in it."""
    try:
        with open(CGROUP) as file:
            parts = [part for text in file for part in text.strip().split("/")]
    except OSError:
        return None
    return next(
        (part for part in parts if part.startswith("session-") and part.endswith(".scope")), None
    )


def _resolve_host() -> Json:
    """Return this host's own name, and the loopback address that it is to this host, if it is one.

    It is what gloo tells other ranks to connect to.
    """
    name = socket.gethostname()
    try:
        address = resolve(name, 0)[1][0]
    except Refusal:
        return {"name": name, "loopback": None}
    return {"name": name, "loopback": address if is_loopback_name(name, address) else None}


def _try_tool(command: List[str], until: float) -> Json:
    """Run a tool that changes nothing, and return how it ended."""
    path = shutil.which(command[0])
    if path is None:
        return {"missing": f"{command[0]} is not on this node's PATH"}
    try:
        result = tools.run(
            [path, *command[1:]], max(0.1, min(TOOL_TIMEOUT, until - time.monotonic()))
        )
    except OSError as error:
        return {"path": path, "exit_code": None, "said": str(error.strerror)}
    output = (
        result.output_tail
        if result.exit_code is not None
        else f"it did not end within {TOOL_TIMEOUT:g} s"
    )
    return {"path": path, "exit_code": result.exit_code, "said": output[-MAX_OUTPUT:]}


def _check_reboot(until: float) -> Json:
    try:
        command = repairs.reboot_command()
    except Refusal as refused:
        return {"command": "systemctl reboot", "cannot": refused.answer["reason"]}
    return _check_permission(command, until)


def _check_gpu_reset(until: float) -> Json:
    path = shutil.which("nvidia-smi")
    if path is None:
        return {"command": "nvidia-smi --gpu-reset", "missing": "nvidia-smi"}
    prefix = repairs.choose_root_prefix()
    if os.geteuid() != 0 and not prefix:
        return {"command": f"{path} --gpu-reset", "cannot": f"uid {os.geteuid()} may reset no GPU"}
    bus_id = _read_bus_id(path, until) if prefix else SAMPLE_BUS_ID
    command = [*prefix, path, "--gpu-reset", "-i", bus_id]
    answer = _check_permission(command, until)
    if prefix and "cannot" not in answer and "missing" not in answer:
        answer.update(_find_excess([*command, "-f", os.devnull], until))
    return answer


def _find_excess(command: List[str], until: float) -> Json:
    """Return `allows` if sudo would run a command that writes a file, but not every program.

    A rule for all programs is meant so. A rule with `-i *` is not.
    """
    is_wide = "cannot" not in _check_permission(command, until)
    if is_wide and "cannot" in _check_permission(["sudo", "-n", "/bin/sh"], until):
        return {"allows": " ".join(command[2:])}
    return {}


def _read_bus_id(path: str, until: float) -> str:
    """Return the bus id of a GPU of this node: the rules of sudo may name each."""
    command = [path, "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    try:
        result = tools.run(command, max(0.1, min(TOOL_TIMEOUT, until - time.monotonic())))
    except OSError:
        return SAMPLE_BUS_ID
    first = result.stdout.strip().partition("\n")[0].strip()
    is_read = result.exit_code == 0 and repairs.BUS_ID.fullmatch(first) is not None
    return first if is_read else SAMPLE_BUS_ID


def _check_permission(command: List[str], until: float) -> Json:
    """Return whether a command could be run, without running it: sudo is asked for its rules."""
    sudo = command[:2] == ["sudo", "-n"]
    arguments = command[2:] if sudo else command
    answer: Json = {"command": " ".join(arguments), "sudo": sudo}
    if shutil.which(command[0]) is None:
        return {**answer, "missing": command[0]}
    if not sudo:
        return answer
    try:
        result = tools.run(
            ["sudo", "-n", "-l", *arguments], max(0.1, min(TOOL_TIMEOUT, until - time.monotonic()))
        )
    except OSError as error:
        return {**answer, "cannot": f"sudo cannot be run: {error.strerror}"}
    if result.exit_code == 0:
        return answer
    output = (
        result.output_tail[-MAX_OUTPUT:]
        if result.exit_code is not None
        else f"it did not answer within {TOOL_TIMEOUT:g} s"
    )
    detail = f": {output}" if output else ""
    return {**answer, "cannot": f"sudo -n does not allow it{detail}"}


# --- the process that is left behind


def _leave_listener(address: str, stay: float) -> Json:
    """Listen where ranks would, in a process that outlives this login if a shim would."""
    try:
        listener = hold_port(address)
        listener.listen(16)
    except Refusal as refused:
        return {"cannot": refused.answer["reason"]}
    except OSError as error:
        return {"cannot": f"nothing can listen at {address}: {error.strerror}"}
    word = secrets.token_hex(16)
    reading, writing = os.pipe()

    def between() -> None:
        os.setsid()
        pid = processes.fork(lambda: _answer_callers(listener, word, stay))
        os.write(writing, str(pid).encode())

    with listener:
        middle = processes.fork(between)
        os.close(writing)
        try:
            pid = int(os.read(reading, 32))
            os.waitpid(middle, 0)
            process = processes.read_process(pid)
        finally:
            os.close(reading)
        started = None if process is None else process.started
        return {
            "pid": pid,
            "started": started,
            "address": address,
            "port": listener.getsockname()[1],
            "word": word,
        }


def _answer_callers(listener: socket.socket, word: str, stay: float) -> None:
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
                caller.settimeout(PEER_TIMEOUT)
                caller.sendall(word.encode() + b"\n")
            except OSError:  # the caller disconnected
                continue


def meet(state: Path, order: Fields) -> Json:
    """Check whether the process that this node left behind lives, and connect to that of a peer."""
    wait, end = order.number("wait"), order.flag("end", False)
    answer: Json = {"outcome": "done", "boot_id": read_boot_id(state), "lives": None, "met": None}
    order_part = order.order.get("left")
    if order_part is not None:
        left = Fields(order_part, "left.")
        pid, started = left.whole("pid"), left.whole("started")
        deadline = time.monotonic() + wait
        while (lives := processes.is_alive(pid, started)) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        answer["lives"] = lives
        if end and lives:
            process = processes.read_process(pid)
            if process is not None and process.started == started:
                processes.kill(process, signal.SIGKILL)
    order_part = order.order.get("peer")
    if order_part is not None:
        peer = Fields(order_part, "peer.")
        port = peer.whole("port")
        if not 0 < port < 65536:
            refuse_field("peer.port", port, "a port")
        answer["met"] = _connect(peer.text("address"), port, peer.text("word"))
    return answer


def _connect(address: str, port: int, word: str) -> Json:
    started_at = time.monotonic()
    try:
        family, target = resolve(address, port)
    except Refusal as refused:
        return {"cannot": refused.answer["reason"]}
    with socket.socket(family, socket.SOCK_STREAM) as caller:
        caller.settimeout(PEER_TIMEOUT)
        try:
            caller.connect(target)
            answer = caller.recv(64)
        except socket.timeout:
            return {"cannot": f"no answer from {address} port {port} within {PEER_TIMEOUT:g} s"}
        except OSError as error:
            return {"cannot": f"{address} port {port}: {error.strerror}"}
    if answer.strip() != word.encode():
        return {
            "cannot": f"another process answers at {address} port {port}: "
            "two machines have this address, or something is between"
        }
    return {"took": time.monotonic() - started_at}
