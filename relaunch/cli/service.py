"""Runs Temporal's server, its web UI and a worker on this machine.

They are started together, restarted when they die, and stopped together. Ranks are not children of
these processes: they keep running whatever happens here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import random
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
from relaunch.cli.forks import Fork, die_with_parent, fork
from relaunch.config import KEYRING_VARIABLE, ConfigError
from relaunch.temporal import (
    SEARCH_ATTRIBUTES,
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
MAX_FAILURES = 5
"""How often in a row a part of the service of one job may end, within some 15 s."""
STEADY_AFTER = 30.0
"""Seconds of uptime after which an exit is a new failure, and the backoff starts over."""
READY_TIMEOUT = 30.0
"""Seconds. A new database takes 0.5 s, a large one on a busy machine takes longer."""
PORT_INTERVAL = 0.01
"""Seconds between two looks whether the server listens."""
MAX_PORT_TRIES = 100
NOTE_DELAY = 5.0
"""Seconds until the server of one job is asked for its version, while its ranks are started."""
STOP_TIMEOUT = 15.0
"""Seconds from SIGTERM to SIGKILL; longer than a worker's graceful shutdown."""
ATTENDANT_ENDED = "`relaunch run` has ended"
MAX_LOG_BYTES = 16 * 1024 * 1024
"""Bytes of the log of the server or of a worker before it begins again."""
LOG_INTERVAL = 60.0
"""Seconds between two looks at its size."""
LAST_WORDS_BYTES = 4096
TIDY_INTERVAL = 3600.0
"""Seconds between two looks for environment files of jobs that the server has forgotten."""
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
    """Return a port that is free now; 0 requests any free port.

    Not one that the kernel gives to connections: until the server listens on it, it would be given
    to the next that any process of this machine makes.
    """
    if port == 0:
        first, last = _read_kernel_ports()
        others = [number for number in range(10_000, 60_000) if not first <= number <= last]
        for number in random.SystemRandom().sample(others, min(MAX_PORT_TRIES, len(others))):
            with contextlib.suppress(ConfigError):
                return choose_port(option, number, host)
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


