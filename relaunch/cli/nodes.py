"""The commands `relaunch nodes …`: show, quarantine, release, examine and repair the nodes of a
fleet."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaunch.cli.terminal import (
    Json,
    RequiredReason,
    check_reason,
    print_json,
    run_with_client,
    say,
)
from relaunch.config import ConfigError, Settings, read_settings
from relaunch.text import count_noun

if TYPE_CHECKING:
    from temporalio.client import Client

    from relaunch.cli.fleets import Answer
    from relaunch.pool.state import FleetState, WarmPython
    from relaunch.spec.policy import RepairKind

nodes_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Nodes: which jobs have them and their health; quarantine, release and repair them.",
)

Node = Annotated[str, typer.Argument(metavar="NODE")]
Fleet = Annotated[str, typer.Option(metavar="FLEET", help="The fleet the node belongs to.")]
File = typer.Option(
    "--file", metavar="FLEET.yaml", help="A fleet file; this machine connects to its nodes."
)
Level = Annotated[
    int, typer.Option(min=0, max=3, help="Level of `dcgmi diag -r LEVEL`; 0: without DCGM.")
]


@nodes_app.command("list")
def nodes_list(fleet: Fleet = "default", as_json: Json = False) -> None:
    """List the nodes of a fleet as the fleet knows them. Shows which job has each, what keeps it
    from jobs, and its faults."""
    from relaunch.cli import fleets, node_pages, node_views

    state = run_with_client(lambda client, s: fleets.read(client, s.task_queue, fleet))
    if as_json:
        print_json(node_views.rows(state))
        return
    now = datetime.now(UTC)
    node_views.print_nodes(state, now)
    if notes := node_pages.fleet_notes(state, now):
        print("\n" + "\n".join(notes))


@nodes_app.command("show")
def nodes_show(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="Default: the fleet itself.")
    ] = None,
    fleet: Fleet = "default",
    as_json: Json = False,
) -> None:
    """Show all that a fleet knows of one node. Without a node: the fleet's limits, its breaker,
    which jobs wait, and what people did."""
    from relaunch.cli import fleets, node_pages, node_views
    from relaunch.pool.tenants import tenants

    async def work(
        client: Client, settings: Settings
    ) -> tuple[FleetState, str | None, tuple[WarmPython, ...] | None]:
        from relaunch.cli.web_views import find_web_ui

        ui = find_web_ui(client, settings)
        web = node_pages.workflow_address(ui, client.namespace) if ui else None
        state = await fleets.read(client, settings.task_queue, fleet)
        if node is None:
            return state, web, None
        record = fleets.node_of(state, node)
        return state, web, await fleets.read_warm(client, settings.task_queue, fleet, record)

    state, web, warm = run_with_client(work)
    now = datetime.now(UTC)
    if node is None:
        print_json(node_pages.fleet_view(state)) if as_json else print(
            "\n".join(node_pages.fleet_lines(state, now))
        )
        return
    record = fleets.node_of(state, node)
    here = tenants(state).get(node, ())
    if as_json:
        print_json({**node_views.row(record, here), **node_pages.node_more(record, here, warm)})
    else:
        print("\n".join(node_pages.node_lines(record, here, fleet, now, web, warm or ())))


@nodes_app.command("quarantine")
def nodes_quarantine(
    node: Node,
    reason: RequiredReason,
    drain: Annotated[
        bool, typer.Option("--drain", help="Also make the jobs that have it leave.")
    ] = False,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="With --drain: deadline for the jobs to leave; default 30m."
        ),
    ] = None,
    fleet: Fleet = "default",
) -> None:
    """Keep a node from jobs until it is released. A job that has it may stay, unless --drain is
    given."""
    from relaunch.cli import fleets
    from relaunch.cli.node_pages import describe_quarantine

    if within is not None and not drain:
        raise ConfigError(
            f"--within {within} limits how long a drain takes: use it together with --drain"
        )
    if within is not None:
        check_duration(within)
    answer = run_with_client(
        lambda client, s: fleets.quarantine(
            client, s.task_queue, fleet, node, reason, drain, within
        )
    )
    finish(answer, fleet, lambda: describe_quarantine(answer.fleet, node))


@nodes_app.command("release")
def nodes_release(node: Node, reason: RequiredReason, fleet: Fleet = "default") -> None:
    """Vouch for a node, so that jobs are given it again. Its earlier faults no longer count."""
    from relaunch.cli import fleets
    from relaunch.cli.node_pages import describe_release

    answer = run_with_client(
        lambda client, s: fleets.release(client, s.task_queue, fleet, node, reason)
    )
    finish(answer, fleet, lambda: describe_release(answer.fleet, node))


@nodes_app.command("pause")
def nodes_pause(reason: RequiredReason, fleet: Fleet = "default") -> None:
    """Pause all repairs, resets and reboots in a fleet until `nodes resume`. Those that people
    order are paused, too. Jobs are given nodes as before."""
    from relaunch.cli import fleets

    answer = run_with_client(lambda client, s: fleets.pause(client, s.task_queue, fleet, reason))
    finish(
        answer,
        fleet,
        lambda: f"repairs of fleet {fleet} are paused by {answer.fleet.breaker.paused}",
    )


@nodes_app.command("resume")
def nodes_resume(reason: RequiredReason, fleet: Fleet = "default") -> None:
    """Close the breaker of a fleet or, where it is closed, end a pause. Repairs that asked
    meanwhile are refused; those still needed ask again."""
    from relaunch.cli import fleets, node_pages

    answer = run_with_client(lambda client, s: fleets.resume(client, s.task_queue, fleet, reason))
    finish(answer, fleet, lambda: node_pages.describe_resume(answer.fleet))


@nodes_app.command("apply")
def nodes_apply(
    reason: Annotated[str, typer.Option(help="The reason, for the history.")] = "",
    fleet: Fleet = "default",
) -> None:
    """Have a fleet read its file again, and print what that changes. The file is the worker's
    (RELAUNCH_FLEETS, `up --fleet`), on the worker's machine: no file of this machine is sent.
    Without this command it is read once a minute."""
    from relaunch.cli import fleets, node_pages

    before, file, answer = run_with_client(
        lambda client, s: fleets.apply(client, s.task_queue, fleet, reason)
    )
    lines = node_pages.changes(before, file) or [
        f"fleet {fleet} has the {count_noun(len(file.nodes), 'node')} of its file already"
    ]
    finish(
        answer, fleet, lambda: "\n".join([*lines, *node_pages.describe_removed_nodes(answer.fleet)])
    )


def check_duration(text: str) -> None:
    from relaunch.fields import parse_duration

    try:
        value = parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--within: {error}") from None
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigError(f"--within: {text!r} is not a duration: write it like 30s, 5m or 1h30m")


def finish(answer: Answer, fleet: str, sentence: Callable[[], str]) -> None:
    """Print the new state, or say that it cannot be seen yet and exit with code 1.

    The request was sent, so this is not an error in the user's input (exit code 2).
    """
    if answer.shown:
        print(sentence())
        return
    from relaunch.cli.fleets import EFFECT_TIMEOUT

    why = "; ".join(answer.news) or f"see `relaunch nodes show --fleet {fleet}`"
    say(
        f"the request was sent, but fleet {fleet} does not show its effect after "
        f"{EFFECT_TIMEOUT:g} s: {why}"
    )
    raise typer.Exit(1)


# --- one node by itself: these ask the node, not the fleet


@nodes_app.command("declare-dead")
def declare_dead(
    node: Node,
    reason: Annotated[
        str,
        typer.Option(
            callback=check_reason, help="How you know that nothing runs there, for the history."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Also if the node answers.")] = False,
    fleet: Fleet = "default",
) -> None:
    """Vouch that nothing runs on a node any more, so that jobs that wait for it continue elsewhere.
    Another fleet's node of the same name is another node: nothing is sent to its jobs. Refused if
    the node answers, unless --force is given: ranks alive there would run beside the new ones."""
    from relaunch.cli import fleets

    told = run_with_client(
        lambda client, s: fleets.declare_dead(client, s.task_queue, fleet, node, reason, force)
    )
    print(f"node {node} of fleet {fleet} declared dead: reported to {', '.join(told)}")


@nodes_app.command("check")
def nodes_check(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="[NODE...]")] = None,
    fleet: Fleet = "default",
    level: Level = 2,
    file: Annotated[Path | None, File] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="With --file: show every row, also of nodes without problems."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Examine nodes as a job does after a fault. DCGM runs only on nodes without ranks. Exit code 1
    unless all are healthy.

    With --file, before anything runs: log in to the nodes of a fleet file from this machine, and
    report for each what works, what does not, and how to fix it. Needs no server and no worker.
    Exit code 1 unless ranks can run on all of them.
    """
    if file is not None:
        _check_file(file, nodes or [], everything, as_json)
        return
    if not nodes:
        raise ConfigError(
            "nodes check: expected a NODE of a running fleet, or --file FLEET.yaml to examine the "
            "nodes of a fleet file from this machine"
        )
    from relaunch.cli import fleets
    from relaunch.cli import repairs as examining

    async def work(client: Client, settings: Settings) -> list[dict[str, Any]]:
        found = await examining.check(client, settings.task_queue, fleet, tuple(nodes), level)
        kept = await fleets.read_withheld_nodes(client, fleet)
        return [examining.row(one, kept.get(one.node)) for one in found]

    rows = run_with_client(work)
    if as_json:
        print_json(rows)
    else:
        examining.print_nodes(rows, datetime.now(UTC))
    if any(one["health"] != "HEALTHY" for one in rows):
        raise typer.Exit(1)


