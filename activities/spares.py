"""Has the spares of a fleet import ahead for a job that runs, so that its ranks start warm there.

It decides nothing: what a node does for it holds no ranks, ends by itself when it is not asked
again, and gives way to everything else. A spare that does not answer or refuses is left as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from temporalio.exceptions import ApplicationError

from relaunch.activities.launch import list_redacted, make_environment
from relaunch.activities.reports import WarmSpares
from relaunch.backends.base import (
    Backend,
    BackendError,
    Fleets,
    ImportsAhead,
    Refusal,
    WarmNode,
    WarmOrder,
    identity,
)
from relaunch.generation import Token
from relaunch.job.ranks import find_defaults, rank_environments, ranks_of, tracker_environment
from relaunch.job.state import Slot
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.policy import Timeouts

log = logging.getLogger("relaunch.spares")

MAX_SPARES = 4
"""Most spares that import ahead for one job. Each needs the memory of the modules; a job that loses
more nodes at once waits for the others' imports."""
RENEWAL_INTERVAL_S = 30.0
"""Seconds between two orders to a spare. Other users of the spare are noticed as late as this."""
UNANSWERED_RENEWALS = 2
"""How many orders in a row a spare may miss before its Python ends."""


def keep_time(timeouts: Timeouts) -> float:
    """Return the seconds for which a spare imports ahead after the last order.

    The watch that orders it ends with a fault. Until the spare is launched on, ranks are stopped,
    or a lost node is waited for until it must have stopped its own.
    """
    wait = timeouts.lease + timeouts.fence_after + 2 * timeouts.stop_grace
    return UNANSWERED_RENEWALS * RENEWAL_INTERVAL_S + wait.total_seconds()


@dataclass(frozen=True, slots=True)
class SpareKeeper:
    """Keeps the spares of one job warm."""

    fleets: Fleets
    token: Token
    timeouts: Timeouts
    wanted: WarmSpares
    used: Collection[str]
    """The nodes of the job."""

    async def keep(self) -> None:
        """Order it again and again until cancelled; log what changes."""
        known: dict[str, str] = {}
        while True:
            try:
                answers = await self.order_once(prefer=known)
            except (ApplicationError, KeyError, OSError) as error:
                # The environment cannot be made, or the fleet file cannot be read. A launch says
                # so, and does something about it.
                log.info("job %s: no spare imports ahead: %s", self.token.job, error)
                answers = {}
            for node, text in answers.items():
                if known.get(node) != text:
                    log.info("job %s: spare %s: %s", self.token.job, node, text)
            known = {node: text for node, text in answers.items() if _is_accepted(text)}
            await asyncio.sleep(RENEWAL_INTERVAL_S)

    async def order_once(self, prefer: Collection[str] = ()) -> dict[str, str]:
        """Order it from as many spares as a job may have; return what each answered, in words.

        Args:
            prefer: Spares that import ahead already: they come first.

        Raises:
            ApplicationError: The environment of the ranks cannot be made.
            KeyError: There is no such fleet any more.
        """
        spec = self.wanted.spec
        fleet, backend = self.fleets.spec(spec.fleet), self.fleets.backend(spec.fleet)
        modules = fleet.warm if spec.warm is None else spec.warm
        if not modules or not isinstance(backend, ImportsAhead):
            return {}
        left = sorted(
            find_spares(fleet, spec.gpus_per_node, self.used), key=lambda n: n not in prefer
        )
        if not left:
            return {}
        make = self._prepare_orders(backend, modules)
        answers: dict[str, str] = {}
        while left and (missing := MAX_SPARES - sum(map(_is_accepted, answers.values()))) > 0:
            asked, left = left[:missing], left[missing:]
            found = await asyncio.gather(*(_order(backend, node, make(node)) for node in asked))
            answers.update(zip(asked, found, strict=True))
        return answers

    def _prepare_orders(
        self, backend: Backend, modules: tuple[str, ...]
    ) -> Callable[[str], WarmOrder]:
        """Return what makes the order to a node.

        The variables are those of the present generation. What the next one has otherwise (its
        number, the address of rank 0) makes a spare start cold only if an import has read it.
        """
        spec, wanted = self.wanted.spec, self.wanted
        environment, secrets = make_environment(
            self.token, spec, wanted.nodes, wanted.max_restarts, ("127.0.0.1", 0)
        )
        given = {*environment, *secrets}

        def make(node: str) -> WarmOrder:
            slot = Slot(node, "", 1, 1, wanted.gpus)
            return WarmOrder(
                token=self.token,
                fleet=identity(self.token.namespace, spec.fleet, backend.server),
                keep=keep_time(self.timeouts),
                command=spec.command,
                workdir=spec.workdir,
                env=environment,
                rank_env=tuple(
                    {**own, **tracker_environment(self.token, backend.server, rank, given)}
                    for rank, own in zip(
                        ranks_of(0, spec), rank_environments(0, slot, spec), strict=True
                    )
                ),
                modules=modules,
                secrets=secrets,
                inherit_env=spec.inherit_env,
                env_defaults=find_defaults(spec, environment, secrets),
                redact=list_redacted(spec, self.fleets.spec(spec.fleet)),
            )

        return make


def find_spares(fleet: FleetSpec, gpus: int, used: Collection[str]) -> list[str]:
    """Return the spares that a job could be given, as the fleet prefers them.

    Args:
        fleet: The fleet file.
        gpus: How many GPUs the job has on each node.
        used: The nodes that the job has.
    """
    spares = [
        node for node in fleet.nodes if node.spare and node.gpus >= gpus and node.name not in used
    ]
    return [node.name for node in sorted(spares, key=lambda node: node.gpus)]


async def _order(backend: ImportsAhead, node: str, order: WarmOrder) -> str:
    try:
        answer = await backend.warm(node, order)
    except BackendError as error:
        return f"not warm, it was not reached: {error}"
    if isinstance(answer, Refusal):
        return f"not warm: {answer.reason}"
    return describe_warm_node(answer)


def describe_warm_node(answer: WarmNode) -> str:
    return f"{answer.state}: {answer.reason}" if answer.reason else answer.state


def _is_accepted(text: str) -> bool:
    return text in ("waiting", "importing", "ready")
