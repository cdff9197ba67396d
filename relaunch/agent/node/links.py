"""Reads this node's network ports, and remembers how each one was when it last had a link.

It does not judge. A port counts if its card is on the PCI bus: of RDMA devices (InfiniBand, RoCE,
EFA) each port, of other Ethernet cards each interface. Virtual interfaces, virtual functions of a
card that is itself here, and wireless cards are left out.

Files: Linux Documentation/ABI/stable/sysfs-class-infiniband and
Documentation/ABI/testing/sysfs-class-net. Counters are read only of ports that are up: on some
hosts the firmware refuses them for ports that it keeps to itself, and each refusal is a line in the
kernel log (leptonai/gpud#1164).
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from relaunch.agent import tools
from relaunch.agent.protocol import Json
from relaunch.agent.state import read_boot_id, write_json

SYSTEM = "/sys/class"
RECORD_FILE = "links.json"
READ_TIMEOUT = 2.0
"""Seconds. Some files are questions to the card's firmware, milliseconds each; a card that hangs
blocks its reader for a minute."""
MAX_PORTS = 64
MAX_FILE_BYTES = 256
RECORD_TTL = 7 * 86400.0
"""Seconds for which a port that had a link is expected to have one, as fast: a week covers a job,
and what was changed for good is forgotten after it."""
COUNTER_WINDOW = 12 * 3600.0
"""Seconds after which counters are compared with newer values. leptonai/gpud looks for flapping
ports in as many."""
COUNTERS = (
    "link_downed",
    "symbol_error",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "link_error_recovery",
    "port_rcv_errors",
)
NAMES = ("key", "name", "kind", "model", "place")
TIMES = ("seen", "rate_seen", "since")
"""Of an entry of the record: of the last link, of the highest rate, and of the counters."""
ETHERNET, IFF_UP = "1", 0x1
"""ARPHRD_ETHER of net/if_arp.h, and the flag of net/if.h that an administrator sets."""


def read_ports(state: Path, timeout: float = READ_TIMEOUT, counts: bool = True) -> Json:
    """Return {"ports": [...]} or {"unreadable": why}, and remember the ports that have a link.

    Without `counts`, counters are compared later with those that are remembered now.

    A record that cannot be read is reported and written again, and is never an exception: it would
    end a watch, and a node without a watch is taken for lost.
    """
    root, now = Path(os.environ.get("RELAUNCH_SYS_CLASS") or SYSTEM), time.time()
    rdma, covered = _list_rdma(root)
    ethernet = [name for name in _list(root / "net") if _is_card(root / "net" / name, covered)]
    recorded, unreadable = _load_record(state, now)
    if not rdma and not ethernet and not recorded and not unreadable:
        return {"ports": []}
    try:
        answer = tools.run_bounded(partial(_read_all, root, rdma, ethernet), timeout)
    except OSError as error:  # for example EAGAIN: no process can be started
        return {"unreadable": f"no process can read them: {error.strerror}"}
    if answer is None:
        return {"unreadable": f"they did not answer within {timeout:g} s"}
    boot_id = read_boot_id(state)
    ports = [_add_record(port, recorded.get(port["key"]), boot_id, now) for port in answer["ports"]]
    present = {port["key"] for port in ports}
    gone = [_describe_gone(recorded[key], now) for key in sorted(set(recorded) - present)]
    rows = _update_record(recorded, ports, boot_id, now, counts)
    if rows or unreadable:
        _save_record(state, rows)
    return {
        "ports": [
            {name: value for name, value in port.items() if name != "key"}
            for port in [*ports, *gone][:MAX_PORTS]
        ],
        **({"record": {"unreadable": unreadable}} if unreadable else {}),
    }


# --- which ports there are; nothing here asks a driver


def _list(folder: Path) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _list_rdma(root: Path) -> tuple[List[str], List[str]]:
    """Return the RDMA devices, and the network interfaces that are other views of them."""
    found, covered = [], []
    for name in _list(root / "infiniband"):
        device = root / "infiniband" / name / "device"
        covered += _list(device / "net")
        if _is_on_pci(device):
            found.append(name)
    return found, covered


def _is_card(interface: Path, covered: List[str]) -> bool:
    # Path.exists raises for a folder that may not be searched.
    is_wireless = any(os.path.exists(interface / name) for name in ("wireless", "phy80211"))
    return (
        interface.name not in covered
        and _is_on_pci(interface / "device")
        and not is_wireless
        and _read(interface / "type") == ETHERNET
    )


def _is_on_pci(device: Path) -> bool:
    """Return whether it is a PCI device, and no virtual function of a card of this host."""
    bus = os.path.basename(os.path.realpath(device / "subsystem"))
    return bus == "pci" and not os.path.exists(device / "physfn")


# --- reading, in a child


def _read_all(root: Path, rdma: List[str], ethernet: List[str]) -> Json:
    ports = [
        _read_rdma_port(root, root / "infiniband" / name, port)
        for name in rdma
        for port in _list(root / "infiniband" / name / "ports")
    ]
    ports += [_read_interface(root / "net" / name) for name in ethernet]
    return {"ports": ports[:MAX_PORTS]}


def _read(path: Path) -> str:
    """Return the first line of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES)
    except OSError:  # for example EINVAL, of the speed of an interface that is down
        return ""
    return data.decode("ascii", "replace").partition("\n")[0].strip()


