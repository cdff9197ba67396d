"""Which network ports a node reports, and what it remembers of them, from folders like /sys/class.

One test reads the machine on which it runs.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaunch.agent.node import links, resets
from relaunch.evidence.links import read_links
from tests.doubles.cards import COUNTS, H100, Cards, write


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    monkeypatch.setenv("RELAUNCH_SYS_CLASS", str(tmp_path / "sys" / "class"))
    return Cards(tmp_path / "sys")


@pytest.fixture
def read(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    state = tmp_path / "state"
    state.mkdir()
    return lambda: {row["name"]: row for row in links.read_ports(state, 60.0)["ports"]}


Read = Callable[[], dict[str, Any]]


def test_ports_of_a_host_with_eight_cards_are_reported(system: Cards, read: Read) -> None:
    for name in H100:
        system.add_rdma(name)
    system.add_rdma("mlx5_bond_0", link_layer="Ethernet", rate="200 Gb/sec (2X NDR)")
    ports = read()
    assert list(ports) == [f"{name} port 1" for name in (*H100, "mlx5_bond_0")]
    assert ports["mlx5_0 port 1"] == {
        "name": "mlx5_0 port 1",
        "kind": "rdma",
        "model": "MT_0000000838",
        "place": "0/1 InfiniBand",
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "rate": 400.0,
        "enabled": True,
        "counters": {name: COUNTS[name] for name in links.COUNTERS},
    }
    assert ports["mlx5_bond_0 port 1"]["rate"] == 200.0


def test_virtual_wireless_and_partial_interfaces_are_no_ports(system: Cards, read: Read) -> None:
    for name in ("lo", "docker0", "veth1", "bond0"):
        system.add_interface(name, None)
    system.add_interface("eth0", system.add_device("virtio"), speed=-1)
    system.add_interface("usb0", system.add_device("usb"))
    (system.add_interface("wlan0", system.add_device("pci")) / "wireless").mkdir()
    system.add_interface("ib0", system.add_device("pci"), type=32)
    function = system.add_device("pci")
    (function / "physfn").mkdir()
    system.add_interface("vf0", function)
    assert read() == {}


def test_ethernet_cards_are_ports_once(system: Cards, read: Read) -> None:
    system.add_rdma("mlx5_0", link_layer="Ethernet")
    roce = (system.root / "class" / "infiniband" / "mlx5_0" / "device").resolve()
    system.add_interface("eth1", roce, flags="0x1002")
    system.add_interface("eno1", system.add_device("pci"))
    system.add_interface("eno2", system.add_device("pci"), operstate="down", speed=-1)
    ports = read()
    assert list(ports) == ["mlx5_0 port 1", "eno1", "eno2"]
    assert ports["mlx5_0 port 1"]["enabled"] is False, "its interface was not set up"
    assert (ports["eno1"]["state"], ports["eno1"]["rate"]) == ("up", 25.0)
    assert ports["eno1"]["counters"] == {"carrier_down_count": 1}
    assert (ports["eno2"]["state"], ports["eno2"]["rate"]) == ("down", None)


def test_a_port_that_had_a_link_is_remembered(system: Cards, read: Read) -> None:
    port = system.add_rdma("mlx5_0")
    system.add_interface("eno2", system.add_device("pci"), operstate="down")
    assert "before" not in read()["mlx5_0 port 1"]
    write(port, {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"})
    for _ in range(2):
        row = read()["mlx5_0 port 1"]
        assert (row["state"], row["phys_state"], row["counters"]) == ("DOWN", "Polling", {})
        assert row["before"]["rate"] == 400.0 and row["before"]["ago"] >= 0
    assert "before" not in read()["eno2"], "it never had a link"
    write(port, {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)"})
    write(port / "counters", {"link_downed": 1})
    read()
    row = read()["mlx5_0 port 1"]
    assert (row["rate"], row["before"]["rate"]) == (200.0, 400.0)
    assert (row["counters"]["link_downed"], row["before"]["counters"]["link_downed"]) == (1, 0)


def test_a_card_that_is_gone_is_reported_for_a_week(
    system: Cards, read: Read, tmp_path: Path
) -> None:
    for name in H100[:2]:
        system.add_rdma(name)
    read()
    os.rename(system.root / "class" / "infiniband" / "mlx5_1", tmp_path / "away")
    gone = read()["mlx5_1 port 1"]
    assert gone["gone"] is True and gone["before"]["rate"] == 400.0 and "state" not in gone
    record = tmp_path / "state" / links.RECORD_FILE
    known = json.loads(record.read_text())
    for row in known["ports"].values():
        row["seen"] = time.time() - links.RECORD_TTL - 1
    record.write_text(json.dumps(known))
    assert list(read()) == ["mlx5_0 port 1"]


def test_counters_of_another_boot_are_not_compared(
    system: Cards, read: Read, tmp_path: Path
) -> None:
    system.add_rdma("mlx5_0")
    read()
    (tmp_path / "state" / "boot_id").write_text("another\n")
    before = read()["mlx5_0 port 1"]["before"]
    assert before["rate"] == 400.0 and "counters" not in before


def test_a_card_that_was_replaced_is_forgotten(system: Cards, read: Read, tmp_path: Path) -> None:
    for name in H100[:2]:
        system.add_rdma(name)
    system.add_interface("eno1", system.add_device("pci"))
    read()
    cards = system.root / "class" / "infiniband"
    os.rename(cards / "mlx5_1", tmp_path / "away")
    system.add_rdma("mlx5_1")  # with another GUID
    os.rename(system.root / "class" / "net" / "eno1", system.root / "class" / "net" / "ens1")
    first = links.read_ports(tmp_path / "state", 60.0)["ports"]
    assert [row["name"] for row in first if row.get("gone")] == ["eno1", "mlx5_1 port 1"]
    assert read_links({"links": {"ports": first}}).findings == ()
    second = links.read_ports(tmp_path / "state", 60.0)["ports"]
    assert [row["name"] for row in second] == ["mlx5_0 port 1", "mlx5_1 port 1", "ens1"]
    assert read_links({"links": {"ports": second}}).findings == ()


def test_a_new_card_stands_for_one_of_its_model_and_name(
    system: Cards, read: Read, tmp_path: Path
) -> None:
    for name in H100[:3]:
        system.add_rdma(name)
    read()
    cards = system.root / "class" / "infiniband"
    for name in H100[1:3]:
        os.rename(cards / name, tmp_path / name)
    system.add_rdma(H100[2])
    write(system.add_rdma(H100[4]).parent.parent, {"board_id": "MT_0000000884"})
    for _ in range(2):
        ports = links.read_ports(tmp_path / "state", 60.0)["ports"]
    assert [row["name"] for row in ports if row.get("gone")] == ["mlx5_1 port 1"]


def test_the_best_rate_is_forgotten_after_a_week(
    system: Cards, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = system.add_rdma("mlx5_0")
    began = time.time()
    read()
    write(port, {"rate": "200 Gb/sec (4X HDR)"})
    for day, rate in ((3, 400.0), (6, 400.0), (8, None), (9, 200.0)):
        monkeypatch.setattr(time, "time", lambda now=began + day * 86400: now)
        assert read()["mlx5_0 port 1"]["before"]["rate"] == rate


def make_row(**changes: Any) -> str:
    row = {
        **{"key": "eno9", "name": "eno9", "kind": "ethernet", "model": "m", "place": ""},
        **{"seen": time.time(), "rate": 25.0, "rate_seen": time.time()},
        **{"boot_id": "b", "since": time.time(), "counters": {}},
        **changes,
    }
    return json.dumps({"ports": {"eno9": row}})


@pytest.mark.long_after(variants=5)
@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[" * 100_000, "[]", '{"ports": 3}', '{"ports": {"a": {}}}'),
        *(make_row(seen="now"), make_row(seen=True), make_row(since=None), make_row(rate="fast")),
        *(make_row(rate_seen=float("nan")), make_row(seen=float("inf")), make_row(key="other")),
        *(make_row(name=None), make_row(counters=[])),
    ],
)
@pytest.mark.parametrize("state", ["", "4: ACTIVE"])
def test_an_unreadable_record_is_reported_and_begun_again(
    text: str, state: str, system: Cards, tmp_path: Path
) -> None:
    system.add_rdma("mlx5_0", state=state)
    (tmp_path / links.RECORD_FILE).write_text(text)
    answer = links.read_ports(tmp_path, 60.0)
    (row,) = answer["ports"]
    assert "before" not in row and answer["record"]["unreadable"]
    again = links.read_ports(tmp_path, 60.0)
    assert "record" not in again and ("before" in again["ports"][0]) is bool(state)


def test_a_row_of_the_record_is_readable(tmp_path: Path, system: Cards) -> None:
    (tmp_path / links.RECORD_FILE).write_text(make_row())
    answer = links.read_ports(tmp_path, 60.0)
    assert answer["ports"][0]["gone"] is True and "record" not in answer
    (tmp_path / links.RECORD_FILE).write_text(make_row(seen=time.time() + 1e9))
    assert links.read_ports(tmp_path, 60.0) == {"ports": []}, "a clock was set back by years"


def test_no_error_of_the_disk_ends_the_reading(
    system: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch makes the record before its hello: an exception would make the node look lost."""
    system.add_rdma("mlx5_0")
    (tmp_path / links.RECORD_FILE).mkdir()
    for _ in range(2):
        answer = links.read_ports(tmp_path, 60.0)
        assert answer["ports"][0]["state"] == "ACTIVE"
        assert answer["record"] == {"unreadable": "Is a directory"}

    def fail(self: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / links.RECORD_FILE).rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        answer = links.read_ports(tmp_path, 60.0)
    assert answer["record"] == {"unreadable": "Input/output error"}
    assert "before" in links.read_ports(tmp_path, 60.0)["ports"][0], "it was begun again"


