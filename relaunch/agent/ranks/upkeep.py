"""Keep the folder of a living generation in place.

Locks the folder so that systemd-tmpfiles does not clean it, and creates again what was removed.
This is part of the shim, which has the content of all these files in memory. It makes no decisions
about ranks.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Dict, List, Optional

from relaunch.agent import disk, folders, processes
from relaunch.agent.locks import try_lock
from relaunch.agent.protocol import Json, Token, now
from relaunch.agent.state import Generation, JobState, read_json, write_json

CHECK_INTERVAL = 2.0
"""Seconds between checks that all files exist. A check takes about a dozen system calls."""
SOCKETS = ("orders", "sock")


def _is_open_as(path: Path, handle: int) -> bool:
    """Return whether this path still leads to the folder that was opened."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except OSError:
        return False


class FolderUpkeep:
    def __init__(self, generation: Generation, token: Token, order: Json, lock: int) -> None:
        """Start upkeep; `lock` is the descriptor of shim.lock, held since this process began."""
        self.generation = generation
        self.job = JobState.from_token(generation.state, token)
        self.order = order
        self.lock = lock
        self.launch: Optional[Json] = None
        """The content of started.json; None before the launch."""
        self.due_at = now() + CHECK_INTERVAL
        self._folder_locks: Dict[Path, int] = {}
        self.has_separate_stderr = False
        """Whether ranks have a log of their own for stderr."""
        self._logs: Dict[Path, int] = {}
        """Descriptors of removed logs, by path.

        They keep the output of a rank readable for as long as this process lives.
        """
        self._was_restored = False
        self.highest = read_json(self.job.path / "highest.json")
        """The content of highest.json when this generation was prepared."""
        own = generation.path
        self._outer = self._list_outer()
        inner = [own / name for name in ("logs", "errors", "progress", "launched", "running")]
        self._folders = [*self._outer, own, *inner]
        """The folders that must exist, outermost first."""
        names = ["order.json", "shim.json", "shim.lock", "journal.jsonl", *SOCKETS]
        self._files = [*(own / name for name in names), self.job.path / "highest.json"]
        """The files that must exist from the begin on."""
        self.lock_folders()

    # --- locking folders ---

    def _list_outer(self) -> List[Path]:
        state = self.generation.state
        above = [state.parent] if folders.list_places(str(state)) != [str(state)] else []
        return [*above, state, state / "jobs", self.job.path]

    def lock_folders(self) -> None:
        """Take a shared lock on every folder. Systemd-tmpfiles skips folders that are locked."""
        for path in [*self._outer, self.generation.path]:
            previous = self._folder_locks.get(path)
            if previous is not None and _is_open_as(path, previous):
                continue
            try:
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:  # removed: the next check creates it again
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # locked by systemd-tmpfiles right now, or locks are not supported
                os.close(handle)
                continue
            self._folder_locks[path] = handle
            if previous is not None:
                os.close(previous)

    # --- restoring files ---

    def find_missing(self) -> List[Path]:
        """Return the folders and files that are missing, and set the time of the next check."""
        self.due_at = now() + CHECK_INTERVAL
        self.lock_folders()
        own = self.generation.path
        paths = [*self._folders, *self._files]
        if self.launch is not None:
            paths.append(own / "started.json")
        return [path for path in paths if not os.path.lexists(path)]

    def restore(self, missing: List[Path], alive: Dict[int, int]) -> None:
        """Create missing folders and files again, except the journal and the sockets.

        The shim restores the journal and the sockets itself.

        Raises:
            OSError, folders.FolderError: They cannot be created now.
        """
        own = self.generation.path
        disk.log(f"removed while this generation lives, made again: {', '.join(map(str, missing))}")
        for path in self._folders:
            if path not in (self.generation.state, self.generation.state.parent):
                path.mkdir(mode=0o700, exist_ok=True)
            elif path in missing:
                folders.secure_folder(path)
        if own / "shim.lock" in missing:
            # Lock the file first, then rename it: an unlocked shim.lock means that no shim lives.
            lock = try_lock(own / ".shim.lock.restored")
            if lock is not None:
                os.rename(own / ".shim.lock.restored", own / "shim.lock")
                os.dup2(lock, self.lock, inheritable=False)
                os.close(lock)
        if own / "order.json" in missing:
            write_json(own / "order.json", self.order, durable=False)
        if own / "shim.json" in missing:
            process = processes.read_process(os.getpid())
            if process is not None:
                self.generation.write_identity("shim", process.pid, process.started)
        if own / "started.json" in missing and self.launch is not None:
            write_json(own / "started.json", self.launch, durable=False)
        self._relink_logs(alive)
        if self.job.path / "highest.json" in missing:
            self._restore_highest()
        self._was_restored = True
        self.lock_folders()

    def _relink_logs(self, alive: Dict[int, int]) -> None:
        """Replace each removed log of a living rank by a symlink to the file it still writes."""
        streams = {1: "stdout", 2: "stderr"} if self.has_separate_stderr else {1: "stdout"}
        for rank, pid in alive.items():
            for number, stream in streams.items():
                self._relink_log(self.generation.log_path(rank, stream), f"/proc/{pid}/fd/{number}")

    def _relink_log(self, log: Path, written: str) -> None:
        if os.path.lexists(log):
            return
        try:
            handle = os.open(written, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # the rank ended, or has closed this stream
            return
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            return
        if log in self._logs:
            os.close(self._logs[log])
        self._logs[log] = handle
        os.symlink(f"/proc/{os.getpid()}/fd/{handle}", log)

    def _restore_highest(self) -> None:
        """Write highest.json again, unless an order has written it in the meantime.

        This does not take the job's lock: an order that holds it may be waiting for this file.
        """
        path = self.job.path / "highest.json"
        if self.highest is None:
            self.job.reserve(prepared=self.generation.order)
            return
        partial = path.with_name(".highest.json.restored")
        write_json(partial, self.highest)
        try:
            os.link(partial, path)
        except FileExistsError:
            pass
        os.unlink(partial)

    def find_successor(self) -> Optional[str]:
        """Return why this generation must end, or None.

        After files were restored, this checks once whether the generation was stopped, or a higher
        one prepared, while its records were missing.
        """
        if not self._was_restored:
            return None
        self._was_restored = False
        own, highest = self.generation.order, self.job.read_highest()
        if highest.stopped is not None and highest.stopped >= own:
            return f"generation {own[1]} was stopped while the records of this node were gone"
        if highest.prepared is not None and highest.prepared > own:
            return (
                f"generation {highest.prepared[1]} was prepared "
                "while the records of this node were gone"
            )
        return None
