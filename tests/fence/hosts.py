"""Hosts on one kernel: each has a separate network, mounts, processes, name and IPC, and an sshd.

They are plugged into a switch in user space (`switch.py`). Nothing of the machine's own network,
mounts or folders is touched. Needs root with CAP_SYS_ADMIN, /dev/net/tun, util-linux and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from relaunch.backends import local_power
from relaunch.temporal import read_start_time
from tests.backends.netns import Network, run_in_network
from tests.backends.sshd import ASYNCSSH, DEFAULT, Sshd, make_key
from tests.chaos.disks import Disk
from tests.fence import switch

HERE = Path(__file__).parent
NETWORK = "10.77.0"
FIRST_HOST = 11
"""Number of the first host on the network; controllers come before it."""
PYTHON = "/usr/bin/python3"
"""What hosts run: they see this machine's file system, but not the home of who runs this."""
PRIVATE = ("/var/tmp", "/var/lib", "/home")
"""Folders that each host has for itself: those that an agent may keep its state in."""
USERS = {"root": (0, "/home/root"), "sshd": (2000, "/run/sshd"), "train": (2001, "/home/train")}
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount")
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""So that nothing is left behind by a run that is killed."""

T = TypeVar("T")


def find_obstacle() -> str | None:
    """Return why no hosts can be made here; None: they can."""
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"hosts in namespaces need {', '.join(missing)}"
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun") or not os.path.exists(PYTHON):
        return f"hosts in namespaces need root, /dev/net/tun and {PYTHON}"
    if DEFAULT == "asyncssh" and any(
        Path(needed).is_relative_to(hidden)
        for needed in (sys.executable, sys.prefix, sys.base_prefix, ASYNCSSH[-1])
        for hidden in PRIVATE
    ):
        return f"hosts in namespaces hide {', '.join(PRIVATE)}: the Python SSH server lies there"
    words = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "true"]
    tried = subprocess.run(words, capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no namespaces can be made here: {tried.stderr.strip()}"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"no network devices can be made here: {error}"
    return None


class Controller:
    """A machine of which only the network is separate: workers run on it."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.process = subprocess.Popen(
            [
                *DIES_WITH_PARENT,
                "unshare",
                "--net",
                "sh",
                "-c",
                "ip link set lo up; echo up; exec sleep infinity",
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interruption is for us: we end it when all else has ended
            stdout=subprocess.PIPE,
        )
        _await_up(self.process, name)
        self.pid = self.process.pid

    @property
    def within(self) -> tuple[str, ...]:
        return ("nsenter", "-t", str(self.pid), "-n", "--")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Host(Sshd):
    """One node: an sshd in namespaces, with its own machine id, accounts and folders.

    Its agents keep their state where agents do by default.
    """

    def __init__(
        self, folder: Path, name: str, number: int, key: Path, has_disk: bool = False
    ) -> None:
        """`has_disk`: its folders are on a separate disk."""
        super().__init__(folder, "127.0.0.1", key)
        self.disk: Disk | None = None
        self._folders = folder
        if has_disk:
            self._folders = folder / "disk"
            self._folders.mkdir()
            self.disk = Disk(folder / "image", self._folders)
            self._folders.chmod(0o755)
        self.name, self.number = name, number
        self.address, self.port = f"{NETWORK}.{number}", 22
        for variable in ("RELAUNCH_AGENT_STATE", "HOME"):
            del self.environment[variable]
        order = (
            f"exec {sys.executable} -c pass"  # a reboot is ours to make: `SwitchedPlaces.reboot`
        )
        self.program_named("systemctl", f"#!/bin/sh\n{order}\n")
        self._boot()

    def _boot(self) -> None:
        binds = [(self._private(target), target) for target in PRIVATE]
        self.machine_id = self.folder / "machine-id"
        self.machine_id.write_text(uuid.uuid4().hex + "\n")
        if os.path.exists("/etc/machine-id"):
            binds.append((self.machine_id, "/etc/machine-id"))
        for name, lines in self._accounts().items():
            (self.folder / name).write_text(lines)
            (self.folder / name).chmod(0o644)
            binds.append((self.folder / name, f"/etc/{name}"))
        for user, (uid, home) in USERS.items():
            if home.startswith("/home/"):
                place = self._folders / "home" / user
                place.mkdir(mode=0o700)
                os.chown(place, uid, uid)
        given = {"name": self.name, "binds": [(str(source), target) for source, target in binds]}
        namespaces = [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
        ]
        self.init = subprocess.Popen(
            [*DIES_WITH_PARENT, *namespaces, PYTHON, str(HERE / "host_init.py"), json.dumps(given)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interruption is for us: we end it when all else has ended
            stdout=subprocess.PIPE,
        )
        _await_up(self.init, self.name)
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        self.pid = int(children[0])
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        # Not forked by nsenter: the sshd is the process that we started, and what it starts is on
        # the host.
        self.within = ("nsenter", "-t", str(self.pid), "-F", "-n", "-m", "-p", "-u", "-i", "--")

    def _private(self, target: str) -> Path:
        place = self._folders / target.strip("/").replace("/", "_")
        place.mkdir(exist_ok=True)
        place.chmod(0o1777 if target == "/var/tmp" else 0o755)
        return place

    @staticmethod
    def _accounts() -> dict[str, str]:
        passwd = "".join(
            f"{user}:x:{uid}:{uid}::{home}:/bin/sh\n" for user, (uid, home) in USERS.items()
        )
        group = "".join(f"{user}:x:{uid}:\n" for user, (uid, _) in USERS.items())
        shadow = "".join(f"{user}:*:20000:0:99999:7:::\n" for user in USERS)
        return {"passwd": passwd, "group": group, "shadow": shadow}

    # --- its processes, by their numbers on this machine

    def processes(self) -> list[int]:
        """Return every living process of the host but its process 1 and the listening sshd."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.pid:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/ns/pid") == self._namespace:
                        found.append(int(entry))
        return [pid for pid in found if read_start_time(pid) is not None]

    def find(self, kind: str) -> list[int]:
        """Return the host's living processes of a kind: shim, supervisor, rank, session or sshd."""
        return [pid for pid in self.processes() if kind_of(pid) == kind]

    def signal_kind(self, kind: str, number: signal.Signals) -> list[int]:
        pids = self.find(kind)
        local_power.signal_all(pids, number)
        return pids

    def kill_processes(self) -> None:
        """End everything on the host at once, as the loss of power does.

        Its sshd is down afterwards.
        """
        self.thaw()
        self.kill()
        while pids := self.processes():
            local_power.signal_all(pids, signal.SIGSTOP)
            local_power.signal_all({*pids, *self.processes()}, signal.SIGKILL)
            time.sleep(0.005)

    def freeze(self) -> None:
        """Stop everything on the host, as a paused virtual machine is.

        By the kernel where that is possible.
        """
        self._freezer = (
            Freezer(f"relaunch-{uuid.uuid4().hex[:12]}") if Freezer.is_available() else None
        )
        if self._freezer is not None:
            self._freezer.freeze(self._everything)
            return
        stopped: set[int] = set()
        while new := set(self._everything()) - stopped:
            local_power.signal_all(new, signal.SIGSTOP)
            stopped |= new

    _freezer: Freezer | None = None

    def _everything(self) -> list[int]:
        return [*self.processes(), *self.servers()]

    def thaw(self) -> None:
        if self._freezer is not None:
            self._freezer.thaw()
            self._freezer = None
        else:
            local_power.signal_all(self._everything(), signal.SIGCONT)

    # --- its files

    def path(self, inside: str) -> Path:
        """Return a path of the host as one of this machine."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def state_of(self, rank: int) -> Path:
        """Return the state folder of the agent that started a rank."""
        variables = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
        (found,) = (v for v in variables if v.startswith(b"RELAUNCH_NODE_STATE="))
        return self.path(os.fsdecode(found.partition(b"=")[2]))

    def states(self) -> list[Path]:
        """Return every state folder of an agent on the host."""
        found = []
        for target in PRIVATE:
            for jobs in self._private(target).glob("**/jobs"):
                if any(jobs.glob("*/highest.json")) or any(jobs.glob("*/lock")):
                    found.append(jobs.parent)
        return found

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program on the host."""
        return subprocess.run([*self.within, *words], capture_output=True, text=True, check=True)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.thaw()  # what writes to it cannot be killed before
        self.kill_processes()
        self.init.kill()  # its child, process 1 of the host, dies with it
        self.init.wait()
        if self.disk is not None:
            self.disk.close()


def kind_of(pid: int) -> str | None:
    """Return what a process of relaunch is: shim, supervisor, rank, session or sshd."""
    try:
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
        if comm in ("relaunch-shim", "relaunch-sup"):
            return "shim" if comm == "relaunch-shim" else "supervisor"
        if b"RELAUNCH_TOKEN=" in Path(f"/proc/{pid}/environ").read_bytes():
            return "rank"
        if comm.startswith("sshd"):
            return "sshd"
        return (
            "session"
            if b"session" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            else None
        )
    except OSError:
        return None


class Freezer:
    """A group of processes that the kernel stops all at once (cgroup v1 `freezer`)."""

    ROOT = Path("/sys/fs/cgroup/freezer")

    def __init__(self, name: str) -> None:
        self._group = self.ROOT / name
        self._group.mkdir()

    @classmethod
    def is_available(cls) -> bool:
        return os.access(cls.ROOT / "cgroup.procs", os.W_OK)

    def freeze(self, find: Callable[[], Iterable[int]]) -> None:
        inside: set[int] = set()
        while new := set(find()) - inside:
            for pid in new:
                _write_pid(self._group, pid)
            inside |= new
        self._set("FROZEN")

    def thaw(self) -> None:
        self._set("THAWED")
        deadline = time.monotonic() + 5
        while (self._group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            for pid in (self._group / "cgroup.procs").read_text().split():
                _write_pid(self.ROOT, int(pid))
        with contextlib.suppress(OSError):  # a process that is just ending holds it a moment longer
            self._group.rmdir()

    def _set(self, wanted: str) -> None:
        (self._group / "freezer.state").write_text(wanted)
        deadline = time.monotonic() + 10
        while (self._group / "freezer.state").read_text().strip() != wanted:
            assert time.monotonic() < deadline, f"{self._group} does not become {wanted}"
            time.sleep(0.005)


def _write_pid(group: Path, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


def _await_up(process: subprocess.Popen[bytes], name: str) -> None:
    assert process.stdout is not None
    with process.stdout as stdout:  # it says nothing more
        said = stdout.readline()
    assert said == b"up\n", f"{name} does not come up: {said!r}"


class SwitchedNetwork(Network):
    """Two controllers and hosts on one switch with losses and delays by direction and pair.

    In the terms of `Network`: its control and its training network are the ways between a host and
    the controllers, and those between a host and the others.
    """

    def __init__(
        self, folder: Path, names: Iterable[str], key: Path, seed: int = 0, has_disks: bool = False
    ) -> None:
        self.machines: list[Controller] = []
        self.hosts: dict[str, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        try:
            self.machines = [Controller(f"c{number}", number) for number in (1, 2)]
            for number, name in enumerate(names, FIRST_HOST):
                self.hosts[name] = Host(folder / "hosts" / name, name, number, key, has_disks)
            self.controllers = [one.name for one in self.machines]
            self.nodes = list(self.hosts)
            self._plug_all(seed)
        except BaseException:
            self.close()
            raise

    def _plug_all(self, seed: int) -> None:
        everything: list[Controller | Host] = [*self.machines, *self.hosts.values()]
        handles = {
            one.name: self._run_at(one.name, lambda: switch.open_tap("net0")) for one in everything
        }
        for one in everything:
            lines = [
                f"link set net0 address {_mac(one)} up",
                f"addr add {_address(one)}/24 dev net0",
            ]
            # Known in advance: a host that is cut off loses packets, and hears of no missing
            # neighbour.
            lines += [
                f"neigh replace {_address(o)} lladdr {_mac(o)} nud permanent dev net0"
                for o in everything
                if o != one
            ]
            words = ["nsenter", "-t", str(one.pid), "-n", "ip", "-batch", "-"]
            subprocess.run(words, input="\n".join(lines) + "\n", text=True, check=True)
        ours, theirs = socket.socketpair()
        ports = {one.name: [one.number, handles[one.name]] for one in everything}
        given = {"ports": ports, "control": theirs.fileno(), "seed": seed}
        self._switch = subprocess.Popen(
            [*DIES_WITH_PARENT, PYTHON, "-S", str(HERE / "switch.py"), json.dumps(given)],
            pass_fds=[*handles.values(), theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interruption is for us: we end it when all else has ended
        )
        theirs.close()
        for handle in handles.values():
            os.close(handle)
        self._control = ours

    def _pid(self, name: str) -> int:
        return next(one.pid for one in (*self.machines, *self.hosts.values()) if one.name == name)

    def _run_at(self, name: str, call: Callable[[], T]) -> T:
        return run_in_network(Path(f"/proc/{self._pid(name)}/ns/net"), call)

    def _there(self, call: Callable[[], T], controller: int = 1) -> T:
        return self._run_at(f"c{controller}", call)

    def at(self, name: str) -> tuple[str, ...]:  # type: ignore[override]
        return next(
            one.within for one in (*self.machines, *self.hosts.values()) if one.name == name
        )

    # --- rules

    def set_link(
        self, source: str, target: str, loss: float = 0.0, delay: float = 0.0, largest: int = 0
    ) -> None:
        """Set what becomes of frames from one to another ("*": all) from now on.

        Without more: they pass.
        """
        assert self._control is not None
        rule = {"from": source, "to": target, "loss": loss, "delay": delay, "largest": largest}
        self._control.sendall(json.dumps(rule).encode() + b"\n")
        assert self._control.recv(3) == b"ok\n"

    def set_links(self, one: str, other: str, **rule: float) -> None:
        """The same in both directions."""
        self.set_link(one, other, **rule)  # type: ignore[arg-type]
        self.set_link(other, one, **rule)  # type: ignore[arg-type]

    def isolate(self, name: str) -> None:
        self.set_links(name, "*", loss=1.0)

    def clear(self) -> None:
        """Every frame passes again."""
        self.set_link("*", "*")

    def lose(self, number: int, network: str = "control") -> None:
        for other in self._others(number, network):
            self.set_links(self.nodes[number - 1], other, loss=1.0)

    def heal(self, number: int, network: str = "control") -> None:
        for other in self._others(number, network):
            self.set_links(self.nodes[number - 1], other)

    def lose_answers(self, number: int) -> None:
        for other in self.controllers:
            self.set_link(self.nodes[number - 1], other, loss=1.0)

    def _others(self, number: int, network: str) -> list[str]:
        if network == "control":
            return self.controllers
        return [name for name in self.nodes if name != self.nodes[number - 1]]

    def answer_for(self, host: str, other: str) -> None:
        """Have the controllers reach `other` at the address of `host`."""
        mine, its = self.hosts[host], self.hosts[other]
        words = [
            "nsenter",
            "-t",
            str(its.pid),
            "-n",
            "ip",
            "addr",
            "add",
            f"{mine.address}/32",
            "dev",
            "net0",
        ]
        subprocess.run(words, check=host != other, capture_output=True)
        for controller in self.machines:
            words = [
                "nsenter",
                "-t",
                str(controller.pid),
                "-n",
                "ip",
                "neigh",
                "replace",
                mine.address,
                "lladdr",
                _mac(its),
            ]
            subprocess.run([*words, "nud", "permanent", "dev", "net0"], check=True)

    def answer_for_itself(self, host: str, other: str) -> None:
        """Undo `answer_for`."""
        mine, its = self.hosts[host], self.hosts[other]
        words = [
            "nsenter",
            "-t",
            str(its.pid),
            "-n",
            "ip",
            "addr",
            "del",
            f"{mine.address}/32",
            "dev",
            "net0",
        ]
        subprocess.run(words, check=True)
        self.answer_for(host, host)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._switch is not None:
            self._switch.wait()
        for host in self.hosts.values():
            host.close()
        for controller in self.machines:
            controller.close()


def _mac(one: Controller | Host) -> str:
    return ":".join(f"{byte:02x}" for byte in switch.mac(one.number))


def _address(one: Controller | Host) -> str:
    return f"{NETWORK}.{one.number}"


__all__ = [
    "PYTHON",
    "Controller",
    "Freezer",
    "Host",
    "SwitchedNetwork",
    "find_obstacle",
    "kind_of",
    "make_key",
]
