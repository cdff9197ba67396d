"""Replaces the values of variables in what a rank printed, before it leaves the node.

The values are in no file: of each there is a salted hash, its length and its first two bytes, in
the record of the launch. So a log can be read long after all processes that knew them have ended.
A log itself is not changed: it belongs to the rank, which has it open.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from fnmatch import fnmatchcase
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from relaunch.agent.protocol import Json
from relaunch.agent.state import Generation

MIN_CHARS = 8
"""A shorter value stays: it would be found in words and numbers that mean something else."""
HEAD_BYTES = 2
OWN_VARIABLES = ("RELAUNCH_", "TORCHELASTIC_")
"""The agent sets these itself, and they are in names of folders and in messages anyway."""
UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")

URL_SAFE = bytes.maketrans(b"+/", b"-_")


class Match(NamedTuple):
    begin: int
    end: int
    name: str


class _Value(NamedTuple):
    name: str
    length: int
    """In bytes."""
    digest: str


def make_record(environments: Iterable[Mapping[str, str]], names: Sequence[str]) -> Optional[Json]:
    """Return what `Redactor` needs to find the values of variables, as JSON; None: there are none.

    Args:
        environments: Those of the ranks.
        names: Which variables; `*` stands for any characters.
    """
    values: Dict[bytes, str] = {}
    for environment in environments if names else ():
        for name, value in environment.items():
            if not name.startswith(OWN_VARIABLES) and any(fnmatchcase(name, one) for one in names):
                for form in _list_forms(value):
                    values.setdefault(form, name)
    if not values:
        return None
    salt = os.urandom(16)
    rows = [
        [name, form[:HEAD_BYTES].hex(), len(form), _hash(salt, form)]
        for form, name in values.items()
    ]
    return {"salt": salt.hex(), "values": rows}


def _list_forms(value: str) -> List[bytes]:
    """Return how a value may be printed: its lines as they are, in JSON, in an address, and in
    base64."""
    forms = []
    for part in value.splitlines():
        text = part.strip()
        if len(text) >= MIN_CHARS:
            raw = text.encode(errors="surrogateescape")
            quoted = "".join(chr(b) if b in UNRESERVED else f"%{b:02X}" for b in raw)
            forms += [raw, json.dumps(text)[1:-1].encode(), quoted.encode()]
            forms += _list_base64(raw)
    return forms


def _list_base64(raw: bytes) -> List[bytes]:
    """Return what is of the value alone in its base64, wherever it is in what was encoded.

    Three bytes are four characters, so there are three ways, as in the header of basic
    authentication after a name of any length. A character that has bits of a neighbour, too, stays.
    """
    forms = []
    for before in range(3):
        coded = base64.b64encode(bytes(before) + raw)
        begin, end = -(-before * 8 // 6), (before + len(raw)) * 8 // 6
        forms.append(coded[begin:end])
        forms.append(forms[-1].translate(URL_SAFE))
    return forms


def _hash(salt: bytes, data: bytes) -> str:
    return hashlib.sha256(salt + data).hexdigest()


class Redactor:
    """Finds and replaces the values that `make_record` has recorded."""

    def __init__(self, record: Optional[Json] = None) -> None:
        self._salt = bytes.fromhex(record["salt"]) if record else b""
        self._by_head: Dict[bytes, List[_Value]] = {}
        for name, head, length, digest in record["values"] if record else ():
            value = _Value(name, length, digest)
            self._by_head.setdefault(bytes.fromhex(head), []).append(value)
        for values in self._by_head.values():
            values.sort(key=lambda one: -one.length)  # a value may be the begin of another
        self._heads = re.compile(b"|".join(re.escape(head) for head in sorted(self._by_head)))
        self.longest = max(
            (one.length for values in self._by_head.values() for one in values), default=0
        )
        """Bytes of the longest value; 0: nothing is replaced."""

    @classmethod
    def read(cls, generation: Generation) -> Redactor:
        """Return the redactor of a generation, by the record of its launch."""
        return cls((generation.launch or {}).get("redact"))

    def find(self, data: bytes) -> List[Match]:
        """Return where values are, in order and apart."""
        found: List[Match] = []
        at = 0
        while self.longest:
            head = self._heads.search(data, at)
            if head is None:
                break
            at = head.start()
            length, name = self._compare(data, at, head.group())
            if length:
                found.append(Match(at, at + length, name))
            at += length or 1
        return found

    def _compare(self, data: bytes, at: int, head: bytes) -> "tuple[int, str]":
        for name, length, digest in self._by_head[head]:
            if at + length <= len(data) and _hash(self._salt, data[at : at + length]) == digest:
                return length, name
        return 0, ""

    def find_unfinished(self, data: bytes, begin: int) -> int:
        """Return where, from `begin` on, a value may begin whose end is not there yet; the length
        of the data without one."""
        at = max(begin, len(data) - self.longest + 1)
        while self.longest:
            head = self._heads.search(data, at)
            if head is None:
                break
            at = head.start()
            if any(at + one.length > len(data) for one in self._by_head[head.group()]):
                return at
            at += 1
        return len(data)

    def replace(self, data: bytes, matches: Sequence[Match], begin: int, end: int) -> bytes:
        """Return a part of the data with the matches replaced; a match may begin before it."""
        parts = []
        for match in matches:
            if match.begin < end and match.end > begin:
                parts += [
                    data[begin : max(begin, match.begin)],
                    f"[redacted {match.name}]".encode(),
                ]
                begin = match.end
        return b"".join([*parts, data[begin:end]])

    def redact_bytes(self, data: bytes) -> bytes:
        return self.replace(data, self.find(data), 0, len(data)) if self.longest else data

    def redact(self, value: Any) -> Any:
        """Return a value of JSON with all its texts redacted."""
        if not self.longest:
            return value
        if isinstance(value, str):
            data = value.encode(errors="surrogatepass")
            matches = self.find(data)
            if not matches:
                return value
            return self.replace(data, matches, 0, len(data)).decode(errors="surrogatepass")
        if isinstance(value, dict):
            return {self.redact(key): self.redact(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.redact(inner) for inner in value]
        return value
