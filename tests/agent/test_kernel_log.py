"""The exit of a failed rank carries what the kernel logged.

Real processes, and a file in place of the log.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_node import Json, Node, is_alive, wait_for

from relaunch.agent.node import kernel_log
from relaunch.agent.node.kernel_log import (
    MAX_LINE,
    MAX_LINES,
    LogPosition,
    read,
    read_generation,
    read_records,
    record_position,
)
from relaunch.agent.state import Generation
from relaunch.evidence.kernel_log import KERNEL_MARKS

XID = (
    "[12345.678901] NVRM: Xid (PCI:0000:05:00): 79, pid=4242, name=python, GPU has fallen off the "
    "bus."
)
OLD = "[11111.000000] NVRM: Xid (PCI:0000:06:00): 48, pid=99, name=python, DBE"
FAILS_ON_CUE = [
    "sh",
    "-c",
    'if [ "$CUE" ]; then until [ -e "$CUE" ]; do sleep 0.01; done; exit 7; fi; exec sleep 1000',
]
UNPRIVILEGED = 65534


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the node's agent reads as the kernel log."""
    path = tmp_path / "kern.log"
    path.write_text(f"{OLD}\n")
    monkeypatch.setenv("RELAUNCH_KERNEL_LOG", str(path))
    return path


