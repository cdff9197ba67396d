"""One fault, seen in whatever order: the cause, its nodes and its code stay the same."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from relaunch.evidence.causes import Cause
from relaunch.evidence.observations import Observation
from relaunch.job.diagnose import diagnose
from relaunch.job.events import FaultObserved
from tests.recovery.builders import T0, error, exited, running
from tests.recovery.generated import searched
from tests.recovery.streams import ROOTS, Root, echo

SECOND = timedelta(seconds=1)


@searched(200)
@given(
    st.sampled_from(ROOTS),
    st.lists(st.integers(0, 3), max_size=6),
    st.permutations(range(7)),
    st.permutations(range(7)),
    st.sampled_from((0.0, 0.001, 5.0)),
)
def test_the_order_of_echoes_does_not_change_the_cause(
    root: Root, echoing: list[int], arrival: list[int], listed: list[int], apart: float
) -> None:
    def observe(order: list[int], listing: list[int]) -> FaultObserved:
        whole: list[Observation] = [root("n2", 0, T0 + order[6] * apart * SECOND)]
        whole += [
            echo(f"n{node}", index + 1, T0 + order[index] * apart * SECOND)
            for index, node in enumerate(echoing)
        ]
        return FaultObserved(
            1, tuple(whole[index] for index in listing if index < len(whole)), 0, T0
        )

    job = running()
    plain, other = (
        diagnose(job, observe(list(range(7)), list(range(7)))),
        diagnose(job, observe(arrival, listed)),
    )
    assert (plain.cause, set(plain.nodes), plain.code, plain.ranks) == (
        other.cause,
        set(other.nodes),
        other.code,
        other.ranks,
    )


@searched(100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.permutations(range(7)))
def test_echoes_alone_are_the_network_in_any_order(echoing: list[int], order: list[int]) -> None:
    whole = [echo(f"n{node}", index, T0) for index, node in enumerate(echoing)]
    shuffled = tuple(whole[index] for index in order if index < len(whole))
    diagnosis = diagnose(running(), FaultObserved(1, shuffled, 0, T0))
    assert (Cause.NETWORK, {f"n{node}" for node in echoing}) == (
        diagnosis.cause,
        set(diagnosis.nodes),
    )


MESSAGES = (
    "ValueError: bad batch",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "FloatingPointError: loss is nan",
)


@searched(300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(MESSAGES), st.sampled_from((0.0, 0.2, 0.4, 3.0))
        ),
        min_size=2,
        max_size=5,
    ),
    st.permutations(range(5)),
)
def test_s3_6_dated_errors_name_the_same_cause_in_any_order(
    errors: list[tuple[int, str, float]], order: list[int]
) -> None:
    def observe(arrival: list[int]) -> FaultObserved:
        now = T0.timestamp() - 10
        return FaultObserved(
            1,
            tuple(
                exited(
                    rank,
                    f"n{node}",
                    code=1,
                    error=error(message, now + when),
                    seconds=arrival[rank],
                )
                for rank, (node, message, when) in enumerate(errors)
            ),
            0,
            T0,
        )

    plain, other = diagnose(running(), observe(list(range(5)))), diagnose(running(), observe(order))
    assert (plain.cause, set(plain.nodes), plain.code) == (
        other.cause,
        set(other.nodes),
        other.code,
    )
