"""A double of torchrun, as torch 2.13.0 documents and prints.

The flags, the environment of ranks, the error files and the last words.

Standard library only, so that a launcher can be killed in tests where there is no torch. It
restarts nothing, as its options say. With DOUBLE_LINGERS in its environment it waits so many
seconds before it reports a failure, as ft_launcher does for other nodes. Sources:
torch/distributed/run.py; torch/distributed/elastic/multiprocessing/api.py, subprocess_handler.py
and errors/__init__.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLOSE_TIMEOUT = 30.0
"""Seconds from SIGTERM to SIGKILL, as in SubprocessContext._close."""
STORE_TIMEOUT = 60.0


class Told(Exception):
    """A signal that ends the launcher."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("--nnodes", "--nproc-per-node", "--node-rank", "--max-restarts"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--monitor-interval", type=float, default=0.1)
    parser.add_argument("--rdzv-backend", choices=["static"], required=True)
    parser.add_argument("--rdzv-endpoint", required=True)
    parser.add_argument("--rdzv-id", required=True)
    parser.add_argument("--no-python", action="store_true", required=True)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def meet(given: argparse.Namespace) -> tuple[str, str, list[socket.socket]]:
    """Group rank 0 serves the store; the others wait for it. No group rank goes on alone."""
    host, _, port = given.rdzv_endpoint.rpartition(":")
    if given.node_rank == 0:
        listener = socket.create_server((host, int(port)))
        listener.settimeout(STORE_TIMEOUT)
        return host, port, [listener, *(listener.accept()[0] for _ in range(given.nnodes - 1))]
    deadline = time.monotonic() + STORE_TIMEOUT
    while True:
        try:
            return host, port, [socket.create_connection((host, int(port)))]
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def environment(
    given: argparse.Namespace, host: str, port: str, local_rank: int, error_file: Path
) -> dict[str, str]:
    each, rank = given.nproc_per_node, given.node_rank * given.nproc_per_node + local_rank
    world = str(each * given.nnodes)
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(given.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(each),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(given.nnodes),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(given.max_restarts),
        "TORCHELASTIC_RUN_ID": given.rdzv_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def close(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    for rank in ranks.values():
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGTERM)
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for rank in ranks.values():
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def block(
    given: argparse.Namespace,
    failures: dict[int, tuple[int, int]],
    errors: dict[int, Path],
    root: int,
) -> str:
    """What ChildFailedError.format_msg makes of it."""

    def one(index: int, local_rank: int) -> str:
        code, pid = failures[local_rank]
        said = json.loads(errors[local_rank].read_text()) if errors[local_rank].is_file() else None
        signalled = (
            f"Signal {-code} ({signal.Signals(-code).name}) received by PID {pid}"
            if code < 0
            else None
        )
        told = (
            said["message"]["extraInfo"]["py_callstack"].replace("\n", "\n  ")
            if said
            else signalled
        )
        return "\n".join(
            (
                f"[{index}]:",
                "  time      : 2026-11-21_12:00:00",
                "  host      : double",
                f"  rank      : {given.node_rank * given.nproc_per_node + local_rank} (local_rank: "
                f"{local_rank})",
                f"  exitcode  : {code} (pid: {pid})"
                + (f"  ({signal.Signals(-code).name})" if code < 0 else " "),
                f"  error_file: {errors[local_rank] if said else '<N/A>'}",
                "  traceback : "
                f"{told or 'To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html'}",
            )
        )

    others = (
        "\n".join(one(index, local) for index, local in enumerate(failures) if local != root)
        or "  <NO_OTHER_FAILURES>"
    )
    title, line, section = f"{given.training_script} FAILED", "=" * 60, "-" * 60
    head = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    last = one(list(failures).index(root), root)
    return "\n".join(
        (
            head,
            line,
            title,
            section,
            "Failures:",
            others,
            section,
            "Root Cause (first observed failure):",
            last,
            line,
        )
    )


def watch(
    given: argparse.Namespace, ranks: dict[int, subprocess.Popen[bytes]]
) -> dict[int, tuple[int, int]]:
    """Exit code and pid of each that failed, the first one first.

    Those that are ended because of it are failures too.
    """
    while True:
        ended = {
            local: (rank.returncode, rank.pid)
            for local, rank in ranks.items()
            if rank.poll() is not None
        }
        failures = {local: (code, pid) for local, (code, pid) in ended.items() if code}
        if failures:
            close(ranks)
            code, pid = next(iter(failures.values()))
            print(
                f"failed (exitcode: {code}) local_rank: {next(iter(failures))} (pid: {pid}) of "
                "binary: double",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(float(os.environ.get("DOUBLE_LINGERS", "0")))
            return {
                **failures,
                **{
                    local: (rank.returncode, rank.pid)
                    for local, rank in ranks.items()
                    if rank.returncode
                },
            }
        if len(ended) == len(ranks):
            return {}
        time.sleep(given.monitor_interval)


def end(number: int, frame: object) -> None:
    raise Told(f"signal {number}")


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    signal.signal(signal.SIGTERM, end)
    host, port, _open = meet(given)
    folder = Path(tempfile.mkdtemp(prefix="torchelastic_double_"))
    errors, ranks = (
        {local: folder / str(local) / "error.json" for local in range(given.nproc_per_node)},
        {},
    )
    try:
        for local, error_file in errors.items():
            error_file.parent.mkdir()
            words = [
                string.Template(word).safe_substitute(local_rank=local)
                for word in given.training_script_args
            ]
            env = environment(given, host, port, local, error_file)
            ranks[local] = subprocess.Popen(
                [given.training_script, *words], env=env, start_new_session=True
            )
        failures = watch(given, ranks)
        if not failures:
            return 0
        root = next(iter(failures))
        if errors[root].is_file() and "TORCHELASTIC_ERROR_FILE" in os.environ:
            shutil.copyfile(errors[root], os.environ["TORCHELASTIC_ERROR_FILE"])
        print(block(given, failures, errors, root), file=sys.stderr, flush=True)
        return 1
    except Told:
        return 1
    finally:
        close(ranks)
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
