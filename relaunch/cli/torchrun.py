"""Command lines of torchrun, as `run` takes them.

Options and defaults are those of torch.distributed.run (torch 2.15), `get_args_parser`. Each is
honoured, has no effect here, or is refused with what to do instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from relaunch.cli import clients
from relaunch.cli.rank_output import RunOutput
from relaunch.config import ConfigError
from relaunch.fields import MAX_DURATION, duration
from relaunch.spec.job import JobSpec, OutputStream, find_launcher
from relaunch.spec.policy import Policy, preset

GPUS = Path("/proc/driver/nvidia/gpus")
LOOPBACK = ("localhost", "::1", "[::1]")
LOGS = "the output of all ranks is printed and kept: `relaunch logs {job} --rank N` prints one"
REPLACED = {
    "logs_specs": LOGS,
    "log_line_prefix_template": LOGS,
    "role": "ROLE_NAME is `default`",
    "event_log_handler": "what happens to a job is in `relaunch history {job} --json`",
    "numa_binding": "ranks run on all processors: a script before the command binds each by its "
    "LOCAL_RANK (docs/launchers.md#processors-near-the-gpu); `numactl` alone would bind all to one "
    "NUMA node",
    "signals_to_handle": "SIGINT, SIGTERM and SIGHUP stop the job; SIGUSR1 and SIGUSR2 go to the "
    "ranks that handle them, on this machine",
}
"""Options without effect that a user may miss, and what there is instead. The others without
effect describe a rendezvous, which relaunch makes itself, or how torchrun polls its ranks."""
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""What torchrun reads where `--shutdown-timeout` is not given, since torch 2.12."""
DEFAULT_SHUTDOWN_TIMEOUT = timedelta(seconds=30)
MAX_SHUTDOWN_DIGITS = 9
REFUSED = {
    "virtual_local_rank": "give each rank its device by LOCAL_RANK, or start torchrun itself with "
    "`launcher: torchrun` in a job file",
}


def make_command(
    words: list[str], module: bool, no_python: bool, ours: Mapping[str, str]
) -> list[str]:
    """Return the command of one rank.

    A word that is a program stays as it is, so that `run -- python train.py` and
    `run train.py` are the same.

    Raises:
        ConfigError: There is no such program and no such file.
    """
    if module and no_python:
        raise ConfigError("--module and --no-python: expected only one of them")
    if not words:
        raise ConfigError(
            "no command: write it last, such as `relaunch run train.py` or "
            "`relaunch run -- python train.py`"
        )
    first = words[0]
    if module:
        return [find_python(ours), "-u", "-m", *words]
    # The shebang of a script with this suffix does not count, as with torchrun.
    is_script = first.endswith(".py") and Path(first).is_file() and not no_python
    if not is_script and shutil.which(first, path=ours.get("PATH")) is not None:
        return words
    if no_python or not Path(first).exists():
        raise ConfigError(
            f"command {first!r} is not found: expected a program on PATH, a path to one that may "
            "be executed, or a Python script"
        )
    return [find_python(ours), "-u", *words]


def find_python(ours: Mapping[str, str]) -> str:
    """Return the Python that runs a script, as torchrun would choose it.

    Args:
        ours: The environment of this process.

    Raises:
        ConfigError: There is none.
    """
    if named := ours.get("PYTHON_EXEC"):  # torchrun reads it as well
        return named
    for name in ("python", "python3"):
        if shutil.which(name, path=ours.get("PATH")) is not None:
            return name
    raise ConfigError("neither python nor python3 is on PATH: expected one, to run the script")


def count_ranks(text: str, ours: Mapping[str, str]) -> int:
    """Return the number of ranks on each node.

    Args:
        text: A number, or `gpu`, `cpu`, `auto`: as many as this machine has.
        ours: The environment of this process.

    Raises:
        ConfigError: It is neither, or there is no GPU.
    """
    if text.isdecimal():
        return int(text)
    if text == "cpu":
        return os.cpu_count() or 1
    if text in ("gpu", "auto"):
        gpus = count_gpus(ours)
        if gpus or text == "auto":
            return gpus or os.cpu_count() or 1
        raise ConfigError("--nproc-per-node gpu: no NVIDIA GPU is found on this machine")
    raise ConfigError(
        f"--nproc-per-node {text}: expected a number of ranks, or gpu, cpu or auto for as many as "
        "this machine has"
    )


