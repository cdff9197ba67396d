"""Runs inside the job's own Python as `sitecustomize`: imports modules, then forks ranks on demand.

The interpreter is started with the command of the ranks, and stops here, before it has looked at
that command. A process that is forked from here returns from here, so that the interpreter goes on
with the command as in any other start: it reads the script that is on the disk now, and sets
`__main__`, `sys.argv` and `sys.path` itself. Nothing of this file is left in it.

This file is copied next to no other module and uses the standard library only (Python 3.8 and
later). The other side of its socket is relaunch.agent.warm.python. It never returns in the process
that imports, whatever happens there: that process is no rank.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # a rank is to find no more modules loaded than its own
    import socket
    from types import ModuleType
    from typing import Any, Dict, Iterator, List, NoReturn, Optional, Tuple

    Json = Dict[str, Any]
    Version = Optional[Tuple[int, int, int]]
    Rank = Tuple[Json, List[int]]

FD_VARIABLE = "RELAUNCH_WARM_FD"
"""Names the descriptor of the socket to the agent."""
TASK_VARIABLE = "RELAUNCH_WARM_TASK"
"""`probe`, or the modules to import as a JSON list."""
SPACE_VARIABLE = "RELAUNCH_WARM_SPACE"
"""Reserves space in which the environment of a rank will be visible in /proc."""
OWN_VARIABLES = (FD_VARIABLE, TASK_VARIABLE, SPACE_VARIABLE)
NATIVE_PREFIXES = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LANG", "LC_", "PATH", "HOME", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "TBB_", "TCMALLOC_"),
    *("CUDA", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "UCX_", "OMPI_", "FI_"),
)
"""Variables that native code may have read during an import, which this file cannot see."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MAX_NAMED_THREADS = 4
MAX_ERROR = 16384
"""Characters of an error that are sent."""
PARENT_TIMEOUT = 10.0
"""Seconds for the process between this one and a rank to end. It has nothing left to do."""


class Unsuitable(Exception):
    """No rank can be forked from here; the text says why."""


