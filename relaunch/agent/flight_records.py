"""Read torch's flight record of a rank: which collectives it has entered last.

The record is in the rank's memory. It is read from files that torch, or the thread that
`flight_dumper` starts in the rank, writes into the folder of the generation, and from torch's
worker server where the user's program runs one. A dump is data of the rank: it is read in a process
with bounded time and memory, by an unpickler that knows no class and no function.
"""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import pickle
import resource
import socket
import stat
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Tuple

from relaunch.agent import tools
from relaunch.agent.protocol import Json
from relaunch.agent.ranks.flight import FILE_VARIABLES, Environment
from relaunch.agent.state import Generation

MAX_BYTES = 64 * 1024 * 1024
"""Largest dump that is read: 250 times one of 2,000 entries."""
MAX_MEMORY = 1024 * 1024 * 1024
"""Bytes of memory that reading may take, beyond what the agent has."""
READ_TIMEOUT = 3.0
"""Seconds for a dump to be made and read. NCCL's thread looks at its pipe once a second."""
MARGIN = 1.0
"""Seconds more after which the process that reads is left behind."""
POLL_INTERVAL = 0.02
CLOCK_TICK = 0.01
"""Seconds by which a file may seem older than it is: the kernel notes times by its tick."""
MAX_PIPES = 32
MAX_GROUPS, MAX_RECENT = 32, 16
"""Process groups in an answer, those used last, and collectives of each."""
MAX_FRAMES, MAX_NAME, MAX_SIZES, MAX_REASON = 8, 200, 16, 300
MAX_ENVIRONMENT_BYTES = 1024 * 1024
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
SERVER_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"

Key = Tuple[str, str]
"""Name of a process group, and its backend: both of `cpu:gloo,cuda:nccl` have one name."""


class UnreadableError(Exception):
    """There is no record. The text says why."""


class Request(NamedTuple):
    """Which dumps a rank was asked for, and since when they count as new."""

    since: float
    """Unix time."""
    awaited: List[str]
    """Files that are being written."""


def request_dumps(generation: Generation, rank: int, pid: int) -> Request:
    """Ask a rank for dumps by every pipe that it reads; they are written meanwhile.

    Args:
        generation: Its folder has the dumps and the pipes.
        rank: The global rank.
        pid: Its process, whose environment may name other files.
    """
    since = time.time() - CLOCK_TICK
    environment = _read_environment(pid)
    folder = generation.flight_folder
    awaited = []
    for pipe in sorted(folder.glob(f"rank_{rank}.*.pipe"))[:MAX_PIPES]:
        if _request(pipe):
            awaited.append(str(pipe.with_suffix(".dump")))
        else:
            _remove(pipe)  # its process is gone, and had no time to remove it
    named = _find_prefix(pid, environment, (PIPE_VARIABLE,)) or f"{folder}/rank_"
    if _request(Path(f"{named}{rank}.pipe")):
        awaited.append(_find_dump(generation, rank, pid, environment))
    return Request(since, awaited)


def read_flight(
    generation: Generation,
    rank: int,
    pid: int,
    request: Optional[Request] = None,
    within: float = READ_TIMEOUT,
) -> Json:
    """Return the newest record of each process group: the field `flight` of the order `stacks`.

    Args:
        generation: as for `request_dumps`, like `rank` and `pid`.
        rank: The global rank.
        pid: Its process.
        request: What the rank was asked for; None asks it now.
        within: Seconds from the request. If nothing new is written within, what was written
            before is read: on a time-out of a collective, for example.
    """

    def work() -> Json:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY,) * 2)
        try:
            asked = request or request_dumps(generation, rank, pid)
            return _read(generation, rank, pid, asked, time.monotonic() + left)
        except UnreadableError as error:
            return {"unreadable": str(error)}
        except (OSError, MemoryError) as error:
            return {"unreadable": f"{type(error).__name__}: {error}"}

    passed = 0.0 if request is None else time.time() - request.since
    left = min(within, max(0.0, within - passed))
    answer = tools.run_bounded(work, left + MARGIN)
    return answer if answer is not None else {"unreadable": f"not read within {within:g} s"}


