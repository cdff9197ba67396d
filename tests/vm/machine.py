"""One virtual machine.

Its disk over the image, its host key, two networks, and a power switch.

It is reached as any node is, by SSH on a loopback address; what the suite wants to know it asks by
the ssh program, not through relaunch.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests.vm.image import ROOT, Image
from tests.vm.power import order

HERE = Path(__file__).parent
BOOT_TIMEOUT = 300.0
"""Seconds. Emulated on an idle core it takes 20 to 30; that core may be shared."""
GREETING_TIMEOUT = 5.0
"""Seconds: to fork takes an emulated sshd that shares its core one or two."""
ASKED_EVERY = 0.5
"""Seconds: what the times of this suite are exact to."""
ACCELERATOR = "tcg,tb-size=96"
"""Emulation, which every machine can. With the default, a buffer of a gigabyte, a machine that
reboots is slow for half a minute: QEMU then finds, page by page, that the code which it had
translated there is no more."""
KERNEL = (
    "rw console=ttyS0 net.ifnames=0 quiet loglevel=4 random.trust_cpu=on"
    " mitigations=off nokaslr audit=0 apparmor=0 selinux=0 cryptomgr.notests"
)


@dataclass
class Machine:
    name: str
    number: int
    """From 1: its addresses are 127.66.0.NUMBER from outside, and 10.77.0.NUMBER on the training
    network."""
    folder: Path
    """Short: the name of a socket has at most 107 bytes."""
    image: Image
    key: Path
    doubles: Path
    port: int = field(init=False)
    process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def address(self) -> str:
        return f"127.66.0.{self.number}"

    @property
    def network(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def power(self) -> Path:
        return self.folder / f"{self.name}.qmp"

    @property
    def cycled(self) -> Path:
        """When its power was cycled last, if it was."""
        return self.power.with_suffix(".cycled")

    @property
    def console(self) -> Path:
        return self.folder / f"{self.name}.console"

    @property
    def host_key(self) -> Path:
        return self.folder / f"{self.name}.host_key"

    @property
    def known_hosts(self) -> Path:
        """Of all machines in the folder."""
        return self.folder / "known_hosts"

    def start(self) -> None:
        with socket.create_server((self.address, 0)) as free:
            self.port = free.getsockname()[1]
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", self.host_key],
            check=True,
        )
        algorithm, key, _ = self.host_key.with_suffix(".host_key.pub").read_text().split()
        with self.known_hosts.open("a") as file:
            file.write(f"[{self.address}]:{self.port} {algorithm} {key}\n")
        disk, seed = self.folder / f"{self.name}.qcow2", self.folder / f"{self.name}.seed"
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-b", self.image.disk, "-F", "raw", disk],
            check=True,
        )
        self._write_seed(seed)
        identity = f"systemd.hostname={self.name} systemd.machine_id={uuid.uuid4().hex}"
        words = [
            *ENDS_WITH_US,
            "qemu-system-x86_64",
            "-accel",
            ACCELERATOR,
            "-cpu",
            "qemu64",
            "-smp",
            "1",
            "-m",
            "512",
        ]
        words += ["-nodefaults", "-display", "none"]
        words += [
            "-kernel",
            str(self.image.kernel),
            "-initrd",
            str(self.image.initrd),
            "-append",
            f"{KERNEL} {identity}",
        ]
        words += [
            "-drive",
            f"file={disk},if=virtio,format=qcow2",
            "-drive",
            f"file={seed},if=virtio,format=raw,readonly=on",
        ]
        words += [
            "-netdev",
            f"user,id=control,restrict=on,hostfwd=tcp:{self.address}:{self.port}-:22",
        ]
        words += [
            "-netdev",
            f"socket,id=training,mcast=230.0.77.1:{_training_port(self.folder)},"
            "localaddr=127.0.0.1",
        ]
        for name in ("control", "training"):
            words += [
                "-device",
                f"virtio-net-pci,netdev={name},"
                f"mac=52:54:00:77:{int(name == 'training'):02x}:{self.number:02x},romfile=",
            ]
        words += [
            "-object",
            "rng-random,id=entropy,filename=/dev/urandom",
            "-device",
            "virtio-rng-pci,rng=entropy",
        ]
        words += [
            "-serial",
            f"file:{self.console}",
            "-qmp",
            f"unix:{self.power},server=on,wait=off",
        ]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL)

    def _write_seed(self, path: Path) -> None:
        nvml, python = "usr/lib/x86_64-linux-gnu", HERE.parent / "chaos" / "rank.py"
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:

            def put(name: str, content: bytes, mode: int = 0o644, user: int = 0) -> None:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.uid, entry.gid, entry.mtime = (
                    len(content),
                    mode,
                    user,
                    user,
                    int(time.time()),
                )
                archive.addfile(entry, io.BytesIO(content))

            def own(name: str) -> None:
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o700, TRAIN, TRAIN
                archive.addfile(entry)

            put("etc/ssh/ssh_host_ed25519_key", self.host_key.read_bytes(), 0o600)
            put("etc/hosts", f"127.0.0.1 localhost {self.name}\n".encode())
            put("opt/training-address", f"{self.network}/24\n".encode())
            put("etc/sudoers.d/relaunch", documented_sudoers(), 0o440)
            put("opt/at_boot.sh", (HERE / "at_boot.sh").read_bytes())
            own("home/train/.ssh")
            put(
                "home/train/.ssh/authorized_keys",
                self.key.with_suffix(".pub").read_bytes(),
                0o600,
                TRAIN,
            )
            own("home/train/run")
            put("opt/doubles/rank.py", python.read_bytes())
            put("usr/local/bin/dcgmi", (HERE / "dcgmi.py").read_bytes(), 0o755)
            put("usr/bin/nvidia-smi", NVIDIA_SMI, 0o755)
            for name in ("sick.json", "healthy.json"):
                put(f"opt/doubles/{name}", (self.doubles / name).read_bytes())
            put(f"{nvml}/libnvidia-ml.so.1", (self.doubles / "libnvidia-ml.so.1").read_bytes())
            put(f"{nvml}/nvml.txt", (self.doubles / "nvml.txt").read_bytes())

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        order(self.power, "freeze")

    def cycle(self) -> None:
        order(self.power, "cycle")

    @property
    def cycle_command(self) -> list[str]:
        """What stands in the fleet file."""
        return [sys.executable, str(HERE / "power.py"), "cycle", str(self.power)]

    def greets(self) -> bool:
        """Whether its sshd says who it is, in time.

        QEMU accepts a connection to a machine that is off, too.
        """
        with (
            contextlib.suppress(OSError),
            socket.create_connection(
                (self.address, self.port), timeout=GREETING_TIMEOUT
            ) as connection,
        ):
            return connection.recv(8).startswith(b"SSH-2.0")
        return False

    def until(self, greets: bool, within: float = BOOT_TIMEOUT) -> float:
        """Wait for sshd to be there, or to be gone; return when it was."""
        deadline = time.monotonic() + within
        while self.greets() is not greets:
            if (
                time.monotonic() > deadline
                or self.process is None
                or self.process.poll() is not None
            ):
                text = (
                    self.console.read_text(errors="replace")[-2000:]
                    if self.console.exists()
                    else ""
                )
                state = "not there" if greets else "still there"
                raise AssertionError(
                    f"the sshd of {self.name} is {state} after {within:g} s; its console:\n{text}"
                )
            time.sleep(ASKED_EVERY)
        return time.monotonic()

    def ssh(self, command: str, check: bool = True) -> str:
        """Run something there by the ssh program."""
        words = [
            "ssh",
            "-F",
            "none",
            "-i",
            str(self.key),
            "-p",
            str(self.port),
            "-o",
            f"UserKnownHostsFile={self.known_hosts}",
        ]
        words += [
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=30",
            f"train@{self.address}",
            command,
        ]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=90)
        if check and ran.returncode != 0:
            raise AssertionError(
                f"ssh {self.name} {shlex.quote(command)} ended with {ran.returncode}: "
                f"{ran.stdout}{ran.stderr}"
            )
        return ran.stdout.strip()

    def boot_id(self) -> str:
        return self.ssh("cat /proc/sys/kernel/random/boot_id")

    def boots(self) -> list[str]:
        """The id of every boot of its life, which the machine writes down itself."""
        return self.ssh("cat /var/lib/boots").split()


ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""Before a command: when the test run is killed, nothing else would ever stop a machine."""
NVIDIA_SMI = b"""#!/bin/sh
# A double of nvidia-smi: it notes who calls it, and is content.
echo "$(id -u) $*" >> /var/tmp/nvidia-smi.calls
echo All done.
"""
TRAIN = 1000
"""The first user that Debian makes."""


def documented_sudoers() -> bytes:
    """The lines that docs/ssh.md has people give the user of relaunch, and no others."""
    lines = [
        line
        for line in (ROOT / "docs" / "ssh.md").read_text().splitlines()
        if line.startswith("train ALL=")
    ]
    assert len(lines) == 2, (
        f"docs/ssh.md has {len(lines)} lines for sudoers, expected one for reboots and one for GPUs"
    )
    return "\n".join((*lines, "")).encode()


def _training_port(folder: Path) -> int:
    """Two suites at once have each its own training network: machines of one folder share it."""
    return 20000 + sum(str(folder).encode()) % 10000
