"""Read-only reports of a node: its jobs and its logs."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from relaunch.agent.file_changes import FileChanges
from relaunch.agent.node import hold, probe, reboots
from relaunch.agent.protocol import VERSION, Fields, Json, Refusal, refuse_field
from relaunch.agent.ranks import journal, log_times, retention, standby
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import Generation, JobState, read_boot_id, read_json

POLL_INTERVAL = 0.05
"""Fewest seconds between two checks for new log lines while a caller waits, and the interval where
the kernel does not tell of changes."""
CHECK_INTERVAL = 1.0
"""Seconds between checks where it does: a log that was removed and made again is a link, to which
changes are not told."""
WRITE_TIME = 1.0
"""Seconds after which what a rank has written is not the first part of one piece of text."""
MAX_LOOK_BACK_BYTES = 65536
"""Bytes before an offset in which the begin of its line is looked for."""


def _derive_state(generation: Generation) -> str:
    """Derive from the files the state that the shim would report, which lives."""
    if generation.launch is None:
        return "prepared"
    pids = generation.pids
    observations = journal.read(generation.journal)
    if len(journal.list_exited(observations)) == len(pids):
        return "ended"
    over = any(
        observation["kind"] != "RankExited" or observation["exit_code"] != 0
        for observation in observations
    )
    return "stopping" if over else "running"


def list_jobs(state: Path, order: Fields) -> Json:
    """Return the generations on this node.

    With `gpus`, the answer also has what condemns the node: its GPUs and which processes use them,
    its disk and its network ports.
    With `brief`, of the generations that are over only the newest of each job and fleet, without
    its ranks: a node may have thousands of them.
    """
    jobs, brief = [], order.flag("brief", False)
    folder = state / "jobs"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        highest = read_json(entry / "highest.json")
        if highest is None:
            continue
        job = JobState.from_row(state, highest)
        generations: list[Json] = []
        fleets: set[str | None] = set()
        for generation in reversed(job.list_generations()):
            prepared = generation.prepared_order
            if prepared is None:
                continue
            has_shim, alive = generation.has_live_shim(), hold.list_living_ranks(generation)
            is_over, fleet = not has_shim and not alive, prepared.get("fleet")
            # One below it was proven stopped before it was prepared.
            if brief and is_over and fleet in fleets:
                continue
            fleets.add(fleet)
            pids = {rank: pid for rank, (pid, _) in generation.pids.items()}
            generations.append(
                {
                    "submission": generation.order[0],
                    "generation": generation.order[1],
                    "state": _derive_state(generation) if has_shim else "gone",
                    "ranks": [
                        {"rank": rank, "pid": pids.get(rank), "alive": pids.get(rank) in alive}
                        for rank in (() if brief and is_over else prepared["ranks"])
                    ],
                    **({"fleet": fleet} if fleet else {}),
                }
            )
        jobs.append(
            {
                **job.names,
                **{name: highest[name] for name in ("prepared", "stopped")},
                "generations": generations[::-1],
            }
        )
    holder = hold.read_holder(state)
    answer: Json = {
        "outcome": "done",
        "boot_id": read_boot_id(state),
        "protocol": VERSION,
        "jobs": jobs,
        "held": holder,
        "warm": standby.list_standbys(state),
    }
    # The holder of the node may be resetting its GPUs, which requires that no process has them
    # open.
    if (
        not order.flag("gpus", False)
        or holder is not None
        or reboots.read_current(state) is not None
    ):
        return answer
    return {**answer, **probe.look_at_hardware(state)}


def find_generation(state: Path, order: Fields) -> tuple[Generation, list[int]]:
    """Return the generation that an order names, and its ranks here.

    Raises:
        Refusal: This node knows nothing of it.
    """
    token = order.token()
    job = JobState.from_token(state, token)
    generation = job.generation(token.order)
    prepared = generation.prepared_order
    if prepared is not None:
        return generation, prepared["ranks"]
    # The order may be lost (a full disk, a crash of the node) where the logs are not.
    logs = [path.stem[5:] for path in (generation.path / "logs").glob("rank_*.log")]
    if logs:
        return generation, sorted(int(rank) for rank in logs if rank.isdigit())
    highest = job.read_highest()
    if highest.prepared is None or highest.prepared < token.order:
        reason = f"generation {token.generation} was never prepared on this node"
    else:
        reason = (
            f"this node has no files of generation {token.generation}: "
            "it did not run here, or they were removed to make room"
        )
    raise Refusal("no_such_generation", reason)


def _find_tail(path: Path, lines: int, limit: int) -> int:
    """Return the offset of the last lines of a log, looking back over at most this many bytes."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - limit)
            file.seek(begin)
            data = file.read(limit)
    except FileNotFoundError:
        return 0
    at = len(data) - (1 if data.endswith(b"\n") else 0)
    for _ in range(lines):
        at = data.rfind(b"\n", 0, max(at, 0))
        if at < 0:
            return begin
    return begin + at + 1


