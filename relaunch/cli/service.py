"""Runs Temporal's server, its web UI and a worker on this machine.

They are started together, restarted when they die, and stopped together. Ranks are not children of
these processes: they keep running whatever happens here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from relaunch.cli.database import DATABASE, check_database, note_writer
from relaunch.config import KEYRING_VARIABLE, ConfigError
from relaunch.messages.jobs import CancelMessage
from relaunch.temporal import (
    UP_FILE,
    connect,
    ensure_namespace,
    make_embedded_environment,
    write_up,
)

RELAUNCH = (sys.executable, "-P", str(Path(__file__).resolve().parents[1] / "__main__.py"))
"""The command line of this very package. -P keeps the folder of that file off the module path."""
HOST = "127.0.0.1"
LOCAL_NODES = 16
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 10.0
STEADY_AFTER = 30.0
"""Seconds of uptime after which an exit is a new failure, and the backoff starts over."""
READY_TIMEOUT = 30.0
"""Seconds. A new database takes 0.5 s, a large one on a busy machine takes longer."""
STOP_TIMEOUT = 15.0
"""Seconds from SIGTERM to SIGKILL; longer than a worker's graceful shutdown."""
ATTENDANT_ENDED = "`relaunch run` has ended"
TIDY_INTERVAL = 3600.0
"""Seconds between two looks for environment files of jobs that the server has forgotten."""
PR_SET_PDEATHSIG = 1
SERVER_OPTIONS = (
    # WAL (write-ahead log): three times the throughput. FULL: a power cut loses nothing that was
    # acknowledged.
    ("--sqlite-pragma", "journal_mode=WAL"),
    ("--sqlite-pragma", "synchronous=FULL"),
    # The single shard of this server polls its queues 20 times a second by default: 50 ms for every
    # hop.
    ("--dynamic-config-value", "history.transferProcessorMaxPollRPS=1000"),
    ("--dynamic-config-value", "history.timerProcessorMaxPollRPS=1000"),
    # A cancelled activity is notified at once, not with its next heartbeat.
    ("--dynamic-config-value", "system.enableCancelActivityWorkerCommand=true"),
    ("--dynamic-config-value", "frontend.WorkerCommandsEnabled=true"),
    # In a checkout each edit is another build; the default is 100, and nothing is forgotten then.
    ("--dynamic-config-value", "matching.maxVersionsInDeployment=1000"),
)
EMBEDDED_OPTIONS = (
    # Four parts of the server read the namespaces again every 2 s by default, a sixth of what an
    # idle server does. A change, which only `up` makes, is seen this much later.
    ("--dynamic-config-value", 'system.namespaceCacheRefreshInterval="30s"'),
)
"""Further options of the server of `up`, which a shared one does not have."""
ONE_PARTITION = (
    ("--dynamic-config-value", "matching.numTaskqueueReadPartitions=1"),
    ("--dynamic-config-value", "matching.numTaskqueueWritePartitions=1"),
)
"""One part for each task queue instead of four, which poll one another. Only for databases that
have begun so: a task that waits in another part would never be found."""
PARTITIONS_FILE = "one-partition"
"""The file in the state folder that says so of the database beside it."""
SINGLE_JOB_RUNTIME = {"GOMAXPROCS": "1", "GOGC": "50"}
SHARED_RUNTIME = {"GOMAXPROCS": str(min(4, os.cpu_count() or 1)), "GOGC": "50"}
"""Variables of the server's Go runtime, unless they are set: each further core that it may use
costs it wake-ups even when idle, and garbage may be half of what is in use instead of as much."""


