"""A file system in user space with one file, whose reads are answered once and then never.

    python -S blocked_files.py FOLDER

As NFS does whose server is gone: who reads waits in state D. It needs root and /dev/fuse, no
library. It unmounts on SIGTERM, and all that wait get an error. Only the few requests that a read
of one file makes are answered; the numbers are those of Linux's `fuse.h`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import sys

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
INTERRUPT, BATCH_FORGET = 36, 42
UNANSWERED = (FORGET, INTERRUPT, BATCH_FORGET)
ROOT, FILE = 1, 2
NAME, SIZE = b"shard.bin", 64 << 20
ANSWERED_BYTES = 1 << 20
"""Of the file: what lies behind is never read."""
ASYNC_READ = 1
"""Reads are asked for ahead, so that a reader waits for the page, in state D until it is killed."""
SECONDS = 3600
"""For which the kernel keeps names and attributes."""
MNT_DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


def attributes(node: int) -> bytes:
    mode, size = (stat.S_IFDIR | 0o755, 0) if node == ROOT else (stat.S_IFREG | 0o644, SIZE)
    return struct.pack("<6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 0, 0)


def answer(operation: int, node: int, body: bytes) -> bytes | int | None:
    """Return the body of an answer, an error number, or None: it is not answered."""
    if operation == INIT:
        major, minor, ahead = struct.unpack_from("<3I", body)
        return struct.pack(
            "<4I2H2I9I", major, min(minor, 31), ahead, ASYNC_READ, 8, 6, 1 << 17, 1, *[0] * 9
        )
    if operation == LOOKUP:
        if body.rstrip(b"\0") != NAME:
            return errno.ENOENT
        return struct.pack("<4Q2I", FILE, 0, SECONDS, SECONDS, 0, 0) + attributes(FILE)
    if operation == GETATTR:
        return struct.pack("<Q2I", SECONDS, 0, 0) + attributes(node)
    if operation == OPEN:
        return struct.pack("<Q2I", 0, 0, 0)
    if operation == READ:
        _, offset, size = struct.unpack_from("<2QI", body)
        return bytes(size) if offset + size <= ANSWERED_BYTES else None
    if operation in (FLUSH, RELEASE):
        return b""
    return None if operation in UNANSWERED else errno.ENOSYS


def main() -> None:
    folder = os.fsencode(sys.argv[1])
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    if libc.mount(b"relaunch-hangs", folder, b"fuse", 0, options.encode()) != 0:
        sys.exit(f"{sys.argv[1]} cannot be mounted: {os.strerror(ctypes.get_errno())}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            request = os.read(device, 1 << 18)
            _, operation, unique, node = struct.unpack_from("<2I2Q", request)
            body = answer(operation, node, request[40:])
            if isinstance(body, int):
                os.write(device, struct.pack("<IiQ", 16, -body, unique))
            elif body is not None:
                os.write(device, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
    finally:
        libc.umount2(folder, MNT_DETACH)


if __name__ == "__main__":
    main()
