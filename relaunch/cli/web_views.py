"""Saved views of Temporal's web UI for those on call, as links.

The web UI keeps views and columns in the browser, so the server cannot install them. A link with
`savedQuery` saves its view there when it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import urlencode

from temporalio.client import Client

from relaunch.config import ConfigError, Settings

VIEWS = (
    ("Jobs", 'WorkflowType="TrainingJob" AND ExecutionStatus="Running"'),
    (
        "Jobs with an incident",
        'WorkflowType="TrainingJob" AND ExecutionStatus="Running" AND Cause is not null',
    ),
    ("Waits for a person", 'Phase="WAITING_FOR_PERSON" AND ExecutionStatus="Running"'),
    ("Failed jobs", 'Phase="FAILED"'),
    ("Repairs", 'WorkflowType="NodeRepair"'),
    ("Fleets", 'WorkflowType="Fleet" AND ExecutionStatus="Running"'),
)
"""Name and query of each view."""
COLUMNS = ("Status", "Workflow ID", "Phase", "Cause", "Nodes", "Strategy", "Generation", "Start")
COLUMNS_KEY = "namespace-workflow-table-columns"
"""Where UI 2.54 keeps its columns in the browser, by namespace."""


def find_web_ui(client: Client, settings: Settings) -> str | None:
    """Return the address of the web UI of the server that the client reaches; None: not known.

    That of a server which is not the `up` of this state folder follows from no address: it may be
    behind another proxy than the server.
    """
    from relaunch.temporal import find_running_up

    up = find_running_up(settings.state)
    # TEMPORAL_ADDRESS may name another server than the `up` of this state folder.
    if up is not None and client.service_client.config.target_host == up.address:
        return up.ui
    return settings.web_ui.rstrip("/") if settings.web_ui else None


def require_web_ui(client: Client, settings: Settings) -> str:
    """Return the address of the web UI.

    Raises:
        ConfigError: It is not known.
    """
    if (found := find_web_ui(client, settings)) is None:
        raise ConfigError(
            "the address of the web UI is not known: set RELAUNCH_WEB_UI, such as http://ui:8080"
        )
    return found


def list_links(ui: str, namespace: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each view, and the link that saves it in the browser that opens it."""
    for name, query in VIEWS:
        words = urlencode({"query": query, "savedQuery": name})
        yield name, f"{ui}/namespaces/{namespace}/workflows?{words}"


def columns_script(namespace: str) -> str:
    """Return the line of JavaScript that sets the columns, for the console of the browser."""
    columns = {namespace: [{"label": label} for label in COLUMNS]}
    return f"localStorage['{COLUMNS_KEY}'] = '{json.dumps(columns)}'; location.reload()"


def web_lines(ui: str, namespace: str) -> list[str]:
    """Return what `jobs --web` prints."""
    return [
        "Each link saves a view in the browser that opens it; open it once:",
        "",
        *(f"{name:<22} {link}" for name, link in list_links(ui, namespace)),
        "",
        "Columns: the button Configure Columns below the list; or paste into the browser's console",
        "on that page:",
        "",
        columns_script(namespace),
    ]