@dataclass(frozen=True)
class Service:
    state: Path
    port: int
    ui_port: int
    fleets: tuple[Path, ...]
    backends: Mapping[str, str]
    """The backend of each of `fleets`, by the fleet's name."""
    workers: int = 1
    metrics: str | None = None
    """host:port of the first worker's metrics; each further worker has the next port."""
    temporal: Path | None = None
    """The server's program; None: see `find_server`."""
    host: str = HOST
    """The address on which server and web UI listen."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def ui(self) -> str:
        return f"http://{self.host}:{self.ui_port}"


def find_server(chosen: Path | None = None) -> Path:
    """Return the `temporal` binary: the chosen one, that of this Python's environment, or PATH's.

    Raises:
        ConfigError: There is none.
    """
    if chosen is not None:
        if not (chosen.is_file() and os.access(chosen, os.X_OK)):
            raise ConfigError(
                f"RELAUNCH_TEMPORAL_BIN is {chosen}, expected the path of Temporal's program"
            )
        return chosen
    beside = Path(sys.executable).with_name("temporal")
    found = str(beside) if beside.exists() else shutil.which("temporal")
    if found is None:
        raise ConfigError(
            "the temporal binary is neither in .venv/bin nor on PATH: run `make setup`"
        )
    return Path(found)


def prepare_state(state: Path) -> IO[str]:
    """Create the state folder and lock it for as long as the returned file is open.

    Raises:
        ConfigError: The folder cannot be written, or another `up` runs on it.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state / "up.lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"state folder {state} cannot be written: {error.strerror}; choose another with "
            "--state or RELAUNCH_STATE"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"another `relaunch up` runs on state folder {state}: choose another with --state"
        ) from None
    return lock


def check_host(address: str) -> str:
    """Return an address on which server and web UI may listen: one of this machine's loopback.

    Temporal's development server has neither TLS nor users, and starts what it is asked to.

    Raises:
        ConfigError: It is another address.
    """
    try:
        is_loopback = ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"--ip is {address!r}: expected an address in 127.0.0.0/8, because the server of `up` "
            "has neither TLS nor users; docs/operations.md has a proxy with TLS to put before it"
        )
    return address


def choose_port(option: str, port: int, host: str = HOST) -> int:
    """Return a port that is free now; 0 requests any free port."""
    with socket.socket() as probe:
        # Bind as the server will: the remains of closed connections do not matter, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used: {error.strerror}; choose another with {option}"
            ) from None
        except OverflowError:
            raise ConfigError(f"{port} is not a port: expected 0 to 65535 for {option}") from None
        return int(probe.getsockname()[1])


def write_local_fleet(state: Path, nodes: int) -> Path:
    """Write the file of fleet `default`, with nodes on this machine; return its path."""
    folder = state / "fleets"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "default.yaml"
    lines = [
        f"  - {{name: local-{n}, address: 127.77.{(n - 1) // 250}.{(n - 1) % 250 + 1}}}"
        for n in range(1, nodes + 1)
    ]
    acts = "repairs: act  # a reboot of such a node ends its processes, and nothing else"
    head = (
        "# Written by relaunch: nodes on this machine.",
        "name: default",
        "backend: local",
        acts,
        "nodes:",
    )
    path.write_text("\n".join((*head, *lines)) + "\n")
    return path