def _read(generation: Generation, rank: int, pid: int, request: Request, deadline: float) -> Json:
    environment = _read_environment(pid)
    dumps: List[Json] = []
    errors: List[str] = []
    server = environment.get(SERVER_VARIABLE, "")
    for handler in ("fr_trace_json", "dump_nccl_trace_json") if server else ():
        try:
            dumps.append(_ask_server(server, handler, deadline))
        except (UnreadableError, OSError, http.client.HTTPException) as error:
            errors.append(f"{server}: {error}")
    written = _await_dumps(request, deadline)
    dumps += written
    if not dumps:
        # Nothing answers. What was dumped before tells something still.
        folder = generation.flight_folder
        files = {Path(_find_dump(generation, rank, pid, environment)), folder / f"rank_{rank}"}
        for path in sorted(files.union(folder.glob(f"rank_{rank}.*.dump"))):
            try:
                dumps.append(_read_dump(path))
            except FileNotFoundError:
                continue
            except (UnreadableError, OSError) as error:
                errors.append(f"{path}: {error}")
    # Of a rank that has entered no collective yet, the answer is a record without any.
    answer = _join([dump for dump in dumps if dump["last"]] or dumps)
    if answer is None:
        why = f"no dump of it in {generation.flight_folder}"
        raise UnreadableError("; ".join(errors)[:MAX_REASON] if errors else why)
    # Else the rank would seem to work, because we ask it to write.
    return {**answer, "bytes": sum(dump["bytes"] for dump in written)}


def _await_dumps(request: Request, deadline: float) -> List[Json]:
    awaited = {Path(name): False for name in request.awaited}
    found = []
    while True:
        for path in [path for path, is_read in awaited.items() if not is_read]:
            dump = _read_if_newer(path, request.since)
            if dump is not None:
                found.append(dump)
                awaited[path] = True
        if all(awaited.values()) or time.monotonic() > deadline:
            return found
        time.sleep(POLL_INTERVAL)


def _find_dump(generation: Generation, rank: int, pid: int, environment: Environment) -> str:
    """Return where torch dumps what NCCL did: where the user's variable says, or in our folder."""
    prefix = _find_prefix(pid, environment, FILE_VARIABLES)
    return f"{prefix or f'{generation.flight_folder}/rank_'}{rank}"


def _join(dumps: List[Json]) -> Optional[Json]:
    """Return the newest record of each process group and backend, out of several dumps."""
    if not dumps:
        return None
    dumps = sorted(dumps, key=lambda dump: float(dump["at"]))
    groups = {row["name"]: row for dump in dumps for row in dump["process_groups"]}
    last = {(row["process_group"], row["backend"]): row for dump in dumps for row in dump["last"]}
    newest = dumps[-1]
    return {
        "source": newest["source"],
        "at": newest["at"],
        "process_groups": list(groups.values()),
        "last": list(last.values()),
    }


def _read_environment(pid: int) -> Dict[str, str]:
    """Return the environment that a process was started with; empty if it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read(MAX_ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    return {name: value for name, _, value in pairs}


def _find_prefix(pid: int, environment: Environment, names: Tuple[str, ...]) -> Optional[str]:
    """Return the prefix of files that the environment names, as an absolute path."""
    value = next((environment[name] for name in names if environment.get(name)), None)
    if value is None or os.path.isabs(value):
        return value
    try:
        return os.path.join(os.readlink(f"/proc/{pid}/cwd"), value)
    except OSError:
        return None


def _request(pipe: Path) -> bool:
    """Write into a pipe; return whether a process has it open to read it."""
    try:
        if not stat.S_ISFIFO(pipe.lstat().st_mode):
            return False
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # ENXIO: no process reads it
        return False
    try:
        # O_NONBLOCK: a pipe that is full holds requests enough.
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            os.write(handle, b"relaunch\n")
        return True
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(handle)


def _remove(pipe: Path) -> None:
    try:
        pipe.unlink()
    except OSError:  # gone meanwhile, or the folder is of another user: it is left there
        return


def _read_if_newer(path: Path, since: float) -> Optional[Json]:
    try:
        dump = _read_dump(path)
    except (UnreadableError, OSError):  # not there, or still being written
        return None
    return dump if dump["at"] >= since else None


def _read_dump(path: Path) -> Json:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("it is no regular file")
        data = file.read(MAX_BYTES + 1)
    summary = summarize(parse_dump(data), str(path), status.st_mtime)
    return {**summary, "bytes": status.st_size}


class _ServerConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def _ask_server(path: str, handler: str, deadline: float) -> Json:
    """Ask the worker server that the user's program has started (torch.distributed.elastic)."""
    connection = _ServerConnection(path, max(0.05, deadline - time.monotonic()))
    try:
        connection.request("POST", f"/handler/{handler}")
        response = connection.getresponse()
        if response.status != 200:  # 404: torch was built without NCCL
            raise UnreadableError(f"{handler}: {response.status}")
        data = response.read(MAX_BYTES + 1)
    finally:
        connection.close()
    return summarize(parse_dump(data), path, time.time())


# --- what a dump says ---


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class and no function: there is nothing that a dump could have called."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnreadableError(f"it names {module[:50]}.{name[:50]}; a dump is plain data")


