"""Assign ranks to nodes and build the ranks' environment.

The environment has TorchElastic's names, ModelArts' counters, and relaunch's own variables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from relaunch.generation import Token
from relaunch.job.state import Slot
from relaunch.pool.messages import Place
from relaunch.spec.job import JobSpec


def ranks_of(group_rank: int, spec: JobSpec) -> tuple[int, ...]:
    """Return the global ranks on a node; the index is the local rank."""
    first = group_rank * spec.ranks_per_node
    return tuple(range(first, first + spec.ranks_per_node))


def processes_of(group_rank: int, spec: JobSpec) -> tuple[int, ...]:
    """Return the numbers of the processes that relaunch starts on a node.

    These are its ranks, or their launcher, which is numbered after all ranks.
    """
    return (
        ranks_of(group_rank, spec) if spec.launcher == "none" else (spec.world_size + group_rank,)
    )


DEFAULTS = {"OMP_NUM_THREADS": "1"}
"""Variables of several ranks on a node that neither the job nor the node sets.

As torchrun does: many ranks that each use all cores are slower than one.
"""


def find_defaults(
    spec: JobSpec, environment: Collection[str], secrets: Collection[str]
) -> tuple[str, ...]:
    """Return which variables of an environment the job does not set itself.

    Args:
        spec: The job.
        environment: The names of what `common_environment` returned, without those of `secrets`.
        secrets: The names of what the job sets in files.
    """
    return tuple(
        name
        for name in DEFAULTS
        if name in environment and name not in spec.env and name not in secrets
    )


def common_environment(
    token: Token,
    spec: JobSpec,
    nodes: int,
    max_restarts: int,
    master_address: str,
    master_port: int,
) -> dict[str, str]:
    """Return the environment that all ranks of a generation share.

    Sources: torch.distributed.elastic (torch 2.11), agent/server/local_elastic_agent.py.
    """
    ours = {"RELAUNCH_JOB": token.job, "RELAUNCH_GENERATION": str(token.generation)}
    if spec.flight_record:
        ours["RELAUNCH_FLIGHT_RECORD"] = "1"
    if spec.launcher != "none":
        return {**spec.env, **ours}  # the launcher sets the rest, from its flags
    world_size = str(nodes * spec.ranks_per_node)
    environment = {
        **spec.env,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        **restart_counts(token, max_restarts),
        "TORCHELASTIC_RUN_ID": f"{token.job}-{token.submission}",
        # There is no agent store: rank 0 creates its own at MASTER_ADDR:MASTER_PORT.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **ours,
    }
    if spec.ranks_per_node > 1:
        environment = {**DEFAULTS, **environment}
    return environment


def restart_counts(token: Token, max_restarts: int) -> dict[str, str]:
    """Return the restart counters, which a launcher that restarts nothing would set wrongly."""
    return {
        "TORCHELASTIC_RESTART_COUNT": str(token.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
    }


def rank_environments(group_rank: int, slot: Slot, spec: JobSpec) -> tuple[dict[str, str], ...]:
    """Return the environment specific to each process that relaunch starts on a node.

    These are the ranks, by local rank, or their launcher.
    """
    place = {
        "GROUP_RANK": str(group_rank),
        "RELAUNCH_NODE": slot.node,
        "MA_SCHEDULE_CNT": str(slot.scheduled),
        "MA_PROC_START_CNT": str(slot.started),
        # On a shared node each job sees only its own GPUs, numbered from 0. The indices are in PCI
        # bus order, as the driver's are.
        **(
            {
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, slot.gpus)),
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            }
            if slot.gpus
            else {}
        ),
    }
    if spec.launcher != "none":
        return (place,)
    return tuple(
        {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank), **place}
        for local_rank, rank in enumerate(ranks_of(group_rank, spec))
    )


TRACKER_VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME")
"""What `tracker_environment` sets. A job that sets one of them itself is left alone."""


def tracker_environment(
    token: Token, server: str, rank: int, given: Collection[str]
) -> dict[str, str]:
    """Return the variables by which Weights & Biases continues one run after each restart.

    Rank 0 has the run of the submission. The others have runs of their own, for programs that log
    from every rank: two processes must not write one run. Sources: docs.wandb.ai, environment
    variables and distributed training. MLflow has no such variables: it refuses a run id that its
    server does not know (mlflow/tracking/fluent.py, start_run).

    Args:
        token: The token of the launch.
        server: The identity of relaunch's server: two servers may have jobs of one name.
        rank: The global rank.
        given: The names of the variables that the job itself sets.
    """
    if any(name in given for name in TRACKER_VARIABLES):
        return {}
    whole = f"{server}/{token.namespace}/{token.job}/{token.submission}"
    run = f"{token.job.replace('.', '-')}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    return {"WANDB_RUN_ID": run if rank == 0 else f"{run}-{rank}", "WANDB_RESUME": "allow"}


def seat(
    slots: tuple[Slot, ...], places: tuple[Place, ...], *, reassign: bool = False
) -> tuple[Slot, ...]:
    """Return the slots of the next launch with their counters.

    A node that keeps its place is counted as started once more, another node as scheduled there.

    Args:
        slots: The present slots; empty before the first launch.
        places: The places of the next launch, by group rank.
        reassign: All places are assigned again; a node that gets its old place counts as another.
    """
    seated = []
    for index, place in enumerate(places):
        before = slots[index] if index < len(slots) else None
        if before is None:
            seated.append(Slot(place.node, place.address, 1, 1, place.gpus))
        elif before.node == place.node and not reassign:
            seated.append(
                Slot(place.node, place.address, before.scheduled, before.started + 1, place.gpus)
            )
        else:
            seated.append(Slot(place.node, place.address, before.scheduled + 1, 1, place.gpus))
    return tuple(seated)


def keep_places(slots: tuple[Slot, ...], granted: tuple[Place, ...]) -> tuple[Place, ...]:
    """Return granted places in the order of group ranks.

    A node that had a place keeps it, and the others fill the gaps. Where fewer are granted than
    before, the nodes after a gap move up.
    """
    had = {slot.node for slot in slots}
    kept = {place.node: place for place in granted}
    newcomers = [place for place in granted if place.node not in had]
    seated = []
    for slot in slots:
        if slot.node in kept:
            seated.append(kept[slot.node])
        elif newcomers:
            seated.append(newcomers.pop(0))
    return (*seated, *newcomers)
