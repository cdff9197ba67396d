"""The command `run`: runs one job, with its own server if none is running.

Its exit code is the job's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relaunch.cli import environment, files, rank_signals, torchrun
from relaunch.cli.cancellation import Cancellation, explain
from relaunch.cli.own_service import OwnService, keep_agents, start_own
from relaunch.cli.rank_output import RunOutput
from relaunch.cli.terminal import is_closed_output, list_closed_outputs
from relaunch.config import ConfigError, Settings
from relaunch.spec.annotations import apply_grace_period
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, state_restarts
from relaunch.temporal import (
    connect,
    find_backend,
    find_running_up,
    is_away,
    read_configured_address,
)
from relaunch.text import printable

INTERRUPTED = 130
SUBMIT_TIMEOUT_S = 60.0
"""Seconds in which a server that was just started takes the job. It takes some milliseconds."""
OUTPUT_CHECK_INTERVAL_S = 0.5
EXIT_TIMEOUT_S = 2.5
"""Seconds that a second ctrl-C takes at most."""
CANCEL_TIMEOUT_S = 60.0
"""Seconds for which a job that can no longer be followed is tried to be cancelled."""


@dataclass(frozen=True)
class RunRequest:
    """What was typed after `relaunch run`."""

    words: list[str]
    nodes: str
    ranks: str
    """A number, or `gpu`, `cpu`, `auto`."""
    fields: Mapping[str, Any]
    """Further fields of the job, as in a job file."""
    env: list[str]
    """Each NAME=VALUE, or the name of a variable that is set."""
    max_restarts: int | None
    module: bool
    no_python: bool
    options: Mapping[str, str]
    """The other options of torchrun that were given, by name."""

    @property
    def fleet(self) -> str:
        return str(self.fields.get("fleet", "default"))

    def resolve(self, backend: str | None) -> tuple[JobSpec, Policy]:
        """Return the job that is meant, and its policy.

        Args:
            backend: What kind of machine the fleet's nodes are; None: unknown.

        Raises:
            ConfigError: It cannot be run as written.
        """
        ours = os.environ
        if not self.ranks.isdecimal() and backend != "local":
            raise ConfigError(
                f"--nproc-per-node {self.ranks}: expected a number, because the nodes of fleet "
                f"{self.fleet} are not this machine"
            )
        command = torchrun.make_command(self.words, self.module, self.no_python, ours)
        spec, policy = files.job_from_flags(
            {
                "name": default_name(command),
                "command": command,
                "nodes": self.nodes,
                "nproc_per_node": torchrun.count_ranks(self.ranks, ours),
                "workdir": str(Path.cwd()),
                "env": environment.parse_flags(ours, self.env),
                **self.fields,
            }
        )
        torchrun.check_nodes(spec, self.options, backend == "local")
        is_separate, _ = torchrun.read_output(self.options, spec.name)
        if is_separate:
            spec = spec.model_copy(update={"output": "separate"})
        if self.max_restarts is not None:
            policy = state_restarts(policy, self.max_restarts)
        policy = torchrun.apply_shutdown_timeout(policy, self.options, ours)
        # On this machine ranks get the variables of this process too.
        variables = {**ours, **spec.env} if backend == "local" else spec.env
        try:
            return spec, apply_grace_period(policy, variables)
        except ValueError as error:
            raise ConfigError(printable(str(error))) from None


def give_environment(spec: JobSpec, state: Path) -> JobSpec:
    """Return the job with the whole environment of this process, by a file, its umask and limits.

    The worker must be on this machine.

    Raises:
        ConfigError: The state folder cannot be written.
    """
    ours = os.environ
    variables = {
        **environment.select_inherited(ours),
        **environment.measure_terminal(ours, len(f"[rank {spec.world_size - 1}] ")),
        **spec.env,
    }
    umask = os.umask(0)
    os.umask(umask)
    up = find_running_up(state)
    return spec.model_copy(
        update={
            "env": {},
            "env_file": str(environment.write_file(state, spec.name, variables)),
            "inherit_env": False,
            "umask": f"{umask:03o}",
            "limits": environment.read_limits(up.pid if up is not None else None) | spec.limits,
        }
    )


def adapt_policy(policy: Policy, *, has_terminal: bool) -> Policy:
    """Return the policy of a job whose service ends with this program.

    If this program and its server are both killed, no one comes back for the ranks, so they end by
    themselves after a while. Without a terminal a script waits for the exit code: a job that a bad
    checkpoint ends fails, as below torchrun, instead of asking a person.
    """
    changes: dict[str, object] = {}
    if policy.timeouts.unwatched is None:
        limited = {"unwatched": policy.timeouts.lease}
        changes["timeouts"] = policy.timeouts.model_copy(update=limited)
    if not has_terminal:
        changes["bad_checkpoint_ask"] = "off"
    return policy.model_copy(update=changes)


def default_name(command: list[str]) -> str:
    """Return a name that says what runs, and that no other `run` has."""
    words = [word for word in command if not word.startswith("-")]
    script = next(
        (word for word in words[1:] if word.endswith((".py", ".sh"))), words[0] if words else "job"
    )
    stem = (
        "".join(
            letter if letter.isascii() and letter.isalnum() else "-" for letter in Path(script).stem
        ).strip("-")[:30]
        or "job"
    )
    return f"{stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"


def run(settings: Settings, request: RunRequest, say: Callable[[str], None]) -> int:
    """Run a job to its end and return the exit code.

    Raises:
        ConfigError: It cannot be run as written, or its server cannot be started or ended.
    """
    is_shared = find_running_up(settings.state) is not None or read_configured_address() is not None
    backend = find_backend(settings.state, request.fleet) if is_shared else "local"
    spec, policy = request.resolve(backend)
    _, output = torchrun.read_output(request.options, spec.name)
    output.check_folder()
    select = environment.select_inherited if backend == "local" else environment.select_chosen
    for notice in torchrun.find_notices(spec, policy, request.options, select(os.environ)):
        say(notice)
    own: OwnService | None = None
    if not is_shared:
        if spec.fleet != "default":
            raise ConfigError(
                f"--fleet: {spec.fleet!r} is not known: no server is running, and the one that "
                "`run` starts has only the fleet default"
            )
        # Before there is an event loop, and before the imports below: it begins as a fork.
        own = start_own(settings, spec.name, spec.node_count)
        policy = adapt_policy(policy, has_terminal=sys.stdin.isatty())
        say(
            "no server is running, so relaunch starts one for this job; its state folder is "
            f"{own.state}"
        )
    return asyncio.run(_run(settings, request, say, spec, policy, backend, own, output))


async def _run(
    settings: Settings,
    request: RunRequest,
    say: Callable[[str], None],
    spec: JobSpec,
    policy: Policy,
    backend: str | None,
    own: OwnService | None,
    output: RunOutput,
) -> int:
    env_file: Path | None = None
    is_running = False  # where relaunch knows of no end, the job may run
    code: int | None = None
    keeping: asyncio.Task[None] | None = None
    is_printed = True  # all that ranks have printed
    stdout = _identify_stdout()

    def report_unprinted(text: str) -> None:
        nonlocal is_printed
        is_printed = False
        kept = f", which the state folder {own.state} has" if own else ""
        say(f"{text}; `relaunch logs {spec.name}` prints all of it{kept}")

    try:
        from relaunch.cli.submit import submit

        if backend == "local":
            spec = give_environment(spec, own.state if own else settings.state)
            env_file = Path(str(spec.env_file))
        else:
            chosen = {**environment.select_chosen(os.environ), **spec.env}
            spec = spec.model_copy(update={"env": chosen})
            where = (
                f"the worker of fleet {spec.fleet} may be on another machine"
                if backend is None
                else f"fleet {spec.fleet} is on other machines"
            )
            say(
                f"{where}: ranks get PATH, PYTHON*, CUDA_*, NCCL_* and the like of this shell, and "
                "no other variables; add others with --env NAME"
            )
        client = await connect(settings.state, await own.address() if own else None)
        keeping = asyncio.create_task(own.keep(say)) if own else None
        submitting = submit(
            client,
            settings.task_queue,
            spec,
            policy,
            has_fleet=own is not None,
            hides_causes=settings.hides_causes,
        )
        await (_submit_to_own(submitting, keeping) if keeping else submitting)
        is_running = True
        if env_file:
            environment.remove_others(env_file)
        # From here on ctrl-C cancels the job instead of only ending this program.
        interruptions, outlives_terminal = _watch_signals()
        state = (own.state if own else settings.state) if backend == "local" else None
        _relay_signals(state, spec.name, say)
        say(f"job {spec.name} submitted: {spec.size}")
        from relaunch.cli import follow, jobs  # imported while the ranks start

        code = await _wait_for_job(
            lambda: follow.follow_with_logs(
                client,
                settings.task_queue,
                spec.name,
                say,
                is_kept=own is not None,
                output=output,
                report_unprinted=report_unprinted,
            ),
            interruptions,
            lambda reason: jobs.cancel(client, spec.name, reason),
            outlives_terminal,
            spec.name,
            say,
            keeping,
        )
        if code is None:
            return INTERRUPTED
        is_running = False
        return code
    finally:
        # With an exit code other than 0 the job can be retried, and its history read.
        if env_file and not is_running and not code:
            environment.remove_file(env_file)
        if keeping:
            keeping.cancel()
        if own and not is_running:
            keep_agents(settings, own)
            own.stop()
            if code == 0 and is_printed and _identify_stdout() == stdout:  # nothing was discarded
                shutil.rmtree(own.state, ignore_errors=True)


async def _submit_to_own(submitting: Coroutine[Any, Any, Any], keeping: asyncio.Task[None]) -> None:
    """Wait until the job's own server has taken the job.

    Raises:
        ConfigError: It did not, or is gone.
        RPCError: It refuses the job.
    """
    from temporalio.service import RPCError

    try:
        await asyncio.wait_for(submitting, SUBMIT_TIMEOUT_S)
    except TimeoutError:
        raise ConfigError(
            f"the server of this job started, and did not take it within {SUBMIT_TIMEOUT_S:g} s"
        ) from None
    except RPCError as error:
        if is_away(error):  # why the server ended says more than the call that this broke
            await asyncio.wait([keeping], timeout=SUBMIT_TIMEOUT_S)
        if keeping.done():
            keeping.result()
        raise


@dataclass(frozen=True)
class Interruption:
    reason: str
    insists: bool
    """Whether it ends this program at once if the job is already being cancelled. A closed terminal
    does not: it is reported several times."""


OUTPUT_CLOSED = Interruption("the output of `relaunch run` was closed", False)


def _watch_signals() -> tuple[asyncio.Queue[Interruption], bool]:
    """Return a queue of signals to come, and whether the job goes on when the terminal is closed.

    It does if SIGHUP is ignored, as `nohup` has it.
    """
    interruptions: asyncio.Queue[Interruption] = asyncio.Queue()
    outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for number, interruption in (
        (signal.SIGINT, Interruption("ctrl-C", True)),
        (signal.SIGTERM, Interruption("SIGTERM to `relaunch run`", True)),
        (signal.SIGHUP, Interruption("the terminal was closed (SIGHUP)", False)),
    ):
        if number != signal.SIGHUP or not outlives_terminal:
            asyncio.get_running_loop().add_signal_handler(
                number, interruptions.put_nowait, interruption
            )
    return interruptions, outlives_terminal


def _relay_signals(state: Path | None, name: str, say: Callable[[str], None]) -> None:
    """Pass signals that a batch system sends before a time limit on to the ranks.

    Args:
        state: The state folder of the job's service; None: ranks are on other machines.
        name: The job's name.
        say: Says what was done.
    """

    def relay(number: signal.Signals) -> None:
        if state is None:
            say(f"{number.name} has no effect: the ranks are on other machines")
        else:
            say(rank_signals.pass_on(state, name, number))

    for number in rank_signals.PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, relay, number)


async def _watch_output(interruptions: asyncio.Queue[Interruption], is_ignored: bool) -> None:
    while True:
        if _discard_broken_output() and not is_ignored:
            interruptions.put_nowait(OUTPUT_CLOSED)
        await asyncio.sleep(OUTPUT_CHECK_INTERVAL_S)


def _identify_stdout() -> tuple[int, int] | None:
    """Return what descriptor 1 is: it changes where what is written is discarded."""
    try:
        found = os.fstat(1)
    except OSError:  # the shell has closed it
        return None
    return found.st_dev, found.st_ino


def _discard_broken_output() -> bool:
    """Return whether output can no longer be written, and discard what is written from now on."""
    broken = list_closed_outputs()
    for stream in broken:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream)
        os.close(null)
    return bool(broken)


async def _wait_for_job(
    follow: Callable[[], Coroutine[Any, Any, int]],
    interruptions: asyncio.Queue[Interruption],
    cancel: Callable[[str], Coroutine[Any, Any, object]],
    outlives_terminal: bool,
    name: str,
    say: Callable[[str], None],
    keeping: asyncio.Task[None] | None = None,
) -> int | None:
    """Wait for the job and return its exit code.

    The first interruption cancels the job, and others have that tried again if the server did not
    take it; a second ctrl-C or SIGTERM makes this return None at once. It also returns None where
    the job is cancelled and can no longer be followed.

    Args:
        keeping: Keeps the job's server; it ends only if that cannot be kept.

    Raises:
        ConfigError: The job's server is gone.
    """
    servers = set() if keeping is None else {keeping}
    following: asyncio.Task[int | None] = asyncio.create_task(follow())
    watching = asyncio.create_task(_watch_output(interruptions, outlives_terminal))
    interrupted = asyncio.create_task(interruptions.get())
    cancellation: Cancellation | None = None
    try:
        while True:
            await asyncio.wait(
                {following, interrupted, *servers}, return_when=asyncio.FIRST_COMPLETED
            )
            if following.done():
                error = following.exception()
                if is_closed_output(error):
                    _discard_broken_output()
                    if not outlives_terminal:
                        interruptions.put_nowait(OUTPUT_CLOSED)
                    following = asyncio.create_task(follow())
                elif error is None or cancellation is None or cancellation.trying.done():
                    return following.result()
                else:
                    following = asyncio.create_task(_outlast(cancellation, error, say))
                continue
            if keeping is not None and keeping.done():
                following.cancel()
                keeping.result()
            interruption = interrupted.result()
            interrupted = asyncio.create_task(interruptions.get())
            _discard_broken_output()  # a closed terminal sends SIGHUP first
            if cancellation is None:
                say(f"cancelling job {name}; press ctrl-C again to exit at once")
                cancellation = Cancellation(partial(cancel, interruption.reason), name, say)
                continue
            cancellation.hurry()
            if interruption.insists:
                say(f"exiting{cancellation.describe()}")
                following.cancel()
                # The request itself must be sent, and what is not printed be said.
                await asyncio.wait([cancellation.trying, following], timeout=EXIT_TIMEOUT_S)
                if keeping is None:  # else the job's server cancels it: this program has ended
                    cancellation.give_up()
                return None
    finally:
        for task in (watching, interrupted):
            task.cancel()


async def _outlast(
    cancellation: Cancellation, error: BaseException, say: Callable[[str], None]
) -> None:
    """Wait until the server has taken the cancellation of a job that is followed no more.

    Raises:
        BaseException: The error that ended the following: the server has not, after a while.
    """
    await asyncio.wait([cancellation.trying], timeout=CANCEL_TIMEOUT_S)
    cancellation.give_up()
    if not cancellation.is_taken:
        raise error
    say(f"exiting{cancellation.describe()}; it is followed no more: {explain(error)}")
