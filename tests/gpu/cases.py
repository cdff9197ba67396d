"""Which programs fail on the GPU, how, and what the field says is right for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HANG = {
    "hang": {"after": "20s", "first_step": "120s"},
    "timeouts": {"heartbeat": "2s", "lease": "10s", "lost_after": "10s", "fence_after": "5s"},
}
"""Where a hang is to be found within the time of a test."""


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    causes: tuple[str, ...]
    """What an expert accepts as the cause of the first fault."""
    reason: str
    """Why that is right."""
    script: str = "loop.py"
    nproc: int = 1
    alone: bool = False
    """Whether it needs the GPU for itself: it asks for all of its memory."""
    recovers: bool = True
    """Whether the job succeeds in its second generation."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


OWN = ("APPLICATION", "GPU_USER_INDUCED")
CASES = (
    Case(
        "read_wrong_address",
        "a kernel stores to address 16",
        OWN,
        "Xid 31 is a page fault of the program: NVIDIA's catalogue has it restart the application",
    ),
    Case(
        "store_misaligned",
        "a kernel stores four bytes to an odd address",
        OWN,
        "Xid 13: an error of the program's kernel",
    ),
    Case(
        "trap",
        "a kernel ends itself (`__trap()`)",
        OWN,
        "the program's own doing, as an assertion of its kernel",
    ),
    Case(
        "assert_on_device",
        "an embedding is asked for row 11 of 10",
        OWN,
        "torch's kernels check their indices: the data or the model is wrong",
    ),
    Case(
        "spin",
        "a kernel never ends, and the rank waits for it",
        ("HANG",),
        "nothing fails, and no step comes",
        policy=HANG,
    ),
    Case(
        "use_missing_gpu",
        "a rank takes a GPU that the node does not have",
        (*OWN, "USER_INPUT"),
        "more ranks than GPUs: no node is broken",
    ),
    Case(
        "see_no_gpu",
        "a rank whose CUDA_VISIBLE_DEVICES hides all GPUs",
        (*OWN, "USER_INPUT"),
        "torch says that it sees no GPU; the driver is well",
        recovers=False,
        env={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Case(
        "share_gpu",
        "two ranks of NCCL on one GPU",
        (*OWN, "USER_INPUT"),
        "NCCL says that its use is invalid: the command is wrong, not the network",
        nproc=2,
    ),
    Case(
        "die_computing",
        "SIGKILL while a kernel computes",
        ("UNKNOWN", "OUT_OF_MEMORY", "PREEMPTED"),
        "it was killed, and nothing says by what",
    ),
    Case(
        "run_out_of_memory",
        "tensors until the GPU is full",
        ("OUT_OF_MEMORY",),
        "torch says so",
        alone=True,
    ),
    Case(
        "jax_out_of_memory",
        "JAX asks for four TiB",
        ("OUT_OF_MEMORY",),
        "XLA says RESOURCE_EXHAUSTED",
        script="jax_memory.py",
        alone=True,
    ),
)
