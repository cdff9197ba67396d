"""The node's state folder: layout, ownership, and writes that survive a crash.

Does not judge what the contents mean for an order.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterable, Iterator, NamedTuple, NoReturn, Optional

from relaunch.agent import disk, folders, processes
from relaunch.agent.locks import LockWait, open_lock, take, try_lock
from relaunch.agent.protocol import Json, Order, Refusal, Token, job_path
from relaunch.agent.ranks import find_shims

MACHINE_DIGITS = 16
"""Hex digits of a hash of the machine id; systemd asks not to expose the id itself."""
MAX_GENERATIONS = 10
"""Enough to look back over a night with many failures; each is a few files and the logs."""


def _refuse(reason: str) -> NoReturn:
    raise Refusal("cannot_start", reason)


def _read_machine_id() -> str:
    for source in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(source).read_text().strip()
        except OSError:
            continue
        if text:
            return text
    return socket.gethostname()


def open_state() -> Path:
    """Return this node's state folder; create it if necessary."""
    configured = os.environ.get("RELAUNCH_AGENT_STATE")
    try:
        if configured:
            return folders.open_configured_folder(configured).resolve()
        return folders.choose_folder(_read_machine_id(), find_shims.find_used_place).resolve()
    except folders.FolderError as error:
        _refuse(str(error))


