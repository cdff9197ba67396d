"""The caller's environment for the ranks of `run`: what of it travels, in which file, how long.

The file is in the state folder, readable by its owner only, and named by the job. The worker reads
it at each launch, so the variables are in no workflow history.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from relaunch.config import ConfigError
from relaunch.spec.environment import serialize_environment
from relaunch.spec.job import LIMITS, Limit
from relaunch.temporal import RETENTION, find_running_up

if TYPE_CHECKING:
    from temporalio.client import Client

FOLDER = "env"
LEFT_OUT_PREFIXES = ("RELAUNCH_", "TEMPORAL_", "TORCHELASTIC_", "XDG_SESSION_")
LEFT_OUT = (
    # A new rank gets these from relaunch; those of the shell may be of a job around it.
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    # The shell's own.
    "_",
    "SHLVL",
    # The login session's: a generation that is launched after it must be like the first.
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "GPG_TTY",
    "SSH_AUTH_SOCK",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "SSH_TTY",
    "STY",
    "TMUX",
    "TMUX_PANE",
    "WAYLAND_DISPLAY",
    "WINDOWID",
    "XAUTHORITY",
    "XDG_RUNTIME_DIR",
)
CHOSEN = (
    "PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
CHOSEN_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_", "PYTHON")
"""Variables for ranks on other machines: those that decide which program runs and how its ranks
communicate. Not the whole environment: it has secrets, and these are in workflow history."""
MIN_COLUMNS = 20
UNKNOWN_TO_SERVER_AGE = 3600.0
"""Seconds after which a file is no longer that of a job that is about to be submitted."""


def select_inherited(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this shell that ranks on this machine get: nearly all."""
    return {
        name: value
        for name, value in ours.items()
        if name not in LEFT_OUT and not name.startswith(LEFT_OUT_PREFIXES)
    }


def select_chosen(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this shell that ranks on other machines get."""
    return {
        name: value
        for name, value in ours.items()
        if name in CHOSEN or name.startswith(CHOSEN_PREFIXES)
    }


def parse_flags(ours: Mapping[str, str], wanted: list[str]) -> dict[str, str]:
    """Return the variables that `--env` gives, as NAME=VALUE or as the name of one that is set.

    Raises:
        ConfigError: A variable is not set.
    """
    given = {}
    for item in wanted:
        name, equals, value = item.partition("=")
        if not equals and name not in ours:
            raise ConfigError(
                f"--env {name}: the variable is not set; expected NAME=VALUE or the name of a "
                "variable that is set"
            )
        given[name] = value if equals else ours[name]
    return given


def read_limits(up: int | None) -> dict[str, Limit]:
    """Return the soft limits of this process, at most the hard ones of the `up` that starts ranks.

    Args:
        up: The process on this machine whose children the ranks are, or None if not known.
    """
    limits: dict[str, Limit] = {}
    for name in LIMITS:
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        soft = resource.getrlimit(kind)[0]
        with contextlib.suppress(OSError):  # of another user's process
            hard = resource.prlimit(up, kind)[1] if up is not None else soft
            soft = min(soft, hard, key=lambda limit: limit if limit >= 0 else float("inf"))
        limits[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return limits


def measure_terminal(ours: Mapping[str, str], prefix: int) -> dict[str, str]:
    """Return COLUMNS for programs that draw bars, if the output of `run` is a terminal.

    Args:
        ours: The environment of this process; if it has COLUMNS, that stands.
        prefix: How many characters `run` prints before each line.
    """
    if "COLUMNS" in ours:
        return {}
    try:
        columns = os.get_terminal_size(1).columns
    except OSError:
        return {}
    return {"COLUMNS": str(max(MIN_COLUMNS, columns - prefix))} if columns else {}


def write_file(state: Path, job: str, variables: Mapping[str, str]) -> Path:
    """Write an environment file that no other submission has, and return its absolute path.

    Raises:
        ConfigError: The state folder cannot be written.
    """
    path = state.resolve() / FOLDER / job / secrets.token_hex(8)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(serialize_environment(variables))
    except OSError as error:
        raise ConfigError(
            f"state folder {state} cannot be written: {error.strerror}; choose another with "
            "RELAUNCH_STATE"
        ) from None
    return path


def remove_file(path: Path) -> None:
    """Remove the file of a job that will not be launched again, and its folder if that is empty."""
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


def remove_others(path: Path) -> None:
    """Remove the files of earlier submissions of the job that now has `path`."""
    for other in path.parent.iterdir():
        if other != path:
            with contextlib.suppress(OSError):
                other.unlink()


async def remove_unknown(state: Path, client: Client) -> None:
    """Remove the files of jobs that the server no longer knows, because their retention is over.

    Until then a job that has ended can be retried, and needs its file.
    """
    from temporalio.service import RPCError, RPCStatusCode

    from relaunch.cli.jobs import handle_of

    for folder in _folders(state):
        try:
            if time.time() - folder.stat().st_mtime > UNKNOWN_TO_SERVER_AGE:
                await handle_of(client, folder.name).describe()
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                shutil.rmtree(folder, ignore_errors=True)
        except (ConfigError, OSError):
            continue  # not a job's, or removed meanwhile


def remove_expired(runs: Path) -> None:
    """Remove the files of jobs that had their own server, as long after as a server keeps jobs.

    Args:
        runs: The folder that holds their state folders.
    """
    oldest = time.time() - RETENTION.total_seconds()
    for state in runs.glob("*"):
        for folder in _folders(state):
            with contextlib.suppress(OSError):
                if folder.stat().st_mtime < oldest and find_running_up(state) is None:
                    shutil.rmtree(folder, ignore_errors=True)


def _folders(state: Path) -> list[Path]:
    return sorted((state / FOLDER).glob("*"))
