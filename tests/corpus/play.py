"""Plays an ending by real ranks as a job of a running service, and reads what its commands say.

Each rank of the ending has a node for itself, and so has one more rank: the peer, which runs until
it is stopped or prints that it has lost a connection. The second generation succeeds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.corpus.ending import Ending
from tests.corpus.score import diagnose_ending
from tests.programs.service import Service

HERE = Path(__file__)
RANK_PROGRAM = HERE.with_name("rank.py")
TORCHRUN = HERE.parents[1] / "doubles" / "torchrun.py"
FLEET_NODES = 14
"""The largest ending has eight ranks, and nodes that were touched are away for seconds."""
MAX_GAP = 3.0
"""Seconds between two endings that were further apart: the order counts, and a wait of minutes
tells the service nothing more."""
ECHO_GAP = 1.0
"""Seconds between a rank's ending and its peer's echo."""
ECHO = """\
Traceback (most recent call last):
  File "/home/ada/train.py", line 88, in <module>
    dist.all_reduce(loss)
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer \
[10.0.0.5]:40812
"""
END_TIMEOUT = 90.0
"""Seconds for a decision; the longest one needs takes some ten on an idle machine."""
SETTLE_TIMEOUT = 12.0
"""Seconds from the decision for the job to end. A job that waits longer, as STORAGE does before its
restart, is cancelled: the first action is known."""
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
ENDS = {"Stop": "FAIL", "Ask": "ASK"}
"""The strategies of the decisions that launch nothing."""

EXCEPTION = re.compile(r"(?:\w+\.)*(?P<name>\w*(?:Error|Exception|Interrupt|Exit))(?P<rest>: .+)?")
MARK = re.compile(r"^\s*(?:\[(?:rank|default)\d+\]:\s?)+")
NEXT_RECORD = re.compile(r"\[|={5}|-{5}|[A-Z]+:|[WEI]\d{4} |Set the environment variable")
MESSAGE_LINES = 12

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What one rank does in generation 1."""

    after: float
    exit: int | str
    log: str = ""
    kernel: str = ""
    pid: int | None = None
    error: tuple[str, str] | None = None
    """The message and the call stack of its error file."""


@dataclass(frozen=True)
class Play:
    """A job that plays an ending."""

    parts: dict[int, Part]
    world: int
    numbers: dict[int, int]
    """The rank that plays each rank of the ending."""
    launcher: str = "none"


def find_exception(log: str) -> tuple[str, str] | None:
    """Return what torch writes into an error file: message and call stack.

    None: the log does not end with an exception.
    """
    lines = [MARK.sub("", line) for line in log.splitlines()]
    for at in range(len(lines) - 1, max(-1, len(lines) - MESSAGE_LINES - 1), -1):
        if not (match := EXCEPTION.fullmatch(lines[at])):
            continue
        begins = [n for n in range(at) if lines[n].startswith("Traceback (most recent")]
        frames = [n for n in range(at) if lines[n].lstrip().startswith('File "')]
        if not begins and not frames:
            return None
        rest = lines[at + 1 :]
        ends = next((n for n, line in enumerate(rest) if NEXT_RECORD.match(line)), len(rest))
        message = [match["name"] + (match["rest"] or ""), *rest[:ends]]
        begin = begins[-1] if begins else frames[0]
        return "\n".join(message), "\n".join(lines[begin : at + 1 + ends])
    return None


def make_play(ending: Ending, way: str) -> Play | None:
    """Return how an ending is played; None: it cannot be played in this way."""
    ranks = sorted({one.rank for one in ending.ranks}) or [0]
    world = len(ranks) + 1
    # Ranks keep their numbers where they can; the largest published is 162.
    kept = ranks[-1] < world
    numbers = {rank: rank if kept else at for at, rank in enumerate(ranks)}
    (peer,) = set(range(world)) - set(numbers.values())
    parts = {numbers[rank]: part for rank, part in _list_parts(ending)}
    play = Play(parts, world, numbers)
    match way:
        case "alone":
            return play
        case "after-echo":
            late = {n: replace(part, after=part.after + ECHO_GAP) for n, part in parts.items()}
            return replace(play, parts={peer: Part(0.0, 1, ECHO), **late})
        case "before-echo":
            first = min(part.after for part in parts.values() if part.exit != 0)
            return replace(play, parts={**parts, peer: Part(first + ECHO_GAP, 1, ECHO)})
        case "error-file":
            written = {n: replace(p, error=_find_error(p)) for n, p in parts.items()}
            has_error = any(part.error for part in written.values())
            return replace(play, parts=written) if has_error else None
        case "torchrun":
            return replace(play, launcher="torchrun") if ending.ranks else None
    raise ValueError(f"way {way!r} is unknown")