def _check_file(file: Path, names: list[str], everything: bool, as_json: bool) -> None:
    import asyncio

    from relaunch.cli import direct, files, node_check

    fleet = asyncio.run(
        direct.run_preflight(files.read_fleet(file), file, names, read_settings().state)
    )
    print_json(node_check.view(fleet)) if as_json else node_check.print_rows(fleet, everything)
    if not all(node_check.can_run_ranks(node_check.rows(fleet, seen)) for seen in fleet.nodes):
        raise typer.Exit(1)


@nodes_app.command("discover")
def nodes_discover(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="Name or ARN of an ECS cluster.")
    ],
    region: Annotated[
        str | None,
        typer.Option(metavar="REGION", help="Default: the ARN's, else as boto3 finds it."),
    ] = None,
    name: Annotated[str, typer.Option(metavar="FLEET", help="Name of the new fleet.")] = "default",
    task_definition: Annotated[
        str | None,
        typer.Option(
            metavar="F", help="Task definition of a rank: family, family:revision or ARN."
        ),
    ] = None,
) -> None:
    """Print a fleet file for an ECS cluster. Each ACTIVE EC2 instance becomes a node. Needs no
    server and no worker; changes nothing."""
    from relaunch.cli import discover

    print(discover.fleet_file(cluster, region, name, task_definition), end="")


