"""The job file as validated values.

The command line reads the file (YAML, lines, paths); `policy` interprets the policy.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from relaunch.fields import Name, StrictModel, Text, compile_pattern
from relaunch.spec.environment import RESERVED_VARIABLES, VARIABLE, check_redacted
from relaunch.spec.progress import PRESETS
from relaunch.text import count_noun

MAX_WARM = 32
"""Most modules that are named to be imported ahead; each may import any number of others."""
LIMITS = ("as", "core", "data", "fsize", "memlock", "nofile", "nproc", "stack")
"""Resource limits that a job may state, as limits.conf(5) names them; sizes are in bytes."""
Limit = int | Literal["unlimited"]
MAX_LIMIT = 2**63 - 1

OutputStream = Literal["stdout", "stderr"]
MAX_NODES = 100_000
"""More is a mistake: no cluster has so many nodes."""


MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def _check_modules(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"{value!r} is one string: write a list, such as [torch]")
    for name in value if isinstance(value, list | tuple) else ():
        if not (isinstance(name, str) and MODULE_NAME.fullmatch(name)):
            raise ValueError(f"{name!r} is not the name of a Python module, such as torch")
    return value


ModuleNames = Annotated[
    tuple[str, ...], Field(max_length=MAX_WARM), BeforeValidator(_check_modules)
]


PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


MODULES = {
    "torchrun": "torch.distributed.run",
    "ft_launcher": "nvidia_resiliency_ext.fault_tolerance.launcher",
}
"""The module that the console script of that name runs (entry_points.txt of each wheel)."""


ALSO = ("torch.distributed.launch", "torch.distributed.elastic", "accelerate.commands.launch")
"""Other modules that start ranks themselves."""


def find_launcher(command: Sequence[str]) -> str | None:
    """Return the launcher with which a command begins; None: with none.

    A launcher started by another launcher is never intended.
    """
    first = PurePosixPath(command[0]).name
    if first in MODULES or first in ("accelerate", "deepspeed"):
        return first
    if PYTHON.fullmatch(first):
        for flag, module in itertools.pairwise(command[1:]):
            if flag == "-m":
                return f"-m {module}" if module in (*MODULES.values(), *ALSO) else None
            if not flag.startswith("-"):
                return None
    return None


class NodeRange(StrictModel):
    min: int
    """The fewest nodes with which it runs."""
    max: int
    """The most that it takes."""


def parse_nodes(value: Any) -> Any:
    """Parse the number of nodes of a job: `4`, `{min: 3, max: 4}`, or `3:4` as in flags.

    Raises:
        ValueError: The value has another form, or min exceeds max.
    """
    if isinstance(value, NodeRange) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    original = value
    if isinstance(value, str):
        low, colon, high = value.partition(":")
        if not colon and low.isdecimal():
            return int(low)
        if low.isdecimal() and high.isdecimal():
            value = {"min": int(low), "max": int(high)}
    if (
        isinstance(value, dict)
        and set(value) == {"min", "max"}
        and all(type(one) is int for one in value.values())
    ):
        if value["min"] < 1:
            raise ValueError(f"min is {value['min']}: at least 1")
        if value["min"] > value["max"]:
            raise ValueError(
                f"min is {value['min']} and max is {value['max']}: min must not exceed max"
            )
        return NodeRange(**value)
    raise ValueError(
        f"{original!r} is not a number of nodes:"
        " write it like 4, or {min: 3, max: 4} (as a flag 3:4)"
    )


class ProgressSpec(StrictModel):
    """How the step is found in what ranks print; as text, the name of a preset."""

    preset: str | None = None
    """A name of a well-known program: `megatron`, `hf`, … (docs/jobs.md). `progress: NAME` is short
    for it."""
    log_pattern: str | None = None
    """A regular expression with a group named `step`, searched in every line that a rank prints.

    A group named `checkpoint` captures the step of a finished checkpoint, on the same line as a
    step or on a separate one. With groups named `epoch` and `total`, `step` is a counter within an
    epoch of `total` steps, and the step is epoch * total + step.
    """

    @model_validator(mode="before")
    @classmethod
    def _parse_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value

    @field_validator("preset")
    @classmethod
    def _find_preset(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if (name := value.lower()) in PRESETS:  # nanoGPT and NeMo are written with capitals
            return name
        raise ValueError(
            f"{value!r} is not a preset: expected one of {', '.join(sorted(PRESETS))},"
            " or {log_pattern: 'step (?P<step>\\d+)'}"
        )

    @field_validator("log_pattern")
    @classmethod
    def _check_pattern(cls, value: str | None) -> str | None:
        if value is None:
            return None
        compile_pattern(value)
        # The agent, which has only Python's own engine, gives up a pattern that takes too long.
        if "step" not in re.compile(value).groupindex:
            raise ValueError(
                f"{value!r} has no group named step: write it like 'step (?P<step>\\d+)'"
            )
        return value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.preset is not None and self.log_pattern is not None:
            raise ValueError(f"preset is {self.preset!r} and there is a log_pattern: expected one")
        return self

    @property
    def pattern(self) -> str | None:
        """The pattern that the ranks' lines are searched with."""
        return PRESETS[self.preset] if self.preset is not None else self.log_pattern


