"""Lists the functions in which a rank waits for others, or for its GPU.

A row is a fact about a library's source, with where it was read. Add one for another library; what
is not listed is never taken for a wait, so a rank in it can be named as the one that others wait
for, but is never spared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitRow:
    """Functions of one file of a library."""

    file: str
    """The end of its path, from the folder of the package on."""
    functions: tuple[str, ...]
    """Empty: all of the file."""
    source: str
    innermost: bool = False
    """Whether it waits only where it has called no other Python function: it runs others' code."""
    name: str = ""
    """The operation for people, if it is not the function."""


WAITS = (
    WaitRow(
        "torch/distributed/distributed_c10d.py",
        (),
        "torch 2.13: collectives, point to point, barriers, and the rendezvous of "
        "init_process_group and new_group",
    ),
    WaitRow(
        "torch/distributed/_functional_collectives.py",
        (),
        "torch 2.13: collectives of DTensor and of compiled programs, wait_tensor",
    ),
    WaitRow("torch/distributed/nn/functional.py", (), "torch 2.13: collectives with gradients"),
    WaitRow("torch/distributed/rendezvous.py", (), "torch 2.13: the store of the first meeting"),
    WaitRow(
        "torch/distributed/utils.py",
        ("_sync_module_states", "_sync_params_and_buffers", "_verify_param_shape_across_processes"),
        "torch 2.13: DistributedDataParallel and FSDP compare and send the parameters",
    ),
    WaitRow(
        "torch/autograd/graph.py",
        ("_engine_run_backward",),
        "torch 2.13: DistributedDataParallel waits for its buckets inside of backward",
        innermost=True,
        name="backward",
    ),
    WaitRow(
        "torch/cuda/__init__.py", ("synchronize",), "torch 2.13: waits for the GPU", innermost=True
    ),
    WaitRow(
        "torch/cuda/streams.py",
        ("synchronize", "wait_stream", "wait_event", "wait"),
        "torch 2.13: waits for the GPU",
        innermost=True,
    ),
    WaitRow("torch/accelerator/__init__.py", ("synchronize",), "torch 2.13", innermost=True),
    WaitRow(
        "deepspeed/comm/torch.py",
        (
            "all_gather",
            "all_gather_coalesced",
            "all_gather_into_tensor",
            "all_gather_object",
            "all_reduce",
            "all_reduce_coalesced",
            "all_to_all",
            "all_to_all_single",
            "barrier",
            "broadcast",
            "gather",
            "inference_all_reduce",
            "irecv",
            "isend",
            "monitored_barrier",
            "recv",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "scatter",
            "send",
        ),
        "deepspeed 0.19: the backend that calls torch",
    ),
    WaitRow(
        "accelerate/utils/operations.py",
        ("_gpu_gather", "_gpu_broadcast", "gather", "gather_object", "broadcast", "reduce"),
        "accelerate 1.15",
    ),
    WaitRow("accelerate/state.py", ("wait_for_everyone",), "accelerate 1.15"),
    WaitRow("horovod/torch/mpi_ops.py", ("synchronize", "barrier", "join"), "horovod 0.28"),
    WaitRow(
        "jax/experimental/multihost_utils.py",
        (),
        "jax 0.10: sync_global_devices, process_allgather, broadcast_one_to_all",
    ),
    WaitRow(
        "jax/_src/distributed.py", ("initialize",), "jax 0.10: waits until all processes are there"
    ),
    WaitRow(
        "jax/_src/api.py", ("block_until_ready",), "jax 0.10: waits for the device", innermost=True
    ),
    WaitRow(
        "jax/_src/array.py",
        ("block_until_ready", "_value"),
        "jax 0.10: waits for the device",
        innermost=True,
    ),
)

TRANSPARENT = ("torch", "deepspeed", "accelerate", "horovod", "jax", "jaxlib", "contextlib.py")
"""Packages and modules whose functions may be between a collective and where its thread is: code of
the collective's own library. In any other function the rank runs something else, such as the
handler of a signal."""
PLUMBING = (
    ("torch/nn/modules/module.py", ("_call_impl", "_wrapped_call_impl")),
    ("torch/distributed/c10d_logger.py", ("wrapper",)),
    ("torch/utils/_contextlib.py", ("decorate_context",)),
    ("torch/_dynamo/eval_frame.py", ("_fn",)),
)
"""Functions that only call another one: to name them says nothing."""
