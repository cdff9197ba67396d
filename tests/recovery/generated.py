"""What hypothesis draws for the properties: policies that people may write, streams of moves."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import Phase as Search
from hypothesis import strategies as st

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.spec.policy import Policy, Rung, Strategy, preset, preset_names
from tests.recovery.streams import PAUSES, Choice, Move

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
"""Minutes instead of seconds: `HYPOTHESIS_PROFILE=deep pytest tests/recovery --timeout 3600`."""
PRESETS = tuple(preset(name) for name in preset_names())
STEPS = 200 if DEEP else 45
NUMBER = st.integers(0, 2**16)
OFTEN = ("answer", "answer", "answer", "watch", "watch", "watch")


def searched(examples: int) -> settings:
    """The same examples each time, or 200 times as many others with `DEEP`."""
    return settings(
        max_examples=50 * examples if DEEP else examples // 4,
        derandomize=not DEEP,
        database=None,
        deadline=None,
        phases=(Search.explicit, Search.generate, Search.shrink),
        suppress_health_check=list(HealthCheck),
    )


def written(number: int) -> Policy:
    """Return a policy that a person may have written: one number, one policy."""
    choice = Choice(number)
    rows: tuple[dict[str, Any], ...] = (
        {},
        {"window": "1h"},
        {"window": "1d"},
        {"consecutive": True},
    )
    # A row that is restarted by the very faults it counts never ends:
    # NODE_LOST has another ladder.
    ladders = {
        Cause.UNKNOWN: _ladder(
            choice, (*rows, {"consecutive": True, "reset_by": ["NODE_LOST", "PROGRESS"]})
        )
    }
    ladders[Cause.NODE_LOST] = _ladder(choice, rows)
    for cause in (Cause.GPU_RESET, Cause.APPLICATION, Cause.HANG):
        if choice.once_in(2):
            ladders[cause] = _ladder(choice, rows)
    return Policy(
        max_restarts=choice.among((8, 3, 0)),
        renewal=choice.among(("progress", "never")),
        exhaust_restarts=choice.once_in(3),
        no_progress_stop=choice.among((3, 1, "off")),
        startup_stop=choice.among(("off", 3, 2)),
        bad_checkpoint_ask=choice.among(("off", 2)),
        grow_after=choice.among((timedelta(minutes=30), timedelta(0), "off")),
        strict_lease=choice.once_in(6),
        causes=ladders,
    )


def _ladder(choice: Choice, rows: tuple[dict[str, Any], ...]) -> tuple[Rung, ...]:
    rungs: dict[str, Rung] = {}
    for _ in range(choice.among((1, 2, 3))):
        strategy = choice.among(
            [one for one in Strategy if not one.ends and one is not Strategy.GROW]
        )
        rung = Rung(
            strategy=strategy,
            tries=choice.among((1, 2, 3)),
            key=choice.among(
                (("cause",), ("job",), ("node",), ("cause", "node"), ("node", "gpu", "code"))
            ),
            when=choice.among(((), (), (Verdict.UNHEALTHY,), (Verdict.HEALTHY, Verdict.UNKNOWN))),
            codes=choice.among(((), (), ("exit 1",))),
            isolate=strategy in (Strategy.REPLACE_NODE, Strategy.RESCHEDULE_JOB, Strategy.SHRINK)
            and choice.once_in(2),
            spends=choice.once_in(2) and strategy is not Strategy.SHRINK,
            **choice.among(rows),
        )
        rungs.setdefault(rung.label, rung)
    last = Rung(strategy=choice.among((Strategy.FAIL, Strategy.ASK, Strategy.RESCHEDULE_JOB)))
    rungs.pop(last.label, None)
    return (*rungs.values(), last)


policies = st.sampled_from(PRESETS) | NUMBER.map(written)


def moves(*kinds: Any, pauses: tuple[timedelta, ...] = PAUSES) -> st.SearchStrategy[list[Move]]:
    return st.lists(
        st.builds(Move, st.sampled_from(kinds), NUMBER, st.sampled_from(pauses)),
        min_size=STEPS // 2,
        max_size=STEPS,
    )


likely = moves(*OFTEN, *OFTEN, "people", "again")
"""What a cluster and people do."""
anything = moves(*OFTEN, "people", "again", "late", "wild")
"""And what should never happen."""
