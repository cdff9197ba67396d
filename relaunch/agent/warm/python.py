"""The job's Python, started ahead of need: the agent's side of relaunch.agent.warm.hook.

It belongs to the process that started it and dies with it. It holds no token, so it is no rank; a
rank that it forks waits for a word of its shim before it does anything.
"""

from __future__ import annotations

import array
import json
import os
import pkgutil
import select
import signal
import socket
import time
from pathlib import Path
from typing import List, NoReturn, Optional, Tuple

from relaunch.agent import processes
from relaunch.agent.protocol import Json
from relaunch.agent.warm.command import UnsuitableCommand, find_program, parse_command

PROBE_TIMEOUT = 60.0
"""Timeout in seconds for Python itself to start. A cold network file system takes long."""
ANSWER_TIMEOUT = 5.0
"""Timeout in seconds for an answer while a launch waits. A fork of a large process takes 0.05."""
END_TIMEOUT = 5.0
"""Timeout in seconds for it to be gone once its socket is closed, which takes milliseconds."""
NOT_STARTED = 127
"""Exit code where it could not be executed."""
SPACE = 16384
"""Bytes by which the environment of a rank may be larger than that of the Python at its start."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
"""Signals that no crash sends."""
_MAX_MESSAGE = 1 << 20
Spec = Json
"""`modules`, `command`, `workdir` and `environment`: with what the Python is started."""


class WarmError(Exception):
    """No rank can be forked from it; the text says why."""


class WarmInterruption(WarmError):
    """The same, for a reason that has nothing to do with the command and the modules."""


def write_hook(folder: Path) -> str:
    """Write the hook into a folder that is on no other path; return the folder."""
    source = pkgutil.get_data("relaunch.agent.warm", "hook.py")
    assert source is not None, "the agent is one file, which holds the hook"
    own = folder / "path"
    own.mkdir(mode=0o700, exist_ok=True)
    partial = own / f".sitecustomize.{os.getpid()}"
    partial.write_bytes(source)
    os.replace(partial, own / "sitecustomize.py")
    return str(own)


def _find_workdir(order: Json) -> str:
    """Return the folder that ranks run in, without links: one may lead elsewhere by now.

    Raises:
        OSError: It is the folder of this process, which was deleted.
    """
    return os.path.realpath(order["workdir"] or os.getcwd())


class WarmPython:
    """A Python that has imported modules, or is about to."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        """A folder of the job's, for the hook and for what the imports print."""
        self.parsed = parse_command(spec["command"])
        self.workdir = ""
        """The folder that it runs in, without links."""
        self.process: Optional[processes.Process] = None
        self.link: Optional[socket.socket] = None

    def start(self) -> None:
        """Start it; it says by a line on `link` when it is ready, or why it never will be.

        Raises:
            UnsuitableCommand: The command does not start a Python that loads the hook.
            WarmInterruption: It was killed, or is too slow.
            OSError: It cannot be started.
        """
        self.workdir = _find_workdir(self.spec)
        program = self._probe()
        self._spawn(program, self.spec["command"], json.dumps(self.spec["modules"]))

    def _probe(self) -> str:
        """Return the program of the command, once it has proved to be Python and to load the hook.

        What is started with the command of the ranks must never run as far as that command. So the
        same Python is started with the same options and nothing to do, first.
        """
        name = self.spec["command"][0]
        environment = self.spec["environment"]
        folder = self.spec["workdir"] or os.getcwd()
        program = find_program(name, environment.get("PATH", os.defpath), folder)
        if program is None:
            raise UnsuitableCommand(f"{name} is not found")
        self._spawn(program, [name, *self.parsed.options, "-c", ""], "probe")
        try:
            answer = self._receive(PROBE_TIMEOUT)
        except WarmInterruption:
            raise
        except WarmError as error:
            raise UnsuitableCommand(f"{name} does not load `sitecustomize` ({error})") from None
        finally:
            self.kill()
        real = answer.get("executable")
        if not isinstance(real, str) or os.path.realpath(program) != os.path.realpath(real):
            raise UnsuitableCommand(f"{program} is not Python itself, but starts {real}")
        return program

    def _spawn(self, program: str, command: List[str], task: str) -> None:
        parent = os.getpid()
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_MESSAGE)
        path = write_hook(self.folder)
        own = self.spec["environment"].get("PYTHONPATH")
        environment = {
            **self.spec["environment"],
            "PYTHONPATH": os.pathsep.join([path, own]) if own else path,
            "RELAUNCH_WARM_FD": str(theirs.fileno()),
            "RELAUNCH_WARM_TASK": task,
            "RELAUNCH_WARM_SPACE": " " * SPACE,
        }
        pid = os.fork()
        if pid == 0:
            self._become(program, command, environment, theirs, parent)
        self.process = processes.read_process(pid)
        theirs.close()

    def _become(
        self,
        program: str,
        command: List[str],
        environment: dict[str, str],
        link: socket.socket,
        parent: int,
    ) -> NoReturn:
        try:
            os.setsid()
            processes.die_with(parent)
            log = os.open(self.folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            processes.close_all_but([link.fileno()])
            link.set_inheritable(True)
            if self.spec["workdir"] is not None:
                os.chdir(self.spec["workdir"])
            processes.reset_signals()
            os.execve(program, command, environment)
        except BaseException as error:  # never continue as a second agent
            os.write(2, f"relaunch: {program} cannot be started ahead: {error}\n".encode())
        os._exit(NOT_STARTED)

    def take_news(self) -> Json:
        """Return what it has to say, once `link` can be read.

        Raises:
            WarmError: It has ended.
        """
        return self._receive(0.0)

    def check(self, order: Json, command: List[str], environments: List[dict[str, str]]) -> None:
        """Prove that ranks of this order would find everything as in a start from nothing.

        Raises:
            WarmError: They would not, or it does not answer.
        """
        if command != self.spec["command"]:
            raise WarmError("the command is another one now")
        if order["warm"] != self.spec["modules"]:
            raise WarmError("the modules to import ahead are others now")
        # Python has made the entries of PYTHONPATH absolute, with the folder that it was started
        # in.
        if _find_workdir(order) != self.workdir:
            raise WarmError("the working directory is another one now")
        first = self.parsed.first_folder
        folder = None
        if first is not None:
            folder = os.path.realpath(os.path.join(order["workdir"] or os.getcwd(), first))
        self._send({"check": {"environments": environments, "folder": folder}})
        self._receive(ANSWER_TIMEOUT)

    def fork(
        self,
        order: Json,
        environment: dict[str, str],
        outputs: Tuple[int, int],
        failure: int,
        going: int,
    ) -> int:
        """Fork a process that becomes a rank once it reads a `g` from `going`; return its pid.

        It ends where `going` is closed without one.

        Raises:
            WarmError: It does not answer. No process of this call becomes a rank.
        """
        request = {
            "env": environment,
            "workdir": order["workdir"],
            "umask": order["umask"],
            "limits": order["limits"],
            "core_limits": processes.list_core_limits(),
            "shim": os.getpid(),
        }
        self._send(request, [*outputs, failure, going])
        pid = self._receive(ANSWER_TIMEOUT).get("pid")
        if not isinstance(pid, int):
            raise WarmError("it did not fork")
        return pid

    def _send(self, value: Json, handles: Optional[List[int]] = None) -> None:
        if self.link is None:
            raise WarmError("it has ended")
        rights = array.array("i", handles or [])
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if handles else []
        try:
            self.link.sendmsg([json.dumps(value).encode()], extra)
        except OSError as error:
            raise WarmError(f"it cannot be asked: {error.strerror}") from None

    def _receive(self, timeout: float) -> Json:
        if self.link is None:
            raise WarmError("it has ended")
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        if not poll.poll(timeout * 1000):
            raise WarmInterruption(f"it did not answer within {timeout:g} s")
        try:
            data = self.link.recv(_MAX_MESSAGE)
            answer = json.loads(data) if data else None
        except (OSError, ValueError) as error:
            raise WarmError(str(error)) from None
        if not isinstance(answer, dict):
            raise self._explain_end()
        if "cold" in answer:
            raise WarmError(str(answer["cold"]))
        return answer

    def _explain_end(self) -> WarmError:
        """Return how it ended: the kernel kills where memory is short, a crash is its own."""
        if self.process is None:
            return WarmError("it has ended")
        deadline = time.monotonic() + END_TIMEOUT
        # It is not reaped here: `kill` does that, and until then no other process gets its pid.
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            ended = os.waitid(os.P_PID, self.process.pid, how)
            while ended is None and time.monotonic() < deadline:
                time.sleep(0.002)
                ended = os.waitid(os.P_PID, self.process.pid, how)
        except ChildProcessError:  # a shim reaps whatever ends
            ended = None
        if ended is None:
            return WarmError("it has ended")
        if ended.si_code == os.CLD_KILLED and ended.si_status in FROM_OUTSIDE:
            name = signal.Signals(ended.si_status).name
            return WarmInterruption(f"its Python was killed by {name}")
        if ended.si_code == os.CLD_EXITED and ended.si_status == NOT_STARTED:
            return WarmInterruption("its Python could not be started")
        return WarmError("it has ended")

    def kill(self) -> None:
        """Kill and reap it, if it lives. Its forked ranks are children of the shim, and stay."""
        if self.link is not None:
            self.link.close()
            self.link = None
        if self.process is not None:
            processes.kill(self.process, signal.SIGKILL)
            try:
                os.waitpid(self.process.pid, 0)
            except ChildProcessError:  # a shim reaps whatever ends
                pass
            self.process = None
