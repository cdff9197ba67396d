"""The rules of a job's logic that 0.1.0 did not have.

The history of a running job may have decisions from before a rule: they are replayed without it.
Each rule has a patch of the workflow, recorded where it first made a difference.
"""

from __future__ import annotations

from enum import StrEnum

from relaunch.job.events import Event, LaunchRefused, NodeReturned, StepReached
from relaunch.job.state import JobState


class Rule(StrEnum):
    """Its value is the name of the patch, which is never changed."""

    NODE_REFUSES = "a-node-refuses"
    """A node that refuses what has run before, or what other nodes accept, is at fault itself."""
    LOST_DEADLINE = "keep-the-deadline-of-lost-nodes"
    """A person is still asked about lost nodes when one of them has come back."""


Rules = tuple[Rule, ...]
ALL_RULES: Rules = tuple(Rule)


def list_affected(job: JobState, event: Event) -> Rules:
    """Return the rules that may make a difference for an event, most often none."""
    match event:
        case LaunchRefused():
            return (Rule.NODE_REFUSES,)
        case NodeReturned() | StepReached() if job.lost:
            return (Rule.LOST_DEADLINE,)
        case _:
            return ()
