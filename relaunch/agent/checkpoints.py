"""Find checkpoints in a folder, and tell complete from torn ones by the files that they have.

No checkpoint is loaded, and nothing is changed. The folder may be on a network file system that
hangs, so this runs in a separate process, as all orders do.
"""

from __future__ import annotations

import os
import re
import time
from itertools import islice
from typing import Dict, List, NamedTuple, Optional

from relaunch.agent.protocol import Fields, Json

MAX_ENTRIES = 10_000
"""Most entries of a folder that are looked at."""
MAX_EXAMINED = 50
"""Most checkpoints that are examined: those that were changed last."""
MAX_INCOMPLETE = 4
"""Most incomplete checkpoints in an answer."""
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
HF_FILES = ("trainer_state.json", "training_args.bin", "config.json", "optimizer.pt")


class Entry(NamedTuple):
    size: int
    """In bytes; of a folder not 0."""
    changed: float
    """Unix time."""
    is_folder: bool


class Found(NamedTuple):
    name: str
    format: str
    """dcp, hf, accelerate, megatron, or torch for a file of torch.save, as Lightning writes it."""
    changed: float
    incomplete: str
    """What is missing; empty: nothing."""


def read_checkpoints(order: Fields) -> Json:
    """Return the newest complete checkpoint of a folder, and incomplete ones that are newer."""
    folder = order.text("directory")
    if order.get("workdir", "a folder or null", None) is not None:
        folder = os.path.join(order.text("workdir"), folder)
    answer: Json = {"outcome": "done", "newest": None, "incomplete": [], "unreadable": None}
    try:
        found = find_checkpoints(folder)
    except OSError as error:
        return {**answer, "unreadable": f"{error.strerror}"}
    complete = [one for one in found if not one.incomplete]
    newest = complete[0] if complete else None
    torn = [one for one in found if one.incomplete and _is_newer(one, newest)]
    now = time.time()
    return {
        **answer,
        "newest": None if newest is None else _serialize(newest, now),
        "incomplete": [_serialize(one, now) for one in torn[:MAX_INCOMPLETE]],
    }


def _is_newer(found: Found, other: Optional[Found]) -> bool:
    if other is None or found.changed >= other.changed:
        return True
    own, others = _parse_step(found.name), _parse_step(other.name)
    return own is not None and others is not None and own > others


def _parse_step(name: str) -> Optional[int]:
    match = STEP.search(name)
    step = next(filter(None, match.groups()), None) if match is not None else None
    return None if step is None else int(step[:15])


def _serialize(found: Found, now: float) -> Json:
    return {
        "name": found.name[:MAX_NAME],
        "format": found.format,
        "step": _parse_step(found.name),
        "age": round(min(MAX_AGE_S, max(0.0, now - found.changed)), 1),
        "incomplete": found.incomplete,
    }


def find_checkpoints(folder: str) -> List[Found]:
    """Return the checkpoints in a folder, the newest first, or the one that it is.

    Raises:
        OSError: The folder cannot be read.
    """
    entries = _list(folder)
    own = _examine_folder(os.path.basename(folder), entries, 0.0)
    if own is not None and own.format == "dcp":
        return [own._replace(name=".")]
    tracked = _read_tracker(folder) if TRACKER in entries else None
    found = []
    newest = sorted(entries, key=lambda name: -entries[name].changed)[:MAX_EXAMINED]
    for name in newest:
        path, entry = os.path.join(folder, name), entries[name]
        try:
            one = (
                _examine_folder(name, _list(path), entry.changed)
                if entry.is_folder
                else _examine_file(path, name, entry)
            )
        except OSError:  # it is being removed, as old ones are
            continue
        if one is not None:
            found.append(one if tracked is None else _apply_tracker(one, tracked))
    found.sort(key=lambda one: -one.changed)
    name = f"iter_{tracked or 0:07d}"
    if tracked is not None and name not in entries:
        changed = entries[TRACKER].changed
        found.insert(0, Found(name, "megatron", changed, f"{TRACKER} names it, but it is missing"))
    return found


def _list(folder: str) -> Dict[str, Entry]:
    entries = {}
    with os.scandir(folder) as scan:
        for entry in islice(scan, MAX_ENTRIES):
            try:
                status = entry.stat()
            except OSError:  # it was removed, or is a link to nothing
                continue
            is_folder = entry.is_dir()
            size = max(1, status.st_size) if is_folder else status.st_size
            entries[entry.name] = Entry(size, status.st_mtime, is_folder)
    return entries


def _examine_folder(name: str, entries: Dict[str, Entry], created: float) -> Optional[Found]:
    """Return the checkpoint that a folder is; None: it is not one of a known kind."""
    changed = max((entry.changed for entry in entries.values()), default=created)
    shards = [each for each in entries if each.endswith(".distcp")]
    if ".metadata" in entries or shards:
        missing = _find_missing(entries, ".metadata")
        return Found(name, "dcp", changed, missing or ("" if shards else "no .distcp files"))
    if re.fullmatch(r"iter_\d{7,}", name):
        has_model = any(each.startswith("mp_rank_") for each in entries)
        missing = "" if has_model or "metadata.json" in entries else "no model weights"
        return Found(name, "megatron", changed, missing)
    if re.fullmatch(r"checkpoint[-_]\d+", name):
        if not entries:
            return Found(name, "hf" if "-" in name else "accelerate", changed, "it is empty")
        weights = [each for each in entries if WEIGHTS.match(each)]
        missing = "" if weights else "no model weights"
        missing = missing or next((f"{w} is empty" for w in weights if not entries[w].size), "")
        if any(each in entries for each in HF_FILES):
            missing = missing or _find_missing(entries, "trainer_state.json")
            return Found(name, "hf", changed, missing)
        if "random_states_0.pkl" in entries or weights:
            missing = missing or _find_missing(entries, "random_states_0.pkl")
            return Found(name, "accelerate", changed, missing)
    return None


def _find_missing(entries: Dict[str, Entry], last: str) -> str:
    """Return what is wrong with the file that is written last; empty: nothing."""
    if last not in entries:
        return f"no {last}"
    return "" if entries[last].size else f"{last} is empty"


def _examine_file(path: str, name: str, entry: Entry) -> Optional[Found]:
    """Return the checkpoint that a file of torch.save is: a zip file, whose end comes last."""
    if os.path.splitext(name)[1] not in (".ckpt", ".pt", ".pth"):
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
    return Found(name, "torch", entry.changed, incomplete)


def _read_tracker(folder: str) -> Optional[int]:
    with open(os.path.join(folder, TRACKER), "rb") as file:
        text = file.read(64).strip()
    return int(text) if text.isdigit() else None  # `release`: converted weights


def _apply_tracker(found: Found, tracked: int) -> Found:
    """Return a checkpoint of Megatron-LM as torn if it is newer than what the tracker names."""
    match = re.fullmatch(r"iter_(\d+)", found.name)
    if match is None or int(match[1]) <= tracked or found.incomplete:
        return found
    return found._replace(incomplete=f"{TRACKER} still names iteration {tracked}")