def count_gpus(ours: Mapping[str, str]) -> int:
    """Return how many GPUs CUDA would find on this machine."""
    visible = ours.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = 0
        for device in visible.split(","):
            if device.strip() in ("", "-1"):  # CUDA ignores what follows
                break
            count += 1
        return count
    try:
        return len(list(GPUS.iterdir()))
    except OSError:
        return 0


def read_output(options: Mapping[str, str], name: str) -> tuple[bool, RunOutput]:
    """Return whether the streams of ranks are kept apart, and what is done with them.

    They are apart where torchrun would write them into files.

    Args:
        options: torchrun's options that were given, by name.
        name: The job's name.

    Raises:
        ConfigError: An option has a value that is not understood.
    """
    redirected, teed = (_read_streams(option, options) for option in ("redirects", "tee"))
    folder = options.get("log_dir")
    filtered = options.get("local_ranks_filter")
    if filtered is not None and not all(rank.strip().isdecimal() for rank in filtered.split(",")):
        raise ConfigError(
            f"--local-ranks-filter {filtered}: expected ranks of a node, such as 0 or 0,1"
        )
    return bool(redirected or (teed and folder)), RunOutput(
        hidden=redirected - teed,
        local_ranks=None if filtered is None else frozenset(map(int, filtered.split(","))),
        folder=None if folder is None else Path(folder).absolute() / name,
    )


def _read_streams(option: str, options: Mapping[str, str]) -> frozenset[OutputStream]:
    value = options.get(option, "0")
    streams: dict[str, frozenset[OutputStream]] = {
        "0": frozenset(),
        "1": frozenset({"stdout"}),
        "2": frozenset({"stderr"}),
        "3": frozenset({"stdout", "stderr"}),
    }
    if value not in streams:
        raise ConfigError(
            f"--{option} {value}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all "
            "ranks; --local-ranks-filter chooses ranks"
        )
    return streams[value]


def apply_shutdown_timeout(
    policy: Policy, options: Mapping[str, str], ours: Mapping[str, str]
) -> Policy:
    """Return the policy with the time from SIGTERM to SIGKILL that torchrun would give ranks.

    A `stop_grace` that the policy's file writes stays, and that of a preset unless one is given.

    Args:
        policy: The job's policy.
        options: torchrun's options that were given, by name.
        ours: The environment of this process.

    Raises:
        ConfigError: What is given is not a number of seconds.
    """
    given = read_shutdown_timeout(options, ours)
    if writes_stop_grace(policy) or (
        given is None and "stop_grace" in policy.timeouts.model_fields_set
    ):
        return policy
    grace = DEFAULT_SHUTDOWN_TIMEOUT if given is None else given
    timeouts = policy.timeouts.model_copy(update={"stop_grace": grace})
    return policy.model_copy(update={"timeouts": timeouts})


def read_shutdown_timeout(options: Mapping[str, str], ours: Mapping[str, str]) -> timedelta | None:
    """Return the time that the option or the variable gives; None: neither is given.

    Raises:
        ConfigError: It is not a number of seconds.
    """
    for name, value in (
        ("--shutdown-timeout", options.get("shutdown_timeout")),
        (SHUTDOWN_TIMEOUT, ours.get(SHUTDOWN_TIMEOUT) or None),
    ):
        if value is not None:
            return parse_shutdown_timeout(name, value)
    return None


def parse_shutdown_timeout(name: str, value: str) -> timedelta:
    """Return a duration that is written in whole seconds.

    Raises:
        ConfigError: It is not, or is too long.
    """
    is_number = value.isascii() and value.isdigit() and len(value) <= MAX_SHUTDOWN_DIGITS
    if not is_number or timedelta(seconds=int(value)) > MAX_DURATION:
        raise ConfigError(
            f"{name} {value[:40]}: expected a whole number of seconds, such as 120, and at most "
            f"{MAX_DURATION.days} days"
        )
    return timedelta(seconds=int(value))