class Reads:
    """Which environment variables Python code reads while the modules are imported."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._copied: Any = None
        self._own: dict[str, Any] = {}

    def __enter__(self) -> Reads:
        kind: Any = type(os.environ)
        for name in ("__getitem__", "__contains__", "__iter__"):
            self._own[name] = kind.__dict__.get(name)
        get, iterate = kind.__getitem__, kind.__iter__
        contains = kind.__contains__

        def read(environment: Any, key: Any) -> Any:
            self._add(key)
            return get(environment, key)

        def look(environment: Any, key: Any) -> Any:
            self._add(key)
            return contains(environment, key)

        def walk(environment: Any) -> Iterator[Any]:
            # A copy of the whole is no reading of each: it is looked at, if at all, later.
            for key in iterate(environment):
                self._copied = key
                yield key
            self._copied = None

        kind.__getitem__, kind.__contains__, kind.__iter__ = read, look, walk
        return self

    def _add(self, key: Any) -> None:
        if key != self._copied:
            self.names.add(key if isinstance(key, str) else os.fsdecode(key))

    def __exit__(self, *error: object) -> None:
        kind: Any = type(os.environ)
        for name, own in self._own.items():
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


def list_tasks() -> list[str]:
    return os.listdir("/proc/self/task")


def list_descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:  # the one that lists the folder
            continue
    return found


def is_shareable(number: int, target: str) -> bool:
    """Return whether each forked process may have this descriptor: without state, or reopened."""
    if target in HARMLESS:
        return True
    if not has_position(number, target):
        return False
    try:
        os.close(reopen(number))
    except OSError:
        return False
    return True


def has_position(number: int, target: str) -> bool:
    """Return whether a descriptor is of a file or folder, open for reading only."""
    import stat

    if not target.startswith("/") or target.startswith(("/dev/", "/memfd:")):
        return False
    try:
        mode = os.fstat(number).st_mode
        with open("/proc/self/fdinfo/%d" % number) as file:
            flags = next(int(text[6:], 8) for text in file if text.startswith("flags:"))
    except (OSError, StopIteration):
        return False
    return (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and flags & os.O_ACCMODE == os.O_RDONLY


def reopen(number: int) -> int:
    """Return a new descriptor of an open file, with a position that only it has.

    Raises:
        OSError: The file may not be read any more, say.
    """
    found = os.open("/proc/self/fd/%d" % number, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(found, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    except BaseException:
        os.close(found)
        raise
    return found


def take_positions(own: set[int]) -> None:
    """Give this process its own position in each file that was opened before the fork.

    Else what one rank reads would be skipped by the others.

    Args:
        own: The descriptors that no other process has.

    Raises:
        OSError: A file cannot be opened again.
    """
    for number, target in list_descriptors().items():
        if number > 2 and number not in own and has_position(number, target):
            found = reopen(number)
            os.dup2(found, number, os.get_inheritable(number))
            os.close(found)


def check_process(module: str, known: dict[int, str]) -> None:
    """Refuse what a module has left behind that a fork would break or share.

    Args:
        module: The name of the module that was just imported.
        known: The descriptors that were open before.
    """
    found = find_unforkable()
    if found is not None:
        raise Unsuitable("%s %s when it is imported%s" % (module, found[0], found[1]))
    for number, target in list_descriptors().items():
        if number not in known and not is_shareable(number, target):
            raise Unsuitable("%s leaves %s open when it is imported" % (module, target))
    with open("/proc/self/maps", errors="replace") as file:
        for text in file:
            if any(device in text for device in DEVICES):
                raise Unsuitable("%s opens the GPU when it is imported" % module)


def find_unforkable() -> Optional[tuple[str, str]]:
    """Return what this process does that a fork would break, and its details; None if nothing."""
    for target in list_descriptors().values():
        if target.startswith(DEVICES):
            return "opens the GPU (%s)" % target, ""
    children: list[str] = []
    for task in list_tasks():
        try:
            with open("/proc/self/task/%s/children" % task) as file:
                children += file.read().split()
        except OSError:  # a thread that has ended, or a kernel without the list
            continue
    if children:
        return "leaves a process running", ""
    if len(list_tasks()) > 1:
        # OpenBLAS and others end their threads before a fork, and start them again when they are
        # needed. Whether a library does so is tried.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        left = [task for task in list_tasks() if task != str(os.getpid())]
        if left:
            number = "%d thread%s" % (len(left), "" if len(left) == 1 else "s")
            return "leaves %s running" % number, " (%s)" % name_threads(left)
    return None


def name_threads(tasks: list[str]) -> str:
    """Return the names of some threads, by which a person finds who starts them."""
    import threading

    own = {str(getattr(one, "native_id", None)): one.name for one in threading.enumerate()}
    names = []
    for task in tasks[:MAX_NAMED_THREADS]:
        try:
            with open("/proc/self/task/%s/comm" % task, errors="replace") as file:
                names.append(own.get(task) or file.read().strip())
        except OSError:  # it has ended meanwhile
            continue
    return ", ".join(names + ["..."] * (len(tasks) > MAX_NAMED_THREADS))


def find_space() -> tuple[int, int]:
    """Return where the environment lies that /proc shows of this process, and its size."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    if not 0 < start < end:
        raise Unsuitable("the kernel does not say where this process has its environment")
    return start, end - start


def serialize_environment(env: dict[str, str]) -> bytes:
    return b"".join(os.fsencode(k) + b"=" + os.fsencode(v) + b"\0" for k, v in env.items())


def show_environment(env: dict[str, str]) -> None:
    """Let /proc show this environment, by which the agent finds its ranks."""
    start, size = find_space()
    text = serialize_environment(env)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(size, b"\0"))


def set_environment(env: dict[str, str]) -> None:
    import posix

    for name in list(os.environ):
        del os.environ[name]
    for name, value in env.items():
        os.environ[name] = value
    posix.environ.clear()
    posix.environ.update((os.fsencode(k), os.fsencode(v)) for k, v in env.items())
    show_environment(env)


