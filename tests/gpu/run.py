"""What relaunch says of a real GPU, and of programs that fail on it.

    python -m tests.gpu --work FOLDER [--python PYTHON] [--only NAME,NAME]

For a machine with an NVIDIA GPU that nothing else uses, as root or where `dmesg` may be read.
PYTHON (`python3` by default) has torch and CuPy, and JAX for its case. Nothing is reset or
rebooted, and no setting of a GPU is changed. FOLDER gets the output of all programs and commands;
FOLDER/rows.json what was found. Exit code 1: something is not as expected.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from relaunch.backends.artifact import build_agent
from relaunch.pool.nodes import PROBE_LIFETIME
from tests.gpu.cases import CASES, Case
from tests.gpu.examine import check_examination, write_fleet
from tests.gpu.seeds import check_seeds
from tests.gpu.warm import check_warm
from tests.programs.service import ENDED, Service, plain_environment

TRAIN = Path(__file__).with_name("train")
SMI_FIELDS = (
    "name,uuid,pci.bus_id,driver_version,memory.total,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total"
)
READINGS = 5
LIMIT = 100.0
"""Seconds for one program: two starts of torch and a hang's limit are a third of it."""
AT_ONCE = 4
SHARED_NODES = 10
Row = dict[str, Any]


def read_kernel_log() -> list[str]:
    """Return the kernel's lines about NVIDIA's driver; none where it may not be read."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "NVRM" in line]


def ask_agent(agent: Path, *words: str) -> tuple[Any, float]:
    """Return what the agent's program says, and the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run(
        ["python3", "-S", str(agent), *words], capture_output=True, text=True, timeout=100
    )
    took = time.monotonic() - began
    return json.loads(done.stdout.splitlines()[-1]), took


def check_readings(agent: Path, work: Path) -> Iterator[Row]:
    """Compare what the agent reads of each GPU with nvidia-smi."""
    for what in ("full", "inventory"):
        times = []
        for _ in range(READINGS):
            answer, took = ask_agent(agent, "nvml", what, str(work / "agent-state"))
            times.append(round(took, 3))
        (work / f"nvml-{what}.json").write_text(json.dumps(answer, indent=1))
        yield {"check": f"nvml {what}: seconds", "found": times, "ok": "unreadable" not in answer}
    answer = json.loads((work / "nvml-full.json").read_text())
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
    ).stdout
    (work / "nvidia-smi.csv").write_text(query)
    whole = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True).stdout
    (work / "nvidia-smi.xml").write_text(whole)
    gpus = [line.split(", ") for line in query.splitlines()]
    yield compare("number of GPUs", len(answer.get("gpus", [])), len(gpus))
    for read, smi in zip(answer.get("gpus", []), gpus, strict=True):
        name, uuid, bus_id, driver, memory, temperature, volatile, aggregate = smi
        ecc = read["ecc"]
        yield compare("name", read["name"], name)
        yield compare("uuid", read["uuid"], uuid)
        yield compare("bus id", read["bus_id"].upper(), bus_id.upper())
        yield compare("driver", answer["driver"], driver)
        yield compare("memory in MiB", read["memory"]["total"] >> 20, int(memory))
        yield compare("volatile ECC", str(ecc.get("volatile_uncorrected")), volatile)
        yield compare("aggregate ECC", str(ecc.get("aggregate_uncorrected")), aggregate)
        near = abs(read["temperature"] - int(temperature)) <= 5
        yield {"check": "temperature", "found": [read["temperature"], temperature], "ok": near}
        # A GPU without NVLink has no links to read, and one with row remapping no retired pages.
        unread = {
            key: value
            for key, value in read.items()
            if isinstance(value, dict)
            and value.get("unreadable", "NOT_SUPPORTED") != "NOT_SUPPORTED"
        }
        yield {"check": "all is read", "found": unread, "ok": not unread}