STEP_MARK = "{step}"


class CheckpointSpec(StrictModel):
    """Where the program keeps its checkpoints. relaunch looks at them, and changes none."""

    directory: Text
    """On the nodes; a relative path begins at `workdir`."""
    pattern: Annotated[str, Field(max_length=200)] | None = None
    """The name of a checkpoint in that folder, such as `step_{step}.pt`, where `*` stands for any
    text. With it, a watch looks there for new ones while ranks run; None: only when a person asks.
    """

    @field_validator("directory")
    @classmethod
    def _check_directory(cls, value: str) -> str:
        if not value.strip():
            raise ValueError(f"{value!r} is not a folder: write its path, such as out")
        return value

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str | None) -> str | None:
        if value is None:
            return None
        rest = value.replace(STEP_MARK, "", 1)
        if rest == value or STEP_MARK in rest:
            raise ValueError(
                f"{value!r} has {value.count(STEP_MARK)} {STEP_MARK}, expected one, where the name"
                " of a checkpoint has its step, such as checkpoint-{step}"
            )
        if "/" in value:
            raise ValueError(
                f"{value!r} has a slash: expected the name of a checkpoint within the directory,"
                " such as checkpoint-{step}"
            )
        if "{" in rest or "}" in rest:
            raise ValueError(f"{value!r} has a brace that is not of {STEP_MARK}")
        return value

    @property
    def expression(self) -> str | None:
        """The regular expression of a name, with a group `step`; None: no pattern is given."""
        if self.pattern is None:
            return None
        before, after = (
            "[^/]*?".join(map(re.escape, part.split("*"))) for part in self.pattern.split(STEP_MARK)
        )
        return rf"{before}(?P<step>[0-9]{{1,15}}){after}"


class SecretReference(StrictModel):
    """Where the worker reads a secret at launch; the secret itself is never stored."""

    file: Text | None = None
    """A file on the worker's machine."""
    env: Text | None = None
    """A variable of the worker's environment."""

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, value: Any) -> Any:
        # The sentence must not repeat the value, which may be the secret itself.
        if not isinstance(value, dict | cls):
            raise ValueError(
                "a secret is not written here, but where the worker reads it:"
                " {file: PATH} or {env: NAME}"
            )
        return value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise ValueError("a secret has exactly one source: file: PATH or env: NAME")
        return self


class EcsTask(StrictModel):
    """The task that a fleet of Amazon ECS runs as one rank.

    RunTask overrides its command, environment and GPUs with the job's.
    """

    task_definition: Annotated[str, Field(min_length=1)] | None = None
    """Family, family:revision, or ARN; default: that of the fleet file."""
    container: Annotated[str, Field(min_length=1)] | None = None
    """The name of its container that trains; default: the only essential one."""


class Metadata(StrictModel):
    annotations: dict[str, str] = Field(default={})
    """Those of ModelArts jobs change the policy (docs/ascend.md); others are kept as they are."""


