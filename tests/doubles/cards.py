"""Folders like /sys/class of hosts with network cards.

The values of the InfiniBand cards are those that leptonai/gpud recorded on a host with H100s
(4a8de33a, components/accelerator/nvidia/infiniband/class/testdata/sys-class-infiniband-h100.0). PCI
addresses, GUIDs and Ethernet cards are synthetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

H100 = ("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9")
ACTIVE = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
}
COUNTS = {
    "symbol_error": 0,
    "link_downed": 0,
    "local_link_integrity_errors": 0,
    "excessive_buffer_overrun_errors": 15,
    "link_error_recovery": 0,
    "port_rcv_errors": 14,
    "port_rcv_data": 2,
}
UP = {"type": 1, "operstate": "up", "flags": "0x1003", "speed": 25000, "carrier_down_count": 1}


class Cards:
    """A folder like /sys, whose devices are links into its tree of buses."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        (root / "class" / "net").mkdir(parents=True, exist_ok=True)

    def add_device(self, bus: str, function: int = 0) -> Path:
        self.count += 1
        device = self.root / "devices" / f"0000:{self.count:02x}:00.{function}"
        write(device, {"vendor": "0x15b3", "device": "0x1021"})
        (self.root / "bus" / bus).mkdir(parents=True, exist_ok=True)
        (device / "subsystem").symlink_to(self.root / "bus" / bus)
        return device

    def add_rdma(self, name: str, **port: Any) -> Path:
        device, folder = self.add_device("pci"), self.root / "class" / "infiniband" / name
        guid = f"fc6a:1c03:00b5:{self.count:04x}"
        write(folder, {"board_id": "MT_0000000838", "node_guid": guid})
        write(folder / "ports" / "1", {**ACTIVE, **port})
        write(folder / "ports" / "1" / "counters", COUNTS)
        (folder / "device").symlink_to(device)
        return folder / "ports" / "1"

    def add_interface(self, name: str, device: Path | None, **values: Any) -> Path:
        folder = self.root / "class" / "net" / name
        write(folder, {**UP, **values})
        if device is not None:
            (folder / "device").symlink_to(device)
            (device / "net" / name).mkdir(parents=True)
        return folder


def write(folder: Path, values: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")
