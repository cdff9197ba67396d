"""Patches for what happens more than once in a run."""

from __future__ import annotations

from temporalio import workflow


class RepeatedPatch:
    """Tells each time that something happens in a run whether this release decides about it.

    The SDK keeps for the whole run what it answered first for a patch. With one for all times, a
    workflow that was taken over in its run would do later ones, too, as an older release did: what
    that one has done is replayed, and has no patch. So there is another patch after each of those.
    """

    def __init__(self, patch: str) -> None:
        """Initialize.

        Args:
            patch: The id that marks where this release first decides; a number is added to it for
                each time before that one.
        """
        self._patch = patch
        self._older = 0
        """How often an older release has decided."""
        self._is_reached = False

    def is_reached(self) -> bool:
        """Return whether this release decides about what happens now. It is asked once for each
        time, not in a query."""
        if not self._is_reached:
            number = f"-{self._older}" if self._older else ""
            self._is_reached = workflow.patched(self._patch + number)
            self._older += not self._is_reached
        return self._is_reached
