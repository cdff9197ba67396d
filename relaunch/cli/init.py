"""Writes a job file: from answers to five questions, or from a command line of torchrun."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaunch.cli import files
from relaunch.cli.documents import Document
from relaunch.cli.torchrun import count_ranks, find_python, parse_shutdown_timeout
from relaunch.config import ConfigError
from relaunch.fields import duration
from relaunch.spec.job import PYTHON, JobSpec
from relaunch.spec.policy import preset_names

LAUNCHED_BY = ("torch.distributed.run", "torch.distributed.launch")
"""Modules that are torchrun under another name."""
FLAGS = ("standalone", "m", "module", "no-python", "run-path", "use-env", "virtual-local-rank")
"""Options of torchrun that take no value."""
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
SIMPLE = re.compile(r"-{0,2}[A-Za-z0-9_./][A-Za-z0-9_./=+-]*")
"""What YAML takes as text, or what is taken as written, without quotes."""

MAX_LINE = 100


@dataclass
class Draft:
    """What a job file will say."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    nodes: Any = 1
    nproc: int = 1
    progress: Any = None
    policy: Any = "default"
    left_out: tuple[str, ...] = ()
    """Options of torchrun for which relaunch has no use."""
    is_torchrun: bool = False

    def values(self) -> dict[str, Any]:
        """Return the keys and values of the job file."""
        values = {
            "name": _name(self.command),
            "command": list(self.command),
            "workdir": str(Path.cwd()),
            "nodes": self.nodes,
            "nproc_per_node": self.nproc,
            "env": self.env,
            "progress": self.progress,
            "policy": self.policy,
        }
        return {key: value for key, value in values.items() if value not in (None, {})}


def write(
    path: Path,
    words: Sequence[str],
    force: bool,
    is_terminal: bool,
    ask: Callable[[str], str] = input,
    say: Callable[[str], None] = print,
) -> JobSpec:
    """Write a job file and return the job that it describes.

    Args:
        path: Where it is written.
        words: The command line that it runs; empty: ask.
        force: Overwrite a file.
        is_terminal: Whether a person can be asked.
        ask: Asks one question and returns the answer.
        say: Tells why an answer is no answer.

    Raises:
        ConfigError: The file exists, there is no terminal, or the command line cannot be used.
    """
    if path.exists() and not force:
        raise ConfigError(
            f"{path} exists already: overwrite it with --force, or choose another with --file"
        )
    if not words and not is_terminal:
        raise ConfigError(
            "there is no terminal to ask questions on: expected the command, such as "
            "`relaunch init -- torchrun --nproc-per-node 8 train.py`"
        )
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder does not exist any more: change to another one"
        ) from None
    draft = read_command(words) if words else _ask_all(ask, say)
    spec, _ = files.job_from_flags(draft.values())
    try:
        with path.open("w" if force else "x") as file:
            file.write(render(draft))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return spec


# --- a command line


def read_command(words: Sequence[str]) -> Draft:
    """Return what a command line says: one of torchrun, or that of a single rank.

    Raises:
        ConfigError: It has no program, or an option whose meaning depends on the machine.
    """
    rest, env = list(words), {}
    while rest and (assignment := ASSIGNMENT.fullmatch(rest[0])):
        env[assignment[1]] = assignment[2]
        rest.pop(0)
    if not rest:
        raise ConfigError("there is no command: expected one such as torchrun train.py")
    options = _strip_torchrun(rest)
    return Draft(tuple(rest), env) if options is None else _read_torchrun(options, env)


def _strip_torchrun(words: list[str]) -> list[str] | None:
    """Return what follows torchrun in a command line; None: it does not begin with torchrun."""
    first = Path(words[0]).name
    if first == "torchrun":
        return words[1:]
    if PYTHON.fullmatch(first) and words[1:2] == ["-m"] and words[2:3] and words[2] in LAUNCHED_BY:
        return words[3:]
    return None


def _read_torchrun(words: list[str], env: dict[str, str]) -> Draft:
    draft = Draft((), env, is_torchrun=True)
    policy: dict[str, Any] = {}
    rest, left_out, launch = list(words), [], [find_python(os.environ)]
    while rest and rest[0].startswith("-"):
        written = rest.pop(0)
        option, equals, value = written.partition("=")
        name = option.lstrip("-").replace("_", "-")
        if name in FLAGS:
            equals = "="
        elif not equals:
            if not rest:
                raise ConfigError(f"{option}: its value is missing, and so is the program")
            value = rest.pop(0)
        match name:
            case "nnodes":
                draft.nodes = value
            case "nproc-per-node":
                draft.nproc = count_ranks(value, os.environ)
            case "max-restarts":
                policy["max_restarts"] = _parse_count(option, value)
            case "shutdown-timeout":
                grace = duration(parse_shutdown_timeout(option, value))
                policy["timeouts"] = {"stop_grace": grace}
            case "m" | "module":
                launch = [find_python(os.environ), "-m"]
            case "no-python":
                launch = []
            case _:
                left_out.append(written if equals else f"{option} {value}")
    if not rest:
        raise ConfigError("torchrun: there is no program: expected one such as train.py")
    draft.command, draft.left_out = (*launch, *rest), tuple(left_out)
    draft.policy = policy or draft.policy
    return draft


