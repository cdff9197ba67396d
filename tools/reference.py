#!/usr/bin/env python3
"""Writes the pages of docs/reference that follow from the code: `make reference`.

Each is made from what the program itself uses: options from the command line's parser, keys from
the models that read the files, settings from theirs, messages from the workflows. `--check` writes
nothing and exits with 1 if a page differs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402
from temporalio.common import SearchAttributeKey  # noqa: E402

from relaunch.cli.app import app  # noqa: E402
from relaunch.cli.event_file import EVENTS, OBSERVATIONS  # noqa: E402
from relaunch.config import PREFIX, Settings  # noqa: E402
from relaunch.fields import duration  # noqa: E402
from relaunch.spec.fleet import FleetSpec  # noqa: E402
from relaunch.spec.job import JobSpec  # noqa: E402
from relaunch.spec.policy import Policy, preset  # noqa: E402
from relaunch.workflows import search_attributes  # noqa: E402
from relaunch.workflows.fleet.workflow import Fleet  # noqa: E402
from relaunch.workflows.node_repair.workflow import NodeRepair  # noqa: E402
from relaunch.workflows.notifier.workflow import Notifier  # noqa: E402
from relaunch.workflows.training_job.workflow import TrainingJob  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Written by `make reference` from the code: change that, not this page. -->"
POLICY = "text, or keys of a [policy](#policy)"
NOT_WRITTEN = {"Policy": ("stated",)}
"""Fields of a model that are no keys of a file."""


class Undocumented(Exception):
    """Something that users can write has no description in the code."""


def main() -> int:
    pages = make_pages()
    if "--check" in sys.argv[1:]:
        stale = find_stale(pages)
        print("\n".join(f"{name} is stale: run `make reference`" for name in stale))
        return bool(stale)
    for name, text in pages.items():
        (REFERENCE / name).write_text(text)
    return 0


def make_pages() -> dict[str, str]:
    """Return the text of each page by its file's name."""
    return {
        "commands.md": make_commands(),
        "files.md": make_files(),
        "settings.md": make_settings(),
        "workflows.md": make_workflows(),
        "json.md": make_json(),
    }


def find_stale(pages: dict[str, str]) -> list[str]:
    return [
        name
        for name, text in pages.items()
        if not (REFERENCE / name).exists() or (REFERENCE / name).read_text() != text
    ]