def writes_stop_grace(policy: Policy) -> bool:
    """Return whether a person wrote the policy's `stop_grace`, and not its preset."""
    own = preset(policy.extends).timeouts
    return "stop_grace" in policy.timeouts.model_fields_set and (
        "stop_grace" not in own.model_fields_set or policy.timeouts.stop_grace != own.stop_grace
    )


def check_nodes(spec: JobSpec, options: Mapping[str, str], is_here: bool) -> None:
    """Refuse a command line that was written to be typed on each of several hosts.

    Args:
        spec: The job as understood so far.
        options: torchrun's options that were given, by name.
        is_here: Whether all nodes of the fleet are on this machine.

    Raises:
        ConfigError: It names a node rank, or several nodes and another host than this one.
    """
    instead = (
        "list your hosts in a fleet file (`relaunch up --fleet FILE`) and type the command once, "
        "without --node-rank and rendezvous options"
    )
    for name, what in REFUSED.items():
        if name in options:
            raise ConfigError(f"--{name.replace('_', '-')} is not offered: {what}")
    rank = options.get("node_rank", "0")
    if rank != "0":
        raise ConfigError(
            f"--node-rank {rank}: `relaunch run` starts the ranks of all nodes itself; {instead}"
        )
    named = "rdzv_endpoint" if "rdzv_endpoint" in options else "master_addr"
    address = options.get(named, "")
    host = address if named == "master_addr" else address.rpartition(":")[0] or address
    is_loopback = host in ("", *LOOPBACK) or host.startswith("127.")
    if spec.node_count > 1 and is_here and not is_loopback and "standalone" not in options:
        raise ConfigError(
            f"--{named.replace('_', '-')} {address}: several hosts are meant, and all nodes of "
            f"fleet {spec.fleet} are on this one; {instead}"
        )


def find_notices(
    spec: JobSpec, policy: Policy, options: Mapping[str, str], passed_on: Mapping[str, str]
) -> list[str]:
    """Return sentences about what has no effect, or another effect than its writer expects.

    Args:
        spec: The job.
        policy: Its policy.
        options: torchrun's options that were given, by name.
        passed_on: The variables of this process that ranks get.
    """
    has_threads = "OMP_NUM_THREADS" in {**passed_on, **spec.env}
    found = []
    if "shutdown_timeout" in options and writes_stop_grace(policy):
        found.append(
            "--shutdown-timeout has no effect: timeouts.stop_grace of the policy is "
            f"{duration(policy.timeouts.stop_grace)}"
        )
    _, output = read_output(options, spec.name)
    if output.folder is not None:
        found.append(
            f"copies of the output are in {output.folder}/attempt_RESTARTS/RANK/stdout.log"
            + (" and stderr.log" if spec.output == "separate" else "")
        )
    if output.hidden:
        elsewhere = "" if output.folder is not None else "; --log-dir keeps it in files"
        found.append(
            f"--redirects: the ranks' {' and '.join(sorted(output.hidden, reverse=True))} will not "
            f"be printed here, but by `relaunch logs {spec.name}`{elsewhere}"
        )
    for what in dict.fromkeys(REPLACED.values()):
        names = [name for name, own in REPLACED.items() if own == what and name in options]
        if names:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            has = "has" if len(names) == 1 else "have"
            found.append(f"{flags} {has} no effect: {what.format(job=spec.name)}")
    if spec.ranks_per_node > 1 and not has_threads:
        found.append(
            "OMP_NUM_THREADS is not set here, so it is 1 for each rank, as with torchrun, or what "
            "the rank's node sets: `--env OMP_NUM_THREADS=N` sets another"
        )
    if (notice := clients.find_notice(spec.command)) is not None:
        found.append(notice)
    if (launcher := find_launcher(spec.command)) is not None:
        found.append(
            f"{launcher} starts ranks itself, so relaunch sees one process: to have each rank "
            "watched, write `relaunch run` in its place"
        )
    return found