@nodes_app.command("trust")
def nodes_trust(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="[NODE...]")] = None,
    file: Annotated[Path | None, File] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Trust every unknown key without asking."),
    ] = False,
) -> None:
    """Show the host keys of the nodes of a fleet file (of all nodes if none is named). Ask about
    each unknown key, and write those that you vouch for into known_hosts. A key that has changed
    is never replaced. Exit code 1 unless all are known afterwards."""
    import asyncio

    from relaunch.cli import direct, files, trust

    if file is None:
        known = read_settings().fleets
        if len(known) != 1:
            raise ConfigError(
                "nodes trust: expected --file FLEET.yaml, the fleet file that has the nodes"
            )
        file = known[0]
    spec = files.read_fleet(file)
    keys = asyncio.run(direct.read_host_keys(spec, file, nodes or []))
    if not trust.trust(spec, keys, yes, trust.at_terminal()):
        raise typer.Exit(1)


@nodes_app.command("answer")
def nodes_answer(
    node: Node,
    decision: Annotated[str, typer.Argument(metavar="approve|deny")],
    reason: RequiredReason,
    reset_gpus: Annotated[
        bool, typer.Option("--reset-gpus", help="What is approved: its GPUs are reset.")
    ] = False,
    reboot: Annotated[
        bool, typer.Option("--reboot", help="What is approved: it is rebooted.")
    ] = False,
    power_cycle: Annotated[
        bool, typer.Option("--power-cycle", help="What is approved: its power is cycled.")
    ] = False,
    fleet: Fleet = "default",
) -> None:
    """Approve or deny what the repair of a node asks, no matter who ordered it. An approval names
    what it approves, and is refused if the repair asks something else by then."""
    from relaunch.cli import answers

    if decision not in ("approve", "deny"):
        raise ConfigError(f"unknown answer {decision!r}: expected approve or deny")
    named: list[RepairKind] = []
    named += ["reset-gpus"] if reset_gpus else []
    named += ["reboot"] if reboot else []
    named += ["power-cycle"] if power_cycle else []
    if len(named) > 1 or (named and decision == "deny"):
        options = " ".join(f"--{one}" for one in named)
        expected = (
            "one of them" if decision == "approve" else "none: deny refuses whatever is asked"
        )
        raise ConfigError(f"{decision} {options}: expected {expected}")
    run_with_client(
        lambda client, _: answers.for_node(
            client, fleet, node, decision, reason, named[0] if named else None
        )
    )
    print(f"{decision}: sent to the repair of {node}")


@nodes_app.command("repair")
def nodes_repair(
    node: Node,
    reason: RequiredReason,
    reboot: Annotated[
        bool, typer.Option("--reboot", help="Reboot it, and verify that it did.")
    ] = False,
    power_cycle: Annotated[
        bool,
        typer.Option("--power-cycle", help="Cycle its power with the command in the fleet file."),
    ] = False,
    reset_gpus: Annotated[bool, typer.Option("--reset-gpus", help="Reset its GPUs.")] = False,
    gpu: Annotated[list[str] | None, typer.Option(metavar="BUS_ID", help="Only this GPU.")] = None,
    fleet: Fleet = "default",
    level: Level = 2,
) -> None:
    """Reset the GPUs of a node, reboot it or cycle its power, and examine it afterwards. Refused if
    ranks run there, or if the power would be cycled of a node that a job has. Exit code 1 unless
    it is healthy afterwards."""
    from relaunch.cli import repairs
    from relaunch.spec.policy import Strategy

    if [reboot, power_cycle, reset_gpus].count(True) != 1:
        raise ConfigError(
            "no repair was named: expected one of --reboot, --power-cycle and --reset-gpus"
        )
    strategy = Strategy.RESET_GPU if reset_gpus else Strategy.REBOOT_NODE
    what = "power cycle" if power_cycle else str(strategy)
    say(f"{what} of {node}: see {repairs.repair_id(fleet, node)} in the web UI")
    ended = run_with_client(
        lambda client, s: repairs.repair(
            client, s.task_queue, fleet, node, strategy, gpu or (), reason, level, power_cycle
        )
    )
    print(f"{node}: {ended.outcome}, {ended.verdict}: {ended.reason}")
    if ended.outcome != "done":
        raise typer.Exit(1)