async def serve(
    service: Service,
    say: Callable[[str], None],
    *,
    attended: bool = False,
    attended_job: str | None = None,
) -> None:
    """Run until SIGINT, SIGTERM or SIGHUP.

    With `attended`, also until stdin ends: the process that uses this server holds it. With
    `attended_job`, this is the server of that job only. When stdin ends, by whatever end of that
    process, or a signal arrives, the job is cancelled, and everything stops once its ranks have:
    otherwise nothing would watch them. A second signal stops everything at once.

    Raises:
        ConfigError: The server or the worker cannot be started.
    """
    stop = asyncio.Event()
    stop_now = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _set_next, stop, stop_now)
    attended = attended or attended_job is not None
    if attended:
        loop.add_reader(sys.stdin.fileno(), lambda: _read_stdin(stop))
    environment = _make_environment(service)
    is_single = attended_job is not None
    program = find_server(service.temporal)
    await asyncio.to_thread(check_database, service.state, program)
    server = Keeper(
        "server",
        _make_server_command(service, program),
        {**(SINGLE_JOB_RUNTIME if is_single else SHARED_RUNTIME), **_without_keys(environment)},
        service.state / "server.log",
        say,
        # The program may have been replaced since its last start.
        check=partial(check_database, service.state, program),
    )
    # The server of one job meets no other build, and to make one current takes it a second.
    command = [*RELAUNCH, "worker", "--near", *(["--no-build"] if is_single else [])]
    workers = [
        Keeper(name, command, {**environment, **variables}, service.state / f"{name}.log", say)
        for name, variables in _name_workers(service)
    ]
    warm = Keeper(
        "warm command line",
        [*RELAUNCH, "warm", str(service.state.resolve())],
        _without_keys(environment),
        service.state / "warm.log",
        say,
    )
    background: list[asyncio.Task[None]] = []
    stopping = asyncio.create_task(stop.wait())
    keepers = [asyncio.create_task(server.keep())]
    try:
        ready = asyncio.create_task(_wait_for_server(service, server))
        await asyncio.wait({ready, stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await _raise_first_error(ready, *keepers)
            background.append(asyncio.create_task(_note_writer(service.state, program)))
            backends = service.backends if workers else {}
            write_up(service.state, service.address, service.ui, backends)
            say(f"server {service.address}, web UI {service.ui}, state {service.state}")
            if workers:
                keepers += [asyncio.create_task(worker.keep()) for worker in workers]
                say(_announce_workers(service))
            if not attended:  # the server of a single job gets no other commands
                warming = asyncio.create_task(warm.keep())
                warming.add_done_callback(lambda task: _report_warm_failure(task, say))
                background += [warming, asyncio.create_task(_tidy(service))]
            await asyncio.wait({stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            if attended_job is not None and stop.is_set():
                ending = asyncio.create_task(_end_job(service, attended_job, say))
                stopping = asyncio.create_task(stop_now.wait())
                await asyncio.wait(
                    {ending, stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED
                )
                ending.cancel()
        for keeper in keepers:
            if keeper.done():
                keeper.result()
    finally:
        (service.state / UP_FILE).unlink(missing_ok=True)
        for task in (*keepers, ready, *background):
            task.cancel()
        await warm.end()
        # First, so that they can hand back their activities.
        await asyncio.gather(*(worker.end() for worker in workers))
        await server.end()


def _make_environment(service: Service) -> dict[str, str]:
    return {
        **make_embedded_environment(service.address),
        "RELAUNCH_STATE": str(service.state.resolve()),
        "RELAUNCH_FLEETS": os.pathsep.join(str(path.resolve()) for path in service.fleets),
    }


def _without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for processes that decrypt nothing."""
    return {name: value for name, value in environment.items() if name != KEYRING_VARIABLE}


def _name_workers(service: Service) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of each worker, with the variables that no other worker has."""
    for number in range(1, service.workers + 1):
        variables = {}
        if service.ui_port and not os.environ.get("RELAUNCH_WEB_UI"):
            variables["RELAUNCH_WEB_UI"] = service.ui
        if service.metrics is not None:
            host, _, port = service.metrics.rpartition(":")
            variables["RELAUNCH_METRICS"] = f"{host}:{int(port) + number - 1}"
        yield "worker" if number == 1 else f"worker-{number}", variables


def _announce_workers(service: Service) -> str:
    logs = [service.state / f"{name}.log" for name, _ in _name_workers(service)]
    if len(logs) == 1:
        return f"worker started, its log is {logs[0]}; ctrl-C stops both, ranks keep running"
    return (
        f"{len(logs)} workers started, their logs are {logs[0]} to {logs[-1]}; ctrl-C stops them "
        "and the server, ranks keep running"
    )


def _make_server_command(service: Service, program: Path) -> list[str]:
    ports = ["--ip", service.host, "--port", str(service.port), "--ui-port", str(service.ui_port)]
    database = ["--db-filename", str(service.state / DATABASE)]
    partitions = ONE_PARTITION if has_one_partition(service.state) else ()
    options = [word for pair in (*SERVER_OPTIONS, *EMBEDDED_OPTIONS, *partitions) for word in pair]
    return [
        str(program),
        "server",
        "start-dev",
        *ports,
        *database,
        "--log-level",
        "error",
        *options,
    ]


def has_one_partition(state: Path) -> bool:
    """Return whether each task queue of the database has one part. A new database gets one."""
    mark = state / PARTITIONS_FILE
    if not (state / DATABASE).exists():
        mark.touch()
    return mark.exists()


class Keeper:
    """The supervisor of one child process."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        log: Path,
        say: Callable[[str], None],
        check: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._command, self._environment, self._log, self._say = (
            name,
            command,
            environment,
            log,
            say,
        )
        self._check = check
        """Called before each start; raises ConfigError where there must be none."""
        self._process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        """Start the child, and restart it with backoff whenever it ends.

        Raises:
            ConfigError: The child exits with code 2: its settings cannot be used; or the check
                before a start fails.
        """
        backoff = FIRST_BACKOFF
        while True:
            if self._check is not None:
                await asyncio.to_thread(self._check)
            begun = time.monotonic()
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C reaches only this process, which stops the child itself.
                    start_new_session=True,
                    preexec_fn=die_with_parent(os.getpid()),
                )
            code = await self._process.wait()
            if code == 2:
                raise ConfigError(f"the {self._name} cannot start: {self.last_words()}")
            backoff = (
                FIRST_BACKOFF
                if time.monotonic() - begun > STEADY_AFTER
                else min(2 * backoff, LONGEST_BACKOFF)
            )
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._say(
                f"the {self._name} ended ({how}: {self.last_words()}); restarting it in "
                f"{backoff:g} s"
            )
            await asyncio.sleep(backoff)

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [
                line
                for line in self._log.read_bytes()[-4096:].decode(errors="replace").splitlines()
                if line.strip()
            ]
            if lines:
                return lines[-1].strip()
        return "it printed nothing"

    async def end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()


def _report_warm_failure(warming: asyncio.Task[None], say: Callable[[str], None]) -> None:
    """Report why the warm process has ended; without it, commands only start more slowly."""
    if not warming.cancelled() and (error := warming.exception()) is not None:
        say(f"{error}; commands still work, but start more slowly")


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return what a child has to call so that the kernel kills it when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)

    def set_death_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return set_death_signal


async def _wait_for_server(service: Service, server: Keeper) -> None:
    # Not above: it imports the SDK, which other users of this module do without.
    from relaunch.encryption import UnreadablePayloadError

    deadline = time.monotonic() + READY_TIMEOUT
    while True:
        try:
            client = await connect(service.state, service.address)
            await ensure_namespace(client)
            return
        except UnreadablePayloadError:
            raise
        except ConfigError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the server did not start within {READY_TIMEOUT:g} s: {server.last_words()}"
                ) from None
        await asyncio.sleep(0.05)


async def _note_writer(state: Path, program: Path) -> None:
    with contextlib.suppress(ConfigError):  # the next start then compares the tables
        await asyncio.to_thread(note_writer, state, program)


async def _raise_first_error(*tasks: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _end_job(service: Service, name: str, say: Callable[[str], None]) -> None:
    """Cancel a job, unless it has ended, and wait until its ranks have stopped."""
    from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
    from temporalio.service import RPCError, RPCStatusCode

    from relaunch.cli import jobs
    from relaunch.cli.client import whoami

    while True:
        try:
            handle = jobs.handle_of(await connect(service.state, service.address), name)
            if (await handle.describe()).status != WorkflowExecutionStatus.RUNNING:
                return
            say(f"the command that ran job {name} has ended: cancelling the job")
            # Unsigned: there is no person here to type a passphrase.
            message = CancelMessage(reason=ATTENDANT_ENDED, by=whoami())
            await handle.signal("cancel", message.model_dump(exclude={"proof"}))
            await handle.result()
        except WorkflowFailureError:
            return
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:  # never submitted, or just ended
                return
            await asyncio.sleep(FIRST_BACKOFF)
        except ConfigError:  # the server is being restarted
            await asyncio.sleep(FIRST_BACKOFF)


def _set_next(*events: asyncio.Event) -> None:
    """Set the first event that is not set."""
    for event in events:
        if not event.is_set():
            event.set()
            return


async def _tidy(service: Service) -> None:
    from temporalio.service import RPCError

    from relaunch.cli.environment import remove_unknown

    client = await connect(service.state, service.address)
    while True:
        with contextlib.suppress(RPCError):  # the server is being restarted
            await remove_unknown(service.state, client)
        await asyncio.sleep(TIDY_INTERVAL)


def _read_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()
