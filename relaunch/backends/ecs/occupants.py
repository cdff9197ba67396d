"""Classifies the ECS tasks on a container instance: ranks, an examination, or other tasks.

This module makes no calls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from relaunch.backends.ecs.tasks import LONGEST_STARTED_BY, Task, token_of

NODE_TASK = "relaunch-node/"
SERVICES = "ecs-svc/"
"""Prefix of `startedBy` of tasks that the ECS service scheduler starts and restarts, for instance
monitoring agents. They come and go with the machine and do not count as occupants.
"""


@dataclass(frozen=True, slots=True)
class Occupants:
    jobs: tuple[dict[str, Any], ...]
    """Jobs with ranks there and tasks of other owners, in the format of a probe's answer."""
    held: dict[str, Any] | None
    """The examination under way, in the format of a probe's answer."""


def occupants(tasks: Iterable[Task]) -> Occupants:
    jobs: dict[str, dict[str, Any]] = {}
    held = None
    for task in tasks:
        token = token_of(task.started_by)
        kind, id = examination(task)
        if kind == "diagnose":
            held = {"by": "diagnose", "id": id}
        elif kind or task.started_by.startswith(SERVICES):
            continue
        elif token is not None:
            named = {"namespace": token.namespace, "job": token.job}
            jobs[task.started_by] = {
                **named,
                "submission": token.submission,
                "generation": token.generation,
            }
        else:
            by = f" of {task.started_by}" if task.started_by else ""
            jobs[task.arn] = {"namespace": "", "job": f"ECS task {task.short}{by}"}
    return Occupants(tuple(jobs.values()), held)


def names(held_or_job: dict[str, Any]) -> str:
    """Return the name of an occupant for the reason of a refusal."""
    if "by" in held_or_job:
        return f"{held_or_job['by']} of {held_or_job['id']}"
    generation = held_or_job.get("generation")
    return f"job {held_or_job['job']}" + (
        f" generation {generation}" if generation is not None else ""
    )


def node_task(kind: str, id: str = "") -> str:
    """Return the `startedBy` of an examination task.

    It contains the id if that fits and can be written there, and a hash of the id otherwise.
    """
    name = f"{NODE_TASK}{kind}" + (f"/{id.replace('_', '__').replace('.', '_d')}" if id else "")
    if len(name) <= LONGEST_STARTED_BY and re.fullmatch(r"[A-Za-z0-9/_-]+", name):
        return name
    return f"{NODE_TASK}{kind}/_{hashlib.sha256(id.encode()).hexdigest()[:32]}"


def examination(task: Task) -> tuple[str, str]:
    """Return the kind and id of an examination task; both empty if the task is none."""
    if not task.started_by.startswith(NODE_TASK):
        return "", ""
    kind, _, id = task.started_by.removeprefix(NODE_TASK).partition("/")
    return kind, re.sub(r"__|_d", lambda found: "_" if found[0] == "__" else ".", id)