def _list_parts(ending: Ending) -> Iterator[tuple[int, Part]]:
    if not ending.ranks:
        # Published without the job that was on the node, which such faults kill.
        yield 0, Part(0.0, "SIGKILL", kernel=ending.kernel)
    at = before = 0.0
    for number, one in enumerate(ending.ranks):
        at, before = at + min(one.after - before, MAX_GAP), one.after
        kernel = ending.kernel if number == 0 else ""
        yield one.rank, Part(at, one.exit, one.log, kernel, one.pid)


def _find_error(part: Part) -> tuple[str, str] | None:
    return find_exception(part.log) if part.exit == 1 else None


def prepare(folder: Path, fleets: int) -> list[str]:
    """Prepare a folder for `Service`, and return the options of `up`.

    It gets fleets of nodes on this machine, each with a kernel log; a double of torchrun; and the
    program of the ranks, which torchrun must not take for one of its Python's modules.

    Args:
        folder: The folder of the service.
        fleets: How many: a job has a fleet for itself, because jobs without GPUs share nodes.
    """
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for name, program in (("torchrun", TORCHRUN), ("rank", RANK_PROGRAM)):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {program} "$@"\n')
        script.chmod(0o755)
    options = []
    for fleet in range(1, fleets + 1):
        names = [f"f{fleet}n{number:02}" for number in range(1, FLEET_NODES + 1)]
        for name in names:
            node = folder / "state" / "nodes" / name
            node.mkdir(parents=True, exist_ok=True, mode=0o700)
            (node / "kernel.log").touch()
        spec = {
            "name": f"f{fleet}",
            "backend": "local",
            "repairs": "act",
            "limits": {"nodes_out": "100%", "repairs_at_once": 4, "reboots_per_hour": 1000},
            "nodes": [
                {"name": name, "address": f"127.78.{fleet}.{number}"}
                for number, name in enumerate(names, 1)
            ],
        }
        path = folder / f"f{fleet}.yaml"
        path.write_text(json.dumps(spec))  # JSON is YAML, too
        options += ["--fleet", str(path)]
    (folder / "state").chmod(0o700)
    return options


