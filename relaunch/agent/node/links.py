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

import os
import time
from functools import partial
from pathlib import Path
from typing import Dict, List, Optional

from relaunch.agent import tools
from relaunch.agent.protocol import Json
from relaunch.agent.state import read_boot_id, read_json, write_json

SYSTEM = "/sys/class"
RECORD_FILE = "links.json"
READ_TIMEOUT = 2.0
"""Seconds. Some files are questions to the card's firmware, milliseconds each; a card that hangs
blocks its reader for a minute."""
MAX_PORTS = 64
MAX_FILE_BYTES = 256
RECORD_TTL = 7 * 86400.0
"""Seconds for which a port that had a link is expected to have one: a week covers a job, and ports
that were unplugged for good are forgotten after it."""
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
FIELDS = {*NAMES, "seen", "rate", "boot_id", "since", "counters"}
"""Of an entry of the record."""
ETHERNET, IFF_UP = "1", 0x1
"""ARPHRD_ETHER of net/if_arp.h, and the flag of net/if.h that an administrator sets."""


def read_ports(state: Path, timeout: float = READ_TIMEOUT) -> Json:
    """Return {"ports": [...]} or {"unreadable": why}, and remember the ports that have a link."""
    root = Path(os.environ.get("RELAUNCH_SYS_CLASS") or SYSTEM)
    rdma, covered = _list_rdma(root)
    ethernet = [name for name in _list(root / "net") if _is_card(root / "net" / name, covered)]
    recorded = _load_record(state)
    if not rdma and not ethernet and not recorded:
        return {"ports": []}
    answer = tools.run_bounded(partial(_read_all, root, rdma, ethernet), timeout)
    if answer is None:
        return {"unreadable": f"they did not answer within {timeout:g} s"}
    boot_id, now = read_boot_id(state), time.time()
    ports = [_add_record(port, recorded.get(port["key"]), boot_id, now) for port in answer["ports"]]
    present = {port["key"] for port in ports}
    gone = [_describe_gone(recorded[key], now) for key in sorted(set(recorded) - present)]
    _update_record(state, recorded, ports, boot_id, now)
    return {
        "ports": [
            {name: value for name, value in port.items() if name != "key"}
            for port in [*ports, *gone][:MAX_PORTS]
        ]
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
    is_wireless = (interface / "wireless").exists() or (interface / "phy80211").exists()
    return (
        interface.name not in covered
        and _is_on_pci(interface / "device")
        and not is_wireless
        and _read(interface / "type") == ETHERNET
    )


def _is_on_pci(device: Path) -> bool:
    """Return whether it is a PCI device, and no virtual function of a card of this host."""
    bus = os.path.basename(os.path.realpath(device / "subsystem"))
    return bus == "pci" and not (device / "physfn").exists()


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


def _load_record(state: Path) -> Dict[str, Json]:
    rows, now = (read_json(state / RECORD_FILE) or {}).get("ports"), time.time()
    return {
        key: row
        for key, row in (rows.items() if isinstance(rows, dict) else ())
        if isinstance(row, dict) and set(row) >= FIELDS and now - row["seen"] < RECORD_TTL
    }


def _add_record(port: Json, row: Optional[Json], boot_id: str, now: float) -> Json:
    return port if row is None else {**port, "before": _describe_record(row, boot_id, now)}


def _describe_record(row: Json, boot_id: str, now: float) -> Json:
    known: Json = {"ago": max(0.0, now - row["seen"]), "rate": row["rate"]}
    if row["boot_id"] == boot_id:  # a driver that starts may set the counters to zero
        known.update(counters=row["counters"], seconds=max(0.0, now - row["since"]))
    return known


def _describe_gone(row: Json, now: float) -> Json:
    return {
        **{name: row[name] for name in NAMES},
        "gone": True,
        "before": _describe_record(row, "", now),
    }


def _update_record(
    state: Path, recorded: Dict[str, Json], ports: List[Json], boot_id: str, now: float
) -> None:
    rows = dict(recorded)
    for port in ports:
        if not _is_up(port):
            continue
        row = recorded.get(port["key"])
        rates = [rate for rate in (port["rate"], row and row["rate"]) if rate]
        is_fresh = (
            row is not None and row["boot_id"] == boot_id and now - row["since"] < COUNTER_WINDOW
        )
        rows[port["key"]] = {
            **{name: port[name] for name in NAMES},
            "seen": now,
            "rate": max(rates, default=None),
            "boot_id": boot_id,
            "since": row["since"] if row is not None and is_fresh else now,
            "counters": row["counters"] if row is not None and is_fresh else port["counters"],
        }
    if not rows:
        return
    try:
        write_json(state / RECORD_FILE, {"ports": rows}, durable=False)
    except OSError:
        # for example a full disk: the next reading compares with an older record, or with none
        pass