def read_boot_id(state: Path) -> str:
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        own = (state / "boot_id").read_text().strip()
    except FileNotFoundError:
        own = ""
    return f"{kernel}+{own}" if own else kernel


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Replace a file as a whole.

    With `durable` the new content also survives a power loss, at the cost of an fsync. On a full
    disk the file's spare is used, if there is one.
    """
    data = json.dumps(value).encode()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_whole(partial, data, durable)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if not disk.is_full(error) or not disk.write_into_spare(path, data, durable):
            raise
    else:
        os.replace(partial, path)
    if durable:
        sync_folder(path.parent)


def _write_whole(path: Path, data: bytes, durable: bool) -> None:
    # The sticky bit makes systemd-tmpfiles leave the file alone, however old it is.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o1600)
    try:
        while data:  # a nearly full disk accepts a part, and refuses the rest
            data = data[os.write(handle, data) :]
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Json | None:
    """Return the object, or None if the file is missing or broken (never written completely)."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Generation:
    """The folder of one generation on this node."""

    def __init__(self, state: Path, job_folder: Path, order: Order) -> None:
        self.state = state
        self.order = order
        self.path = job_folder / f"{order[0]}-{order[1]}"
        self.journal = self.path / "journal.jsonl"

    def make_folders(self) -> None:
        for folder in (
            self.path,
            self.path / "logs",
            self.path / "errors",
            self.path / "progress",
            self.path / "launched",
            self.path / "running",
            self.flight_folder,
        ):
            folder.mkdir(mode=0o700, exist_ok=True)

    def log_path(self, rank: int, stream: str = "stdout") -> Path:
        """Return the log of a rank: of both streams, or where they are apart, of that one."""
        name = f"rank_{rank}.log" if stream == "stdout" else f"rank_{rank}.{stream}.log"
        return self.path / "logs" / name

    @property
    def log_times(self) -> Path:
        return self.path / "log_times"

    def error_path(self, rank: int) -> Path:
        return self.path / "errors" / f"rank_{rank}.json"

    def progress_path(self, rank: int) -> Path:
        return self.path / "progress" / f"rank_{rank}"

    @property
    def flight_folder(self) -> Path:
        """Where torch dumps the flight records of ranks, and where they are asked for them."""
        return self.path / "flight"

    def stacks_path(self, rank: int, pid: int) -> Path:
        """Return where a process of a rank writes its stacks (relaunch.callbacks.allow_stacks)."""
        return self.path / "progress" / f"rank_{rank}.stacks.{pid}"

    def rank_record_path(self, rank: int) -> Path:
        return self.path / "launched" / f"rank_{rank}.json"

    def task_record_path(self, rank: int) -> Path:
        """Return where a rank is recorded from before its command starts until it has ended."""
        return self.path / "running" / f"rank_{rank}.json"

    def remove_task_records(self, ranks: Iterable[int] | None = None) -> None:
        """Remove the records of ranks that have ended; None: of all. A failure is only logged."""
        try:
            folder = self.path / "running"
            for path in (
                map(self.task_record_path, ranks) if ranks is not None else folder.glob("rank_*")
            ):
                path.unlink(missing_ok=True)
        except OSError as error:  # the boot and the start time in a record say that it is old
            disk.log(f"the records of ended ranks cannot be removed: {error}")

    @property
    def launched_ranks(self) -> dict[int, tuple[int, int]]:
        """pid and start time of every rank that a launcher has started here, from its record."""
        ranks = {}
        folder = self.path / "launched"
        for path in sorted(folder.glob("rank_*.json")) if folder.is_dir() else ():
            record = read_json(path)
            if record is not None:
                ranks[int(path.stem[5:])] = (record["pid"], record["started"])
        return dict(sorted(ranks.items()))

    @property
    def prepared_order(self) -> Json | None:
        """The order that `prepare` received and what it answered."""
        return read_json(self.path / "order.json")

    @property
    def launch(self) -> Json | None:
        """The launch: None before it, `pids` null while in progress, `refused` if it failed."""
        return read_json(self.path / "started.json")

    @property
    def pids(self) -> dict[int, tuple[int, int]]:
        """pid and start time of every rank that was started."""
        pids = (self.launch or {}).get("pids") or {}
        return {int(rank): (pid, started) for rank, (pid, started) in pids.items()}

    @property
    def groups(self) -> dict[int, int]:
        """Start time of the ranks by pid; empty after a reboot, when pids mean nothing."""
        launch = self.launch or {}
        if not launch.get("pids") or launch.get("boot_id") != read_boot_id(self.state):
            return {}
        return dict(launch["pids"].values())

    @property
    def cgroup(self) -> str | None:
        """The control group of the ranks, if there is one; None after a reboot."""
        started = self.launch or {}
        folder = started.get("cgroup")
        return (
            str(folder) if folder and started.get("boot_id") == read_boot_id(self.state) else None
        )

    def identity(self, of: str) -> tuple[int, int] | None:
        """Return pid and start time of the `shim` or the `supervisor`, if from this boot."""
        record = read_json(self.path / f"{of}.json")
        if record is None or record["boot_id"] != read_boot_id(self.state):
            return None
        return record["pid"], record["started"]

    def write_identity(self, of: str, pid: int, started: int) -> None:
        record = {"pid": pid, "started": started, "boot_id": read_boot_id(self.state)}
        write_json(self.path / f"{of}.json", record, durable=False)

    def has_live_shim(self) -> bool:
        """Return whether the lock that the shim holds from its start is taken.

        It is taken even before shim.json is written. If the lock file was removed, look for the
        shim that holds it open.
        """
        try:
            handle = open_lock(self.path / "shim.lock", os.O_RDWR)
        except FileNotFoundError:
            return self.find_shim() is not None
        lock = take(handle)
        if lock is None:
            return True
        os.close(lock)
        return False

    def find_shim(self) -> processes.Process | None:
        """Return the living shim of this generation, even if its files were removed."""
        return find_shims.find_shims(self.state, self.path.parent.name).get(self.order)

    def make_spares(self, ranks: int) -> None:
        """Reserve space for what is written while ranks live, in case the disk fills up."""
        size = disk.SPARE_BYTES + 64 * ranks
        disk.make_spare(self.path / "started.json", size)
        disk.make_spare(self.path / "supervisor.json")

    def is_recorded(self) -> bool:
        """Return whether the files that every preparation creates are there."""
        return all((self.path / name).exists() for name in ("order.json", "shim.lock"))

    @contextmanager
    def open_address(self, name: str) -> Iterator[str]:
        """Yield a short path of a socket, however long the state folder's path is.

        A unix address holds 108 bytes.
        """
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{handle}/{name}"
        finally:
            os.close(handle)

    def listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self.open_address(name) as address:
            try:
                os.unlink(self.path / name)
            except FileNotFoundError:
                pass
            listener.bind(address)
        os.chmod(self.path / name, 0o1600)  # systemd-tmpfiles then leaves it alone
        listener.listen(64)
        listener.setblocking(False)
        return listener

    def connect(self, name: str, timeout: float) -> socket.socket | None:
        """Connect to a socket of this generation, or return None if no process accepts there."""
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.settimeout(timeout)
        try:
            with self.open_address(name) as address:
                caller.connect(address)
        except OSError:  # the socket is gone, refuses, or its queue is full: no process accepts
            caller.close()
            return None
        return caller