def _read_number(path: Path) -> Optional[int]:
    try:
        return int(_read(path), 0)
    except ValueError:
        return None


def _read_rdma_port(root: Path, folder: Path, number: str) -> Json:
    port, device = folder / "ports" / number, folder / "device"
    layer = _read(port / "link_layer")
    state = _read_state(port / "state")
    # A RoCE port is down while its interface is; one that was never set up is not in use.
    interfaces = _list(device / "net") if layer == "Ethernet" else []
    return {
        "key": f"{_read_guid(folder)}/{number}",
        "name": f"{folder.name} port {number}",
        "kind": "rdma",
        "model": _read(folder / "board_id") or _read_pci_model(device),
        "place": f"{os.path.realpath(device).rpartition('.')[2]}/{number} {layer}",
        "state": state,
        "phys_state": _read_state(port / "phys_state"),
        "rate": _read_rate(port / "rate"),
        "enabled": not interfaces or any(_is_set_up(root / "net" / name) for name in interfaces),
        "counters": _read_counters(port / "counters", COUNTERS) if state == "ACTIVE" else {},
    }


def _read_interface(folder: Path) -> Json:
    speed = _read_number(folder / "speed")
    return {
        "key": folder.name,
        "name": folder.name,
        "kind": "ethernet",
        "model": _read_pci_model(folder / "device"),
        "place": "",
        "state": _read(folder / "operstate"),
        "phys_state": "",
        # -1 is an unknown speed
        "rate": speed / 1000 if speed is not None and speed > 0 else None,
        "enabled": _is_set_up(folder),
        "counters": _read_counters(folder, ("carrier_down_count",)),
    }


def _read_guid(folder: Path) -> str:
    """Return what stays with the card when its name changes."""
    guid = _read(folder / "node_guid")
    return guid if guid.strip("0:") else folder.name


def _read_pci_model(device: Path) -> str:
    return f"{_read(device / 'vendor')}:{_read(device / 'device')}"


def _read_state(path: Path) -> str:
    """Return `ACTIVE` of `4: ACTIVE`."""
    return _read(path).partition(":")[2].strip()


def _read_rate(path: Path) -> Optional[float]:
    """Return 400 of `400 Gb/sec (4X NDR)`."""
    try:
        return float(_read(path).partition(" ")[0])
    except ValueError:
        return None


def _is_set_up(interface: Path) -> bool:
    flags = _read_number(interface / "flags")
    return flags is not None and bool(flags & IFF_UP)


