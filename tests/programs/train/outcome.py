"""What a training ended with, to be compared bit for bit: the file `outcome.json`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path


def write(arrays: Iterable[bytes], loss: float) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array)
    found = {"loss": float(loss).hex(), "parameters": digest.hexdigest()}
    Path("outcome.json").write_text(json.dumps(found))


def write_model(model, loss: float) -> None:  # type: ignore[no-untyped-def]
    """Write the outcome of a torch module."""
    state = model.state_dict()
    write((state[name].detach().cpu().numpy().tobytes() for name in sorted(state)), loss)