def parse_dump(data: bytes) -> Dict[str, Any]:
    """Return a dump, pickled or JSON, as plain data.

    Raises:
        UnreadableError: It is torn, too large, or anything but plain data.
    """
    if len(data) > MAX_BYTES:
        raise UnreadableError(f"it has more than {MAX_BYTES} bytes")
    try:
        dump = (
            json.loads(data)
            if data[:1] == b"{"
            else _PlainUnpickler(io.BytesIO(data), encoding="utf-8").load()
        )
    except UnreadableError:
        raise
    except Exception as error:  # pickle's documentation: there are no others that one could list
        raise UnreadableError(f"it is torn or no dump: {type(error).__name__}") from None
    if isinstance(dump, list):  # torch 2.2 dumped the entries alone
        dump = {"entries": dump}
    if not isinstance(dump, dict):
        raise UnreadableError("it is no dump: not an object")
    return dump


def summarize(dump: Dict[str, Any], source: str, at: float) -> Json:
    """Return the newest collectives of each process group, as the order `stacks` answers."""
    entries = dump.get("entries")
    rows: Dict[Key, Json] = {}
    for entry in entries if isinstance(entries, list) else ():
        read = _read_entry(entry)
        if read is None:
            continue
        key, sequence, row, name = read
        is_done = row["state"] == "completed"
        before = rows.pop(key, None)
        recent = before["recent"] if before is not None else []
        pending = before["pending"] if before is not None else None
        # Operations that are coalesced into one have one sequence number: the first tells it.
        if not recent or recent[-1][0] != sequence:
            recent.append([sequence, row["operation"], row["sizes"]])
        if pending is None and not is_done:
            pending = sequence
        rows[key] = {**row, "pending": pending, "recent": recent[-MAX_RECENT:], "_name": name}
    last = list(rows.values())[-MAX_GROUPS:]
    names = {row["process_group"]: row.pop("_name") for row in last}
    return {
        "source": source,
        "at": at,
        "process_groups": [
            {"name": name, "description": text, "size": _read_size(dump.get("pg_config"), name)}
            for name, text in names.items()
        ],
        "last": last,
    }


def _read_entry(entry: Any) -> Optional[Tuple[Key, int, Json, str]]:
    """Return an entry's key, number, fields and the group's description; None: no collective.

    Sends and receives are no collectives: only two ranks take part.
    """
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
    sequence = _read_whole(entry.get("collective_seq_id", entry.get("seq_id")))
    title = entry.get("profiling_name")
    if sequence is None or not isinstance(title, str):
        return None
    backend, _, operation = title[:MAX_NAME].rpartition(":")
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and len(group) == 2:
        name, text = _read_text(group[0]), _read_text(group[1])
    else:  # torch 2.2
        name, text = str(_read_whole(entry.get("pg_id")) or 0), ""
    state = entry.get("state")
    # Gloo never sets the state: a collective that is over is only retired.
    if backend == "gloo" and entry.get("retired") is True:
        state = "completed"
    row = {
        "process_group": name,
        "backend": backend,
        "sequence": sequence,
        "operation": operation,
        "state": state if state in ("scheduled", "started", "completed") else "scheduled",
        "sizes": _read_sizes(entry.get("input_sizes")),
        "frames": _read_frames(entry.get("frames")),
    }
    return (name, backend), sequence, row, text


def _read_text(value: Any) -> str:
    """Return the end of a text; empty for anything else, whose text may be endless."""
    return value[-MAX_NAME:] if isinstance(value, str) else ""


def _read_whole(value: Any) -> Optional[int]:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if is_whole else None


def _read_sizes(value: Any) -> List[List[int]]:
    shapes = value[:MAX_SIZES] if isinstance(value, list) else []
    return [
        [_read_whole(size) or 0 for size in shape[:MAX_SIZES]]
        for shape in shapes
        if isinstance(shape, list)
    ]


def _read_frames(value: Any) -> List[List[Any]]:
    rows = value[:MAX_FRAMES] if isinstance(value, list) else []
    return [
        [
            _read_text(row.get("name")),
            _read_text(row.get("filename")),
            _read_whole(row.get("line")) or 0,
        ]
        for row in rows
        if isinstance(row, dict)
    ]


def _read_size(config: Any, name: str) -> Optional[int]:
    """Return how many ranks a process group has. Gloo does not tell."""
    group = config.get(name) if isinstance(config, dict) else None
    ranks = group.get("ranks") if isinstance(group, dict) else None
    if not isinstance(ranks, str) or not ranks.strip("[] "):
        return None
    return ranks.count(",") + 1