def say(log: Path, *lines: str) -> None:
    with open(log, "a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def start(node: Node, cue: Path) -> dict[str, int]:
    """Start two ranks: 0 fails as soon as `cue` is there, and 1 has to be stopped."""
    return node.run(1, FAILS_ON_CUE, rank_env=[{"CUE": str(cue)}, {}])


def exits(node: Node) -> dict[int, Json]:
    watch = node.watch()
    return {seen["rank"]: seen for seen in (watch.read_observation("RankExited") for _ in range(2))}


@contextmanager
def powerless() -> Iterator[None]:
    """Drop root's rights, where the tests run as root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(UNPRIVILEGED)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_failed_rank_carries_kernel_lines_a_stopped_one_none(
    node: Node, log: Path, tmp_path: Path
) -> None:
    start(node, tmp_path / "cue")
    say(log, "usb 1-1: new high-speed USB device", XID)
    (tmp_path / "cue").touch()
    seen = exits(node)
    assert (seen[0]["kernel"], seen[0]["kernel_unreadable"], seen[0]["stopped"]) == (
        [XID],
        None,
        False,
    )
    assert (seen[1]["kernel"], seen[1]["kernel_unreadable"], seen[1]["stopped"]) == ([], None, True)


def test_stopped_and_successful_ranks_carry_no_kernel_lines(node: Node, log: Path) -> None:
    node.run(1, ["sh", "-c", "exec sleep $S"], rank_env=[{"S": "0"}, {"S": "1000"}])
    say(log, XID)
    wait_for(lambda: len(node.journal()) == 1)
    node.stop()
    assert [(seen["kernel"], seen["kernel_unreadable"]) for seen in exits(node).values()] == [
        ([], None)
    ] * 2
    assert not (node.folder() / "kernel.json").exists()


def test_it_is_read_at_an_unwatched_failure_and_repeated_alike(
    node: Node, log: Path, tmp_path: Path
) -> None:
    start(node, tmp_path / "cue")
    say(log, XID)
    (tmp_path / "cue").touch()
    wait_for((node.folder() / "kernel.json").exists)
    say(log, OLD)  # of a later generation
    log.rename(tmp_path / "kern.log.1")
    assert exits(node)[0]["kernel"] == [XID]
    node.stop()
    wait_for(lambda: not node.list_leftovers())
    assert exits(node)[0]["kernel"] == [XID]  # from the disk: no process of the generation is left


def test_a_log_that_cannot_be_read_is_said_to_be_unreadable(
    node: Node, log: Path, tmp_path: Path
) -> None:
    log.unlink()
    start(node, tmp_path / "cue")
    (tmp_path / "cue").touch()
    failed = exits(node)[0]
    assert failed["kernel"] == [] and failed["kernel_unreadable"].endswith(f": {log}")


def test_a_supervisor_killed_before_it_keeps_lines_loses_none(
    node: Node, log: Path, tmp_path: Path
) -> None:
    start(node, tmp_path / "cue")
    node.watch().read_until("heartbeat")
    supervisor = node.pid("supervisor")
    failpoint = node.set_failpoint("kernel.read")
    say(log, XID)
    watch = node.watch()
    (tmp_path / "cue").touch()
    seen = [watch.read_observation("RankExited") for _ in range(2)]
    assert not failpoint.exists()
    wait_for(lambda: node.pid("supervisor") != supervisor, "its shim writes that down")
    assert [(one["seq"], one["kernel"]) for one in seen] == [(1, [XID]), (2, [])]
    node.stop()
    assert [
        line["observation"]["kind"] for line in watch.read_rest() if "observation" in line
    ] == []


def test_the_end_of_a_shim_and_its_supervisor_carries_it_too(node: Node, log: Path) -> None:
    pids = node.run(1)
    supervisor, shim = node.pid("supervisor"), node.pid("shim")
    killed = "Out of memory: Killed process 4242 (relaunch-shim) total-vm:1kB"
    say(log, killed)
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(shim, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids.values())))
    for _ in range(2):
        told = node.watch().read_observation("RanksVanished")
        assert (told["kernel"], told["kernel_unreadable"]) == ([killed], None)
        say(log, XID)


def test_ranks_killed_with_a_shim_carry_what_its_supervisor_read(node: Node, log: Path) -> None:
    node.run(1)
    watch = node.watch()
    watch.read_until("heartbeat")
    say(log, XID)
    os.kill(node.pid("shim"), signal.SIGKILL)
    assert watch.read_observation("ShimDied")["kernel"] == [XID]


def test_a_flood_is_read_from_its_end_and_the_exit_is_not_late(
    node: Node, log: Path, tmp_path: Path
) -> None:
    start(node, tmp_path / "cue")
    watch = node.watch()
    watch.read_until("heartbeat")
    line = "[12345.000000] usb 1-1: new high-speed USB device number 7 using xhci_hcd\n"
    with open(log, "a") as file:
        file.write(f"{OLD}\n" + line * 100_000 + f"{XID}\n")
    (tmp_path / "cue").touch()
    failed = watch.read_observation("RankExited")
    assert failed["kernel"] == [XID]
    assert "1024 KiB" in failed["kernel_unreadable"]
    assert read(LogPosition(str(log), log.stat().st_ino, 0, 0.0))["kernel"] == [XID]


def test_the_newest_lines_are_kept_and_long_ones_are_cut(log: Path) -> None:
    since = record_position()
    say(log, *(f"NVRM: Xid {number} \x07ä" + "x" * 5000 for number in range(100)))
    told = read(since)
    assert [line.split()[2] for line in told["kernel"]] == [
        str(number) for number in range(100 - MAX_LINES, 100)
    ]
    assert {len(line) for line in told["kernel"]} == {MAX_LINE}
    assert len(json.dumps(told)) < 2 * MAX_LINES * MAX_LINE
    assert told["kernel_unreadable"] is None


@pytest.mark.parametrize("how", ["rotated", "cut"])
def test_a_log_that_began_again_is_read_from_its_beginning(log: Path, how: str) -> None:
    say(log, "much " * 100)
    since = record_position()
    if how == "rotated":
        log.rename(log.with_suffix(".1"))
    log.write_text(f"{XID}\n")
    assert read(since) == {"kernel": [XID], "kernel_unreadable": None}


def test_a_device_gives_one_record_a_call_with_its_time() -> None:
    """A pipe of packets gives records as /dev/kmsg does."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)
    for record in (
        b"6,1,90000000,-;Out of memory: Killed process 1 (old)\n",
        b"6,2,100000001,-;usb 1-1: new device\n",
        b"3,3,100000002,-,caller=T1;NVRM: Xid (PCI:0000:05:00): 79, \\x0afallen; off\n"
        b" SUBSYSTEM=pci\n DEVICE=+pci:0000:05:00.0\n",
        b"12,4,9100000003,-;EDAC MC0: 1 UE memory read error\n",
        b"12,5,9100000004,-;EDAC MC0: 1 CE memory read error\n",
    ):
        os.write(writing, record)
    expected = [
        "[  100.000002] NVRM: Xid (PCI:0000:05:00): 79, \\x0afallen; off",
        "[ 9100.000003] EDAC MC0: 1 UE memory read error",
    ]
    assert read_records(reading, "/dev/kmsg", 100.0) == {
        "kernel": expected,
        "kernel_unreadable": None,
    }
    os.close(reading)
    os.close(writing)


def test_a_new_supervisor_distrusts_the_handle_of_a_dead_one(log: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)
    rest = b"6,2,1,-;Out of memory: Killed process 1 (what the first has left)\n"
    os.write(writing, rest)
    generations = [Generation(tmp_path, tmp_path, (1, number)) for number in (1, 2)]
    for generation in generations:
        generation.make_folders()
    (generations[1].path / "kernel.begun").touch()
    since = LogPosition(str(log), 0, 0, 0.0, reading)
    assert "Killed process" in read_generation(generations[0], since)["kernel"][0]
    os.write(writing, rest)
    assert read_generation(generations[1], since)["kernel"] == [OLD]  # what lies at the path
    assert read_generation(generations[0], None)["kernel"] != [OLD]
    os.close(reading)
    os.close(writing)


def test_a_reboot_loses_the_lines_of_a_device_and_not_of_a_file(log: Path, tmp_path: Path) -> None:
    for number, noted, expected in (
        (
            1,
            {"path": "/dev/kmsg", "inode": 0, "size": 0, "uptime": 0.0},
            ([], "the node rebooted: what /dev/kmsg held is gone"),
        ),
        (
            2,
            {"path": str(log), "inode": log.stat().st_ino, "size": 0, "uptime": 0.0},
            ([OLD], None),
        ),
    ):
        generation = Generation(tmp_path, tmp_path, (1, number))
        generation.make_folders()
        (generation.path / "started.json").write_text(
            json.dumps({"boot_id": "before", "pids": {}, "kernel": noted})
        )
        told = read_generation(generation, None)
        assert (told["kernel"], told["kernel_unreadable"]) == expected


def test_a_ring_that_wrapped_is_read_on_and_marked_incomplete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [BrokenPipeError(), b"6,9,1,-;NVRM: Xid 79\n", BlockingIOError()]

    def give(handle: int, size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, bytes):
            return answer
        raise answer

    monkeypatch.setattr(os, "read", give)
    told = read_records(-1, "/dev/kmsg")
    assert told == {
        "kernel": ["[    0.000001] NVRM: Xid 79"],
        "kernel_unreadable": kernel_log.OVERWRITTEN,
    }


def test_a_device_that_never_ends_is_left_in_time() -> None:
    handle = os.open("/dev/zero", os.O_RDONLY)
    began = time.monotonic()
    told = read_records(handle, "/dev/zero")
    assert time.monotonic() - began < 20
    assert told["kernel"] == [] and told.keys() == {"kernel", "kernel_unreadable"}
    assert all(word in told["kernel_unreadable"] for word in ("/dev/zero", "50 ms"))
    os.close(handle)


def test_the_device_itself_is_read_from_the_mark_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAUNCH_KERNEL_LOG", raising=False)
    monkeypatch.setattr(kernel_log, "_MARKS", (b"",))  # whatever this kernel has said
    first = record_position()
    if first.handle < 0:
        pytest.skip("/dev/kmsg cannot be read here")
    os.close(first.handle)
    whole = read(LogPosition(first.path, 0, 0, 0.0))
    assert len(whole["kernel"]) == MAX_LINES
    # The kernel may log at any moment: what it has said until here comes before the second mark.
    since = record_position()
    after = read(since)["kernel"]
    assert not set(after) & set(whole["kernel"])
    os.close(since.handle)


FORGED = "NVRM: Xid (PCI:0000:65:00): 79, pid=1, GPU has fallen off the bus. x"
"""A name of a file, or a path, that any user can choose."""
FORGERIES = [
    f"x[7]: segfault at 0 ip 1132 sp d9f3 error 6 in {FORGED}[1132,99f4+1000] likely on CPU 1",
    # A program's name has 15 characters, of which it may choose all.
    "NVRM: Xid (0:0[7]: segfault at 0 ip 1132 sp d9f3 error 6 in y): 79, x[1132,99f4+1000]",
    f"traps: x[7] trap invalid opcode ip:1132 sp:d9f3 error:0 in {FORGED}[1132,99f4+1000]",
    f"x[7]: unhandled level 2 translation fault (11) at 0x0, esr 0x92, in {FORGED}[99f4+1000]",
    f"overlayfs: failed to resolve '{FORGED}': -2",
    f"another driver quotes {FORGED}",
    "overlayfs: failed to resolve 'EXT4-fs error (device sda1)': -2",
]


@pytest.mark.parametrize("message", FORGERIES)
@pytest.mark.parametrize("before", ["", "[ 12.345678] ", "Nov 26 04:10:01 gpu-01 kernel: [1.2] "])
def test_a_text_of_a_users_in_the_kernel_log_is_no_evidence(
    log: Path, message: str, before: str
) -> None:
    since = record_position()
    say(log, f"{before}{message}", f"{before}{XID.partition('] ')[2]}")
    assert read(since)["kernel"] == [f"{before}{XID.partition('] ')[2]}"]
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with reading, writing:
        reading.setblocking(False)
        writing.send(f"6,1,12345678,-;{message}\n".encode())
        assert read_records(reading.fileno(), "/dev/kmsg")["kernel"] == []


def test_a_log_that_is_forbidden_is_said_to_be(log: Path) -> None:
    log.chmod(0)
    with powerless():
        assert read(record_position()) == {
            "kernel": [],
            "kernel_unreadable": f"permission denied: {log}",
        }


def test_a_kernel_that_keeps_its_log_to_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device, restricted = Path("/dev/kmsg"), Path("/proc/sys/kernel/dmesg_restrict")
    if (
        not device.exists()
        or not device.stat().st_mode & stat.S_IROTH
        or restricted.read_text().strip() != "1"
    ):
        pytest.skip("this kernel shows its log to all users, or to none")
    monkeypatch.delenv("RELAUNCH_KERNEL_LOG", raising=False)
    with powerless():
        told = read(record_position())
    assert told["kernel"] == [] and told.keys() == {"kernel", "kernel_unreadable"}
    assert told["kernel_unreadable"].endswith("/dev/kmsg (kernel.dmesg_restrict)")


def test_the_agent_looks_for_what_the_controller_can_read() -> None:
    assert kernel_log.MARKS == KERNEL_MARKS