def compare(what: str, found: object, expected: object) -> Row:
    return {"check": what, "found": found, "expected": expected, "ok": found == expected}


def run_bare(case: Case, python: str, work: Path) -> Row:
    """Run a program alone, for its last words."""
    folder = work / "bare" / case.name
    folder.mkdir(parents=True)
    before = len(read_kernel_log())
    command = [python, "-u", str(TRAIN / case.script)]
    if case.nproc > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command[1:1] = [*torchrun, str(case.nproc)]
        command.remove("-u")
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**plain_environment(folder), "FAULT": case.name, **case.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            code: int | None = process.wait(20.0 if case.name == "spin" else LIMIT)
        except subprocess.TimeoutExpired:
            code = None
    ended = time.monotonic()
    if code is None:
        process.send_signal(signal.SIGTERM)
        process.wait()
    row = {
        "bare": case.name,
        "pid": process.pid,
        "exit": process.returncode,
        "seconds": round(ended - began, 1),
        "seconds from SIGTERM to the end": round(time.monotonic() - ended, 3),
        "kernel": read_kernel_log()[before:],
    }
    (folder / "row.json").write_text(json.dumps(row, indent=1))
    return row


def write_fleets(work: Path, gpus: int) -> list[str]:
    """Write a fleet with this machine's GPUs, and one whose nodes share them unseen."""
    options = []
    nodes = {
        "gpus": [{"name": "gpu-1", "address": "127.79.1.1", "gpus": gpus}],
        "shared": [
            {"name": f"shared-{n}", "address": f"127.79.2.{n}"} for n in range(1, SHARED_NODES + 1)
        ],
    }
    for name, listed in nodes.items():
        fleet = {"name": name, "backend": "local", "repairs": "observe", "nodes": listed}
        path = work / f"{name}.yaml"
        path.write_text(json.dumps(fleet))  # JSON is YAML, too
        options += ["--fleet", str(path)]
    return [*options, "--fleet", str(write_fleet(work, gpus))]