def read_versions(modules: dict[str, ModuleType]) -> dict[str, Version]:
    """Return what tells an edited file from the one that was imported, by path."""
    versions = {}
    for module in list(modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            versions[path] = read_version(path)
    return versions


def read_version(path: str) -> Version:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Parent:
    """The process that imports, and then forks."""

    def __init__(self, link: socket.socket, task: str) -> None:
        self.link = link
        self.task = task
        self.start = {k: v for k, v in os.environ.items() if k not in OWN_VARIABLES}
        self.has_own_site = False
        self.reads = Reads()
        self.versions: dict[str, Version] = {}
        self.site_folders: dict[str, Version] = {}

    def send(self, value: Json) -> None:
        import json

        self.link.send(json.dumps(value).encode())

    def run(self) -> bool:
        """Return in a forked rank only, with whether the user has a `sitecustomize`."""
        import sys

        try:
            if self.task == "probe":
                self.send(
                    {"executable": os.readlink("/proc/self/exe"), "flags": sys.flags.isolated}
                )
                os._exit(0)
            try:
                self.import_all()
            except Unsuitable as error:
                self.send({"cold": str(error)})
                os._exit(0)
            self.send({"ready": self.measure()})
            rank = self.serve()
        except BaseException as error:
            try:
                self.send({"cold": "%s: %s" % (type(error).__name__, error)})
            finally:
                os._exit(70)
        self.link.close()
        become(rank)
        return self.has_own_site

    def import_all(self) -> None:
        import gc
        import importlib
        import json
        import sys

        set_path()
        for name in list(os.environ):
            # Into memory of libc's: what a library keeps a pointer to stays as it is when the
            # environment that /proc shows is written over.
            os.environ[name] = os.environ[name]
        for name in OWN_VARIABLES:
            os.environ.pop(name, None)
        restore_python_path(self.start)
        size = find_space()[1]
        needed = len(serialize_environment(self.start))
        if size < needed:
            raise Unsuitable("its environment has %d bytes" % needed)
        known = list_descriptors()
        with self.reads:
            sys.modules.pop("sitecustomize")
            try:
                importlib.import_module("sitecustomize")
                self.has_own_site = True
            except ImportError as error:
                if error.name != "sitecustomize":
                    raise
            check_process("sitecustomize", known)
            for module in json.loads(self.task):
                try:
                    importlib.import_module(module)
                except BaseException as error:
                    # Shortened, and put on one line, where values are replaced: half of one would
                    # not be found.
                    text = str(error)[:MAX_ERROR]
                    raise Unsuitable(
                        "%s cannot be imported (%s: %s)" % (module, type(error).__name__, text)
                    ) from None
                check_process(module, known)
        self.versions = read_versions(sys.modules)
        self.site_folders = {path: read_version(path) for path in sys.path if "-packages" in path}
        gc.collect()
        gc.freeze()  # the collector of a rank would write to, and so copy, every page

    def measure(self) -> Json:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return {"bytes": pages * os.sysconf("SC_PAGE_SIZE")}

    def serve(self) -> Rank:
        """Fork a rank for each order; return in it, with its order and its descriptors."""
        while True:
            order, handles = receive(self.link)
            if order is None:
                os._exit(0)
            if "check" in order:
                reason = self.find_obstacle(order["check"])
                self.send({"cold": reason} if reason else {"ok": True})
                continue
            forked = self.fork(order, handles)
            if forked is not None:
                return forked

    def find_obstacle(self, check: Json) -> Optional[str]:
        """Return why the ranks of this order cannot be forked here, or None."""
        changed = [path for path, seen in self.versions.items() if read_version(path) != seen]
        if changed:
            return "%s has changed since it was imported" % changed[0]
        for folder, seen in self.site_folders.items():
            if read_version(folder) != seen:
                return "what is installed in %s has changed" % folder
        found = find_unforkable()
        if found is not None:
            return "something that was imported %s%s" % found
        for number, target in list_descriptors().items():
            if number > 2 and has_position(number, target) and not is_shareable(number, target):
                return "%s cannot be opened again" % target
        size = find_space()[1]
        for env in check["environments"]:
            if len(serialize_environment(env)) > size:
                return "the environment of a rank is larger than %d bytes" % size
            names = {*env, *self.start}
            for name in sorted(n for n in names if env.get(n) != self.start.get(n)):
                if name in self.reads.names:
                    return "%s was read when the modules were imported, and is different now" % name
                if name.startswith(NATIVE_PREFIXES):
                    return "%s is different now" % name
        return find_shadow(check["folder"])

    def fork(self, order: Json, handles: list[int]) -> Optional[Rank]:
        import json

        middle = os.fork()
        if middle:
            for handle in handles:
                os.close(handle)
            os.waitpid(middle, 0)
            return None
        # The process between: a rank is to be a child of the agent's shim, which adopts orphans.
        try:
            pid = os.fork()
            if pid:
                self.link.send(json.dumps({"pid": pid}).encode())
                os._exit(0)
        except BaseException:
            os._exit(1)
        return order, handles


def find_shadow(folder: Optional[str]) -> Optional[str]:
    """Return why a start from nothing would import another module than the one imported ahead.

    That is so where the folder of the script has a module of the same name; None if it has none.
    """
    import sys

    if folder is None:
        return None
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    imported = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and "." not in name:
            imported[name] = path
    for name in sorted(names):
        top, dot, ending = name.partition(".")
        path = os.path.join(folder, name)
        if not dot:
            path = os.path.join(path, "__init__.py")
        is_module = not dot or ending == "py" or ending.endswith("so")
        if not is_module or top not in imported or not os.path.exists(path):
            continue
        if os.path.realpath(path) != os.path.realpath(imported[top]):
            return "%s has the name of a module that was imported ahead" % path
    return None


def set_path() -> None:
    """Take the folder of this file off the path again."""
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    sys.path_importer_cache.pop(here, None)


def restore_python_path(start: dict[str, str]) -> None:
    """Set PYTHONPATH as it was before this file's folder was put before it."""
    _, _, rest = start["PYTHONPATH"].partition(os.pathsep)
    if rest:
        os.environ["PYTHONPATH"] = start["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH")
        del start["PYTHONPATH"]


def receive(link: socket.socket) -> tuple[Optional[Json], list[int]]:
    """Return the next order and its descriptors; None at the end."""
    import array
    import json
    import socket

    handles: array.array[int] = array.array("i")
    data, extra, _, _ = link.recvmsg(1 << 20, socket.CMSG_SPACE(8 * handles.itemsize))
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
    return (json.loads(data) if data else None), list(handles)


def become(rank: Rank) -> None:
    """Turn this newly forked process into the rank.

    The descriptors: stdout, stderr, where an error is written to, and where the word to go comes
    from. Without that word, this process ends.
    """
    import importlib

    order, (stdout, stderr, failure, going) = rank
    step = "prepare the process"
    try:
        os.setsid()
        await_parent(order["shim"])
        if os.read(going, 1) != b"g":
            os._exit(1)
        os.close(going)
        allow_reading()
        step = "open its files again"
        take_positions({stdout, stderr, failure})
        step = "prepare the process"
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for handle in {stdout, stderr}:
            os.close(handle)
        if order["workdir"] is not None:
            step = "workdir"
            os.chdir(order["workdir"])
        if order["umask"] is not None:
            os.umask(int(order["umask"], 8))
        restore_core_limit(order["core_limits"])
        for name, value in order["limits"].items():
            step = "limits." + name
            set_limit(name, value)
        step = "the environment"
        set_environment(order["env"])
        draw_seeds()
        importlib.invalidate_caches()
    except OSError as error:
        fail(failure, {"step": step, "errno": error.errno, "text": error.strerror})
    except BaseException as error:
        fail(failure, {"step": step, "errno": None, "text": repr(error)})
    os.close(failure)


def draw_seeds() -> None:
    """Draw a new seed where a library drew one at its import: each rank would have the same.

    That of Python's `random` is drawn again by Python, and those of GPUs are drawn when a rank
    first uses one.
    """
    import sys

    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()


def fail(failure: int, report: Json) -> NoReturn:
    import json

    try:
        os.write(failure, json.dumps(report).encode())
    finally:
        os._exit(127)


def call_prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def await_parent(shim: int) -> None:
    """Wait until the shim is the parent, and have the kernel kill this process when it dies."""
    import time

    deadline = time.monotonic() + PARENT_TIMEOUT
    while os.getppid() != shim:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    call_prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != shim:
        os._exit(1)


def allow_reading() -> None:
    """See relaunch.agent.processes.allow_reading."""
    call_prctl(0x59616D61, (1 << 64) - 1)


def restore_core_limit(own_and_given: list[int]) -> None:
    """Take the limit of the agent back, unless a module that was imported has set another."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if own_and_given and soft == own_and_given[0]:
        resource.setrlimit(resource.RLIMIT_CORE, (own_and_given[1], hard))


def set_limit(name: str, value: int) -> None:
    """See relaunch.agent.ranks.spawn: a soft limit, and the hard one where that is below it."""
    import errno
    import resource

    kind = getattr(resource, "RLIMIT_" + name.upper())
    hard = resource.getrlimit(kind)[1]
    is_above = hard != resource.RLIM_INFINITY and (value == -1 or value > hard)
    try:
        resource.setrlimit(kind, (value, value if is_above else hard))
    except ValueError as error:  # also for EPERM
        wanted = "unlimited" if value == -1 else value
        reason = "%s is above %s, the hard limit of this node's agent" % (wanted, hard)
        raise PermissionError(errno.EPERM, reason if is_above else str(error)) from None


def run() -> bool:
    import socket

    link = socket.socket(fileno=int(os.environ[FD_VARIABLE]))
    return Parent(link, os.environ[TASK_VARIABLE]).run()


if FD_VARIABLE in os.environ and not run():
    # As if this file had never been there: the user has no `sitecustomize`, and `site` expects this
    # error of a Python that has none.
    raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
