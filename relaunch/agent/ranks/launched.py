"""Set up a rank that a launcher such as torchrun forked, then exec its command.

The setup gives the process the same log, error file and progress file as any other rank. This
module starts no process and waits for none. Only the launcher receives the exit status of the rank.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from relaunch.agent import processes
from relaunch.agent.protocol import Json, parse_token
from relaunch.agent.state import Generation, JobState, write_json

SEPARATE_STDERR = "RELAUNCH_SEPARATE_STDERR"
"""Variable of a rank whose stderr has a separate log."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes, as in a shell. Relaunch reads them as a mistake in the user's command."""


class StrayRankError(Exception):
    """This process is not below a launcher that relaunch started. The text says why."""


def open_logs(generation: Generation, rank: int, is_separate: bool) -> tuple[int, int]:
    """Return descriptors for stdout and stderr of a rank: one for both, or one for each."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(generation.log_path(rank), flags, 0o600)
    if not is_separate:
        return log, log
    return log, os.open(generation.log_path(rank, "stderr"), flags, 0o600)


def wrap_command(command: list[str], env: Json) -> list[str]:
    """Return the command for the launcher to run: this module's setup, then the rank's command."""
    # Isolated mode: the job's PYTHONHOME and PYTHONPATH must not affect this interpreter.
    own = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "rank"]
    return [*own, *(f"{name}={value}" for name, value in env.items()), "--", *command]


def leave_tracker(env: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """Return `env` without a tracker's run if `own`, what the rank inherits, names another one.

    A WANDB_RUN_ID or WANDB_RESUME of the user's shell stays as it is. In a container, a rank
    inherits the run of rank 0, with which its own begins.
    """
    names = ("WANDB_RUN_ID", "WANDB_RESUME")
    inherits = any(name in own for name in names)
    if not inherits or env.get("WANDB_RUN_ID", "").startswith(own.get("WANDB_RUN_ID", "\0")):
        return env
    return {name: value for name, value in env.items() if name not in names}


def main(arguments: list[str]) -> int:
    if "--" not in arguments:
        return _fail("usage: python3 <agent> rank [NAME=VALUE]... -- COMMAND...", 2)
    end = arguments.index("--")
    env = dict(argument.partition("=")[::2] for argument in arguments[:end])
    try:
        generation, rank = _find_generation(os.environ)
        env = leave_tracker(env, dict(os.environ))
        if rank > 0 and "WANDB_RUN_ID" in env:
            env["WANDB_RUN_ID"] += f"-{rank}"  # see the controller's tracker_environment
        _die_with_launcher(generation)
        _set_up(generation, rank, env)
    except (StrayRankError, OSError) as error:
        return _fail(f"relaunch: this rank cannot begin: {error}", 1)
    return _become(arguments[end + 1 :], env)


def _fail(text: str, code: int) -> int:
    os.write(2, f"{text}\n".encode())
    return code


def _find_generation(env: os._Environ[str]) -> tuple[Generation, int]:
    text, state, rank = (
        env.get(name, "") for name in ("RELAUNCH_TOKEN", "RELAUNCH_NODE_STATE", "RANK")
    )
    token = parse_token(text)
    if token is None or not state:
        raise StrayRankError(
            f"RELAUNCH_TOKEN is {text!r}; expected the one that the launcher was started with"
        )
    if not rank.isdigit():
        raise StrayRankError(f"RANK is {rank!r}; expected the number that the launcher gives")
    return JobState.from_token(Path(state), token).generation(token.order), int(rank)


def _die_with_launcher(generation: Generation) -> None:
    """Have the kernel kill this process when the launcher dies.

    Raises:
        Astray: The launcher or the shim of the generation is gone already.
    """
    parent = os.getppid()
    processes.die_with(parent)
    shim = generation.identity("shim")
    if shim is None or not processes.is_alive(*shim):
        raise StrayRankError("the shim of its generation is gone")
    # When a launcher dies, the shim becomes the parent of its children. A script may stand between
    # the shim and the launcher, so walk up until the shim is found.
    above = processes.read_process(parent)
    while above is not None and above.pid != shim[0]:
        above = processes.read_process(above.parent)
    if above is None or parent == shim[0]:
        raise StrayRankError("its launcher is gone")


def _set_up(generation: Generation, rank: int, env: dict[str, str]) -> None:
    """Set up the log, the error file and the progress file of this rank, and record its process.

    Sets TORCHELASTIC_ERROR_FILE and RELAUNCH_PROGRESS_FILE in `env`.
    """
    outputs = open_logs(generation, rank, SEPARATE_STDERR in os.environ)
    for log, stream in zip(outputs, (1, 2)):
        os.dup2(log, stream)
    for log in set(outputs):
        os.close(log)
    error = str(generation.error_path(rank))
    requested = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if requested and requested != os.devnull:
        try:
            os.symlink(error, requested)  # the launcher reads it there and removes it when it ends
        except OSError:  # the file exists or its folder does not: use the launcher's path
            error = requested
    env["TORCHELASTIC_ERROR_FILE"] = error
    env["RELAUNCH_PROGRESS_FILE"] = str(generation.progress_path(rank))
    process = processes.read_process(os.getpid())
    if process is not None:
        local = os.environ.get("LOCAL_RANK", "")
        record = {
            "pid": process.pid,
            "started": process.started,
            "local_rank": int(local) if local.isdecimal() else 0,
        }
        write_json(generation.rank_record_path(rank), record, durable=False)


def _become(command: list[str], env: dict[str, str]) -> int:
    processes.allow_reading()
    processes.reset_signals()  # Python ignores some signals, and exec would keep them ignored
    try:
        os.execvpe(command[0], command, {**os.environ, **env})
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return _fail(f"the command {command[0]} is not found on this node's PATH", NOT_FOUND)
        return _fail(f"the command {command[0]} cannot be run: {error.strerror}", NOT_EXECUTABLE)
