"""Decode the text of Xids 144 to 150 by NVIDIA's table.

A text that is cut off, or that no rule matches, is reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from relaunch.evidence.catalog.rows import NvlinkRule
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Role

XIDS = range(144, 151)

_TEXT = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]*)\b.*?"
    r"\((?P<info>0x[0-9a-fA-F]{1,8})[ ,]+(?P<status>0x[0-9a-fA-F]{1,8})[ ,)]"
)

_GRAVITY = {"RESET_GPU": 2, "XID_154_EVAL": 1, "IGNORE": 0}


def decode(xid: int, text: str, rules: Iterable[NvlinkRule]) -> NvlinkRule | str:
    """Return the rule that matches, or a clause that says why none does."""
    words = _TEXT.match(text)
    if words is None:
        return "not decoded: the line is cut off"
    unit, info, status = words["unit"], int(words["info"], 16), int(words["status"], 16)
    fits = [
        rule
        for rule in rules
        if rule.xid == xid and _matches(rule, info) and unit in rule.unit.split("/")
    ]
    for rule in fits:
        if int(rule.error_status, 16) == status:
            return rule
    # The table has one row for each bit of the status, and several bits may be set. For Xid 149 the
    # status is an event number instead.
    among = [rule for rule in fits if xid != 149 and status & int(rule.error_status, 16)]
    if among:
        return max(among, key=lambda rule: _GRAVITY[rule.resolution])
    return f"not decoded: NVIDIA's table has no row for {unit} {words['info']} {words['status']}"


def interpret_rule(rule: NvlinkRule) -> tuple[Role, Cause | None]:
    match rule.resolution:
        case "RESET_GPU":
            return Role.ROOT, Cause.GPU_RESET
        case "XID_154_EVAL":
            # The program is killed (Xid 45). What the GPU needs is in an Xid 154, which is printed
            # only when it needs something.
            return Role.ROOT, Cause.GPU_TRANSIENT
        case _:
            return (
                Role.INFORMATION if rule.severity.startswith("Non-fatal") else Role.SYMPTOM
            ), None


def _matches(rule: NvlinkRule, info: int) -> bool:
    mask, bits = _split_pattern(rule.pattern_v1)
    mask2, bits2 = _split_pattern(rule.pattern_v2)
    return info & mask == bits or info & mask2 == bits2


@cache
def _split_pattern(pattern: str) -> tuple[int, int]:
    """Return the mask of the bits that a pattern compares, and their required values."""
    return int("".join("0" if bit == "-" else "1" for bit in pattern), 2), int(
        pattern.replace("-", "0"), 2
    )
