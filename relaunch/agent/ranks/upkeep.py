"""Keeps the folder of a living generation: held against systemd-tmpfiles, and made again where it was removed.

Part of the keeper, which knows all that these files have to say. Decides nothing about ranks.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Dict, List, Optional

from relaunch.agent import disk, folders, processes
from relaunch.agent.protocol import Json, Token, now
from relaunch.agent.state import Generation, JobState, read_json, try_lock, write_json

LOOK_INTERVAL = 2.0
"""Seconds between looks at whether everything is there: a dozen system calls."""
SOCKETS = ("orders", "sock")


class FolderUpkeep:
    def __init__(self, generation: Generation, token: Token, order: Json, lock: int) -> None:
        """`lock`: the handle of keeper.lock, which this process was born with."""
        self.generation = generation
        self.job = JobState.of(generation.state, token)
        self.order = order
        self.lock = lock
        self.launch: Optional[Json] = None
        """What started.json says."""
        self.due_at = now() + LOOK_INTERVAL
        self._held: Dict[Path, int] = {}
        self._logs: Dict[int, int] = {}
        """Handles of removed logs, by rank: what a rank prints can be read as long as this process lives."""
        self._was_restored = False
        self.highest = read_json(self.job.path / "highest.json")
        """As it was when this generation was prepared."""
        self.hold()

    # --- held ---

    def _list_folders(self) -> List[Path]:
        """Return what has to be there, from the outermost folder on."""
        own = self.generation.path
        inner = [own / name for name in ("logs", "errors", "progress", "launched")]
        return [*self._list_outer(), own, *inner]

    def _list_outer(self) -> List[Path]:
        state = self.generation.state
        above = [state.parent] if folders.list_places(str(state)) != [str(state)] else []
        return [*above, state, state / "jobs", self.job.path]

    def hold(self) -> None:
        """Hold every folder by the shared lock at which systemd-tmpfiles passes a folder by."""
        for path in [*self._list_outer(), self.generation.path]:
            try:
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:  # removed: the next look makes it again
                continue
            held = self._held.get(path)
            if held is not None and os.path.sameopenfile(held, handle):
                os.close(handle)
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # systemd-tmpfiles looks at it at this moment, or it cannot be locked there
                os.close(handle)
                continue
            self._held[path] = handle
            if held is not None:
                os.close(held)

    # --- made again ---

    def find_missing(self) -> List[Path]:
        """Return what has to be there and is not; says when to look again."""
        self.due_at = now() + LOOK_INTERVAL
        self.hold()
        own = self.generation.path
        names = ["order.json", "keeper.json", "keeper.lock", "journal.jsonl", *SOCKETS]
        if self.launch is not None:
            names.append("started.json")
        files = [*(own / name for name in names), self.job.path / "highest.json"]
        return [path for path in [*self._list_folders(), *files] if not os.path.lexists(path)]

    def restore(self, missing: List[Path], alive: Dict[int, int]) -> None:
        """Make folders and files again; the journal and the sockets are the keeper's to do.

        Raises:
            OSError, folders.FolderError: It cannot be done now.
        """
        own = self.generation.path
        disk.log(f"removed while this generation lives, made again: {', '.join(map(str, missing))}")
        for path in self._list_folders():
            if path not in (self.generation.state, self.generation.state.parent):
                path.mkdir(mode=0o700, exist_ok=True)
            elif path in missing:
                folders.secure_folder(path)
        if own / "keeper.lock" in missing:
            # It gets its name when it is held: in between it would say that no keeper lives.
            lock = try_lock(own / ".keeper.lock.restored")
            if lock is not None:
                os.rename(own / ".keeper.lock.restored", own / "keeper.lock")
                os.dup2(lock, self.lock, inheritable=False)
                os.close(lock)
        if own / "order.json" in missing:
            write_json(own / "order.json", self.order, durable=False)
        if own / "keeper.json" in missing:
            found = processes.look(os.getpid())
            if found is not None:
                self.generation.write_identity("keeper", found.pid, found.started)
        if own / "started.json" in missing and self.launch is not None:
            write_json(own / "started.json", self.launch, durable=False)
        self._relink_logs(alive)
        if self.job.path / "highest.json" in missing:
            self._restore_highest()
        self._was_restored = True
        self.hold()

    def _relink_logs(self, alive: Dict[int, int]) -> None:
        """Where the log of a living rank was removed, have its name lead to the file that the rank writes on."""
        for rank, pid in alive.items():
            log = self.generation.log(rank)
            if os.path.lexists(log):
                continue
            try:
                handle = os.open(f"/proc/{pid}/fd/1", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError:  # it ended, or has closed its stdout
                continue
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                continue
            if rank in self._logs:
                os.close(self._logs[rank])
            self._logs[rank] = handle
            os.symlink(f"/proc/{os.getpid()}/fd/{handle}", log)

    def _restore_highest(self) -> None:
        """Write again what was prepared here; what an order has written meanwhile stays.

        Not under the job's lock: an order that has it may wait for just this.
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
        """Return why this generation may not live on, once, where an order was carried out without its records."""
        if not self._was_restored:
            return None
        self._was_restored = False
        own, highest = self.generation.order, self.job.highest()
        if highest.stopped is not None and highest.stopped >= own:
            return f"generation {own[1]} was stopped while the records of this node were gone"
        if highest.prepared is not None and highest.prepared > own:
            return f"generation {highest.prepared[1]} was prepared while the records of this node were gone"
        return None