def join(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def prose(*sentences: str) -> list[str]:
    """Return a paragraph as lines of at most a hundred columns."""
    text = " ".join(" ".join(sentences).split())
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def cell(text: str) -> str:
    """Return a text as a cell of a table: one line, with links to the pages that it names."""
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", " ".join(text.split()))
    return text.replace("|", "\\|")


# Commands


def make_commands() -> str:
    lines = [
        "# Commands and options",
        "",
        NOTE,
        "",
        *prose(
            "`relaunch COMMAND --help` prints the same. What commands print with `--json`, and",
            "their exit codes: [cli.md](cli.md). `relaunch run` also takes the options of",
            "torchrun: [launchers.md](../launchers.md).",
        ),
    ]
    for name, command in list_commands(typer.main.get_command(app), "relaunch"):
        lines += ["", f"## {name}", "", *prose(getattr(command, "help", None) or "")]
        rows = [row for one in command.params if (row := describe_parameter(name, one))]
        if rows:
            lines += ["", "| argument or option | default | |", "| -- | -- | -- |", *rows]
    return join(*lines)


def list_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, one in sorted(inner.items()):
        if not one.hidden:
            yield from list_commands(one, f"{name} {word}")


def describe_parameter(command: str, parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    help_text = getattr(parameter, "help", None) or ""
    is_flag = getattr(parameter, "is_flag", False)
    metavar = parameter.metavar or ("" if is_flag else name_value(parameter))
    if parameter.param_type_name == "argument":
        return f"| `{cell(metavar or parameter.name.upper())}` | | {cell(help_text)} |"
    if not help_text:
        raise Undocumented(f"{command} {parameter.opts[0]} has no help")
    names = ", ".join(f"`{one}`" for one in parameter.opts)
    value = f" `{cell(metavar)}`" if metavar else ""
    if parameter.required:
        default = "required"
    elif parameter.default in (None, False, "") or callable(parameter.default):
        default = ""
    else:
        default = f"`{parameter.default}`"
    return f"| {names}{value} | {default} | {cell(help_text)} |"


def name_value(parameter: Any) -> str:
    """Return what stands for the value of an option that names nothing for it."""
    annotation = parameter.type_descriptor.annotation
    return "N" if annotation is int else "TEXT"


# Files


def make_files() -> str:
    lines = [
        "# Keys of job, policy and fleet files",
        "",
        NOTE,
        "",
        "Unknown keys are refused. Durations are written like `90s`, `5m`, `1h30m`, `2d`.",
        "",
        "[job file](#job-file) · [policy](#policy) · [fleet file](#fleet-file)",
        "",
        "## Job file",
        "",
        "For `relaunch submit`. With examples: [jobs.md](../jobs.md); `relaunch init` writes one.",
        "",
        *describe_model(JobSpec, JobSpec.model_fields, {"policy": POLICY}),
        "",
        "## Policy",
        "",
        *prose(
            "Under `policy` of a job file, or a separate file. What is left out has the value",
            "of the preset that `extends` names; defaults below are those of the preset",
            "`default`, whose ladders `relaunch policy explain default` draws.",
            "[recovery.md](../recovery.md) explains them.",
        ),
        "",
        *describe_model(Policy, Policy.model_fields, {}, preset("default")),
        "",
        "## Fleet file",
        "",
        *prose(
            "For `relaunch up --fleet` and the setting `fleets`. With examples:",
            "[SSH](../ssh.md), [ECS](../ecs.md), [nodes](../nodes.md),",
            "[notifications](../notifications.md).",
        ),
        "",
        *describe_model(FleetSpec, FleetSpec.model_fields, {}),
    ]
    return join(*lines)


def describe_model(
    model: type[BaseModel], fields: Any, more: dict[str, str], values: BaseModel | None = None
) -> list[str]:
    """Return a table of a model's keys, then those of the models that these consist of."""
    lines = ["| key | value | default | |", "| -- | -- | -- | -- |"]
    inner: list[tuple[str, type[BaseModel], BaseModel | None]] = []
    texts = read_field_texts(model)
    for name, field in fields.items():
        if name in NOT_WRITTEN.get(model.__name__, ()):
            continue
        text = texts.get(name, "")
        if not text:
            raise Undocumented(f"{model.__name__}.{name} has no description: a string below it")
        used = getattr(values, name) if values is not None else field.default
        default = "required" if used is PydanticUndefined else describe_value(used)
        below = list(find_models(field.annotation))
        if below:
            default = "required" if field.is_required() and values is None else ""
        if name == "catalog":
            default = ""
        kind = more.get(name) or describe_type(field.annotation, name)
        lines.append(f"| `{name}` | {cell(kind)} | {default} | {cell(text)} |")
        for one in below:
            keep = used if isinstance(used, BaseModel) else None
            inner.append((name, one, keep))
    for name, one, keep in inner:
        if not one.model_fields:
            continue
        nested = describe_model(one, one.model_fields, {}, keep)
        lines += ["", f"**{name}**:", "", *nested]
    return lines


def read_field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the string below each field, as the source has it, of a model and its bases."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not (issubclass(one, BaseModel) and one.__module__.startswith("relaunch")):
            continue
        (body,) = ast.parse(inspect.cleandoc(f"\n{inspect.getsource(one)}")).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = str(text.value.value)
    return found


def find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation.__name__ not in ("NodeRange", "SecretReference", "CatalogOverrides"):
            yield annotation
        return
    for one in get_args(annotation):
        if one is not Annotated and not isinstance(one, str):
            yield from find_models(one)


NAMED = {
    "NodeRange": "`{min: 1, max: 2}`",
    "SecretReference": "`{file: PATH}` or `{env: NAME}`",
    "CatalogOverrides": "see [recovery.md](../recovery.md)",
}
PLAIN: dict[Any, str] = {
    int: "number",
    float: "number",
    str: "text",
    bool: "true or false",
    timedelta: "duration",
    Path: "path",
    Any: "any",
}


def describe_type(annotation: Any, name: str) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return NAMED.get(annotation.__name__, f"keys of **{name}**, below")
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    if origin is Annotated:
        return describe_type(inner[0], name)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inner)
    if origin in (Union, types.UnionType):
        parts = [describe_type(one, name) for one in inner if one is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if origin is tuple:
        return f"list of: {describe_type(inner[0], name)}"
    if origin is dict:
        key = "cause" if isinstance(inner[0], type) and issubclass(inner[0], Enum) else "name"
        return f"by {key}: {describe_type(inner[1], name)}"
    raise TypeError(f"{name}: {annotation} has no description here")


def describe_value(value: Any) -> str:
    if value is None or value in ((), {}, ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, timedelta):
        return f"`{duration(value)}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(str(getattr(one, 'value', one)) for one in value)}]`"
    return f"`{value}`"


# Settings


def make_settings() -> str:
    lines = [
        "# Settings",
        "",
        NOTE,
        "",
        *prose(
            "Of `relaunch` and `relaunch-worker`. A variable of the environment counts before",
            "the key in `relaunch.toml` of the current folder, or in the file that",
            "`RELAUNCH_SETTINGS` names; `relaunch-worker --show-settings` prints all with their",
            "sources. How Temporal is reached is [Temporal's own",
            "configuration](https://docs.temporal.io/develop/environment-configuration):",
            "`TEMPORAL_ADDRESS` and [others](../operations.md#tls-mtls-and-api-keys).",
            "Where traces of incidents are sent is [OpenTelemetry's",
            "own](../operations.md#traces): `OTEL_EXPORTER_OTLP_ENDPOINT`. Keys themselves may be",
            "in `RELAUNCH_ENCRYPTION_KEYRING`, which is [no setting](../encryption.md#set-up).",
        ),
        "",
        "| variable | key | value | default | |",
        "| -- | -- | -- | -- | -- |",
    ]
    texts = read_field_texts(Settings)
    for name, field in Settings.model_fields.items():
        if name not in texts:
            raise Undocumented(f"Settings.{name} has no description: a string below it")
        lines.append(
            f"| `{PREFIX}{name.upper()}` | `{name}` | {describe_type(field.annotation, name)}"
            f" | {describe_value(field.default)} | {cell(texts[name])} |"
        )
    return join(*lines)


# Workflows

WORKFLOWS = (
    (TrainingJob, "job/NAME", "What each field does: [job-workflow.md](job-workflow.md)."),
    (Fleet, "fleet/NAME", ""),
    (NodeRepair, "repair/FLEET/NODE", ""),
    (Notifier, "notifier/FLEET", ""),
)


def make_workflows() -> str:
    lines = [
        "# Workflows: what they can be sent and asked",
        "",
        NOTE,
        "",
        *prose(
            "For those who use Temporal's clients or its web UI instead of `relaunch`. Each",
            "message takes one JSON object or nothing.",
        ),
    ]
    for workflow, name, more in WORKFLOWS:
        definition: Any = getattr(workflow, "__temporal_workflow_definition")
        lines += ["", f"## {definition.name}", "", f"Id `{name}`. {more}".rstrip(), ""]
        lines += ["| | name | |", "| -- | -- | -- |"]
        for kind in ("signals", "updates", "queries"):
            for message, handler in sorted(getattr(definition, kind).items(), key=str):
                if message is None:
                    continue
                if not handler.description:
                    raise Undocumented(f"{definition.name}.{message} has no description")
                word = {"queries": "query"}.get(kind, kind[:-1])
                lines.append(f"| {word} | `{message}` | {cell(handler.description)} |")
    lines += ["", "## Search attributes of jobs", "", "| name | type |", "| -- | -- |"]
    for key in vars(search_attributes).values():
        if isinstance(key, SearchAttributeKey):
            kind = key.indexed_value_type.name.title().replace("_", "")
            lines.append(f"| `{key.name}` | {kind} |")
    return join(*lines)


# JSON

VIEWS = (
    ("show JOB", "job_views", "show"),
    ("show JOB, beside those", "tables", "show_view"),
    ("history JOB", "job_views", "history_entry"),
    ("stacks JOB", "stacks", "row"),
    ("report", "report_views", "report_view"),
    ("jobs", "tables", "row"),
    ("nodes list", "node_views", "row"),
    ("nodes show NODE, beside those of nodes list", "node_pages", "node_more"),
    ("nodes show", "node_pages", "fleet_view"),
    ("nodes check NODE…", "repairs", "row"),
    ("nodes check --file FLEET.yaml", "node_check", "view"),
    ("notify test", "channel_test", "view"),
    ("doctor", "doctor", "row"),
    ("explain KIND WHAT", "explain", "view_of"),
    ("explain xid, beside those", "explain", "explain_xid"),
    ("explain npu, beside those", "explain", "explain_npu"),
    ("explain dcgm, beside those", "explain", "explain_dcgm"),
    ("explain log and kernel, beside those", "explain", "explain_log"),
    ("policy explain", "policy_views", "policy_view"),
    ("policy replay", "policy_replay", "trial_view"),
)
"""Commands, with the module of `relaunch/cli` and the function that makes what they print."""
CLI = ROOT / "relaunch" / "cli"


def make_json() -> str:
    lines = [
        "# Keys of `--json`, and of events",
        "",
        NOTE,
        "",
        *prose(
            "All keys that the commands print, and all fields that events of `policy replay` have.",
            "What they mean: [cli.md](cli.md) and [events.md](events.md). A command that prints a",
            "list is here with the keys of one entry. `…`: keys that depend on the job.",
        ),
    ]
    before: set[str] = set()
    for command, module, function in VIEWS:
        keys = read_keys(module, function)
        lines += ["", f"## relaunch {command}", "", "| key | within it |", "| -- | -- |"]
        for key, inner in keys:
            if "beside those" not in command or key not in before:
                lines.append(f"| `{key}` | {f'`{inner}`' if inner else ''} |")
        before = {key for key, _ in keys}
    lines += ["", "## Events", "", "| kind | fields | |", "| -- | -- | -- |"]
    for kind, event in sorted({**EVENTS, **OBSERVATIONS}.items()):
        fields = [one.name for one in dataclasses.fields(event) if one.name != "kind"]
        text = inspect.getdoc(event) or ""
        text = "" if text.startswith(f"{kind}(") else text.split("\n\n")[0]
        lines.append(f"| `{kind}` | {', '.join(f'`{one}`' for one in fields)} | {cell(text)} |")
    return join(*lines)


def read_keys(module: str, function: str) -> list[tuple[str, str]]:
    """Return the keys of the mapping that a function returns, each with those within it."""
    tree = ast.parse((CLI / f"{module}.py").read_text())
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    found = find_mapping(functions[function])
    if found is None:
        raise Undocumented(f"{module}.{function} returns no mapping that can be read")
    return list(list_keys(found, functions))


def list_keys(mapping: ast.Dict, functions: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the keys of a mapping, also of those that it takes in by `**`, where they are read."""
    for key, value in zip(mapping.keys, mapping.values, strict=True):
        match key, value:
            case ast.Constant(), _:
                yield key.value, describe_keys(value, functions)
            case None, ast.Dict() | ast.IfExp(body=ast.Dict()):
                yield from list_keys(
                    value.body if isinstance(value, ast.IfExp) else value, functions
                )


def find_mapping(function: ast.FunctionDef) -> ast.Dict | None:
    """Return the mapping that a function returns; without one, that which it calls `more`."""
    returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
    added = [
        one.value
        for one in ast.walk(function)
        if isinstance(one, ast.Assign) and [ast.unparse(name) for name in one.targets] == ["more"]
    ]
    mappings = [one for one in (*reversed(returned), *added) if isinstance(one, ast.Dict)]
    return next((one for one in mappings if any(one.keys)), mappings[0] if mappings else None)


def describe_keys(value: ast.expr, functions: dict[str, Any]) -> str:
    """Return the keys within a value: `{a, b}`, or `[{a, b}]` of a list; empty: none are known."""
    match value:
        case ast.Dict(keys=keys, values=values):
            if not keys:
                return ""
            parts = [
                "…" if key is None else key.value + describe_keys(one, functions)
                for key, one in zip(keys, values, strict=True)
                if key is None or isinstance(key, ast.Constant)
            ]
            return f"{{{', '.join(parts)}}}"
        case ast.ListComp(elt=inner):
            within = describe_keys(inner, functions)
            return f"[{within}]" if within else ""
        case ast.IfExp(body=one, orelse=other):
            return describe_keys(one, functions) or describe_keys(other, functions)
        case ast.BoolOp(values=values):
            return next((text for one in values if (text := describe_keys(one, functions))), "")
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            found = find_mapping(functions[name])
            return "" if found is None else describe_keys(found, functions)
        case _:
            return ""


def find_unexplained(page: str) -> list[str]:
    """Return the keys that a page, `cli.md` and what belongs to it, does not mention."""
    words = set(re.findall(r"\w+", page))
    return [
        f"{command}: {key}"
        for command, module, function in VIEWS
        for key, _ in read_keys(module, function)
        if key not in words
    ]


if __name__ == "__main__":
    sys.exit(main())
