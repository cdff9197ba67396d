"""Torch's flight record of a rank: what is read of it, and what is not trusted.

Dumps of the format of NCCL are made here by the format that torch documents; those of gloo in
tests/recovery/samples/flight were recorded from real ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, is_alive, token, wait_for

from relaunch.agent import flight_records
from relaunch.agent.flight_records import Request, UnreadableError, parse_dump, read_flight
from relaunch.agent.ranks import flight, flight_dumper
from relaunch.agent.state import Generation
from relaunch.evidence.flight import FlightKind, compare_flights, parse_flight

Json = dict[str, Any]
ASKED = {flight.ASK_VARIABLE: "1"}
SAMPLES = Path(__file__).parents[1] / "recovery/samples/flight"
PYTHON = os.environ.get("RELAUNCH_TORCH_PYTHON", "python3")


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    made = Generation(tmp_path, tmp_path, (1, 1))
    made.make_folders()
    return made


def nccl_entry(sequence: int, **more: Any) -> Json:
    """One entry as torch documents it (unstable/flight_recorder_tutorial, version 2.x)."""
    frame = {"name": "train", "filename": "train.py", "line": 7}
    return {
        "frames": [frame],
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1,
        "input_sizes": [[1024]],
        "output_sizes": [[1024]],
        "state": "completed",
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


def nccl_dump(*entries: Json) -> bytes:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return pickle.dumps({"version": "2.4", "pg_config": config, "entries": list(entries)}, 2)


def read(generation: Generation, rank: int = 3, **more: Any) -> Json:
    """Read without a request, and without waiting."""
    return read_flight(generation, rank, os.getpid(), Request(time.time(), []), 0.0, **more)


# --- the environment ---


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, set()),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, {"TORCH_FR_BUFFER_SIZE"}),
        ({"TORCH_FR_BUFFER_SIZE": "9"}, {"TORCH_FR_BUFFER_SIZE"}),
        (
            {"TORCH_FR_BUFFER_SIZE": "0"},
            {"TORCH_FR_BUFFER_SIZE", "PYTHONPATH", "RELAUNCH_FLIGHT_FOLDER"},
        ),
        (
            {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": ""},
            {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"},
        ),
        ({"TORCH_FR_DUMP_ON_TIMEOUT": "0"}, {"TORCH_NCCL_DUMP_ON_TIMEOUT"}),
    ],
)
def test_the_record_is_set_up_unless_job_or_node_did(
    generation: Generation, given: dict[str, str], missing: set[str]
) -> None:
    flight.write_dumper(generation)
    folder = str(generation.flight_folder)
    every = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "RELAUNCH_FLIGHT_FOLDER": folder,
        "PYTHONPATH": f"{folder}/python",
    }
    own = flight.make_environment(generation, {**ASKED, **given})
    assert own == {name: value for name, value in every.items() if name not in missing}


def test_the_folder_comes_after_those_of_the_job(generation: Generation) -> None:
    flight.write_dumper(generation)
    own = flight.make_environment(generation, {**ASKED, "PYTHONPATH": "/a:/b"})
    assert own["PYTHONPATH"] == f"/a:/b:{generation.flight_folder}/python"


def test_without_room_for_the_module_ranks_start(generation: Generation) -> None:
    generation.flight_folder.rmdir()
    generation.flight_folder.touch()
    flight.write_dumper(generation)
    assert "PYTHONPATH" not in flight.make_environment(generation, ASKED)


def test_a_job_that_does_not_ask_has_no_module_in_its_ranks(generation: Generation) -> None:
    flight.write_dumper(generation)
    own = flight.make_environment(generation, {})
    assert not {"PYTHONPATH", "RELAUNCH_FLIGHT_FOLDER"} & set(own)


def test_both_sides_name_the_same_variables() -> None:
    # Twice, because the module runs alone in the ranks.
    assert (flight_dumper.NEW_SIZE, flight_dumper.OLD_SIZE) == flight.SIZE_VARIABLES
    assert flight_dumper.FOLDER_VARIABLE == flight.FOLDER_VARIABLE
    assert flight_dumper.PIPE_VARIABLE == flight_records.PIPE_VARIABLE


# --- what is read ---


def test_a_dump_of_nccl_tells_the_last_collectives(generation: Generation) -> None:
    entries = [nccl_entry(n) for n in range(1, 30)]
    entries += [nccl_entry(30, state="started"), nccl_entry(31, state="scheduled")]
    entries.append(nccl_entry(31, profiling_name="nccl:send 0->1", is_p2p=True))
    path = generation.flight_folder / "rank_3"
    path.write_bytes(nccl_dump(*entries))
    found = read(generation)
    assert found["source"] == str(path)
    assert found["process_groups"] == [{"name": "0", "description": "default_pg", "size": 4}]
    (last,) = found["last"]
    assert (last["backend"], last["operation"], last["sequence"]) == ("nccl", "all_reduce", 31)
    assert (last["state"], last["pending"], last["sizes"]) == ("scheduled", 30, [[1024]])
    assert last["frames"] == [["train", "train.py", 7]]
    assert [row[0] for row in last["recent"]] == list(range(16, 32))


def test_a_dump_of_torch_2_2_is_a_list(generation: Generation) -> None:
    entry = {"pg_id": 2, "seq_id": 7, "profiling_name": "nccl:broadcast", "state": "scheduled"}
    (generation.flight_folder / "rank_3").write_bytes(pickle.dumps([entry], 2))
    (last,) = read(generation)["last"]
    assert (last["process_group"], last["sequence"], last["pending"]) == ("2", 7, 7)


def test_the_newest_record_of_each_backend_counts(generation: Generation) -> None:
    folder = generation.flight_folder
    (folder / "rank_3").write_bytes(nccl_dump(nccl_entry(8)))
    for number, name in enumerate(("rank_3.11.dump", "rank_3.12.dump")):
        path = folder / name
        path.write_bytes(nccl_dump(nccl_entry(5 - number, profiling_name="gloo:barrier")))
        os.utime(path, (1000 + number, 1000 + number))
    found = {row["backend"]: row["sequence"] for row in read(generation)["last"]}
    assert found == {"nccl": 8, "gloo": 4}


def test_files_of_the_users_variable_are_read(generation: Generation, tmp_path: Path) -> None:
    (tmp_path / "mine_3").write_bytes(nccl_dump(nccl_entry(8)))
    for value in (f"{tmp_path}/mine_", "mine_"):
        rank = subprocess.Popen(
            ["sleep", "100"], cwd=tmp_path, env={"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": value}
        )
        try:
            command = Path(f"/proc/{rank.pid}/comm")
            wait_for(lambda command=command: command.read_text() == "sleep\n")
            found = read_flight(generation, 3, rank.pid, Request(time.time(), []), 0.0)
        finally:
            rank.kill()
            rank.wait()
        assert found["source"] == f"{tmp_path}/mine_3"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (nccl_dump(nccl_entry(1))[:-9], "torn"),
        (b"", "torn"),
        (b"{", "torn"),
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00truetR.", "os.system"),
        (b"\x80\x02r\xff\xff\xff\xff.", "torn"),  # asks for 34 GB
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "torn"),  # a number of 2 GB
        (pickle.dumps(7), "not an object"),
    ],
)
def test_a_torn_or_hostile_dump_is_unreadable(
    generation: Generation, content: bytes, why: str
) -> None:
    (generation.flight_folder / "rank_3").write_bytes(content)
    assert why in read(generation)["unreadable"]


def test_a_dump_is_read_up_to_a_size(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_records, "MAX_BYTES", 100)
    (generation.flight_folder / "rank_3").write_bytes(nccl_dump(nccl_entry(1)))
    assert "more than 100 bytes" in read(generation)["unreadable"]


def test_a_pickle_that_names_a_class_calls_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
            return os.mkdir, (str(tmp_path / "called"),)  # type: ignore[return-value]

    with pytest.raises(UnreadableError, match="mkdir"):
        parse_dump(pickle.dumps({"entries": [Evil()]}))
    assert not (tmp_path / "called").exists()


def test_nonsense_in_a_dump_is_passed_over(generation: Generation) -> None:
    wrong: list[Any] = [
        7,
        {},
        nccl_entry(1, collective_seq_id=True),
        nccl_entry(1, profiling_name=None),
        nccl_entry(
            2, process_group=(10**5000, []), frames=[7, {"name": 10**5000}], input_sizes=[7, [-1]]
        ),
    ]
    dump = {"entries": wrong, "pg_config": {"0": 7}}
    (generation.flight_folder / "rank_3").write_bytes(pickle.dumps(dump, 4))
    (last,) = read(generation)["last"]
    assert (last["process_group"], last["sequence"]) == ("", 2)
    assert (last["sizes"], last["frames"]) == ([[0]], [["", "", 0]])


def test_a_rank_without_a_dump_is_unreadable(generation: Generation) -> None:
    assert read(generation) == {"unreadable": f"no dump of it in {generation.flight_folder}"}
    os.mkfifo(generation.flight_folder / "rank_3")  # an open of it would block
    assert "no regular file" in read(generation)["unreadable"]


# --- how a rank is asked ---


def test_a_rank_is_asked_by_its_pipe(generation: Generation) -> None:
    # As NCCL's thread does it: it looks at its pipe from time to time, and writes in place.
    folder = generation.flight_folder
    os.mkfifo(folder / "rank_3.pipe")
    os.mkfifo(folder / "rank_3.99.pipe")  # of a process that is gone
    pipe = os.open(folder / "rank_3.pipe", os.O_RDWR)
    (folder / "rank_3").write_bytes(nccl_dump(nccl_entry(1)))
    os.utime(folder / "rank_3", (1000, 1000))

    def answer() -> None:
        os.read(pipe, 100)
        dump = nccl_dump(nccl_entry(2))
        with open(folder / "rank_3", "wb", buffering=0) as file:
            file.write(dump[:50])
            file.write(dump[50:])

    asked = threading.Thread(target=answer)
    asked.start()
    found = read_flight(generation, 3, os.getpid(), within=60.0)
    asked.join()
    os.close(pipe)
    assert found["last"][0]["sequence"] == 2
    assert found["bytes"] == (folder / "rank_3").stat().st_size
    assert not (folder / "rank_3.99.pipe").exists()


def test_a_rank_that_does_not_answer_is_not_awaited_for_long(generation: Generation) -> None:
    folder = generation.flight_folder
    os.mkfifo(folder / "rank_3.7.pipe")
    pipe = os.open(folder / "rank_3.7.pipe", os.O_RDWR | os.O_NONBLOCK)
    os.write(pipe, bytes(65536))  # it is full: the rank reads nothing
    (folder / "rank_3.7.dump").write_bytes(nccl_dump(nccl_entry(1)))
    os.utime(folder / "rank_3.7.dump", (1000, 1000))
    found = read_flight(generation, 3, os.getpid(), within=0.1)
    os.close(pipe)
    assert (found["at"], found["bytes"]) == (1000, 0)


def test_the_worker_server_of_a_program_is_asked(generation: Generation, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "server"))
    listener.listen()
    entry = nccl_entry(9, profiling_name="gloo:barrier", process_group=["0", "default_pg"])
    answers = [("200 OK", json.dumps({"entries": [entry]})), ("404 Not Found", "no handler")]
    asked = []

    def serve() -> None:
        for status, body in answers:
            caller, _ = listener.accept()
            with caller:
                asked.append(caller.recv(4096).split(b" ")[1])
                head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
                caller.sendall((head + body).encode())

    server = threading.Thread(target=serve)
    server.start()
    environment = {"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "server")}
    rank = subprocess.Popen(["sleep", "100"], env=environment)
    try:
        wait_for(lambda: Path(f"/proc/{rank.pid}/comm").read_text() == "sleep\n")
        found = read_flight(generation, 3, rank.pid, within=30.0)
    finally:
        rank.kill()
        rank.wait()
        server.join()
        listener.close()
    assert asked == [b"/handler/fr_trace_json", b"/handler/dump_nccl_trace_json"]
    assert (found["source"], found["last"][0]["sequence"]) == (str(tmp_path / "server"), 9)


# --- with torch ---


def has_torch() -> bool:
    code = "import sys, torch.distributed; sys.exit(torch.__version__ < '2.5')"
    return subprocess.run([PYTHON, "-c", code], capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_gloo_ranks_tell_which_one_does_not_enter(node: Node) -> None:
    if not has_torch():
        pytest.skip(f"{PYTHON} has no torch: RELAUNCH_TORCH_PYTHON names one that has")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pids = node.run(
        1,
        [PYTHON, str(SAMPLES / "record.py"), "rank", "missing"],
        ranks=3,
        env={**ASKED, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"},
        rank_env=[{"RANK": str(rank)} for rank in range(3)],
        lease=300.0,  # it is not watched
    )
    wait_for(lambda: "away" in node.log(2), timeout=120.0)

    def look() -> dict[int, Any]:
        answer = expect_done(node.order("stacks", token=token(1), frames=True, within=60.0))
        return {row["rank"]: parse_flight(row.get("flight")) for row in answer["stacks"]}

    def compare() -> Any:
        finding = compare_flights(look())
        return finding if finding is not None and len(finding.waiting) == 2 else None

    finding = wait_for(compare, timeout=120.0)
    assert (finding.kind, finding.suspects) == (FlightKind.MISSING, (2,))
    assert (finding.collective.operation, finding.collective.sequence) == ("all_reduce", 6)
    # A stopped rank cannot answer. Once it goes on it does.
    os.kill(pids["0"], signal.SIGSTOP)
    before = look()
    os.kill(pids["0"], signal.SIGCONT)
    assert before[0].at < before[1].at
    wait_for(lambda: look()[0].at > before[1].at)
    # The pipe goes with a rank that ends by itself; the rest goes with the generation.
    assert all(is_alive(pid) for pid in pids.values())
