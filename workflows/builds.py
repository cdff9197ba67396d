"""Which build of relaunch works for a workflow.

A workflow is pinned to the build that it began on. It moves to a newer one by continuing as new,
where its state is all that the new code has to understand, and no history of the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from temporalio import workflow
from temporalio.workflow import ContinueAsNewVersioningBehavior, Info


def is_build_outdated(info: Info) -> bool:
    """Return whether another build is to work for the workflow than the one that does.

    The server tells it with each workflow task, so an idle workflow learns it with the next
    message: `relaunch upgrade` sends one.
    """
    return info.is_target_worker_deployment_version_changed()


def continue_as_new(input: Any, memo: Mapping[str, object] | None = None) -> NoReturn:
    """Continue the workflow as new, on the build that is to work for it.

    Without `memo`, the next run has the one that the first run was started with: what was upserted
    is not carried over, as search attributes are.
    """
    behavior = (
        ContinueAsNewVersioningBehavior.AUTO_UPGRADE if is_build_outdated(workflow.info()) else None
    )
    workflow.continue_as_new(input, memo=memo, initial_versioning_behavior=behavior)