def test_a_host_without_room_for_a_process_is_unreadable(
    system: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.add_rdma("mlx5_0")

    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fail)
    before = os.listdir("/proc/self/fd")
    reason = "no process can read them: Resource temporarily unavailable"
    assert links.read_ports(tmp_path, 60.0) == {"unreadable": reason}
    assert os.listdir("/proc/self/fd") == before


def test_a_folder_that_may_not_be_searched_has_no_ports(
    system: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.exists raises for one in Python before 3.12."""
    system.add_rdma("mlx5_0")
    system.add_interface("eno1", system.add_device("pci"))

    def fail(self: Path, **_: Any) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", fail)
    assert len(links.read_ports(tmp_path, 60.0)["ports"]) == 2


def test_cards_that_do_not_answer_are_unreadable(system: Cards, tmp_path: Path) -> None:
    state = system.add_rdma("mlx5_0") / "state"
    state.unlink()
    os.mkfifo(state)  # blocks its reader, as a card whose firmware hangs
    assert links.read_ports(tmp_path, 0.2) == {"unreadable": "they did not answer within 0.2 s"}


def test_the_ports_of_this_machine_can_be_read(tmp_path: Path) -> None:
    for row in links.read_ports(tmp_path, 60.0)["ports"]:
        assert row["name"] and row["state"]


# --- resets of GPUs


def test_resets_of_this_boot_are_reported(tmp_path: Path) -> None:
    assert resets.list_resets(tmp_path) == []
    began = time.monotonic()
    resets.record_reset(tmp_path, "r1", ["00000000:05:00.0"])
    resets.record_reset(tmp_path, "r2", ["00000000:06:00.0"])
    first, second = resets.list_resets(tmp_path)
    assert (first["id"], second["gpus"]) == ("r1", ["00000000:06:00.0"])
    assert began <= first["uptime"] <= second["uptime"] <= time.monotonic()
    resets.record_reset(tmp_path, "r3", [])
    assert [row["id"] for row in resets.list_resets(tmp_path)] == ["r3"], "it was of all GPUs"
    (tmp_path / "boot_id").write_text("another\n")
    assert resets.list_resets(tmp_path) == []


def test_a_look_keeps_what_counters_are_compared_with(
    system: Cards, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = system.add_rdma("mlx5_0")
    began = time.time()
    read()
    write(port / "counters", {"link_downed": COUNTS["link_downed"] + 2})
    monkeypatch.setattr(time, "time", lambda: began + links.COUNTER_WINDOW + 60)
    links.read_ports(tmp_path / "state", 60.0, counts=False)
    before = read()["mlx5_0 port 1"]["before"]
    assert before["counters"]["link_downed"] == COUNTS["link_downed"]
    assert before["ago"] == 0, "but that it has a link"
    assert read()["mlx5_0 port 1"]["before"]["counters"]["link_downed"] > COUNTS["link_downed"]
