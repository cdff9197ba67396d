"""The commands `relaunch notify …`: whether messages of relaunch reach people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from relaunch.cli.terminal import Json, print_json, run_with_client

if TYPE_CHECKING:
    from temporalio.client import Client

    from relaunch.config import Settings
    from relaunch.messages.notices import SendTestResult

notify_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Notifications: prove that the channels of a fleet work.",
)


@notify_app.command("test")
def notify_test(
    fleet: Annotated[str, typer.Argument(metavar="FLEET")] = "default", as_json: Json = False
) -> None:
    """Send a message, marked as a test, to every channel of a fleet, and print for each whether it
    was delivered. A worker sends it, by its copy of the fleet file and with its secrets. Exit code
    1 unless all channels delivered it."""
    from relaunch.cli import channel_test

    async def work(client: Client, settings: Settings) -> SendTestResult:
        return await channel_test.send(client, settings.task_queue, fleet)

    sent = run_with_client(work)
    print_json(channel_test.view(fleet, sent)) if as_json else print(
        "\n".join(channel_test.lines(fleet, sent))
    )
    if any(one.outcome != "done" for one in sent.results):
        raise typer.Exit(1)