def write_job(service: Service, case: Case, python: str, folder: Path) -> str:
    name = f"{case.name.replace('_', '-')}-{time.time_ns() // 1_000_000 % 10**6}"
    job = {
        "name": name,
        "fleet": "gpus" if case.alone else "shared",
        "command": [python, "-u", str(TRAIN / case.script)],
        "workdir": str(folder),
        "nproc_per_node": case.nproc,
        "progress": {"log_pattern": r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"},
        "env": {"FAULT": case.name, "HOME": str(folder), **case.env},
        "policy": {"max_restarts": 1, "bad_checkpoint_ask": "off", **case.policy},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return name


def run_job(service: Service, case: Case, python: str, work: Path) -> Row:
    """Run a program as a job, and return what the commands say of it."""
    folder = work / "jobs" / case.name
    folder.mkdir(parents=True)
    name = write_job(service, case, python, folder)
    before = len(read_kernel_log())
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(
            service.call, "submit", str(folder / "job.yaml"), "--follow", timeout=LIMIT
        )
        if case.name == "spin":
            while "launched" not in read_text(folder, name, service) and not following.done():
                time.sleep(1.0)
            code, out, errors = service.call("stacks", name)
            (folder / "stacks.txt").write_text(out + errors)
        code, out, errors = following.result()
    (folder / "follow.txt").write_text(out + errors)
    if code == -1:
        service.call("cancel", name, "--reason", "no end within the limit of the test")
    for what in ("show", "history", "logs", "report"):
        _, text, complaints = service.call(what, name)
        (folder / f"{what}.txt").write_text(text + complaints)
    show, history = service.read_json("show", name), service.read_json("history", name)
    (folder / "show.json").write_text(json.dumps(show, indent=1))
    (folder / "history.json").write_text(json.dumps(history, indent=1))
    cause = history[0]["cause"] if history else None
    return {
        "job": case.name,
        "exit": code,
        "seconds": round(time.monotonic() - began, 1),
        "phase": show["phase"],
        "generation": show["generation"],
        "cause": cause,
        "expected": case.causes,
        "reason": history[0].get("reason") if history else None,
        "kernel": read_kernel_log()[before:],
        "ok": cause in case.causes
        and not show["avoided"]
        and (show["phase"] == "SUCCEEDED" or not case.recovers),
    }


def read_text(folder: Path, name: str, service: Service) -> str:
    return service.call("logs", name)[1]


@contextmanager
def hold_gpu(agent: Path, python: str, folder: Path) -> Iterator[int]:
    """Have a program hold the memory of the GPU; yield its pid."""
    folder.mkdir(exist_ok=True)
    with (folder / "hold.txt").open("wb") as output:
        holder = subprocess.Popen(
            [python, "-u", str(TRAIN / "hold.py")], stdout=output, stderr=output
        )
    try:
        await_text(folder / "hold.txt", "holds")
        answer, _ = ask_agent(agent, "nvml", "inventory")
        (folder / "nvml.json").write_text(json.dumps(answer, indent=1))
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def check_foreign_process(service: Service, agent: Path, python: str, work: Path) -> Iterator[Row]:
    """A job waits for a GPU that another program holds, and says for which."""
    folder = work / "foreign"
    with hold_gpu(agent, python, folder) as pid:
        # A node is given away on what was read of its GPUs within this time.
        time.sleep(PROBE_LIFETIME.total_seconds() + 1.0)
        row = run_bare(Case("find_no_room", "", (), ""), python, work)
        yield {**row, "ok": row["exit"] == 1}
        case = Case("waits", "", (), "", alone=True)
        name = write_job(service, case, python, folder)
        service.call("submit", str(folder / "job.yaml"))
        deadline = time.monotonic() + 40.0
        page = ""
        while f"pid {pid}" not in page and time.monotonic() < deadline:
            time.sleep(1.0)
            page = service.call("show", name)[1]
        waited = service.read_json("show", name)["phase"]
        listed = service.call("nodes", "list", "--fleet", "gpus")[1]
        node = service.call("nodes", "show", "gpu-1", "--fleet", "gpus")[1]
        (folder / "pages.txt").write_text(page + listed + node)
    freed = time.monotonic()
    phase = await_end(service, name, 90.0)
    for what in ("show", "history"):
        (folder / f"{what}.txt").write_text(service.call(what, name)[1])
    yield {
        "check": "a job waits for a foreign process on the GPU, and names it",
        "found": [waited, f"pid {pid}" in page, phase],
        "seconds from its end to the job's": round(time.monotonic() - freed, 1),
        "ok": waited == "QUEUED" and f"pid {pid}" in page and phase == "SUCCEEDED",
    }


def check_process_that_comes(
    service: Service, agent: Path, python: str, work: Path
) -> Iterator[Row]:
    """A program takes the GPU's memory while a job runs, which then has no room to grow."""
    folder = work / "comes"
    case = Case("grows", "", (), "", script="grow.py", alone=True)
    folder.mkdir()
    name = write_job(service, case, python, folder)
    service.call("submit", str(folder / "job.yaml"))
    await_file(folder / "ready")
    with hold_gpu(agent, python, folder) as pid:
        (folder / "go").touch()
        deadline = time.monotonic() + 60.0
        page = ""
        while f"pid {pid}" not in page and time.monotonic() < deadline:
            time.sleep(1.0)
            page = service.call("show", name)[1]
        time.sleep(PROBE_LIFETIME.total_seconds())
        waiting = service.read_json("show", name)
        (folder / "pages.txt").write_text(page + service.call("show", name)[1])
        stayed = waiting["phase"] not in ENDED
    freed = time.monotonic()
    phase = await_end(service, name, 120.0)
    for what in ("show", "history"):
        (folder / f"{what}.txt").write_text(service.call(what, name)[1])
    history = service.read_json("history", name)
    (folder / "history.json").write_text(json.dumps(history, indent=1))
    causes = [(incident["cause"], str(incident["reason"])) for incident in history]
    yield {
        "check": "a job whose GPU another process takes while it runs waits, and names it",
        "found": [waiting["phase"], stayed, phase, *causes],
        "seconds from its end to the job's": round(time.monotonic() - freed, 1),
        "ok": stayed
        and f"pid {pid}" in page
        and phase == "SUCCEEDED"
        and causes[0][0] == "OUT_OF_MEMORY"
        and f"pid {pid}" in causes[0][1],
    }


def await_file(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path} did not come")
        time.sleep(0.2)


def await_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + LIMIT
    while text not in path.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path} does not have {text!r}")
        time.sleep(0.2)


def await_end(service: Service, name: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        phase = str(service.read_json("show", name)["phase"])
        if phase in ENDED or time.monotonic() > deadline:
            return phase
        time.sleep(1.0)


def check_node(service: Service, work: Path) -> Iterator[Row]:
    """Examine the node as a person does; this machine may have no DCGM."""
    for words in (
        ("nodes", "check", "gpu-1", "--fleet", "gpus", "--level", "1"),
        ("nodes", "check", "--file", str(work / "gpus.yaml")),
        ("nodes", "list", "--fleet", "gpus"),
        ("nodes", "show", "gpu-1", "--fleet", "gpus"),
    ):
        code, out, errors = service.call(*words)
        text = f"$ relaunch {' '.join(words)}\n{out}{errors}[exit code {code}]\n\n"
        with (work / "node.txt").open("a") as file:
            file.write(text)
        yield {"check": " ".join(words[:3]), "found": code, "ok": code in (0, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--python", default=shutil.which("python3"))
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--no-bare", action="store_true", help="run the programs as jobs only")
    chosen = parser.parse_args()
    work, python = chosen.work.resolve(), chosen.python
    if shutil.which("nvidia-smi") is None:
        print("no nvidia-smi on PATH: this needs a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    work.mkdir(parents=True)
    only = set(filter(None, re.split(",", chosen.only)))
    cases = [case for case in CASES if not only or case.name in only]
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        (work / "rows.json").write_text(json.dumps(rows, indent=1))

    agent = build_agent(work / "agent")
    (work / "kernel-before.txt").write_text("\n".join(read_kernel_log()))
    for row in check_readings(agent, work):
        add(row)
    shared, alone = ([c for c in cases if c.alone is flag] for flag in (False, True))
    if not chosen.no_bare:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for row in pool.map(lambda case: run_bare(case, python, work), shared):
                add(row)
        for case in alone:
            add(run_bare(case, python, work))
    with Service(work / "service", *write_fleets(work, len(list_gpus()))) as service:
        for row in check_node(service, work):
            add(row)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for row in pool.map(lambda case: run_job(service, case, python, work), shared):
                add(row)
        for case in alone:
            add(run_job(service, case, python, work))
        checks = {
            "seeds": lambda: check_seeds(service, python, work),
            "foreign": lambda: check_foreign_process(service, agent, python, work),
            "comes": lambda: check_process_that_comes(service, agent, python, work),
            "examine": lambda: check_examination(
                service, python, work, partial(hold_gpu, agent, python, work / "examine")
            ),
            "warm": lambda: check_warm(service, python, work, SHARED_NODES),
        }
        for name, check in checks.items():
            if only and name not in only:
                continue
            try:
                for row in check():
                    add(row)
            except Exception as error:  # the other checks go on
                add({"check": name, "found": repr(error), "ok": False})
    (work / "kernel-after.txt").write_text("\n".join(read_kernel_log()))
    wrong = [row for row in rows if row.get("ok") is False]
    print(f"{len(rows)} rows, {len(wrong)} not as expected")
    return bool(wrong)


def list_gpus() -> list[str]:
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
