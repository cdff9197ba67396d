"""The advice for DCGM's error ids and `dcgmi diag`'s exit codes.

The rows are in the two data files beside this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


class Advice(StrEnum):
    """The action that an examination of a node's GPUs calls for."""

    HEALTHY = "healthy"
    CONFIG_ERROR = "config_error"
    """The host is misconfigured; nothing is known about the state of its hardware."""
    RESET = "reset"
    ISOLATE = "isolate"
    """No work should run there until a reboot or a field diagnostic gives more information."""
    RMA = "rma"
    """The hardware must be replaced."""
    INCONCLUSIVE = "inconclusive"
    RETRY = "retry"
    """Nothing was measured, for a transient reason."""


@dataclass(frozen=True, slots=True)
class DcgmErrorRow:
    id: int
    name: str
    severity: str
    """NVIDIA's severity in the version that the data file names."""
    category: str
    advice: Advice
    note: str
    """Where sources or versions disagree: what each says, and which one relaunch follows."""
    meaning: str = ""
    """A clause for people, where the name is not clear enough."""
    old_severity: str = ""
    """NVIDIA's severity before it changed; empty where it never did."""

    @property
    def title(self) -> str:
        """The name as text for people: `NVLink effective BER threshold`."""
        return " ".join(
            word if word in _CAPITALS else _SPELLING.get(word, word.lower())
            for word in self.name.split("_")
        )


@dataclass(frozen=True, slots=True)
class DcgmExitRow:
    exit: int
    name: str
    advice: Advice
    meaning: str


_SPELLING = {
    "NVLINK": "NVLink",
    "NVLINKS": "NVLinks",
    "NVSWITCH": "NVSwitch",
    "PCIE": "PCIe",
    "XID": "Xid",
    "SXID": "SXid",
}
_CAPITALS = frozenset(
    [
        "API",
        "BER",
        "CRC",
        "CUDA",
        "DBE",
        "DCGM",
        "ECC",
        "EUD",
        "GFLOPS",
        "GPU",
        "GPUS",
        "IMEX",
        "L1TAG",
        "NCCL",
        "NVML",
        "P2P",
        "PCI",
        "SBE",
        "SRAM",
    ]
)


def _load_rows(file: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((_FOLDER / file).read_text(encoding="utf-8"))["rows"]
    return rows


@cache
def load_dcgm_errors() -> dict[int, DcgmErrorRow]:
    return {
        row["id"]: DcgmErrorRow(**(row | {"advice": Advice(row["advice"])}))
        for row in _load_rows("dcgm_errors.json")
    }


@cache
def load_dcgm_exits() -> dict[int, DcgmExitRow]:
    """Return the rows by exit code, which is DCGM's return value modulo 256."""
    return {
        row["exit"]: DcgmExitRow(row["exit"], row["name"], Advice(row["advice"]), row["meaning"])
        for row in _load_rows("dcgm_exits.json")
    }