def _read_counters(folder: Path, names: tuple[str, ...]) -> Json:
    values = {name: _read_number(folder / name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value >= 0}


# --- the record of ports that had a link


def _is_up(port: Json) -> bool:
    return port["state"] in ("ACTIVE", "up")


def _load_record(state: Path, now: float) -> Tuple[Dict[str, Json], str]:
    """Return the rows that still count, and why any cannot be read; empty if all can."""
    try:
        record = json.loads((state / RECORD_FILE).read_bytes())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, error.strerror or str(error)
    except (ValueError, RecursionError):
        return {}, "it is no JSON"
    rows = record.get("ports") if isinstance(record, dict) else None
    if not isinstance(rows, dict):
        return {}, "it has no ports"
    readable = {key: row for key, row in rows.items() if _is_row(key, row)}
    broken = len(rows) - len(readable)
    return (
        # A clock that was set back must not make the record last for ever.
        {key: row for key, row in readable.items() if abs(now - row["seen"]) < RECORD_TTL},
        f"{broken} of its {len(rows)} rows make no sense" if broken else "",
    )


def _is_row(key: str, row: Any) -> bool:
    return (
        isinstance(row, dict)
        and row.get("key") == key
        and all(isinstance(row.get(name), str) for name in (*NAMES, "boot_id"))
        and all(_is_number(row.get(name)) for name in TIMES)
        and (row.get("rate", "") is None or _is_number(row.get("rate")))
        and isinstance(row.get("counters"), dict)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _add_record(port: Json, row: Optional[Json], boot_id: str, now: float) -> Json:
    return port if row is None else {**port, "before": _describe_record(row, boot_id, now)}


def _describe_record(row: Json, boot_id: str, now: float) -> Json:
    known: Json = {"ago": max(0.0, now - row["seen"]), "rate": _best_rate(row, now)}
    if row["boot_id"] == boot_id:  # a driver that starts may set the counters to zero
        known.update(counters=row["counters"], seconds=max(0.0, now - row["since"]))
    return known


def _best_rate(row: Json, now: float) -> Optional[float]:
    """Return the highest rate within the time for which the record counts."""
    return row["rate"] if abs(now - row["rate_seen"]) < RECORD_TTL else None


def _describe_gone(row: Json, now: float) -> Json:
    return {
        **{name: row[name] for name in NAMES},
        "gone": True,
        "before": _describe_record(row, "", now),
    }


def _update_record(
    recorded: Dict[str, Json], ports: List[Json], boot_id: str, now: float, counts: bool
) -> Dict[str, Json]:
    """Return the record with the ports that have a link now."""
    rows = dict(recorded)
    absent = set(recorded) - {port["key"] for port in ports}
    for port in ports:
        if not _is_up(port):
            continue
        row = recorded.get(port["key"])
        if row is None:
            replaced = _find_replaced(port, [rows[key] for key in sorted(absent)])
            if replaced is not None:
                absent.remove(replaced)
                del rows[replaced]
        best = None if row is None else _best_rate(row, now)
        is_best = best is None or (port["rate"] is not None and port["rate"] >= best)
        is_fresh = row is not None and (
            not counts or (row["boot_id"] == boot_id and now - row["since"] < COUNTER_WINDOW)
        )
        rows[port["key"]] = {
            **{name: port[name] for name in NAMES},
            "seen": now,
            "rate": port["rate"] if is_best else best,
            "rate_seen": now if row is None or is_best else row["rate_seen"],
            "boot_id": row["boot_id"] if row is not None and is_fresh else boot_id,
            "since": row["since"] if row is not None and is_fresh else now,
            "counters": row["counters"] if row is not None and is_fresh else port["counters"],
        }
    return rows


def _find_replaced(port: Json, absent: List[Json]) -> Optional[str]:
    """Return the key of the absent port that a new one replaces, if its card was exchanged or its
    interface renamed: one of its model and place, preferably of its name."""
    alike = [row for row in absent if all(row[name] == port[name] for name in ("model", "place"))]
    alike.sort(key=lambda row: (row["name"] != port["name"], row["seen"]))
    return alike[0]["key"] if alike else None


def _save_record(state: Path, rows: Dict[str, Json]) -> None:
    try:
        write_json(state / RECORD_FILE, {"ports": rows}, durable=False)
    except OSError:
        # for example a full disk: the next reading compares with an older record, or with none
        pass