def _parse_count(option: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", value):
        raise ConfigError(f"{option}: {value!r} is not a number: expected one such as 8")
    return int(value)


# --- questions


def _ask_all(ask: Callable[[str], str], say: Callable[[str], None]) -> Draft:
    def answer(question: str, take: Callable[[str], None]) -> None:
        while True:
            try:
                text = ask(f"{question}: ").strip()
            except EOFError:
                raise ConfigError(
                    "the answers ended before the last question: nothing is written"
                ) from None
            try:
                return take(text)
            except ConfigError as error:
                say(f"  {error}")

    draft = Draft(())

    def take_command(text: str) -> None:
        nonlocal draft
        try:
            draft = read_command(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"{text!r}: {error}".lower()) from None

    def take(key: str, value: Any) -> None:
        before = getattr(draft, key)
        setattr(draft, key, value)
        try:
            files.job_from_flags(draft.values())
        except ConfigError:
            setattr(draft, key, before)
            raise

    answer("The command of one rank, or of torchrun, as you type it today", take_command)
    if not draft.is_torchrun:
        answer("Nodes, such as 2, or 1:2 for one or two [1]", lambda text: take("nodes", text or 1))
        answer(
            "Ranks on each node, usually one for each GPU [1]",
            lambda text: take("nproc", _parse_count("ranks on each node", text) if text else 1),
        )
    answer(
        "A line that it prints with its step, such as `step 12 loss 3.1`, or a pattern [none]",
        lambda text: take("progress", _parse_progress(text)),
    )
    answer(
        f"What is tried after a fault, a file or one of {', '.join(preset_names())} [default]",
        lambda text: take("policy", text or draft.policy),
    )
    return draft


def _parse_progress(text: str) -> Any:
    """Return the `progress` of a job file: a name that it knows, a pattern, or that of a line."""
    if not text:
        return None
    if "(?P<" in text:
        return {"log_pattern": text}
    try:
        return files.job_from_flags({"name": "a", "command": ["a"], "progress": text}) and text
    except ConfigError:
        pass
    found = re.search(r"((?i:step|iteration|iter)\D{0,3})(\d+)", text) or re.search(
        r"(\w+\W{0,3})(\d+)", text
    )
    if found is None:
        raise ConfigError(f"{text!r} has no number: expected a line such as `step 12 loss 3.1`")
    return {"log_pattern": f"{_escape(found[1])}(?P<step>\\d+)"}


def _escape(text: str) -> str:
    """Escape a text for a pattern; spaces, which programs use to align, match any number."""
    return re.sub(r"(\\ |\s)+", r"\\s+", re.escape(text))


# --- the file


def render(draft: Draft) -> str:
    """Return the text of a job file, with comments for the next person."""
    values = draft.values()
    lines = ["# A training job: `relaunch submit` starts it. All keys are in docs/jobs.md."]

    def add(key: str, value: str, comment: str) -> None:
        line = f"{key}: {value}  # {comment}"
        lines.extend([line] if len(line) <= MAX_LINE else [f"# {comment}", f"{key}: {value}"])

    add("name", _quote(values["name"]), "its folder, its logs, and what you type to see it")
    add(
        "command",
        f"[{', '.join(_quote(word, as_written=True) for word in draft.command)}]",
        "of one rank: relaunch starts the ranks and sets torchrun's variables",
    )
    if draft.left_out:
        lines.append("# Options of torchrun that relaunch does not need, and leaves out:")
        lines += [f"#   {option}" for option in draft.left_out]
    add("workdir", _quote(values["workdir"]), "a folder that every node has")
    add("nodes", _format_nodes(draft.nodes), "or {min: 1, max: 2}: fewer where no others are free")
    add("nproc_per_node", str(draft.nproc), "ranks on each node, usually one for each GPU")
    if draft.env:
        lines.append("env:")
        lines += [f"  {key}: {_quote(one, as_written=True)}" for key, one in draft.env.items()]
    if draft.progress is None:
        lines += [
            "# How relaunch sees that training advances, which it needs to detect hangs:",
            r"# progress: {log_pattern: 'step (?P<step>\d+)'}",
        ]
    elif isinstance(draft.progress, dict):
        lines += [
            "# How relaunch sees that training advances, which it needs to detect hangs:",
            *("progress:", f"  log_pattern: {_quote(draft.progress['log_pattern'])}"),
        ]
    else:
        add("progress", _quote(draft.progress), "how relaunch sees that training advances")
    policy = draft.policy
    add(
        "policy",
        _quote(policy) if isinstance(policy, str) else _format_keys(policy),
        "what is tried after a fault: `relaunch policy presets`",
    )
    return "\n".join(lines) + "\n"


def _quote(text: str, as_written: bool = False) -> str:
    """Return a text as YAML, in quotes where it needs them."""
    if SIMPLE.fullmatch(text) and text.lower() != "null":
        document = Document(f"[{text}]", "", ((),) if as_written else ())
        if document.content == [text]:
            return text
    if text.isprintable() and "'" not in text:
        return f"'{text}'"
    return json.dumps(text)


def _format_keys(keys: Mapping[str, Any]) -> str:
    """Return keys on one line of YAML; the values are numbers, simple words or such keys."""
    pairs = (
        f"{key}: {_format_keys(value) if isinstance(value, dict) else value}"
        for key, value in keys.items()
    )
    return f"{{{', '.join(pairs)}}}"


def _format_nodes(nodes: Any) -> str:
    low, colon, high = str(nodes).partition(":")
    return f"{{min: {low}, max: {high}}}" if colon else low


def _name(command: Sequence[str]) -> str:
    """Return a job's name that says what runs: that of its script, its module or its program."""
    words = [word for word in command if not word.startswith("-")]
    if not words:
        return "job"
    script = next((word for word in words if word.endswith((".py", ".sh"))), None)
    if script is None and "-m" in command[:3]:
        module = command[command.index("-m") + 1 : command.index("-m") + 2]
        script = module[0] if module else None
    stem = Path(script or words[0]).name.removesuffix(".py").removesuffix(".sh")
    return re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:40].strip("-") or "job"
