"""Which spares import ahead for a job, and how a launch says what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from relaunch.activities.launch import FIRST_LAUNCH, _describe_warmth
from relaunch.activities.reports import WarmSpares
from relaunch.activities.spares import MAX_SPARES, SpareKeeper, find_spares, keep_time
from relaunch.backends.base import Refusal, StartedRanks, Unreachable, WarmNode, WarmOrder
from relaunch.generation import Token
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Timeouts


@dataclass
class Spares:
    """A double of nodes: it keeps the orders. Agents are tried in tests/agent and tests/e2e."""

    fleet: FleetSpec
    busy: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    orders: list[tuple[str, WarmOrder]] = field(default_factory=list)
    server: str = "s"

    def spec(self, fleet: str) -> FleetSpec:
        return self.fleet

    def backend(self, fleet: str) -> Any:
        return self

    async def warm(self, node: str, order: WarmOrder) -> WarmNode | Refusal:
        self.orders.append((node, order))
        if node in self.away:
            raise Unreachable(node, "no route to host")
        if node in self.busy:
            return Refusal(node, "busy", "job other generation 1 runs on this node")
        return WarmNode(node, "ready", "")


def make_fleet(count: int, **more: Any) -> FleetSpec:
    nodes = [{"name": f"n{i}", "address": f"10.0.0.{i}"} for i in (1, 2)]
    nodes += [
        {"name": f"s{i}", "address": f"10.0.1.{i}", "spare": True, "gpus": 8} for i in range(count)
    ]
    return FleetSpec.model_validate({"name": "lab", "backend": "local", "nodes": nodes, **more})


def make_keeper(spares: Spares, **spec: Any) -> SpareKeeper:
    given = {"name": "train", "command": ["python", "t.py"], "fleet": "lab", "warm": ["torch"]}
    wanted = WarmSpares(JobSpec.model_validate({**given, **spec}), 2, 8, (0, 1))
    token = Token("default", "train", 1, 3)
    return SpareKeeper(spares, token, Timeouts(), wanted, {"n1", "s0"})  # type: ignore[arg-type]


async def test_a_job_has_few_spares_import_and_passes_over_others() -> None:
    spares = Spares(make_fleet(9), busy=frozenset({"s1"}), away=frozenset({"s2"}))
    answers = await make_keeper(spares).order_once()
    assert [node for node, text in answers.items() if text == "ready"] == ["s3", "s4", "s5", "s6"]
    assert len(answers) == 2 + MAX_SPARES
    assert "no route to host" in answers["s2"]
    assert "job other" in answers["s1"]
    spares.orders.clear()
    await make_keeper(spares).order_once(prefer=["s5", "s6", "s7", "s8"])
    assert {node for node, _ in spares.orders} == {"s5", "s6", "s7", "s8"}


async def test_an_order_names_the_variables_to_redact() -> None:
    spares = Spares(make_fleet(1, redact=["FLEET_*"]))
    keeper = make_keeper(spares, redact=["OWN"])
    keeper.used.discard("s0")
    await keeper.order_once()
    assert [order.redact for _, order in spares.orders] == [("OWN", "FLEET_*")]


async def test_an_order_has_what_ranks_of_the_job_would_have() -> None:
    spares = Spares(make_fleet(2))
    await make_keeper(spares, env={"A": "1"}, nproc_per_node=2, workdir="/w").order_once()
    ((node, order),) = spares.orders
    assert (node, order.command, order.workdir) == ("s1", ("python", "t.py"), "/w")
    assert (order.modules, order.fleet) == (("torch",), "s/default/lab")
    assert order.env["A"] == "1"
    assert order.env["WORLD_SIZE"] == "4"
    assert [one["LOCAL_RANK"] for one in order.rank_env] == ["0", "1"]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in order.rank_env} == {"0,1"}
    assert {one["RELAUNCH_NODE"] for one in order.rank_env} == {"s1"}


@pytest.mark.parametrize(
    ("of_job", "of_fleet", "expected"),
    [
        (["torch"], [], ("torch",)),
        (None, ["numpy"], ("numpy",)),
        ([], ["numpy"], None),
        (None, [], None),
    ],
)
async def test_modules_are_the_jobs_or_the_fleets(
    of_job: list[str] | None, of_fleet: list[str], expected: tuple[str, ...] | None
) -> None:
    spares = Spares(make_fleet(2, warm=of_fleet))
    await make_keeper(spares, warm=of_job).order_once()
    assert [order.modules for _, order in spares.orders] == ([expected] if expected else [])


def test_a_spare_is_kept_until_a_lost_node_was_fenced() -> None:
    times = Timeouts(lease=timedelta(seconds=60), fence_after=timedelta(seconds=60))
    assert keep_time(times) == 60 + 120 + 30


def test_spares_are_those_with_enough_gpus() -> None:
    fleet = make_fleet(3)
    assert find_spares(fleet, 8, {"s1"}) == ["s0", "s2"]
    assert find_spares(fleet, 9, set()) == []


def test_a_launch_says_where_ranks_began_from_nothing() -> None:
    def describe(**cold: str | None) -> str:
        return _describe_warmth([StartedRanks(n, {}, False, why) for n, why in cold.items()])

    assert describe(n1=None, n2=None) == ""
    assert describe() == ""
    assert describe(n1="", n2="").startswith("its ranks were forked")
    assert describe(n1="", s1=None) == f"its ranks on s1 were started from nothing: {FIRST_LAUNCH}"
    assert "on n1 were" in describe(n1="its Python was not ready yet", n2="")