class JobSpec(StrictModel):
    """A job file."""

    name: Name
    """Its name, in all commands and in the workflow `job/NAME`."""
    command: tuple[Text, ...] = Field(min_length=1)
    """The program of one rank and its arguments, such as `[python, train.py]`; no shell."""
    nodes: int | NodeRange = 1
    """How many nodes; with a range it goes on with fewer where no more are free, and grows
    again."""
    nproc_per_node: int = Field(default=1, ge=1, le=1024)
    """Ranks on each node."""
    gpus_per_node: int = Field(default=0, ge=0, le=1024)
    """GPUs that it takes of each node; 0: whole nodes (docs/nodes.md)."""
    launcher: Literal["none", "torchrun", "ft_launcher"] = "none"
    """What starts the ranks of a node: relaunch itself, or one launcher process per node.

    The launcher's own restarts are turned off.
    """
    gang: Literal["lockstep", "independent"] = "lockstep"
    """lockstep: no rank advances without all others (the usual data or model parallel job)."""
    fleet: Name = "default"
    """The fleet whose nodes it uses."""
    env: dict[str, Text] = Field(default={})
    """Environment variables of the ranks."""
    env_file: Text | None = None
    """A file of variables that the worker reads at each launch; `env` overrides them. Like a secret
    it is stored nowhere else."""
    inherit_env: bool = True
    """Whether ranks also get the variables that the node itself has: PATH, HOME and the like."""
    secrets: dict[str, SecretReference] = Field(default={})
    """Variables whose values the worker reads at each launch, and which are stored nowhere."""
    redact: Annotated[
        tuple[str, ...], Field(max_length=64, repr=False), AfterValidator(check_redacted)
    ] = ()
    """Variables, beside those of `secrets`, whose values the nodes replace in what is read of this
    job's logs and error files: `[WANDB_API_KEY, '*_TOKEN']` (docs/jobs.md)."""
    workdir: Text | None = None
    """Absolute path on the nodes; default: the folder in which `submit` was typed, where nodes are
    on this machine."""
    umask: Annotated[str, Field(pattern="^0?[0-7]{3}$")] | None = None
    """In octal, such as `'027'`; default: that of the node's agent."""
    limits: dict[str, Limit] = Field(default={})
    """Soft resource limits of each rank, by name: `as`, `core`, `data`, `fsize`, `memlock`,
    `nofile`, `nproc`, `stack`; sizes in bytes. One above the hard limit of the
    node's agent raises that, which only root can."""
    output: Literal["merged", "separate"] = "merged"
    """Whether a rank's stdout and stderr are one log, in the order of writing, or one each."""
    progress: ProgressSpec = ProgressSpec()
    """How the step is found in what ranks print: a preset's name or a pattern (docs/jobs.md)."""
    flight_record: bool = False
    """Whether torch loads a module of relaunch in each rank, which writes the record of its last
    collectives when it is asked (docs/jobs.md)."""
    warm: ModuleNames | None = None
    """Python modules, such as `[torch]`, that each node imports ahead, so that after a fault the
    ranks are forked from there ([warm ranks](../warm.md)); default: those of the fleet file."""
    checkpoint: CheckpointSpec | None = None
    """Where its checkpoints are, for `show` and `history`."""
    policy: str | dict[str, Any] = "default"
    """A preset's name, a file, or a mapping; the submitting client resolves it."""
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    """Of jobs that wait for nodes, the one with the highest number is first."""
    ecs: EcsTask | None = None
    """Only for fleets of Amazon ECS, and only where it differs from the fleet file."""
    metadata: Metadata = Metadata()
    """As in a ModelArts job."""

    @field_validator("command", mode="before")
    @classmethod
    def _check_command_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                f"{value!r} is one string: write a list, one item per argument,"
                " such as [python, train.py]"
            )
        return value

    @field_validator("command")
    @classmethod
    def _check_program(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value[0].strip():
            raise ValueError(
                f"{value[0]!r} is not a program: the first item is the program to run, such as"
                " python"
            )
        return value

    @field_validator("nodes", mode="before")
    @classmethod
    def _parse_nodes(cls, value: Any) -> Any:
        return parse_nodes(value)

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, value: int | NodeRange) -> int | NodeRange:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is not a number of nodes: at least 1")
        most = value if isinstance(value, int) else value.max
        if most > MAX_NODES:
            raise ValueError(f"{most} is not a number of nodes: at most {MAX_NODES}")
        return value

    @field_validator("env", "secrets")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key.startswith(RESERVED_VARIABLES) or not VARIABLE.fullmatch(key):
                raise ValueError(
                    f"{key!r} cannot be set: a variable's name,"
                    " not starting with RELAUNCH_ or TORCHELASTIC_"
                )
        return value

    @field_validator("env_file")
    @classmethod
    def _check_env_file(cls, value: str | None) -> str | None:
        if value is not None and not PurePosixPath(value).is_absolute():
            raise ValueError(
                f"{value!r} is a relative path: the file's absolute path on the worker"
            )
        return value

    @field_validator("umask", mode="before")
    @classmethod
    def _check_umask(cls, value: Any) -> Any:
        # YAML reads 027 as an octal number, and 0o27 and 27 as others.
        if isinstance(value, int):
            raise ValueError(
                f"{value!r} is a number: write three octal digits in quotes, like '027'"
            )
        return value

    @field_validator("limits", mode="before")
    @classmethod
    def _check_limits(cls, value: Any) -> Any:
        for name, limit in value.items() if isinstance(value, dict) else ():
            if name not in LIMITS:
                raise ValueError(f"{name!r} is not a limit: one of {', '.join(LIMITS)}")
            is_number = isinstance(limit, int) and not isinstance(limit, bool)
            if not (is_number and 0 <= limit <= MAX_LIMIT) and limit != "unlimited":
                raise ValueError(f"{name} {limit!r}: a whole number of at least 0, or unlimited")
        return value

    @field_validator("workdir")
    @classmethod
    def _check_workdir(cls, value: str | None) -> str | None:
        if value is not None and not PurePosixPath(value).is_absolute():
            raise ValueError(f"{value!r} is a relative path: a folder's absolute path on the nodes")
        return value

    @property
    def node_count(self) -> int:
        """The maximum number of nodes; the slots of a generation give its actual number."""
        return self.nodes if isinstance(self.nodes, int) else self.nodes.max

    @property
    def fewest_nodes(self) -> int:
        """The minimum number of nodes with which the job runs."""
        return self.nodes if isinstance(self.nodes, int) else self.nodes.min

    @property
    def is_elastic(self) -> bool:
        return self.fewest_nodes < self.node_count

    @model_validator(mode="after")
    def _check_launcher(self) -> Self:
        if self.launcher != "none" and self.warm:
            raise ValueError(
                f"warm: {self.launcher} starts the ranks itself, so they cannot be forked: "
                "leave out warm or launcher"
            )
        if self.launcher != "none" and (nested := find_launcher(self.command)) is not None:
            raise ValueError(
                f"command: {nested} starts ranks itself: give the command of one rank;"
                f" launcher: {self.launcher} puts {self.launcher} before it"
            )
        return self

    @property
    def soft_limits(self) -> dict[str, int]:
        """Soft limits by name, as setrlimit(2) takes them; -1: unlimited."""
        return {name: -1 if limit == "unlimited" else limit for name, limit in self.limits.items()}

    @property
    def ranks_per_node(self) -> int:
        return self.nproc_per_node

    @property
    def processes_per_node(self) -> int:
        """The number of processes per node that relaunch starts itself and whose exits it sees.

        Where there is a launcher, it is the only one.
        """
        return self.nproc_per_node if self.launcher == "none" else 1

    @property
    def world_size(self) -> int:
        """The maximum number of ranks."""
        return self.node_count * self.ranks_per_node

    @property
    def size(self) -> str:
        """The size as text for people: `8 ranks on 4 nodes`, `4 to 8 ranks on 2 to 4 nodes`."""
        if not self.is_elastic:
            return f"{count_noun(self.world_size, 'rank')} on {count_noun(self.node_count, 'node')}"
        fewest = self.fewest_nodes
        return (
            f"{fewest * self.ranks_per_node} to {count_noun(self.world_size, 'rank')}"
            f" on {fewest} to {count_noun(self.node_count, 'node')}"
        )
