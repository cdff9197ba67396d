"""Names and prefixes by which workflows and task queues are found on the server."""

from __future__ import annotations

TASK_QUEUE = "relaunch"
WORKFLOW_ID_PREFIX = "job/"
FLEET_ID_PREFIX = "fleet/"
REPAIR_ID_PREFIX = "repair/"
"""Followed by fleet/node: two repairs of one node have the same id, and the server accepts only
one."""
NOTIFIER_ID_PREFIX = "notifier/"
"""Followed by the name of the fleet whose people it notifies."""
FLEET_PRIORITY = 1
"""Temporal's priority key of a fleet's tasks: before those of jobs (3), which all wait for their
fleet."""