def _read_kernel_ports() -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to connections."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32_768, 60_999


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
    first_worker: Fork | None = None,
) -> None:
    """Run until SIGINT, SIGTERM or SIGHUP.

    With `attended`, also until stdin ends: the process that uses this server holds it. With
    `attended_job`, this is the server of that job only. When stdin ends, by whatever end of that
    process, or a signal arrives, the job is cancelled, and everything stops once its ranks have:
    otherwise nothing would watch them. A second signal stops everything at once.

    `first_worker` is one that has been started for this server, and waits until it listens.

    Raises:
        ConfigError: The server or the worker cannot be started.
    """
    stop = asyncio.Event()
    stop_now = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in list_stopping_signals():
        loop.add_signal_handler(number, _set_next, stop, stop_now)
    attended = attended or attended_job is not None
    if attended:
        loop.add_reader(sys.stdin.fileno(), lambda: _read_stdin(stop))
    is_single = attended_job is not None
    program = find_server(service.temporal)
    await asyncio.to_thread(check_database, service.state, program)
    server, workers, warm = _make_keepers(service, program, say, is_single, first_worker)
    background: list[asyncio.Task[None]] = []
    stopping = asyncio.create_task(stop.wait())
    keepers = [asyncio.create_task(server.keep())]
    # The worker of one job imports while the server starts: no other process writes to it.
    begun = workers if is_single else []
    keepers += [asyncio.create_task(worker.keep()) for worker in begun]
    try:
        waiting = (_wait_for_port if is_single else _wait_for_server)(service, server)
        ready = asyncio.create_task(waiting)
        await asyncio.wait({ready, stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await _raise_first_error(ready, *keepers)
            background.append(
                asyncio.create_task(
                    _note_writer(service.state, program, NOTE_DELAY if is_single else 0.0)
                )
            )
            backends = service.backends if workers else {}
            write_up(service.state, service.address, service.ui, backends)
            say(f"server {service.address}, web UI {service.ui}, state {service.state}")
            if workers:
                if not begun:
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


def list_stopping_signals() -> list[signal.Signals]:
    """Return the signals that stop a service: a closed terminal does not, under `nohup`."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    return (
        numbers if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*numbers, signal.SIGHUP]
    )


def _make_keepers(
    service: Service,
    program: Path,
    say: Callable[[str], None],
    is_single: bool,
    first_worker: Fork | None,
) -> tuple[Keeper, list[Keeper], Keeper]:
    """Return the keepers of the server, of the workers, and of the warm command line."""
    environment = _make_environment(service)
    limit = MAX_FAILURES if is_single else None  # a person reads what `up` says
    server = Keeper(
        "server",
        _make_server_command(service, program),
        {**(SINGLE_JOB_RUNTIME if is_single else SHARED_RUNTIME), **_without_keys(environment)},
        service.state / "server.log",
        say,
        # The program may have been replaced since its last start.
        check=partial(check_database, service.state, program),
        max_failures=limit,
    )
    # The server of one job meets no other build, and to make one current takes it a second.
    command = [*RELAUNCH, "worker", "--near", *(["--no-build"] if is_single else [])]
    workers = [
        Keeper(
            name,
            command,
            {**environment, **variables},
            service.state / f"{name}.log",
            say,
            max_failures=limit,
        )
        for name, variables in _name_workers(service)
    ]
    if first_worker is not None:
        workers[0].adopt(first_worker)
    warm = Keeper(
        "warm command line",
        [*RELAUNCH, "warm", str(service.state.resolve())],
        _without_keys(environment),
        service.state / "warm.log",
        say,
    )
    return server, workers, warm


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
    pairs = (*SERVER_OPTIONS, *EMBEDDED_OPTIONS, *partitions)
    options = [word for pair in pairs for word in pair]
    # For a new database. Those of an existing one are added by `ensure_namespace`.
    for name, kind in SEARCH_ATTRIBUTES.items():
        options += ["--search-attribute", f"{name}={kind}"]
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
        max_failures: int | None = None,
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
        self._max_failures = max_failures
        """How often in a row the child may end soon; None: there is no limit."""
        self._process: asyncio.subprocess.Process | Fork | None = None

    def adopt(self, child: Fork) -> None:
        """Keep a child that has been started already."""
        self._process = child

    async def keep(self) -> None:
        """Start the child, and restart it with backoff whenever it ends.

        Raises:
            ConfigError: The child exits with code 2 and has never run steadily: its settings cannot
                be used; or the check before a start fails, or the child ends too often.
        """
        backoff, failures, was_steady = FIRST_BACKOFF, 0, False
        while True:
            if self._check is not None:
                await asyncio.to_thread(self._check)
            begun = time.monotonic()
            code = await self._run()
            is_new = time.monotonic() - begun > STEADY_AFTER
            was_steady = was_steady or is_new
            # Later, the settings may be those of a file that is being edited for the next start:
            # the other children are not to end for that.
            if code == 2 and not was_steady:
                raise ConfigError(f"the {self._name} cannot start: {self.last_words()}")
            failures = 1 if is_new else failures + 1
            backoff = FIRST_BACKOFF if is_new else min(2 * backoff, LONGEST_BACKOFF)
            if isinstance(code, OSError):
                how, cause = "could not be started", code.strerror
            else:
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                how, cause = "ended", f"{end}: {self.last_words()}"
            if failures == self._max_failures:
                raise ConfigError(
                    f"the {self._name} {how} {failures} times in a row, the last time with {cause}"
                )
            with contextlib.suppress(OSError):  # the disk is full, or its reader gone
                self._say(f"the {self._name} {how} ({cause}); restarting it in {backoff:g} s")
            await asyncio.sleep(backoff)

    async def _run(self) -> int | OSError:
        """Start the child, unless it runs, and wait for its end; return its exit code, or why it
        cannot be started now: no process or memory is left, or the disk is full."""
        if self._process is None or self._process.returncode is not None:
            try:
                self._process = await self._start()
            except OSError as error:
                return error
        return await self._attend(self._process)

    async def _start(self) -> asyncio.subprocess.Process:
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches only this process, which stops the child itself.
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )

    async def _attend(self, process: asyncio.subprocess.Process | Fork) -> int:
        """Return the exit code of the child; keep its log bounded until then."""
        ending = asyncio.create_task(_wait_for_end(process))
        try:
            while not ending.done():
                self._bound_log()
                await asyncio.wait({ending}, timeout=LOG_INTERVAL)
            return await ending
        finally:
            ending.cancel()

    def _bound_log(self) -> None:
        """Begin the log again where it is too long; what it has is kept beside it until then.

        The child goes on appending to the same file. What it writes between the copy and the
        truncation is lost.
        """
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(self._log, self._log.with_name(f"{self._log.name}.1"))
                os.truncate(self._log, 0)

    def last_words(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            lines = [
                line for line in log.read().decode(errors="replace").splitlines() if line.strip()
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
            await asyncio.wait_for(_wait_for_end(process), STOP_TIMEOUT)
        except TimeoutError:
            process.kill()
            await _wait_for_end(process)


async def _wait_for_end(process: asyncio.subprocess.Process | Fork) -> int:
    return await (process.wait_async() if isinstance(process, Fork) else process.wait())


def _report_warm_failure(warming: asyncio.Task[None], say: Callable[[str], None]) -> None:
    """Report why the warm process has ended; without it, commands only start more slowly."""
    if not warming.cancelled() and (error := warming.exception()) is not None:
        say(f"{error}; commands still work, but start more slowly")


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


async def _wait_for_port(service: Service, server: Keeper) -> None:
    """Wait until a server listens: without the SDK, whose import takes as long as that."""
    deadline = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(service.host, service.port)
            writer.close()
            return
        await asyncio.sleep(PORT_INTERVAL)
    raise ConfigError(f"the server did not start within {READY_TIMEOUT:g} s: {server.last_words()}")


async def _note_writer(state: Path, program: Path, delay: float) -> None:
    await asyncio.sleep(delay)
    with contextlib.suppress(ConfigError):  # the next start then compares the tables
        await asyncio.to_thread(note_writer, state, program)


def fork_worker(service: Service) -> Fork:
    """Start the first worker as a fork, before the server is there: it imports meanwhile.

    Raises:
        OSError: Its log cannot be written, or there is no process left.
    """
    import runpy  # here, not in `up`, which does without

    name, variables = next(_name_workers(service))
    environment = {**_make_environment(service), **variables}

    def act() -> int:
        os.environ.clear()
        os.environ.update(environment)
        *_, program = RELAUNCH
        sys.argv[:] = [program, "worker", "--near", "--no-build"]
        runpy.run_path(program, run_name="__main__")
        return 1  # it ends the process itself

    return fork(f"relaunch-{name}"[:15], service.state / f"{name}.log", act, is_attended=False)


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
    from relaunch.messages.jobs import CancelMessage

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
