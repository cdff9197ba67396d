"""The links of `jobs --web`. That the web UI takes them is tested in `tests/e2e/test_web_ui.py`."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs, urlsplit

from relaunch.cli.web_views import COLUMNS, VIEWS, columns_script, list_links, web_lines
from relaunch.temporal import SEARCH_ATTRIBUTES

UI = "http://ui:8080"


def test_each_link_has_its_query_and_its_name() -> None:
    links = dict(list_links(UI, "lab"))
    assert list(links) == [name for name, _ in VIEWS]
    for name, query in VIEWS:
        found = urlsplit(links[name])
        assert found.path == "/namespaces/lab/workflows"
        assert parse_qs(found.query) == {"query": [query], "savedQuery": [name]}
    assert set(links.values()) <= set(" ".join(web_lines(UI, "lab")).split())


def test_queries_and_columns_name_attributes_that_exist() -> None:
    system = {"WorkflowType", "ExecutionStatus", "Status", "Workflow ID", "Start"}
    named = {word for _, query in VIEWS for word in re.findall(r"(\w+)(?:=| is )", query)}
    assert named | set(COLUMNS) <= system | set(SEARCH_ATTRIBUTES)
    given = json.loads(columns_script("lab").split("'")[3])
    assert [one["label"] for one in given["lab"]] == list(COLUMNS)
