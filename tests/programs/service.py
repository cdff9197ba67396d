"""The whole service as a new user starts it, and torchrun: each runs a program in a folder.

Both get the environment of a plain shell: PATH, HOME and TERM, and the fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.programs.cases import Fault, Program

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train")
RELAUNCH = (sys.executable, str(ROOT / "starter.py"))
START_TIMEOUT = 120.0
COMMAND_TIMEOUT = 120.0
"""Seconds that only a hang takes."""
MAX_RESTARTS = 1
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
DISK_BYTES = 8 << 20
"""Of the disk that is to be full: some checkpoints, and no more."""
CGROUP_BYTES = 256 << 20
PR_SET_PDEATHSIG = 1
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


def plain_environment(home: Path) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "xterm"}


def command_of(program: Program, python: str) -> list[str]:
    return [python, str(TRAIN / program.script), *program.arguments]


def fault_environment(fault: Fault, cgroup: Path | None) -> dict[str, str]:
    found = {
        "FAULT": f"{fault.name}:{fault.step}:{fault.rank}",
        "FAULT_REPEATS": str(int(fault.repeats)),
        **fault.env,
    }
    if fault.needs == "cgroup" and cgroup is not None:
        found["FAULT_CGROUP"] = str(cgroup)
    return found


def read_outcome(folder: Path) -> dict[str, str] | None:
    try:
        found: dict[str, str] = json.loads((folder / "outcome.json").read_text())
    except FileNotFoundError:
        return None
    return found


def end_with_parent() -> None:
    """Have the kernel end this process with its parent: nothing else does after a SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Service:
    """`relaunch up` with a private state folder, and the commands that talk to it.

    Args:
        folder: The folder to work in, which may be that of an interrupted run.
        options: Further options of `up`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options
        home = folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **plain_environment(home),
            "RELAUNCH_STATE": str(folder / "state"),
        }

    def __enter__(self) -> Service:
        self._log = (self.folder / "up.log").open("wb")
        self._up = subprocess.Popen(
            [*RELAUNCH, "up", "--port", "0", *self._options],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        deadline = time.monotonic() + START_TIMEOUT
        while b"worker started" not in (self.folder / "up.log").read_bytes():
            if self._up.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"`relaunch up` did not start: {self.folder}/up.log")
            time.sleep(0.1)
        # Of a run that was interrupted: their ranks would run beside those that are measured.
        for job in self.read_json("jobs"):
            if job["phase"] not in ENDED:
                self.call("cancel", job["name"], "--reason", "its run was interrupted")
        return self

    def __exit__(self, *_: object) -> None:
        if self._up.poll() is None:
            self._up.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._up.wait(60.0)
        if self._up.poll() is None:
            self._up.kill()
            self._up.wait()
        self._log.close()

    def call(self, *words: str, timeout: float = COMMAND_TIMEOUT) -> tuple[int, str, str]:
        """Run a command; return its exit code (-1: it did not end), its output and its errors."""
        process = subprocess.Popen(
            [*RELAUNCH, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            return -1, out, errors
        finally:
            process.kill()  # where this is interrupted
        return process.returncode, out, errors

    def read_json(self, *words: str) -> Any:
        """Return what a command prints with `--json`.

        Raises:
            RuntimeError: It printed something else.
        """
        code, out, errors = self.call(*words, "--json")
        try:
            return json.loads(out)
        except ValueError:
            raise RuntimeError(f"{' '.join(words)} exits with {code}: {errors[-500:]}") from None

    def run(
        self, program: Program, fault: Fault, python: str, folder: Path, cgroup: Path | None
    ) -> dict[str, Any]:
        """Submit a program as a job, wait for its end, and return what the commands say."""
        name = f"{program.name}-{fault.name}-{time.time_ns() // 1_000_000 % 10**8}".replace(
            "_", "-"
        )
        job = {
            "name": name,
            "command": command_of(program, python),
            "workdir": str(folder),
            "nodes": program.nodes,
            "nproc_per_node": program.nproc,
            "launcher": program.launcher,
            "progress": program.progress,
            "env": fault_environment(fault, cgroup),
            # A case must end: the policy asks no person about a checkpoint.
            "policy": {
                "max_restarts": MAX_RESTARTS,
                "bad_checkpoint_ask": "off",
                **fault.policy,
            },
        }
        file = folder / "job.yaml"
        file.write_text(json.dumps(job))  # JSON is YAML, too
        begun = time.monotonic()
        code, out, errors = self.call("submit", str(file), "--follow", timeout=fault.limit)
        seconds = time.monotonic() - begun
        if code == -1:
            self.call("cancel", name, "--reason", f"no end after {fault.limit:.0f} s")
            self.call("follow", name)
        (folder / "follow.txt").write_text(out + errors)
        row = {"job": name, "exit_code": code, "seconds": seconds, **self.read(name, folder)}
        row["unreadable"] += find_unread_end(row, out + errors)
        return row

    def read(self, name: str, folder: Path) -> dict[str, Any]:
        """Return the fields of `show`, `history` and `logs` that a row has.

        `unreadable` has what a person could not read, as sentences.
        """
        unreadable = []
        texts = {}
        for what in ("show", "history", "logs"):
            code, out, errors = self.call(what, name)
            texts[what] = out
            (folder / f"{what}.txt").write_text(out + errors)
            if code:
                unreadable.append(f"{what} exits with {code}: {errors.strip()[-200:]}")
        show, history = self.read_json("show", name), self.read_json("history", name)
        (folder / "show.json").write_text(json.dumps(show))
        (folder / "history.json").write_text(json.dumps(history))
        faults = [one for incident in history for one in incident["faults"]]
        last = faults[-1] if faults else {}
        for generation in range(1, show["generation"]):
            code, out, errors = self.call("logs", name, "--generation", str(generation))
            (folder / f"logs-{generation}.txt").write_text(out + errors)
            texts[f"logs --generation {generation}"] = out
            if code or "[rank 0] " not in out:
                unreadable.append(f"logs --generation {generation} has nothing of rank 0")
        for what, text in texts.items():
            if any(ord(one) < 32 and one not in "\n\t" for one in text):
                unreadable.append(f"{what} has control characters")
        failure = show.get("failure") or {}
        if show["phase"] == "FAILED" and failure.get("cause") != last.get("cause"):
            unreadable.append(
                f"show names {failure.get('cause')}, the last fault is {last.get('cause')}"
            )
        return {
            "phase": show["phase"],
            "generations": show["generation"],
            "cause": last.get("cause"),
            "code": last.get("code"),
            "said": last.get("reason", ""),
            "incidents": len(history),
            "faults": [[one["generation"], one["cause"], one["code"]] for one in faults],
            "traceback": (last.get("traceback") or "").strip().rpartition("\n")[2],
            "step": (show["progress"] or {}).get("step"),
            "hint": show["progress_hint"],
            "lines": len(texts["logs"].splitlines()),
            "unreadable": unreadable,
        }


def find_unread_end(row: Mapping[str, Any], text: str) -> list[str]:
    """Return what `submit --follow` does not say of a job's end, as sentences.

    It says how the job ended and exits with 0 only for success. Of a failure it ends with the cause
    and the last line of the traceback, as `show` does.
    """
    phase, code = row["phase"], row["exit_code"]
    if code == -1:
        return []  # it was ended from outside
    found = []
    if (code == 0) != (phase == "SUCCEEDED"):
        found.append(f"submit --follow exits with {code} for a job that is {phase}")
    wanted = [f"{row['job']} {phase}"]
    if phase == "FAILED":
        wanted += [f"root cause: {row['cause']} in generation {row['generations']}"]
        wanted += [f"| {row['traceback']}"] if row["traceback"] else []
    return found + [f"submit --follow does not say {one!r}" for one in wanted if one not in text]


def run_torchrun(
    program: Program, fault: Fault, python: str, folder: Path, home: Path, cgroup: Path | None
) -> dict[str, Any]:
    """Run a program under torchrun with as many restarts, all ranks on one node."""
    command = [
        python,
        "-m",
        "torch.distributed.run",
        # As the tutorials and nanoGPT say. Its store has a free port.
        "--standalone",
        f"--nproc-per-node={program.nodes * program.nproc}",
        f"--max-restarts={MAX_RESTARTS}",
        *command_of(program, python)[1:],
    ]
    begun = time.monotonic()
    with (folder / "torchrun.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**plain_environment(home), **fault_environment(fault, cgroup)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(fault.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_all_in(folder)
            process.wait()
    return {
        "exit_code": code,
        "seconds": time.monotonic() - begun,
        "outcome": read_outcome(folder),
        "said": find_root_cause((folder / "torchrun.txt").read_text(errors="replace")),
    }


def kill_all_in(folder: Path) -> None:
    """Kill the processes that work in a folder: torchrun's ranks have other sessions."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                os.kill(int(entry.name), signal.SIGKILL)


