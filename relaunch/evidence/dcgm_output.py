"""Find the JSON documents of `dcgmi diag -j` in its output.

Other lines may come before or between, and the end may be missing; a readable prefix is read, and
reported as incomplete. `dcgm` interprets the documents.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_ROOT_3, _ROOT_4 = "DCGM GPU Diagnostic", "DCGM Diagnostic"
_ROOT = re.compile(rf'"(?:{_ROOT_3}|{_ROOT_4}|iterations)"\s*:')
_MAX_STARTS = 64  # braces in other lines before the document; each costs one attempt


@dataclass(frozen=True, slots=True)
class DiagDocument:
    """One JSON document, the result of one iteration."""

    body: dict[str, Any]
    """The value of the root key: categories of tests, or a runtime error."""
    is_4: bool
    version: str
    gpus: frozenset[str]
    """Indices of the GPUs for which it was run; empty where it does not list them."""


def read_output(stdout: str) -> tuple[tuple[DiagDocument, ...], bool]:
    """Return the documents of an output, one for each iteration, and whether they are complete."""
    found, whole = _find(stdout)
    if found is None:
        return (), False
    runs = found.get("iterations", [found])
    documents = [_read_document(run) for run in runs] if isinstance(runs, list) else []
    readable = tuple(document for document in documents if document is not None)
    return readable, whole and len(readable) == len(documents)


def _read_document(run: object) -> DiagDocument | None:
    if not isinstance(run, dict):
        return None
    is_4 = _ROOT_4 in run
    body = run.get(_ROOT_4 if is_4 else _ROOT_3)
    if not isinstance(body, dict):
        return None
    metadata = run.get("metadata")
    holders = (
        metadata if isinstance(metadata, dict) else {},
        run,
        body,
    )  # version 4, version 3, a runtime error
    versions = [holder["version"] for holder in holders if isinstance(holder.get("version"), str)]
    return DiagDocument(
        body,
        is_4,
        versions[0].encode("utf-8", "replace").decode()[:40] if versions else "",
        _list_gpus(run),
    )


def _list_gpus(run: dict[str, Any]) -> frozenset[str]:
    serials = run.get("GPU Device Serials")
    found = (
        [key for key in serials if re.fullmatch(r"[0-9]{1,9}", key)]
        if isinstance(serials, dict)
        else []
    )
    groups = run.get("entity_groups")
    for group in groups if isinstance(groups, list) else []:
        if (
            isinstance(group, dict)
            and group.get("entity_group") == "GPU"
            and isinstance(group.get("entities"), list)
        ):
            numbers = [
                entity.get("entity_id") for entity in group["entities"] if isinstance(entity, dict)
            ]
            found += [
                str(number) for number in numbers if type(number) is int and 0 <= number < 10**9
            ]
    return frozenset(found)


def _find(stdout: str) -> tuple[dict[str, Any] | None, bool]:
    root = _ROOT.search(stdout)
    if root is None:
        return None, False
    starts = [match.start() for match in re.finditer("{", stdout[: root.start()])][-_MAX_STARTS:]
    broken = []
    for start in starts:
        try:
            found, _ = json.JSONDecoder().raw_decode(stdout, start)
        except json.JSONDecodeError as error:
            broken.append((start, error.pos))
        except (
            ValueError,
            RecursionError,
        ):  # a number of thousands of digits; brackets thousands deep
            continue
        else:
            if _is_ours(found):
                return found, True
    for start, end in broken:
        closed = _close_brackets(stdout[start:end])
        try:
            found = json.loads(closed)
        except (ValueError, RecursionError):
            continue
        if _is_ours(found):
            return found, False
    return None, False


def _is_ours(found: object) -> bool:
    return isinstance(found, dict) and any(key in found for key in (_ROOT_3, _ROOT_4, "iterations"))


def _close_brackets(text: str) -> str:
    """Return the longest prefix that ends after a whole value, with all open brackets closed."""
    stack: list[str] = []
    cut = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{},]', text, re.DOTALL):
        character = token[0]
        if character in "{[":
            stack.append("}" if character == "{" else "]")
        elif character in "}]" and stack:
            stack.pop()
        if character in "{[}]":
            cut = token.end()
        elif character == ",":
            cut = token.start()
    return text[:cut] + "".join(reversed(stack))
