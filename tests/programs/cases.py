"""Which programs are run with which faults, and what is expected of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STEP = 8
"""The step of every fault: after a checkpoint, and before the next."""


@dataclass(frozen=True)
class Program:
    name: str
    script: str
    what: str
    arguments: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    """What its Python must have."""
    nodes: int = 1
    nproc: int = 2
    progress: Any = None
    """As in a job file."""
    launcher: str = "none"
    last_step: int | None = 20
    """The step that `show` has at the end, or None where none can be read."""
    continues: bool = True
    """Whether a resumed run sees the batches of an uninterrupted one, and so has its bits.

    Lightning creates the iterator of a resumed run before it tells the sampler the epoch: with
    loader processes the first epoch has the order of epoch 0. It is the same under torchrun.
    """
    loaders: bool = False
    """Whether other processes load its data."""
    hooks: frozenset[str] = frozenset()
    """Faults that not every program has a place for."""


TORCH = ("torch", "numpy")
PURE = Program(
    "pure",
    "pure.py",
    "a loop in Python, `print`",
    nodes=2,
    nproc=1,
    progress={"log_pattern": r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"},
    last_step=30,
    hooks=frozenset({"slow_checkpoint", "slow_evaluation"}),
)
NANOGPT = Program(
    "nanogpt",
    "nanogpt.py",
    "DDP as in nanoGPT, `print`",
    imports=TORCH,
    progress="nanogpt",
    hooks=frozenset({"late", "nan_silent", "slow_checkpoint", "slow_evaluation"}),
)
PROGRAMS = (
    PURE,
    NANOGPT,
    replace(
        NANOGPT,
        name="nanogpt-torchrun",
        what="the same, `launcher: torchrun`",
        launcher="torchrun",
    ),
    Program(
        "elastic",
        "elastic.py",
        "PyTorch's fault-tolerance tutorial, `print`",
        imports=TORCH,
        progress={"log_pattern": r"Epoch (?P<step>\d+) \| Batchsize"},
        last_step=14,
        loaders=True,
        hooks=frozenset({"late", "nan_silent"}),
    ),
    Program(
        "trainer",
        "trainer.py",
        "Trainer of Hugging Face, its bar",
        imports=(*TORCH, "transformers", "accelerate"),
        progress="hf",
        loaders=True,
        hooks=frozenset({"late", "nan_silent"}),
    ),
    Program(
        "accelerate",
        "accelerated.py",
        "a loop with Accelerate, tqdm",
        imports=(*TORCH, "accelerate"),
        progress="tqdm",
        last_step=24,
        loaders=True,
        hooks=frozenset({"nan_silent"}),
    ),
    Program(
        "lightning-tqdm",
        "lit.py",
        "Lightning, its tqdm bar",
        ("--bar", "tqdm"),
        imports=(*TORCH, "lightning"),
        progress="lightning",
        continues=False,
        loaders=True,
        hooks=frozenset({"nan_silent"}),
    ),
    Program(
        "lightning-rich",
        "lit.py",
        "Lightning, its Rich bar",
        ("--bar", "rich"),
        imports=(*TORCH, "lightning"),
        progress="lightning",
        continues=False,
        # Rich draws nothing into a file but the last state of the bar.
        last_step=None,
        loaders=True,
    ),
    Program(
        "async-dcp",
        "async_dcp.py",
        "`torch.distributed.checkpoint.async_save`, `logging`",
        imports=TORCH,
        nodes=2,
        nproc=1,
        progress={"log_pattern": r"step (?P<step>\d+) loss (?P<loss>[\d.]+)"},
        hooks=frozenset({"late", "nan_silent"}),
    ),
    Program(
        "jax",
        "jax_two.py",
        "JAX in two processes, `print`",
        imports=("jax", "numpy"),
        nodes=2,
        nproc=1,
        progress={"log_pattern": r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"},
    ),
)

QUICK = {"heartbeat": "2s", "lease": "10s", "lost_after": "10s", "fence_after": "5s"}
"""Where a hang is to be found within a test."""
HANG = {
    "hang": {"after": "20s", "first_step": "90s"},
    "timeouts": {**QUICK, "stop_grace": "3s"},
}


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    rank: str = "1"
    step: int = STEP
    repeats: bool = False
    """Whether it happens again after each start, as a bug does."""
    env: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 400.0
    """Seconds until what has not ended is taken for hanging: ten times what it takes on two idle
    cores."""
    everywhere: bool = True
    """Whether every program has a place for it."""
    needs: str = ""
    """What of this machine: `tmpfs` or `cgroup`."""


FAULTS = (
    Fault("none", "nothing"),
    Fault("kill", "a rank is killed by SIGKILL"),
    Fault("keyerror", "a rank raises KeyError, after each start", repeats=True),
    Fault(
        "loader_keyerror",
        "a process that loads data raises KeyError, after each start",
        rank="any",
        repeats=True,
        everywhere=False,
    ),
    Fault("exit0", "a rank exits with 0 in the middle"),
    Fault("oom", "a rank reaches RLIMIT_AS, after each start: MemoryError", repeats=True),
    Fault("oom_cgroup", "the kernel kills a rank in a memory cgroup", needs="cgroup"),
    Fault("torn", "a rank is killed, and the newest checkpoint is cut in half", rank="0"),
    Fault("disk_full", "no room for a checkpoint, once", rank="0", needs="tmpfs"),
    Fault("nan_raised", "a rank raises FloatingPointError: loss is nan"),
    Fault("nan_silent", "parameters become NaN, nothing is raised", everywhere=False),
    Fault(
        "loader_kill",
        "a process that loads data is killed by SIGKILL",
        rank="any",
        step=40,
        everywhere=False,
    ),
    Fault(
        "loader_hang",
        "a process that loads data hangs",
        rank="any",
        step=40,
        policy=HANG,
        everywhere=False,
    ),
    Fault(
        "late",
        "a rank sleeps through a collective with a time-out of 6 s",
        env={"FAULT_SECONDS": "60", "COLLECTIVE_TIMEOUT_MIN": "0.1"},
        everywhere=False,
    ),
    Fault(
        "slow_checkpoint",
        "a checkpoint takes 9 s, with `hang.after` of 20 s",
        rank="0",
        step=10,
        env={"FAULT_SECONDS": "9"},
        policy=HANG,
        everywhere=False,
    ),
    Fault(
        "slow_evaluation",
        "an evaluation takes 12 s, with `hang.after` of 20 s",
        rank="0",
        step=10,
        env={"FAULT_SECONDS": "12"},
        policy=HANG,
        everywhere=False,
    ),
)


def has_place(program: Program, fault: Fault) -> bool:
    return (
        fault.everywhere
        or fault.name in program.hooks
        or (fault.name.startswith("loader_") and program.loaders)
    )


@dataclass(frozen=True)
class Expected:
    """What a cell must show. Fields that are None may have any value."""

    phase: str
    generations: int
    cause: str | None
    """Of the last fault."""
    reason: str
    same: bool | None = True
    """Whether parameters and loss have the bits of a run without a fault."""
    traceback: str = ""
    """What the last line of the traceback in `show` contains."""


EXPECTED: Mapping[str, Expected] = {
    "none": Expected("SUCCEEDED", 1, None, "nothing happened"),
    "kill": Expected("SUCCEEDED", 2, "UNKNOWN", "a SIGKILL does not say who sent it"),
    "keyerror": Expected(
        "FAILED",
        2,
        "APPLICATION",
        "a bug is there after each start, and `max_restarts` is 1",
        None,
        "KeyError: 'label_ids'",
    ),
    "loader_keyerror": Expected(
        "FAILED", 2, "APPLICATION", "as in a rank", None, "KeyError: 'label_ids'"
    ),
    "exit0": Expected(
        "SUCCEEDED", 2, "APPLICATION", "a rank that ends before the others has a bug"
    ),
    "oom": Expected(
        "FAILED", 2, "OUT_OF_MEMORY", "the second time it is the program", None, "MemoryError"
    ),
    "oom_cgroup": Expected("SUCCEEDED", 2, "OUT_OF_MEMORY", "the kernel log says so"),
    "torn": Expected(
        "FAILED", 2, "APPLICATION", "a checkpoint that cannot be read stays unreadable", None
    ),
    "disk_full": Expected(
        "SUCCEEDED", 2, "STORAGE", "there is room again when it starts again", True
    ),
    "nan_raised": Expected("SUCCEEDED", 2, "NUMERICS", "the checkpoint has no NaN"),
    "nan_silent": Expected(
        "SUCCEEDED", 1, None, "nothing fails, and relaunch does not judge a loss", False
    ),
    "loader_kill": Expected(
        "SUCCEEDED", 2, "OUT_OF_MEMORY", "the most frequent reason why a loader is killed"
    ),
    "loader_hang": Expected("SUCCEEDED", 2, "HANG", "no step for longer than `hang.after`"),
    "late": Expected("SUCCEEDED", 2, "HANG", "a collective timed out"),
    "slow_checkpoint": Expected("SUCCEEDED", 1, None, "shorter than `hang.after`"),
    "slow_evaluation": Expected("SUCCEEDED", 1, None, "shorter than `hang.after`"),
}
"""By fault; `EXCEPTIONS` has what is different for a program."""
OVERWRITES = Expected(
    "SUCCEEDED", 1, None, "its checkpoint overwrites the one before, whose room is free again"
)
EXCEPTIONS: Mapping[tuple[str, str], Expected] = {
    ("nanogpt", "disk_full"): OVERWRITES,
    ("nanogpt-torchrun", "disk_full"): OVERWRITES,
    ("elastic", "disk_full"): OVERWRITES,
    ("jax", "disk_full"): OVERWRITES,
    ("accelerate", "torn"): Expected(
        "SUCCEEDED",
        2,
        "UNKNOWN",
        "the largest file has the random states of a rank: Accelerate goes on without them",
    ),
    ("accelerate", "disk_full"): Expected(
        "FAILED",
        3,
        "APPLICATION",
        "the program takes the newest folder, which has no weights",
        None,
        "No such file or directory",
    ),
    ("trainer", "late"): Expected(
        "SUCCEEDED", 1, None, "the rank comes within the 30 minutes of `ddp_timeout`"
    ),
    ("lightning-rich", "loader_hang"): Expected(
        "CANCELLED",
        1,
        None,
        "Rich draws no step into a file, so nothing tells a hang from work; callbacks would",
        None,
    ),
    ("trainer", "disk_full"): Expected(
        "FAILED",
        3,
        "APPLICATION",
        "`get_last_checkpoint` takes the folder that was begun, which has no weights",
        None,
        "Can't find a valid checkpoint",
    ),
}


def expected(program: Program, fault: str) -> Expected:
    want = EXCEPTIONS.get((program.name, fault), EXPECTED[fault])
    resumed = want.generations > 1 and want.same
    return replace(want, same=False) if resumed and not program.continues else want


@dataclass(frozen=True)
class Known:
    """A field that is wrong today. The run fails once it is right, so that this line is removed."""

    field: str
    today: Any
    mended_by: str


THE_RIGHT_CAUSE = "the exits of the ranks below a launcher"
KNOWN: Mapping[tuple[str, str], tuple[Known, ...]] = {
    # One launcher waits for both ranks and does not tell that one has ended with 0.
    ("nanogpt-torchrun", "exit0"): (Known("cause", "NETWORK", THE_RIGHT_CAUSE),),
}


def find_deviations(row: Mapping[str, Any]) -> list[str]:
    """Return what of a row is not as expected, as sentences; empty where all is."""
    [program] = (one for one in PROGRAMS if one.name == row["program"])
    fault = row["fault"]
    want = expected(program, fault)
    got = {
        "phase": row["phase"],
        "generations": row["generations"],
        "cause": row["cause"],
        "same": row["same"],
        "traceback": want.traceback in row["traceback"] if want.traceback else True,
        "step": row["step"],
    }
    wanted = {
        "phase": want.phase,
        "generations": want.generations,
        "cause": want.cause,
        "same": got["same"] if want.same is None else want.same,
        "traceback": True,
        # The patterns of these programs read no `loss nan`, nor the steps of such lines.
        "step": program.last_step
        if row["phase"] == "SUCCEEDED" and fault != "nan_silent"
        else row["step"],
    }
    known = {one.field: one for one in KNOWN.get((program.name, fault), ())}
    found = []
    for name, value in got.items():
        if (one := known.get(name)) is not None:
            if value == wanted[name]:
                found.append(f"{name} is {value!r}, which is right: remove it from KNOWN")
            elif value != one.today:
                found.append(f"{name} is {value!r}, known to be {one.today!r}")
        elif value != wanted[name]:
            found.append(f"{name} is {value!r}, expected {wanted[name]!r}: {want.reason}")
    return found + list(row["unreadable"])