def _find_line(path: Path, offset: int) -> int:
    """Return where the line begins that has the byte at an offset of a log.

    A line that is longer than what is looked back over begins at the offset.
    """
    begin = max(0, offset - MAX_LOOK_BACK_BYTES)
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            at = file.read(offset - begin).rfind(b"\n")
    except OSError:
        return offset
    return begin + at + 1 if at >= 0 or begin == 0 else offset


CUT_NOTICE = "[relaunch: this log was cut by the job]\n"


def _read_chunk(
    path: Path, rank: int, offset: int, limit: int, whole: bool, redactor: Redactor
) -> Json | None:
    """Read a log from an offset.

    A character whose bytes are not all there yet is left for the next read, unless `whole`. So is
    what may be the begin of a value to replace, while it is being written.

    A log that is shorter than the offset was cut by its rank, such as by `echo > /dev/stderr`, and
    is read from its begin.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                return {"rank": rank, "offset": offset, "next": 0, "data": CUT_NOTICE}
            begin = retention.find_data(file.fileno(), offset)
            if begin > offset:
                left_out = (
                    f"[relaunch: {begin - offset} bytes left out, "
                    "this log outgrew its share of the disk]\n"
                )
                return {"rank": rank, "offset": offset, "next": begin, "data": left_out}
            before = min(redactor.longest, offset)
            file.seek(offset - before)
            read = file.read(before + limit + redactor.longest)
            is_fresh = time.time() < os.fstat(file.fileno()).st_mtime + WRITE_TIME
    except FileNotFoundError:
        return None
    matches = redactor.find(read)
    end = min(len(read), before + limit)
    # A value is never in two chunks.
    end = next((match.end for match in matches if match.begin < end < match.end), end)
    if is_fresh and not whole and end == len(read):
        end = redactor.find_unfinished(read, max([before, *(one.end for one in matches)]))
    data = read[before:end]
    if not whole or len(data) == limit:
        for back in range(1, min(4, len(data))):
            if data[-back] & 0xC0 == 0xC0:
                length = 2 if data[-back] < 0xE0 else 3 if data[-back] < 0xF0 else 4
                if back < length:
                    data = data[:-back]
                break
            if data[-back] < 0x80:
                break
    if not data:
        return None
    shown = redactor.replace(read, matches, before, before + len(data))
    return {
        "rank": rank,
        "offset": offset,
        "next": offset + len(data),
        "data": shown.decode(errors="replace"),
    }


def read_logs(state: Path, order: Fields, reading: int) -> Json:
    generation, ranks = find_generation(state, order)
    stream = order.text("stream", "stdout")
    if stream not in ("stdout", "stderr"):
        refuse_field("stream", stream, "stdout or stderr")
    most = order.whole("max_bytes", 65536)
    if most < 4:
        refuse_field("max_bytes", most, "at least 4, the longest letter of UTF-8")
    deadline = time.monotonic() + order.number("wait", 0.0)
    lines = None if order.order.get("tail") is None else order.whole("tail")
    offsets_field = order.order.get("offsets")
    fields = Fields({} if offsets_field is None else offsets_field, "offsets.")
    for name in fields.order:
        if not name.isdigit():
            refuse_field("a name in offsets", name, "a global rank")
        fields.whole(name)
    since = None
    if order.order.get("since") is not None:
        since = time.time() - order.number("since", least=0.0)
    offsets: dict[int, int] = {}
    begins: dict[str, int] = {}
    sizes: dict[str, int] = {}
    below = list(generation.launched_ranks)
    all_ranks = [*ranks, *below] if stream == "stdout" or not below else below
    logs = {rank: generation.log_path(rank, stream) for rank in all_ranks}
    limit = max(4, most // max(1, len(all_ranks)))
    for rank, log in logs.items():
        # a reader follows the whole job, so its offsets also name ranks of other nodes
        if str(rank) in fields.order:
            offsets[rank] = fields.whole(str(rank))
            continue
        offsets[rank] = max(
            0 if lines is None else _find_tail(log, lines, limit),
            0 if since is None else _find_line(log, log_times.find_offset(generation, log, since)),
        )
        begins[str(rank)], sizes[str(rank)] = offsets[rank], _find_size(log)
    changes: FileChanges | None = None
    redactor = Redactor.read(generation)
    try:
        while True:
            over = _has_ended(generation, ranks)
            unread = {rank: _find_size(logs[rank]) - at for rank, at in offsets.items()}
            shares = _share_bytes(most, unread)
            read_chunks = [
                _read_chunk(logs[rank], rank, offset, shares[rank], over, redactor)
                for rank, offset in offsets.items()
                if rank in shares
            ]
            chunks = [chunk for chunk in read_chunks if chunk is not None]
            ended = over and all(
                _is_read_up(logs[rank], rank, offset, chunks) for rank, offset in offsets.items()
            )
            if chunks or ended or deadline <= time.monotonic():
                missing = [
                    rank for rank in ranks if over and rank in logs and not logs[rank].exists()
                ]
                return {
                    "outcome": "done",
                    "chunks": chunks,
                    "ended": ended,
                    "begins": begins,
                    "sizes": sizes,
                    "missing": missing,
                }
            if changes is None:  # then look again: something may have come before
                changes = FileChanges([generation.path, generation.path / "logs"])
            elif not _await_changes(changes, reading, deadline):
                deadline = 0.0
    finally:
        if changes is not None:
            changes.close()


def _share_bytes(most: int, unread: dict[int, int]) -> dict[int, int]:
    """Return how many bytes of each log to read at once, of those that have any.

    What short ones leave of equal shares is for the long ones.

    Args:
        most: Bytes of all logs together.
        unread: Bytes of each log that were not read, by rank; negative: it was cut.
    """
    waiting = sorted((size, rank) for rank, size in unread.items() if size != 0)
    shares = {}
    left = most
    for done, (size, rank) in enumerate(waiting):
        # Of a log that is read to its end, an unfinished character is no reason to read again.
        shares[rank] = max(4, min(size + 4, left // (len(waiting) - done)))
        left -= max(0, min(size, shares[rank]))
    return shares


def _await_changes(changes: FileChanges, reading: int, deadline: float) -> bool:
    """Wait until there may be more to read; return whether the caller still waits for it."""
    time.sleep(max(0.0, min(POLL_INTERVAL, deadline - time.monotonic())))
    handles = [reading] if changes.handle is None else [reading, changes.handle]
    interval = 0.0 if changes.handle is None else CHECK_INTERVAL
    left = max(0.0, min(interval, deadline - time.monotonic()))
    ready, _, _ = select.select(handles, [], [], left)
    changes.clear()
    return reading not in ready or bool(os.read(reading, 65536))


def _has_ended(generation: Generation, ranks: list[int]) -> bool:
    if not generation.has_live_shim():
        return True
    return len(journal.list_exited(journal.read(generation.journal))) == len(ranks)


def _is_read_up(log: Path, rank: int, offset: int, chunks: list[Json]) -> bool:
    after = next((chunk["next"] for chunk in chunks if chunk["rank"] == rank), offset)
    return bool(after >= _find_size(log))


def _find_size(log: Path) -> int:
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0