def run_play(
    service: Service, fleet: str, name: str, way: str, ending: Ending, folder: Path
) -> Row:
    """Play an ending as a job, and return what the commands say of it.

    Raises:
        ValueError: It cannot be played in this way.
    """
    play = make_play(ending, way)
    if play is None:
        raise ValueError(f"{name} cannot be played {way}")
    stamp = f"{time.time_ns() >> 24 & 0xFFFF:04x}"
    job = f"{name.removesuffix('.yaml').replace('_', '-')}-{way}-{stamp}"
    folder = folder / job
    folder.mkdir(parents=True)
    parts = {str(number): vars(part) for number, part in play.parts.items()}
    (folder / "parts.json").write_text(json.dumps({"world": play.world, "parts": parts}))
    spec = {
        "name": job,
        "fleet": fleet,
        "command": [str(service.folder / "bin" / "rank"), str(folder)],
        "nodes": play.world,
        "launcher": play.launcher,
        "env": {"PATH": f"{service.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"},
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    began = time.time()
    code, _, errors = service.call("submit", str(folder / "job.yaml"))
    if code:
        raise RuntimeError(f"{job}: submit exits with {code}: {errors[-500:]}")
    shown, history = _await_action(service, job, folder, play)
    (folder / "show.json").write_text(json.dumps(shown, indent=1))
    (folder / "history.json").write_text(json.dumps(history, indent=1))
    incident = history[0] if history else {}
    marks = list(folder.glob("started.*"))
    nodes = {int(path.suffix[1:]): path.read_text() for path in marks}
    first = play.numbers[ending.ranks[0].rank if ending.ranks else 0]
    return {
        "ending": name,
        "way": way,
        "job": job,
        "service": str(service.folder),
        "started": min((path.stat().st_mtime for path in marks), default=began),
        "seconds": round(time.time() - began, 1),
        "phase": shown["phase"],
        "generations": shown["generation"],
        "cause": incident.get("cause"),
        "action": find_action(history),
        "code": incident.get("code"),
        "reason": incident.get("reason", ""),
        "ranks": incident.get("ranks", []),
        "guilty": [play.numbers[rank] for rank in ending.guilty if rank in play.numbers],
        "nodes": [nodes[number] for number in sorted(nodes)],
        "first_node": nodes.get(first),
        "touched": _find_touched(shown, history),
        "pure": diagnose_ending(ending),
    }


def _await_action(
    service: Service, job: str, folder: Path, play: Play
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Wait until a job has ended, or has acted and now waits; then cancel it.

    Return what `show` and `history` say.
    """
    begun = time.monotonic()
    # The files of ranks say that they have started without a command: no need to ask before.
    while len(list(folder.glob("started.*"))) < play.world and time.monotonic() < begun + 30.0:
        time.sleep(0.1)
    time.sleep(max(part.after for part in play.parts.values()) + 1.0)
    acted_at: float | None = None
    while True:
        shown = service.read_json("show", job)
        if shown["phase"] in FINAL:
            break
        if shown["incident"] and find_action([shown["incident"]]):
            acted_at = acted_at or time.monotonic()
        now = time.monotonic()
        if now > (begun + END_TIMEOUT if acted_at is None else acted_at + SETTLE_TIMEOUT):
            service.call("cancel", job, "--reason", "the first action is known")
            break
        time.sleep(1.0)
    return shown, service.read_json("history", job)


def find_action(history: list[dict[str, Any]]) -> str | None:
    """Return the strategy of the first decision that is more than a wait or a look at a node."""
    for incident in history:
        for decision in incident["decisions"]:
            if found := decision["strategy"] or ENDS.get(decision["decision"]):
                return str(found)
    return None


def _find_touched(shown: dict[str, Any], history: list[dict[str, Any]]) -> list[list[str]]:
    """Return the nodes that the job isolated or had repaired, each with what was done."""
    isolated = [[one["node"], "isolated"] for one in shown["avoided"]]
    repaired = [
        [node, decision["strategy"]]
        for incident in history
        for decision in incident["decisions"]
        if decision["decision"] == "Repair"
        for node in incident["nodes"]
    ]
    return isolated + repaired


def find_reboots(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Yield each reboot of a node, with the row of the last job whose ranks ran there before it."""
    for service in {row["service"] for row in rows}:
        played = [row for row in rows if row["service"] == service]
        for journal in Path(service).glob("state/nodes/*/reboots.jsonl"):
            node = journal.parent.name
            # The agent keeps room for more behind the last entry.
            for line in filter(None, journal.read_text().rstrip("\0").splitlines()):
                at = json.loads(line)["at"]
                before = [one for one in played if node in one["nodes"] and one["started"] < at]
                if before:
                    yield max(before, key=lambda row: row["started"]), node


def find_mistakes(row: Row, ending: Ending, rebooted: frozenset[str] = frozenset()) -> list[str]:
    """Return what a row has wrong: `cause`, `action`, `healthy node touched`, `guilty`.

    Args:
        row: What was played.
        ending: What is right.
        rebooted: The nodes that the fleet rebooted after this job.
    """
    touched = {node for node, _ in row["touched"]} | rebooted
    if ending.examination != "HEALTHY":
        touched.discard(row["first_node"])
    return [
        what
        for what, wrong in (
            ("cause", row["cause"] not in ending.causes),
            ("action", row["action"] not in ending.actions),
            ("healthy node touched", bool(touched)),
            ("guilty", bool(row["guilty"]) and not set(row["guilty"]) & set(row["ranks"])),
        )
        if wrong
    ]
