"""Find checkpoints in a folder, and tell complete from torn ones by the files that they have.

No checkpoint is loaded, and nothing is changed. The folder may be on a network file system that
hangs or is slow: a process that can be left behind reads it, one for each folder at a time, and
asks for the status of few files.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from itertools import islice
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Pattern, Tuple

from relaunch.agent import tools
from relaunch.agent.locks import HeldLock, wait_for_lock
from relaunch.agent.protocol import Fields, Json, Refusal

READ_TIMEOUT = 2.5
"""Timeout in seconds for reading a folder."""
LOCK_TIMEOUT = 1.0
"""Seconds to wait for another reader of the folder; with READ_TIMEOUT less than callers wait."""
MAX_ENTRIES = 10_000
"""Most entries of a folder that are looked at."""
MAX_EXAMINED = 50
"""Most checkpoints that are examined: those that were changed last, down to a complete one."""
MAX_SAMPLE = 16
"""Most entries of a checkpoint whose times are read; those that tell completeness come first."""
MAX_INCOMPLETE = 4
"""Most incomplete checkpoints in an answer."""
SETTLE_S = 20.0
"""Seconds without a change after which a checkpoint of no known kind counts as complete."""
MAX_NAME = 200
MAX_AGE_S = 1e8
ZIP_BEGIN, ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
MAX_ZIP_END_BYTES = 22 + 65_535
"""Most bytes from the end record of a zip file to its end."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM writes it last, and resumes from the iteration that it names."""
STEP = re.compile(r"step[=_-]?(\d+)|^(?:checkpoint|iter)[-_](\d+)$|^(\d+)$")
WEIGHTS = re.compile(
    r"(?:model|pytorch_model|adapter_model)(?:\.safetensors|\.bin)(?:\.index\.json)?$"
    r"|pytorch_model_fsdp_0$|global_step\d+$"
)
"""What a folder of Hugging Face's Trainer or of Accelerate has of the model: the index of several
files is written after them."""
ACCELERATE_FILE = "random_states_0.pkl"
HF_FILES = ("trainer_state.json", "training_args.bin", "config.json", "optimizer.pt")


TORCH_SUFFIXES = (".ckpt", ".pt", ".pth")


class Entry(NamedTuple):
    size: int
    """In bytes; of a folder not 0."""
    changed: float
    """Unix time."""


Folder = Dict[str, "os.DirEntry[str]"]
"""The entries of a folder by name, which were listed and not looked at."""


class FoundCheckpoint(NamedTuple):
    name: str
    format: str
    """dcp, hf, accelerate, megatron, torch for a file of torch.save, as Lightning writes it, or
    other."""
    changed: float
    incomplete: str
    """What is missing; empty: nothing."""


def read_checkpoints(state: Path, order: Fields) -> Json:
    """Return the newest complete checkpoint of a folder, and incomplete ones that are newer.

    Raises:
        Refusal: The folder is not read within the time, or an earlier reader of it still lives.
    """
    folder = order.text("directory")
    if order.get("workdir", "a folder or null", None) is not None:
        folder = os.path.join(order.text("workdir"), folder)
    pattern = order.text("pattern") if order.get("pattern", "text or null", None) else None
    try:
        names = None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise Refusal("bad_order", f"pattern is no regular expression: {error}") from None
    # The reader holds it, so that readers which cannot be killed do not become more.
    path = state / f"reading-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.lock"
    try:
        lock = wait_for_lock(path, LOCK_TIMEOUT)
    except HeldLock:
        reason = f"{folder} is still being read: its file system is slow"
        raise Refusal("still_reading", reason) from None
    try:
        answer = tools.run_bounded(lambda: _read(folder, names), READ_TIMEOUT, keep=[lock])
        if answer is None:
            raise Refusal("still_reading", f"{folder} was not read within {READ_TIMEOUT:g} s")
        path.unlink(missing_ok=True)
    finally:
        os.close(lock)
    return answer


def _read(folder: str, names: Optional[Pattern[str]] = None) -> Json:
    answer: Json = {"outcome": "done", "newest": None, "incomplete": [], "unreadable": None}
    try:
        found = find_checkpoints(folder, names)
    except OSError as error:
        return {**answer, "unreadable": f"{error.strerror}"}
    complete = [one for one in found if not one.incomplete]
    newest = complete[0] if complete else None
    torn = [one for one in found if one.incomplete and _is_newer(one, newest, names)]
    now = time.time()
    return {
        **answer,
        "newest": None if newest is None else _serialize(newest, now, names),
        "incomplete": [_serialize(one, now, names) for one in torn[:MAX_INCOMPLETE]],
    }


def _is_newer(
    found: FoundCheckpoint, other: Optional[FoundCheckpoint], names: Optional[Pattern[str]]
) -> bool:
    if other is None or found.changed >= other.changed:
        return True
    return _has_higher_step(found.name, other.name, names)