class HighestTokens(NamedTuple):
    """The highest tokens of a job that this node has prepared and has permanently stopped."""

    prepared: Optional[Order]
    stopped: Optional[Order]
    boot_id: Optional[str] = None
    """Boot of the last preparation. After a reboot no other record says whether it was launched."""
    id: str = ""
    """Random id, made with highest.json: a state folder that never had this file, or has lost it,
    is a different place."""


class JobState:
    """What this node knows about one job."""

    def __init__(self, state: Path, namespace: str, job: str, server: str = "") -> None:
        self.state = state
        self.server = server
        self.namespace = namespace
        self.job = job
        self.token_prefix = job_path(server, namespace, job)
        self.path = state / "jobs" / hashlib.sha256(self.token_prefix.encode()).hexdigest()[:16]

    @classmethod
    def from_token(cls, state: Path, token: Token) -> JobState:
        return cls(state, token.namespace, token.job, token.server)

    @classmethod
    def from_row(cls, state: Path, row: Json) -> JobState:
        """Return the job that a highest.json, or a row of `list` or `probe`, names."""
        return cls(state, row["namespace"], row["job"], row.get("server", ""))

    @property
    def names(self) -> Json:
        """The fields that name this job in files and answers."""
        return {
            "namespace": self.namespace,
            "job": self.job,
            **({"server": self.server} if self.server else {}),
        }

    @property
    def place(self) -> Json:
        """The place where this job's orders are carried out: machine, boot, uid and state folder.

        Only the place that started ranks can prove anything about them.
        """
        machine = hashlib.sha256(f"relaunch/{_read_machine_id()}".encode()).hexdigest()[
            :MACHINE_DIGITS
        ]
        return {
            "machine": machine,
            "boot_id": read_boot_id(self.state),
            "uid": os.geteuid(),
            "state": self.read_highest().id,
        }

    def generation(self, order: Order) -> Generation:
        return Generation(self.state, self.path, order)

    def list_generations(self) -> list[Generation]:
        """Return every generation that has a folder here, oldest first."""
        orders = []
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            submission, dash, number = entry.name.partition("-")
            if dash and submission.isdigit() and number.isdigit():
                orders.append((int(submission), int(number)))
        return [self.generation(order) for order in sorted(orders)]

    def read_highest(self) -> HighestTokens:
        record = read_json(self.path / "highest.json") or {}
        prepared, stopped = (
            tuple(record[name]) if record.get(name) else None for name in ("prepared", "stopped")
        )
        return HighestTokens(prepared, stopped, record.get("boot_id"), record.get("id", ""))

    def reserve(self, prepared: Order | None = None, stopped: Order | None = None) -> None:
        """Record the token of an order before the order is carried out."""
        highest = self.read_highest()
        tokens = {
            "prepared": max(filter(None, (highest.prepared, prepared)), default=None),
            "stopped": max(filter(None, (highest.stopped, stopped)), default=None),
        }
        boot = read_boot_id(self.state) if prepared is not None else highest.boot_id
        record = {**tokens, "boot_id": boot, "id": highest.id or secrets.token_hex(8), **self.names}
        path = self.path / "highest.json"
        # Rewriting identical content would need space that a full disk does not have.
        if read_json(path) != json.loads(json.dumps(record)):
            write_json(path, record)

    def is_recorded(self) -> bool:
        """Return whether the records are complete: none was removed since the last preparation."""
        if not (self.path / "highest.json").exists():
            return False
        prepared = self.read_highest().prepared
        return prepared is None or self.generation(prepared).is_recorded()

    def make_spare(self) -> None:
        """Reserve space for the next order to stop, for a disk that is full by then."""
        disk.make_spare(self.path / "highest.json")

    @contextmanager
    def hold_lock(self, timeout: float) -> Iterator[None]:
        """Hold the job's lock.

        Raises:
            HeldLock: It is not free within `timeout` seconds.
        """
        waiting = LockWait(self.path / "lock", timeout)
        while True:
            (self.state / "jobs").mkdir(mode=0o700, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock = try_lock(self.path / "lock")
            if lock is not None and self._is_in_place(lock):
                break
            if lock is not None:
                os.close(lock)
            waiting.pause()
        try:
            yield
        finally:
            os.close(lock)

    def _is_in_place(self, lock: int) -> bool:
        """Return whether the lock file is still in place: it may have been removed meanwhile."""
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.path / "lock"))
        except FileNotFoundError:
            return False
