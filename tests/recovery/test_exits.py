"""Exits, last lines and stop codes become findings."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.catalog import CatalogOverrides, catalog
from relaunch.evidence.causes import Cause
from relaunch.evidence.exits import read_ecs_stop, read_exit, read_log
from relaunch.evidence.findings import Finding, Role
from relaunch.evidence.kernel_log import read_kernel_log

RANK_KILLED = (
    "Memory cgroup out of memory: Killed process 123 (python3) total-vm:98123456kB, "
    "anon-rss:65012345kB"
)
OTHER_KILLED = "Out of memory: Killed process 77 (chrome) total-vm:98123456kB, anon-rss:65012345kB"


def read(
    exit_code: int | None,
    signal: int | None = None,
    *,
    stopped: bool = False,
    kernel: str = "",
    pid: int | None = 123,
) -> Finding:
    findings = read_kernel_log(kernel.splitlines(), catalog())
    return read_exit(
        exit_code, signal, stopped=stopped, kernel=findings, pid=pid, catalog=catalog()
    )


@pytest.mark.parametrize(
    ("exit_code", "signal", "code", "role", "cause"),
    [
        (0, None, "exit 0", Role.INFORMATION, None),
        (1, None, "exit 1", Role.WRAPPER, Cause.APPLICATION),
        (3, None, "exit 3", Role.WRAPPER, Cause.APPLICATION),
        (14, None, "exit 14", Role.WRAPPER, Cause.APPLICATION),
        (93, None, "exit 93", Role.ROOT, Cause.APPLICATION),
        (107, None, "exit 107", Role.SYMPTOM, Cause.STORAGE),
        (126, None, "exit 126", Role.ROOT, Cause.USER_INPUT),
        (127, None, "exit 127", Role.ROOT, Cause.USER_INPUT),
        (128, None, "exit 128", Role.SYMPTOM, Cause.UNKNOWN),
        (130, None, "exit 130", Role.SYMPTOM, Cause.UNKNOWN),
        (132, None, "exit 132", Role.ROOT, Cause.APPLICATION),
        (134, None, "exit 134", Role.WRAPPER, Cause.UNKNOWN),
        (137, None, "exit 137", Role.SYMPTOM, Cause.UNKNOWN),
        (139, None, "exit 139", Role.ROOT, Cause.APPLICATION),
        (143, None, "exit 143", Role.SYMPTOM, Cause.UNKNOWN),
        (245, None, "exit 245", Role.ROOT, Cause.APPLICATION),
        (247, None, "exit 247", Role.SYMPTOM, Cause.UNKNOWN),
        (255, None, "exit 255", Role.WRAPPER, Cause.APPLICATION),
        (-11, None, "SIGSEGV", Role.ROOT, Cause.APPLICATION),
        (None, 6, "SIGABRT", Role.WRAPPER, Cause.UNKNOWN),
        (None, 7, "SIGBUS", Role.ROOT, Cause.APPLICATION),
        (None, 9, "SIGKILL", Role.SYMPTOM, Cause.UNKNOWN),
        (None, 15, "SIGTERM", Role.SYMPTOM, Cause.UNKNOWN),
        (None, 40, "signal 40", Role.SYMPTOM, Cause.UNKNOWN),
        (None, None, "exit unknown", Role.SYMPTOM, Cause.UNKNOWN),
    ],
)
def test_an_exit_by_itself(
    exit_code: int | None, signal: int | None, code: str, role: Role, cause: Cause | None
) -> None:
    found = read(exit_code, signal)
    assert ("exit", code, role, cause, 123) == (
        found.source,
        found.code,
        found.role,
        found.cause,
        found.pid,
    )
    assert found.reason


@pytest.mark.parametrize(
    ("exit_code", "signal", "stopped", "kernel", "pid", "role", "cause"),
    [
        pytest.param(None, 9, True, "", 123, Role.CASCADE, None, id="we did it"),
        pytest.param(137, None, True, "", 123, Role.CASCADE, None, id="we did it, through a shell"),
        pytest.param(
            None,
            9,
            False,
            RANK_KILLED,
            123,
            Role.ROOT,
            Cause.OUT_OF_MEMORY,
            id="the kernel names the process",
        ),
        pytest.param(
            None,
            9,
            False,
            RANK_KILLED,
            None,
            Role.ROOT,
            Cause.OUT_OF_MEMORY,
            id="no pid known: the kernel names a rank",
        ),
        pytest.param(
            None,
            9,
            False,
            RANK_KILLED,
            999,
            Role.SYMPTOM,
            Cause.UNKNOWN,
            id="the kernel names another process",
        ),
        pytest.param(
            None,
            9,
            False,
            OTHER_KILLED,
            None,
            Role.SYMPTOM,
            Cause.UNKNOWN,
            id="no pid known: no rank was named",
        ),
        pytest.param(
            None,
            9,
            False,
            OTHER_KILLED,
            77,
            Role.ROOT,
            Cause.OUT_OF_MEMORY,
            id="by its pid a rank may have any name",
        ),
        pytest.param(
            137,
            None,
            False,
            RANK_KILLED,
            999,
            Role.ROOT,
            Cause.OUT_OF_MEMORY,
            id="a shell passes on what killed its child",
        ),
        pytest.param(
            137,
            None,
            False,
            OTHER_KILLED,
            999,
            Role.SYMPTOM,
            Cause.UNKNOWN,
            id="a shell, and no rank was named",
        ),
        pytest.param(
            247,
            None,
            False,
            RANK_KILLED,
            999,
            Role.ROOT,
            Cause.OUT_OF_MEMORY,
            id="a Python launcher passes it on",
        ),
        pytest.param(
            None,
            9,
            False,
            "eth0: Lost carrier",
            123,
            Role.SYMPTOM,
            Cause.UNKNOWN,
            id="other words of the kernel",
        ),
        pytest.param(None, 9, False, "", 123, Role.SYMPTOM, Cause.UNKNOWN, id="not said by whom"),
        pytest.param(
            None,
            11,
            False,
            RANK_KILLED,
            123,
            Role.ROOT,
            Cause.APPLICATION,
            id="another signal is not memory",
        ),
    ],
)
def test_the_meanings_of_137_are_distinguished(
    exit_code: int | None,
    signal: int | None,
    stopped: bool,
    kernel: str,
    pid: int | None,
    role: Role,
    cause: Cause | None,
    snapshot: SnapshotAssertion,
) -> None:
    found = read(exit_code, signal, stopped=stopped, kernel=kernel, pid=pid)
    assert (role, cause) == (found.role, found.cause)
    assert found.reason == snapshot


def test_s1_1_a_code_that_stands_for_a_signal_says_so(snapshot: SnapshotAssertion) -> None:
    assert read(137).reason == snapshot(name="code-of-a-signal")
    assert read(3).reason == snapshot(name="code")
    assert read(None, 11).reason == snapshot(name="signal")


def test_success_is_success_also_when_we_stopped_it() -> None:
    assert Role.INFORMATION is read(0, stopped=True).role


def test_a_users_row_is_read_by_code_before_by_signal() -> None:
    ours = catalog(
        CatalogOverrides.model_validate(
            {
                "exit": {
                    "exit 143": {"cause": "PREEMPTED", "meaning": "our scheduler"},
                    "SIGTERM": {"cause": "PLATFORM", "meaning": "our agent"},
                    "exit 42": {"cause": "PREEMPTED", "meaning": "our scheduler"},
                }
            }
        )
    )
    causes = [
        read_exit(code, signal, stopped=False, kernel=(), pid=None, catalog=ours).cause
        for code, signal in ((143, None), (None, 15), (42, None))
    ]
    assert causes == [Cause.PREEMPTED, Cause.PLATFORM, Cause.PREEMPTED]


LINES: list[tuple[str, str]] = [
    ("shm_left", "FileExistsError: [Errno 17] File exists: '/000010_locals'"),
    (
        "shm_left",
        "ValueError: Reused local directory: ['/data/c4'] vs ['/data/c4']. Provide a different one."
        " If using a unique local directory, try deleting the local directory and call"
        " `streaming.base.util.clean_stale_shared_memory()` only once in your script to clean up"
        " the stale shared memory before instantiation of `StreamingDataset`.",
    ),
    ("no_debugger", "bdb.BdbQuit"),
    ("no_answer", "EOFError: EOF when reading a line"),
    (
        "child_sigkill",
        "[launch.py:321] ['/usr/bin/python', 'train.py'] exits with return code = -9",
    ),
    ("child_failed", "subprocess.CalledProcessError: Command '['python', 'train.py']' returned 1"),
    ("cuda_not_ready", "RuntimeError: No CUDA GPUs are available"),
    ("cuda_not_ready", "RuntimeError: Found no NVIDIA driver on your system. Please check"),
    ("cuda_unavailable", "pynvml.NVMLError_Unknown: Unknown Error"),
    (
        "cuda_oom",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp"',
    ),
    ("illegal_access", "RuntimeError: CUDA error: hardware stack error"),
    ("slurm_oom", "srun: error: n1: task 3: Out Of Memory"),
    ("evicted_memory", "The node was low on resource: memory. Container train was using 100Gi"),
    ("evicted_disk", "The node was low on resource: ephemeral-storage."),
    ("object_store", "botocore.errorfactory: An error occurred (503) when calling the PutObject"),
    ("store_credential", "botocore.exceptions.NoCredentialsError: Unable to locate credentials"),
    (
        "store_denied",
        "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the "
        "PutObject operation: Access Denied",
    ),
    ("write_failed", "[enforce fail at inline_container.cc:672] . unexpected pos 1216 vs 1110"),
    ("nan_inf", "train_loss: nan"),
    ("nan_inf", "{'loss': nan, 'grad_norm': nan}"),
    ("nan_inf", "RuntimeError: Function 'PowBackward0' returned nan values in its 0th output."),
    ("ray_actor", "ray.exceptions.RayActorError: The actor died unexpectedly"),
    ("monitored_barrier", "Timed out initializing process group in store based barrier on rank: 0"),
    ("coordination_service", "XlaRuntimeError: ABORTED: The remote task died"),
    (
        "port_in_use",
        "socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ),
    ("port_in_use", "RuntimeError: Address already in use"),
    (
        "port_in_use",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, name: EADDRINUSE, message: address already in use",
    ),
    ("address_in_use", "OSError: [Errno 98] Address already in use"),
    ("nccl_interface", "NCCL WARN Bootstrap : no socket interface found"),
    ("ib_completion", "NET/IB : Got completion from peer 10.0.0.1<3333> with status=12 opcode=0"),
    ("ib_completion", "NET/IB: Got completion from peer 10.0.0.1<3333> with error 12, opcode 0"),
    ("rdzv_connection", "OSError: [Errno 113] No route to host"),
    ("http_service", "ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443)"),
    ("http_service", "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable"),
    ("child_sigkill", "Signal 9 (SIGKILL) received by PID 4242"),
    ("signal_exit", "Signal 11 (SIGSEGV) received by PID 4242"),
    ("outer_signal", "SignalException: Process 2920830 got signal: 1"),
    (
        "peer_access_contained",
        "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware "
        "error",
    ),
    (
        "cuda_oom",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a "
        "total capacity of 23.64 GiB of which 264.00 MiB is free. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.",
    ),
    ("cuda_unavailable", "CUDA-capable device(s) is/are busy or unavailable"),
    ("cuda_unknown", "RuntimeError: CUDA error: unknown error"),
    ("nccl_oom", "enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'"),
    ("object_store", "botocore.exceptions.ConnectionClosedError: Connection was closed before"),
    ("loss_scale", "Exception: Current loss scale already at minimum - cannot decrease scale"),
    ("node_failure", "srun: error: Node failure on jean-zay-iam37"),
    ("requeued", "slurmstepd: error: *** JOB 608 ON n1 CANCELLED AT 10:00 DUE TO JOB REQUEUE ***"),
    ("job_credential", "srun: error: Task launch failed on node cn131: Job credential expired"),
    ("not_executable", "exec /usr/local/bin/python3: exec format error"),
    ("arguments", "train.py: error: unrecognized arguments: --local-rank=1"),
    (
        "heartbeat_monitor",
        "[rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out!",
    ),
    (
        "monitored_barrier",
        "RuntimeError: [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 2000000 ms",
    ),
    (
        "coordination_service",
        "coordination_service.cc:954] /job:jax_worker/replica:0/task:37 has been set to ERROR in "
        "coordination service",
    ),
    ("mpi_peer", "generally: such peer hangups are frequently caused by application bugs"),
    ("nccl_proxy", "proxy.cc:862 NCCL WARN Proxy Call to rank 14 failed (Connect)"),
    (
        "rdzv_connection",
        "RendezvousConnectionError: The connection to the C10d store has failed. See inner",
    ),
    ("nic_event", "transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error"),
    (
        "signal_exit",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with "
        "signal SIGSEGV",
    ),
    (
        "signal_exit",
        "E1121 10:00:00 api.py:874] failed (exitcode: -9) local_rank: 3 (pid: 4242) of "
        "binary: /usr/bin/python3",
    ),
    ("child_failed", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"),
    ("child_failed", "Root Cause (first observed failure):"),
    (
        "xid_line",
        "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen "
        "off the bus.",
    ),
    (
        "gpu_off_bus",
        "Unable to determine the device handle for GPU0000:05:00.0: GPU is lost.  Reboot "
        "the system to recover this GPU",
    ),
    ("cuda_ecc_uncorrectable", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    (
        "nvlink_fault",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    ("peer_memory", "RuntimeError: CUDA error: peer mapping resources exhausted"),
    ("peer_memory", "NET/IB : GPU Direct RDMA disabled, nvidia_peermem not loaded"),
    ("cuda_not_ready", "RuntimeError: CUDA error: system not yet initialized"),
    ("cuda_not_ready", "Failed to initialize NVML: Driver/library version mismatch"),
    (
        "cuda_oom",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 "
        "has a total capacity of 79.11 GiB",
    ),
    ("cuda_oom", "[rank0]: torch.cuda.OutOfMemoryError: CUDA out of memory."),
    (
        "cuda_oom",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    ("device_assert", "RuntimeError: CUDA error: device-side assert triggered"),
    (
        "device_assert",
        "Indexing.cu:1146: block: [12,0,0], thread: [96,0,0] Assertion `srcIndex < "
        "srcSelectDimSize` failed.",
    ),
    ("illegal_access", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("illegal_access", "RuntimeError: CUDA error: unspecified launch failure"),
    (
        "illegal_access",
        "[rank1]:[E1121 ProcessGroupNCCL.cpp:1895] [PG ID 0 Rank 1] Process group "
        "watchdog thread terminated with exception: "
        "CUDA error: an illegal memory access was encountered",
    ),
    (
        "slurm_oom",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step "
        "tasks have been OOM Killed.",
    ),
    ("host_oom", "Last State: Terminated, Reason: OOMKilled, Exit Code: 137"),
    ("memory_error", "MemoryError"),
    (
        "memory_error",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an "
        "array with shape (100000, 100000)",
    ),
    ("memory_error", "OSError: [Errno 12] Cannot allocate memory"),
    ("memory_error", "terminate called after throwing an instance of 'std::bad_alloc'"),
    (
        "memory_error",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. "
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1",
    ),
    (
        "shm_full",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-AbCdEf (size "
        "9637888), error: No space left on device (28)",
    ),
    (
        "shm_full",
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. "
        "dataloader's workers are out of shared memory.",
    ),
    ("shm_full", "RuntimeError: unable to write to file </torch_12_34>"),
    (
        "dataloader_killed",
        "RuntimeError: DataLoader worker (pid 12345) is killed by signal: Killed.",
    ),
    (
        "dataloader_exited",
        "RuntimeError: DataLoader worker (pid(s) 12345, 12346) exited unexpectedly",
    ),
    ("disk_quota", "OSError: [Errno 122] Disk quota exceeded: '/home/train/ckpt.pt'"),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/ckpt/step_100.npz'"),
    ("readonly_fs", "OSError: [Errno 30] Read-only file system: '/ckpt/step_100.npz'"),
    ("stale_nfs", "OSError: [Errno 116] Stale file handle: '/mnt/data/shard-0001'"),
    ("stale_nfs", "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/data'"),
    (
        "fabric_poll",
        "MPIDI_OFI_handle_cq_error(1062): OFI poll failed (ofi_events.c:1064:"
        "MPIDI_OFI_handle_cq_error:Input/output error - UNDELIVERABLE)",
    ),
    (
        "data_torn",
        "DataLossError (see above for traceback): Checksum does not match: stored 2584675441 vs. "
        "calculated on the restored bytes 1023513604",
    ),
    (
        "data_torn",
        "tensorflow.python.framework.errors_impl.DataLossError: truncated record at 72435675",
    ),
    (
        "launch_failed",
        "srun: error: Task launch for StepId=96.0 failed on node n1: Socket timed out on send/recv "
        "operation",
    ),
    (
        "launch_failed",
        "srun: error: Application launch failed: Socket timed out on send/recv operation",
    ),
    ("launch_failed", "ORTE was unable to reliably start one or more daemons."),
    (
        "launch_failed",
        "RuntimeError: Request failed with status code 500: No available agent to submit job, "
        "please try again later..",
    ),
    (
        "container_setup",
        "slurmstepd: error: pyxis:   nvidia-container-cli: container error: file lookup failed: "
        "/proc/421042/root/etc/debian_version: permission denied",
    ),
    ("container_setup", "slurmstepd: error: pyxis: couldn't start container"),
    (
        "cuda_not_ready",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 805: MPS client failed to "
        "connect to the MPS control daemon or the MPS server.",
    ),
    (
        "cuda_unavailable",
        "jax.errors.JaxRuntimeError: UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Device "
        "or resource busy: Device or resource busy; Couldn't open iommu group /dev/vfio/0",
    ),
    ("loss_scale", "RuntimeError: grad_scale is too small, exiting: 9.5367431640625e-06"),
    (
        "loss_scale",
        "2024-01-14 01:03:00,826 WARNING [train.py:1057] (2/4) Grad scale is small: "
        "1.2924697071141057e-26",
    ),
    (
        "rdzv_connection",
        "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:global_topology/cpu",
    ),
    (
        "rdzv_connection",
        "At least one pair of MPI processes are unable to reach each other for",
    ),
    (
        "port_in_use",
        "E0510 20:48:44.272031  1 add_port.cc:83] Failed to add port to server: No address added "
        "out of total 1 resolved for '[::]:8476'",
    ),
    (
        "device_count",
        "RuntimeError: The number of node-local MPI processes 8cannot be larger than the device "
        "count 4",
    ),
    (
        "object_store",
        "fsspec.exceptions.FSTimeoutError: Caught FSTimeoutError in DataLoader worker process 1.",
    ),
    ("io_error", "OSError: [Errno 5] Input/output error: '/mnt/data/shard-0001'"),
    (
        "ckpt_torn",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding "
        "central directory",
    ),
    ("ckpt_torn", "zipfile.BadZipFile: File is not a zip file"),
    ("nan_inf", "RuntimeError: Rank 3: found NaN in local grad norm for bucket #0"),
    ("nan_inf", "ValueError: loss is nan at step 120"),
    ("nan_inf", "step 120 loss: nan"),
    ("nan_inf", "FloatingPointError: overflow encountered in multiply"),
    (
        "preempt",
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO "
        "PREEMPTION ***",
    ),
    (
        "time_limit",
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO "
        "TIME LIMIT ***",
    ),
    ("user_cancel", "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-21T10:00:00 ***"),
    ("user_cancel", "KeyboardInterrupt"),
    (
        "nccl_watchdog",
        "[rank2]:[E ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective "
        "operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 "
        "milliseconds before timing out.",
    ),
    (
        "gloo_timeout",
        "RuntimeError: [../gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
        "waiting 1800000ms for recv operation to complete",
    ),
    (
        "nccl_aborted",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
    ),
    (
        "nccl_remote",
        "torch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, "
        "remote process exited or there was a network error, NCCL version 2.27.5",
    ),
    (
        "nccl_remote",
        "ncclRemoteError: A call failed possibly due to a network error or a remote "
        "process exiting prematurely.",
    ),
    ("nccl_unhandled_cuda", "ncclUnhandledCudaError: Call to CUDA function failed."),
    ("nccl_invalid", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5000"),
    (
        "nccl_system_error",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call "
        "failed or device error.",
    ),
    ("nccl_internal", "ncclInternalError: Internal check failed."),
    ("python_connection", "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ("python_connection", "[rank3]: BrokenPipeError: [Errno 32] Broken pipe"),
    (
        "gloo_loopback",
        "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:20901",
    ),
    ("gloo_loopback", "RuntimeError: connect [127.0.1.1]:29341: Connection refused"),
    (
        "gloo_closed",
        "RuntimeError: [../gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
        "peer [10.0.0.2]:5555",
    ),
    (
        "gloo_closed",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:25266: "
        "Connection reset by peer",
    ),
    (
        "store_gone",
        "[c10d] sendBytes failed on SocketImpl(fd=67, addr=[n1]:36214, "
        "remote=[n0]:43145): Broken pipe",
    ),
    (
        "store_gone",
        "torch.distributed.DistNetworkError: TCPStore: failed to recv, got 0 bytes. "
        "Connection was likely closed.",
    ),
    (
        "conn_reset",
        "requests.exceptions.ConnectionError: ('Connection aborted.', "
        "RemoteDisconnected, Connection refused)",
    ),
    ("store_check", 'Failed to check the "should dump" flag on the store, with error: timeout'),
    (
        "nccl_init_timeout",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for "
        "clients. 3/4 clients joined.",
    ),
    (
        "nccl_init_timeout",
        "RuntimeError: Gloo connectFullMesh failed with "
        "[../gloo/transport/tcp/pair.cc:144] no error",
    ),
    ("nccl_teardown", "To avoid data inconsistency, we are taking the entire process down."),
    ("device_count", "RuntimeError: CUDA error: invalid device ordinal"),
    (
        "script_missing",
        "python3: can't open file '/home/train/trian.py': [Errno 2] No such file or directory",
    ),
    ("missing_file", "FileNotFoundError: [Errno 2] No such file or directory: '/data/tokens.npy'"),
    ("permission", "PermissionError: [Errno 13] Permission denied: '/ckpt'"),
    ("ckpt_mismatch", "RuntimeError: Error(s) in loading state_dict for GPT:"),
    ("shape", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x10 and 20x5)"),
    (
        "shape",
        "ValueError: operands could not be broadcast together with shapes (3,) (4,) : "
        "shapes (3,) (4,) not aligned",
    ),
    ("import", "ModuleNotFoundError: No module named 'flash_attn'"),
    ("bus_error", "Fatal Python error: Bus error"),
    ("segv", "Fatal Python error: Segmentation fault"),
    ("segv", "Segmentation fault (core dumped)"),
    ("aborted", "terminate called after throwing an instance of 'c10::Error'"),
    ("python_bug", "ValueError: bad batch"),
    ("python_bug", "[rank0]: KeyError: 'tokens'"),
    ("python_bug", "numpy.linalg.LinAlgError: Singular matrix"),
    ("python_bug", "AssertionError"),
    # of other vendors: ROCm and amdgpu, Level Zero, Gaudi, Neuron, Ascend
    (
        "device_hang",
        " 41%|####| 366/903 HW Exception by GPU node-9 (Agent handle: 0x63) reason :GPU Hang",
    ),
    ("device_hang", "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    ("device_hang", "Synapse detected a device critical error that requires a restart."),
    ("device_hang", "synStatus 31 [Synapse is being terminated due to fatality]."),
    ("illegal_access", "Memory access fault by GPU node-3 (Agent handle: 0x5a) on address 0x7098."),
    ("illegal_access", "RTS_HWTS: aicore exception, slot_id=31, stream_id=3"),
    (
        "illegal_access",
        "EZ9999: serial number is 2, there is an aivec error exception, core id is 11",
    ),
    ("illegal_access", "Aicore kernel execute failed, device_id=4, stream_id=450"),
    ("illegal_access", "HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: out of bounds"),
    ("illegal_access", "RuntimeError: hipErrorLaunchFailure"),
    ("cuda_ecc_uncorrectable", "RuntimeError: HIP error: hipErrorECCNotCorrectable"),
    ("cuda_ecc_uncorrectable", "nrt_execute: NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE"),
    ("cuda_not_ready", "RuntimeError: No HIP GPUs are available"),
    ("cuda_not_ready", "NRT:nrt_init      Unable to determine Neuron Driver version."),
    (
        "neuron_fatal",
        "Uncorrectable memory error is detected on Neuron device: 5:1 metadata: 0x2. "
        "Failing execution.",
    ),
    ("neuron_fatal", "nrt_execute: NRT_EXEC_HW_ERR_NC_UE"),
    ("npu_lost", "Inner_Error_Device_Status_Abnormal(E39009): Failed to connect the device."),
    ("nccl_oom", "Failed to CUDA calloc async 1920 bytes"),
    ("cuda_oom", "RuntimeError: HIP error: out of memory"),
    ("cuda_oom", "backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    ("cuda_oom", "RuntimeError: Malloc for kernel output failed, Memory isn't enough, node:A"),
    (
        "cuda_oom",
        "ERROR (nnet3-train[5.5]) Failed to allocate a memory region of 8088715264 bytes.",
    ),
    ("cuda_oom", "ERROR: Out of GPU memory trying to allocate 1.000 GiB"),
    ("cuda_oom", "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.1GB"),
    ("cuda_oom", "EI0007: [PID: 2969] Failed to allocate resource"),
    ("nccl_watchdog", "EI0002: [PID: 2969] The wait execution of the Notify register times out."),
    ("nccl_watchdog", "BaseCollectiveExecutor::StartAbort DEADLINE_EXCEEDED: Deadline Exceeded"),
    ("nccl_init_timeout", "EI0006: [PID: 7] Getting socket times out."),
    ("nccl_init_timeout", "[Wait][LinkEstablish]wait socket establish timeout, role[0] rank[0]"),
    ("peer_memory", "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152"),
    ("coordination_service", "ring_reducer.cc:369] Aborting RingReduce with Unavailable: OS Error"),
    ("coordination_service", 'RPC failed with status = "Unavailable: Socket closed" and'),
    ("coordination_service", '"file_line":1056,"grpc_message":"Socket closed","grpc_status":14}'),
    ("mpi_peer", "ORTE has lost communication with a remote daemon."),
    ("mpi_peer", "RX, connection closed by remote peer"),
    ("rdzv_connection", "Error: ucp_ep_create(proc=9) failed: Destination is unreachable"),
    # of batch systems and platforms
    ("limit_kill", "slurmstepd: error: Job 7518 exceeded memory limit (626 > 512), being killed"),
    ("limit_kill", "slurmstepd: error: Exceeded job memory limit"),
    ("limit_kill", "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit."),
    ("limit_kill", "=>> PBS: job killed: mem 38427376kb exceeded limit 33554432kb"),
    ("limit_kill", "=>> PBS: job killed: vmem 3372163072 exceeded limit 2147483648"),
    ("limit_kill", "Job exceeded a memory resource limit (vmem, pvmem, etc.). Job was aborted"),
    ("time_limit", "=>> PBS: job killed: walltime 3602 exceeded limit 3600"),
    ("time_limit", "TERM_RUNLIMIT: job killed after reaching LSF run time limit."),
    ("preempt", "TERM_PREEMPT: job killed after preemption."),
    ("user_cancel", "TERM_OWNER: job killed by owner."),
    (
        "node_failure",
        "The node with node id: 8f20 and ip: 10.128.0.103 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
    ),
    ("object_store", "Unavailable: Error executing an HTTP request: HTTP response code 503"),
    ("container_setup", "BFSMountError: Unable to mount blob fuse file system"),
    ("container_setup", "FATAL:   container creation failed: mount hook function failure"),
    (
        "image_lacks_folder",
        "FATAL:   container creation failed: mount hook function failure: mount a->/mmfs1 error: "
        "while mounting a: destination /mmfs1 doesn't exist in container",
    ),
]


PREEMPTIONS = (
    "Preempted by default/urgent-7 on node gpu-3",
    "Preempted by a pod on node gpu-3",
    "Preempted by pod 9b0c4d1e-0000-4a6e-8d8f-0d2f4f3c1a11 on node gpu-3",
    "Preempted in order to admit critical pod",
    "Pod was preempted",
    "Instance train-3 was preempted.",
    "this node is being preempted",
    "Job 4711 has been preempted",
)
"""As Kubernetes (scheduler, kubelet), Compute Engine and Slurm say it."""


@pytest.mark.parametrize("line", PREEMPTIONS)
def test_a_node_or_job_that_is_preempted_is_read(line: str) -> None:
    assert [found.code for found in read_log([line], catalog())] == ["log preempt"]


@pytest.mark.parametrize(
    "line",
    [
        "WARNING scheduler.py:1057] Sequence group 0 is preempted by PreemptionMode.RECOMPUTE mode "
        "because there is not enough KV cache space. This can affect the end-to-end performance.",
        "INFO job 3 rank 0: Sequence group 0 is preempted by PreemptionMode.SWAP mode",
        "WARNING:root:Grad scale is small: 0.0078125",
        "Data loss: corrupted record at 0",  # a file of another kind, given by its user
        "Port 8000: address already in use, trying 8001",
        "TensorBoard could not bind to port 6006, it was already in use",
    ],
)
def test_words_of_other_things_are_not_read(line: str) -> None:
    assert read_log([line], catalog()) == ()


@pytest.mark.parametrize(
    ("row", "line"), LINES, ids=[f"{n} {row}" for n, (row, _) in enumerate(LINES)]
)
def test_a_line_is_read_by_its_row(row: str, line: str) -> None:
    assert [f"log {row}"] == [found.code for found in read_log([line], catalog())]


def test_every_row_of_the_log_table_is_met_by_a_line() -> None:
    # The code of an NPU, in a line of npu_event, has its own row and its own tests.
    assert {row.id for row in catalog().log_lines} == {"npu_event", *(row for row, _ in LINES)}


def test_gloo_on_one_node_may_be_refused_by_a_rank_that_died() -> None:
    line = "SO_ERROR: Connection refused, remote=[127.0.0.1]:2485, rank=0, size=2"
    assert [found.code for found in read_log([line], catalog())] == ["log conn_reset"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   ",
        "Traceback (most recent call last):",
        "step 100 loss=2.31",
        '  File "train.py", line 12, in <module>',
        (
            "CUDA kernel errors might be asynchronously reported at some other API call, so "
            "the stacktrace below might be incorrect."
        ),
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "Try setting TORCH_NCCL_TRACE_BUFFER_SIZE to see what timed out",
        "loaded 12 infos; epoch 3 done",
        "step 7 loss: 2.3 best loss: inf",
        "best_val_loss=inf",
        "min loss: inf",
        "FileExistsError: [Errno 17] File exists: '/data'",
    ],
)
def test_advice_and_chatter_are_no_evidence(line: str) -> None:
    assert read_log([line], catalog()) == ()


def test_the_first_row_reads_a_line_and_lines_keep_their_order(snapshot: SnapshotAssertion) -> None:
    lines = [
        (
            "[rank1]: RuntimeError: CUDA error: an illegal memory access was "
            "encountered\nFor debugging pass CUDA_LAUNCH_BLOCKING=1"
        ),
        "step 3",
        "To avoid data inconsistency, we are taking the entire process down.",
        (
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: Signal 6 "
            "(SIGABRT) received by PID 3"
        ),
    ]
    found = read_log(lines, catalog())
    assert [each.code for each in found] == [
        "log illegal_access",
        "log nccl_teardown",
        "log signal_exit",
    ]
    assert found[0].reason == snapshot
    assert (found[0].role, found[0].cause) == (Role.ROOT, Cause.GPU_USER_INDUCED)


@pytest.mark.parametrize(
    ("line", "code", "cause"),
    [
        (
            "HBM MULTI BIT ECC, Uncorrectable ECC, device_id=3, event_id=0x80e01801, time us=7",
            "NPU 80E01801",
            Cause.GPU_TRANSIENT,
        ),
        ("[klogd.c:242][583733.71] event_id=0x80c98002", "NPU 80C98002", Cause.GPU_USER_INDUCED),
        ("[IMP] event_id:  [0x80CB8002]", "NPU 80CB8002", Cause.GPU_USER_INDUCED),
        ("Event id=0x80e18005", "NPU 80E18005", Cause.GPU_RESET),
        ("event_id=0x8f180200", "NPU 8F180200", Cause.GPU_FATAL),
        ("event_id=0x80c98006", "NPU 80C98006", None),
    ],
)
def test_s4_3_an_npu_code_in_a_log_is_read_by_the_table(
    line: str, code: str, cause: Cause | None
) -> None:
    [found] = read_log([f"[rank3]: {line}"], catalog())
    assert (found.code, found.cause) == (code, cause)
    assert found.reason.startswith(code) and found.reason.endswith(line)


def test_an_event_id_of_another_program_is_no_fault_of_an_npu() -> None:
    assert read_log(["register_event(event_id=0x80010001, group=1)"], catalog()) == ()
    # What else the line says is read by the other rows.
    [found] = read_log(["event_id=0x80010001: CUDA out of memory"], catalog())
    assert found.code == "log cuda_oom"


def test_an_xid_in_a_log_is_read_by_the_table_of_xids(snapshot: SnapshotAssertion) -> None:
    known, unknown = read_log(
        [f"NVRM: Xid (PCI:0000:05:00): {code}, pid=1" for code in (79, 999)], catalog()
    )
    assert (known.role, known.cause) == (Role.ROOT, Cause.GPU_FATAL)
    assert known.reason == snapshot
    assert (unknown.role, unknown.cause) == (Role.SYMPTOM, None)


def test_a_users_line_is_looked_at_first() -> None:
    ours = catalog(
        CatalogOverrides.model_validate(
            {
                "log": [
                    {
                        "id": "our_oom",
                        "pattern": "CUDA out of memory",
                        "role": "root",
                        "cause": "APPLICATION",
                        "meaning": "ours",
                    }
                ]
            }
        )
    )
    line = "CUDA out of memory"
    assert [found.code for found in read_log([line], ours)] == ["log our_oom"]


@pytest.mark.parametrize(
    ("stop_code", "reason", "exit_code", "code", "role", "cause"),
    [
        (
            "EssentialContainerExited",
            "Essential container in task exited",
            1,
            "exit 1",
            Role.WRAPPER,
            Cause.APPLICATION,
        ),
        (
            "EssentialContainerExited",
            "Essential container in task exited",
            0,
            "exit 0",
            Role.INFORMATION,
            None,
        ),
        ("EssentialContainerExited", "", 134, "exit 134", Role.WRAPPER, Cause.UNKNOWN),
        ("EssentialContainerExited", "", 137, "exit 137", Role.SYMPTOM, Cause.UNKNOWN),
        ("EssentialContainerExited", "", 139, "exit 139", Role.ROOT, Cause.APPLICATION),
        (
            "EssentialContainerExited",
            "OutOfMemoryError: Container killed due to memory usage",
            137,
            "ecs EssentialContainerExited",
            Role.ROOT,
            Cause.OUT_OF_MEMORY,
        ),
        (
            "EssentialContainerExited",
            "",
            None,
            "ecs EssentialContainerExited",
            Role.SYMPTOM,
            Cause.UNKNOWN,
        ),
        (
            "UserInitiated",
            "Task stopped by user",
            143,
            "ecs UserInitiated",
            Role.ROOT,
            Cause.PREEMPTED,
        ),
        (
            "ServiceSchedulerInitiated",
            "",
            None,
            "ecs ServiceSchedulerInitiated",
            Role.ROOT,
            Cause.PREEMPTED,
        ),
        ("SpotInterruption", "", 143, "ecs SpotInterruption", Role.ROOT, Cause.PREEMPTED),
        ("TerminationNotice", "", None, "ecs TerminationNotice", Role.ROOT, Cause.PREEMPTED),
        ("TaskFailedToStart", "", None, "ecs TaskFailedToStart", Role.ROOT, Cause.PLATFORM),
        (
            "TaskFailedToStart",
            "CannotPullContainerError: pull image manifest: manifest unknown",
            None,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.USER_INPUT,
        ),
        (
            "TaskFailedToStart",
            "CannotPullContainerError: no space left on device",
            None,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.NODE_FAULT,
        ),
        (
            "TaskFailedToStart",
            "CannotPullContainerError: toomanyrequests",
            None,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.PLATFORM,
        ),
        (
            "TaskFailedToStart",
            'CannotStartContainerError: exec: "trian": executable file not found in $PATH',
            127,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.USER_INPUT,
        ),
        (
            "TaskFailedToStart",
            "CannotStartContainerError: nvidia-container-cli: initialization error",
            None,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.NODE_FAULT,
        ),
        (
            "TaskFailedToStart",
            "CannotCreateContainerError: other",
            None,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.PLATFORM,
        ),
        (
            "TaskFailedToStart",
            "ResourceInitializationError: unable to pull secrets",
            None,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.PLATFORM,
        ),
        (
            "TaskFailedToStart",
            "DockerTimeoutError: Could not transition to started",
            None,
            "ecs TaskFailedToStart",
            Role.ROOT,
            Cause.NODE_FAULT,
        ),
        (
            None,
            "Host EC2 (instance i-0abc) terminated.",
            None,
            "ecs unknown",
            Role.ROOT,
            Cause.NODE_LOST,
        ),
        (
            "UserInitiated",
            "Container instance deregistration forced by user",
            None,
            "ecs UserInitiated",
            Role.ROOT,
            Cause.NODE_LOST,
        ),
        (None, "", None, "ecs unknown", Role.SYMPTOM, Cause.UNKNOWN),
        (None, "", 1, "exit 1", Role.WRAPPER, Cause.APPLICATION),
        ("SomethingNew", "", None, "ecs SomethingNew", Role.SYMPTOM, Cause.UNKNOWN),
    ],
)
def test_s1_1_every_end_of_an_ecs_task_is_classified(
    stop_code: str | None,
    reason: str,
    exit_code: int | None,
    code: str,
    role: Role,
    cause: Cause | None,
) -> None:
    found = read_ecs_stop(stop_code, reason, exit_code, catalog())
    assert ("ecs", code, role, cause) == (found.source, found.code, found.role, found.cause)
    assert reason in found.reason and (stop_code or "stop code") in found.reason
