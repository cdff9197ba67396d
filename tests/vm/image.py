"""Builds, once, the disk of a real Debian machine from Debian's packages.

No image is downloaded, nothing is mounted.

What makes one machine different from another is not here but in `machine`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUITE = "bookworm"
PACKAGES = (
    *("linux-image-cloud-amd64", "busybox-static", "cpio", "systemd-sysv", "udev"),
    *("openssh-server", "sudo", "python3", "iproute2", "procps"),
)
UNREAD = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
SIZE = "1G"
"""350 MB are used; the file is sparse."""
NEEDED = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "cc": "gcc",
}
"""Programs, and the Debian packages that have them."""


@dataclass(frozen=True, slots=True)
class Image:
    disk: Path
    kernel: Path
    initrd: Path


def missing() -> str | None:
    """Return what has to be installed before anything can be built here."""
    packages = {
        package
        for program, package in NEEDED.items()
        if shutil.which(program, path=_path()) is None
    }
    if os.geteuid() != 0 and shutil.which("fakeroot") is None:
        packages.add("fakeroot")
    return f"apt-get install {' '.join(sorted(packages))}" if packages else None


def image() -> Image:
    """Return the image, built if there is none or if what it is made of has changed."""
    folder = Path(os.environ.get("RELAUNCH_VM") or ROOT / ".relaunch-vm")
    key = hashlib.sha256(
        "\0".join((SUITE, *PACKAGES, *UNREAD, SIZE, (HERE / "guest.sh").read_text())).encode()
    ).hexdigest()[:12]
    finished = folder / key
    if not finished.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as name:
            _build(Path(name))
            made = Path(name) / "made"
            if not finished.is_dir():  # another process may have been faster
                made.rename(finished)
    return Image(finished / "disk.ext4", finished / "vmlinuz", finished / "initrd")


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _build(folder: Path) -> None:
    archive, tree, made = folder / "root.tar", folder / "root", folder / "made"
    log = folder.parent / "build.log"
    words = [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        '--aptopt=Apt::Install-Recommends "false"',
    ]
    words += [f"--dpkgopt=path-exclude={pattern}" for pattern in UNREAD]
    words += [f'--customize-hook=chroot "$1" sh -s < {HERE / "guest.sh"}', SUITE, str(archive)]
    tree.mkdir()
    made.mkdir()
    # One process, because fakeroot forgets who owns what when it ends.
    steps = (
        "tar -xf root.tar --numeric-owner --exclude './dev/*' -C root",
        "cp root/vmlinuz made/ && cp root/boot/initrd.suite made/initrd && chmod 0644 made/*",
        f"mkfs.ext4 -q -L root -d root made/disk.ext4 {SIZE}",
    )
    unpack = " && ".join(steps) + "; status=$?; rm -rf root; exit $status"
    as_root = [] if os.geteuid() == 0 else ["fakeroot"]
    with log.open("wb") as output:
        for command in (words, [*as_root, "sh", "-c", unpack]):
            ran = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PATH": _path()},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            if ran.returncode != 0:
                raise RuntimeError(
                    f"{command[0]} ended with {ran.returncode} while the image was built: see {log}"
                )