def _has_higher_step(name: str, other: str, names: Optional[Pattern[str]]) -> bool:
    own, others = _parse_step(name, names), _parse_step(other, names)
    return own is not None and others is not None and own > others


def _parse_step(name: str, names: Optional[Pattern[str]]) -> Optional[int]:
    if names is not None:
        named = names.fullmatch(name)
        return None if named is None else int(named["step"])
    match = STEP.search(name)
    step = next(filter(None, match.groups()), None) if match is not None else None
    return None if step is None else int(step[:15])


def _serialize(found: FoundCheckpoint, now: float, names: Optional[Pattern[str]]) -> Json:
    return {
        "name": found.name[:MAX_NAME],
        "format": found.format,
        "step": _parse_step(found.name, names),
        "age": round(min(MAX_AGE_S, max(0.0, now - found.changed)), 1),
        "incomplete": found.incomplete,
    }


def find_checkpoints(folder: str, names: Optional[Pattern[str]] = None) -> List[FoundCheckpoint]:
    """Return the newest checkpoints in a folder, the newest first, or the one that it is.

    They are those down to the newest complete one, and some that are older with a higher step: a
    program may take the highest, and the clock of a file server may be off.

    Args:
        folder: The folder.
        names: The names of checkpoints, whatever kind they are; None: those of known kinds.

    Raises:
        OSError: The folder cannot be read.
    """
    listed = _list(folder)
    tracked = _read_tracker(folder) if TRACKER in listed else None
    if names is not None:
        listed = {name: entry for name, entry in listed.items() if names.fullmatch(name)}
        return _find_named(listed, names, tracked)
    own = _examine_folder(os.path.basename(folder), listed, 0.0)
    if own is not None and own.format == "dcp":
        return [own._replace(name=".")]
    found: List[FoundCheckpoint] = []
    candidates = _sort_candidates(listed)[:MAX_EXAMINED]
    while candidates and (not found or found[-1].incomplete):
        found += _examine(listed[candidates.pop(0)], tracked)
    higher = [name for name in candidates if found and _has_higher_step(name, found[-1].name, None)]
    higher.sort(key=lambda name: -(_parse_step(name, None) or 0))
    for name in higher[:MAX_INCOMPLETE]:
        found += _examine(listed[name], tracked)
    found.sort(key=lambda one: -one.changed)
    name = f"iter_{tracked or 0:07d}"
    if tracked is not None and name not in listed:
        changed = listed[TRACKER].stat().st_mtime
        found.insert(
            0, FoundCheckpoint(name, "megatron", changed, f"{TRACKER} names it, but it is missing")
        )
    return found


def _find_named(
    listed: Folder, names: Pattern[str], tracked: Optional[int]
) -> List[FoundCheckpoint]:
    """Return the newest checkpoints with these names, down to a complete one, the newest first."""
    looked = {name: _look_at(entry) for name, entry in listed.items()}
    changed = {name: entry.changed for name, entry in looked.items() if entry is not None}
    ordered = sorted(changed, key=lambda name: (-changed[name], -(_parse_step(name, names) or 0)))
    found: List[FoundCheckpoint] = []
    for name in ordered[:MAX_EXAMINED]:
        found += _examine(listed[name], tracked) or _examine_other(listed[name])
        if found and not found[-1].incomplete:
            break
    return found


def _examine_other(entry: os.DirEntry[str]) -> List[FoundCheckpoint]:
    """Return a checkpoint of no known kind: it is complete once nothing has changed for a while.

    A clock of a file server that is behind makes that while shorter.
    """
    looked = _look_at(entry)
    if looked is None:
        return []
    changed, is_empty = looked.changed, not looked.size
    if entry.is_dir():
        try:
            listed = _list(entry.path)
        except OSError:  # it is being removed
            return []
        changed, is_empty = _sample(listed, [], changed)[1], not listed
    recent = time.time() - changed < SETTLE_S
    missing = f"it was changed less than {SETTLE_S:g} s ago" if recent else ""
    return [FoundCheckpoint(entry.name, "other", changed, "it is empty" if is_empty else missing)]


def _list(folder: str) -> Folder:
    with os.scandir(folder) as scan:
        return {entry.name: entry for entry in islice(scan, MAX_ENTRIES)}


def _sort_candidates(listed: Folder) -> List[str]:
    """Return the names of what may be a checkpoint, those that were changed last first.

    A folder is changed when an entry of it is made or renamed, as the one that is written last is.
    """
    changed: Dict[str, float] = {}
    for name, each in listed.items():
        entry = _look_at(each) if _may_be_checkpoint(each) else None
        if entry is not None:
            changed[name] = entry.changed
    return sorted(changed, key=lambda name: -changed[name])


