"""Torch's flight recorder: set it up for the ranks of a generation.

Torch keeps a record of the collectives that a rank enters. Variables say how long it is and where
torch dumps it; a module that torch loads in the rank dumps it when the agent asks
(`flight_dumper`). This reads no record: `flight_records` does.
"""

from __future__ import annotations

import os
import pkgutil
from typing import Dict, Mapping

from relaunch.agent.state import Generation

BUFFER_SIZE = "2000"
"""Entries of the record, as torch's tutorial advises and as newer releases have by default. An
entry has 120 bytes in a dump. Source: docs.pytorch.org, flight_recorder_tutorial."""
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The new name and the old one, as below."""
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
ON_TIMEOUT_VARIABLES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
FOLDER_VARIABLE = "RELAUNCH_FLIGHT_FOLDER"
PYTHON_FOLDER = "python"
_MODULE = "relaunch_flight"
_METADATA = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_MODULE}\nVersion: 1\n",
    "entry_points.txt": f"[torch.backends]\n{_MODULE} = {_MODULE}:begin\n",
}

Environment = Mapping[str, str]


def make_environment(generation: Generation, given: Environment) -> Dict[str, str]:
    """Return the variables that turn the record on, without those that job or node have set.

    Two names of one setting count as one: torch prefers the new one, so that a new name set here
    would overrule an old one of the user's.
    """
    own: Dict[str, str] = {}
    if not any(name in given for name in SIZE_VARIABLES):
        own[SIZE_VARIABLES[0]] = BUFFER_SIZE
    if not any(name in given for name in FILE_VARIABLES):
        own.update(dict.fromkeys(FILE_VARIABLES, str(generation.flight_folder / "rank_")))
    if not any(name in given for name in ON_TIMEOUT_VARIABLES):
        own[ON_TIMEOUT_VARIABLES[1]] = "1"
    size = next((given[name] for name in SIZE_VARIABLES if name in given), BUFFER_SIZE)
    python = generation.flight_folder / PYTHON_FOLDER
    if size.isdigit() and int(size) > 0 and (python / f"{_MODULE}.py").exists():
        own[FOLDER_VARIABLE] = str(generation.flight_folder)
        path = given.get("PYTHONPATH", "")
        own["PYTHONPATH"] = f"{path}{os.pathsep if path else ''}{python}"
    return own


def write_dumper(generation: Generation) -> None:
    """Write the module that torch loads in the ranks. Without it only NCCL's dumps are read."""
    source = pkgutil.get_data(__name__.rpartition(".")[0], "flight_dumper.py")
    assert source is not None
    folder = generation.flight_folder / PYTHON_FOLDER
    try:
        generation.flight_folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{_MODULE}-1.dist-info").mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in _METADATA.items():
            (folder / f"{_MODULE}-1.dist-info" / name).write_text(text)
        (folder / f"{_MODULE}.py").write_bytes(source)  # last: it says that the rest is there
    except OSError:  # a full disk: what ranks need is refused elsewhere, and this they do not need
        return