def find_root_cause(text: str) -> str:
    """Return what torchrun's report names as the first failure: rank and exit code."""
    _, found, report = text.rpartition("Root Cause (first observed failure):")
    if not found:
        return ""
    wanted = ("rank", "exitcode")
    lines = [line.strip() for line in report.splitlines()]
    return ", ".join(line for line in lines if line.split(" ")[0] in wanted)


def clear(folder: Path) -> None:
    """Make a folder empty, also where an interrupted run has left its small disk."""
    if (folder / "out").is_mount():
        subprocess.run(["umount", "--lazy", str(folder / "out")], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Put a small file system at a folder. It needs root."""
    folder.mkdir(exist_ok=True)
    options = ["-o", f"size={DISK_BYTES}", "relaunch-programs", str(folder)]
    subprocess.run(["mount", "-t", "tmpfs", *options], check=True)
    try:
        yield
    finally:
        # Lazily, because a rank that could not be killed may still use it.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path | None]:
    """Yield a cgroup with little memory that ranks can join, or None where none can be made."""
    name, limit = f"relaunch-programs-{os.getpid()}", str(CGROUP_BYTES)
    parent, key = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    try:
        (parent / name).mkdir()
        (parent / name / key).write_text(limit)
    except OSError:
        with contextlib.suppress(OSError):
            (parent / name).rmdir()
        yield None
        return
    try:
        yield parent / name
    finally:
        # A process that was killed a moment ago may still be in it.
        for _ in range(50):
            with contextlib.suppress(OSError):
                (parent / name).rmdir()
                break
            time.sleep(0.1)


def find_obstacle(fault: Fault, cgroup: Path | None) -> str:
    """Return why this machine cannot have a fault, or nothing."""
    if fault.needs == "tmpfs" and os.geteuid() != 0:
        return "a small file system is mounted, which needs root"
    if fault.needs == "cgroup" and cgroup is None:
        return "no memory cgroup can be made here"
    return ""


def find_missing(python: str, program: Program) -> str:
    """Return what a Python lacks for a program, as a sentence, or nothing."""
    if shutil.which(python) is None:
        return f"{python} is no program: expected a Python" if program.imports else ""
    # Found and not imported: an import of torch takes seconds.
    asked = (
        "import importlib.util as u, sys; print(*(m for m in sys.argv[1:] if not u.find_spec(m)))"
    )
    done = subprocess.run([python, "-c", asked, *program.imports], capture_output=True, text=True)
    missing = done.stdout.split() if done.returncode == 0 else [done.stderr.strip()[-200:]]
    return f"{python} has no {', '.join(missing)}" if missing else ""