def _may_be_checkpoint(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.name.endswith(TORCH_SUFFIXES) or entry.is_dir()
    except OSError:  # a link to itself
        return False


def _look_at(entry: os.DirEntry[str]) -> Optional[Entry]:
    """Return an entry; None: it was removed, or is a link to nothing."""
    try:
        status = entry.stat()
    except OSError:
        return None
    size = max(1, status.st_size) if entry.is_dir() else status.st_size
    return Entry(size, status.st_mtime)


def _examine(entry: os.DirEntry[str], tracked: Optional[int]) -> List[FoundCheckpoint]:
    """Return what an entry is, or nothing if it is not a checkpoint."""
    looked = _look_at(entry)
    try:
        if looked is None:
            one = None
        elif entry.is_dir():
            one = _examine_folder(entry.name, _list(entry.path), looked.changed)
        else:
            one = _examine_file(entry.path, entry.name, looked)
    except OSError:  # it is being removed, as old ones are
        return []
    if one is None:
        return []
    return [one if tracked is None else _apply_tracker(one, tracked)]


def _examine_folder(name: str, listed: Folder, created: float) -> Optional[FoundCheckpoint]:
    """Return the checkpoint that a folder is; None: it is not one of a known kind."""
    shards = [each for each in listed if each.endswith(".distcp")]
    if ".metadata" in listed or shards:
        entries, changed = _sample(listed, [".metadata"], created)
        missing = _find_missing(entries, ".metadata")
        return FoundCheckpoint(
            name, "dcp", changed, missing or ("" if shards else "no .distcp files")
        )
    if re.fullmatch(r"iter_\d{7,}", name):
        has_model = any(each.startswith("mp_rank_") for each in listed)
        missing = "" if has_model or "metadata.json" in listed else "no model weights"
        return FoundCheckpoint(name, "megatron", _sample(listed, [], created)[1], missing)
    if re.fullmatch(r"checkpoint[-_]\d+", name):
        if not listed:
            return FoundCheckpoint(
                name, "hf" if "-" in name else "accelerate", created, "it is empty"
            )
        weights = [each for each in listed if WEIGHTS.match(each)]
        last = "trainer_state.json" if any(each in listed for each in HF_FILES) else ACCELERATE_FILE
        entries, changed = _sample(listed, [last, *weights], created)
        missing = "" if weights else "no model weights"
        empty = (
            f"{each} is empty" for each in weights if each in entries and not entries[each].size
        )
        missing = missing or next(empty, "") or _find_missing(entries, last)
        if last in HF_FILES:
            return FoundCheckpoint(name, "hf", changed, missing)
        if last in listed or weights:
            return FoundCheckpoint(name, "accelerate", changed, missing)
    return None


def _sample(listed: Folder, first: List[str], created: float) -> Tuple[Dict[str, Entry], float]:
    """Return some entries of a checkpoint, these first, and when it was changed.

    A checkpoint of a thousand files is changed when those that tell completeness are, and before
    they are written, some of the others tell whether it still grows.
    """
    entries: Dict[str, Entry] = {}
    present = [name for name in first if name in listed]
    for name in present or islice(listed, MAX_SAMPLE):
        entry = _look_at(listed[name])
        if entry is not None:
            entries[name] = entry
    return entries, max((created, *(entry.changed for entry in entries.values())))


def _find_missing(entries: Dict[str, Entry], last: str) -> str:
    """Return what is wrong with the file that is written last; empty: nothing."""
    if last not in entries:
        return f"no {last}"
    return "" if entries[last].size else f"{last} is empty"


def _examine_file(path: str, name: str, entry: Entry) -> Optional[FoundCheckpoint]:
    """Return the checkpoint that a file of torch.save is: a zip file, whose end comes last."""
    if not name.endswith(TORCH_SUFFIXES):
        return None
    incomplete = "" if entry.size else "it is empty"
    with open(path, "rb") as file:
        if file.read(len(ZIP_BEGIN)) == ZIP_BEGIN:
            file.seek(max(0, entry.size - MAX_ZIP_END_BYTES))
            end = file.read(MAX_ZIP_END_BYTES)
            at = end.rfind(ZIP_END)
            # Its last field is the length of the comment that follows.
            if at < 0 or len(end) < at + 22 + int.from_bytes(end[at + 20 : at + 22], "little"):
                incomplete = "its end is missing"
    return FoundCheckpoint(name, "torch", entry.changed, incomplete)


def _read_tracker(folder: str) -> Optional[int]:
    with open(os.path.join(folder, TRACKER), "rb") as file:
        text = file.read(64).strip()
    return int(text) if text.isdigit() else None  # `release`: converted weights


def _apply_tracker(found: FoundCheckpoint, tracked: int) -> FoundCheckpoint:
    """Return a checkpoint of Megatron-LM as torn if it is newer than what the tracker names."""
    match = re.fullmatch(r"iter_(\d+)", found.name)
    if match is None or int(match[1]) <= tracked or found.incomplete:
        return found
    return found._replace(incomplete=f"{TRACKER} still names iteration {tracked}")
