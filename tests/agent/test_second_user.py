"""What a second local user tries against a node of another user's, or of root's.

Every attack is a test: real processes of a real second uid. Nothing of it works. What root itself
may do, and what the jobs of one user may do to each other, is in docs/security.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import Json, Node, expect_done, is_alive, refusal, token, wait_for

from relaunch.agent import processes
from relaunch.agent.node import kernel_log
from relaunch.agent.ranks.peers import compute_mac
from relaunch.agent.state import JobState, read_boot_id
from relaunch.backends.ssh.ship import MARK, Artifact, first_line

OWNER, ATTACKER = 4243, 4244
SYSTEM_PYTHON = "/usr/bin/python3"
"""One that every user can run."""
SECRET = "hunter2-c0ffee-secret"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
    pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason=f"there is no {SYSTEM_PYTHON}"),
]


def as_user(uid: int, *words: str) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *words]


def attack(code: str, *arguments: object) -> str:
    """Run Python as the second user; return the last line that it printed, or of its error."""
    done = subprocess.run(
        as_user(ATTACKER, SYSTEM_PYTHON, "-c", code, *map(str, arguments)),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return ((done.stdout + done.stderr).strip().splitlines() or [""])[-1]


@pytest.fixture
def public(agent: Path) -> Iterator[Path]:
    """A folder that every user can enter, with the agent in it: pytest's are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="relaunch-second-"))
    folder.chmod(0o755)
    shutil.copy(agent, folder / "agent.pyz")
    (folder / "agent.pyz").chmod(0o644)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def plain(public: Path) -> Iterator[Node]:
    """A node whose agent is a plain user's."""
    (public / "n1").mkdir(mode=0o700)
    os.chown(public / "n1", OWNER, OWNER)
    wrapper = public / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(as_user(OWNER, SYSTEM_PYTHON))} "$@"\n')
    wrapper.chmod(0o755)
    node = Node(public / "n1", public / "agent.pyz", interpreter=str(wrapper))
    yield node
    node.kill_everything()


# --- the files and sockets of a generation that runs ----------------------------------------------

FILES = {
    "state folder": ("", "import os; os.listdir(P)"),
    "journal": ("journal.jsonl", "open(P, 'a').write('{}')"),
    "order": ("order.json", "print(open(P).read())"),
    "highest token": ("../highest.json", "open(P, 'w')"),
    "progress file": ("progress/rank_0", "open(P, 'w').write('999')"),
    "progress file as a link": ("progress/rank_0", "import os; os.symlink('/etc/passwd', P)"),
    "error file": ("errors/rank_0.json", "open(P, 'w')"),
    "log": ("logs/rank_0.log", "print(open(P).read())"),
    "log as a link": ("logs/rank_9.log", "import os; os.symlink('/etc/shadow', P)"),
    "file of the same name": ("order.json.new", "open(P, 'x')"),
    "hard link": ("order.json", "import os; os.link(P, '/tmp/stolen-order')"),
    "socket of the shim": ("orders", "import socket; socket.socket(1).connect(P)"),
    "socket of the supervisor": ("sock", "import socket; socket.socket(1).connect(P)"),
    "socket in its place": ("orders", "import os, socket; os.unlink(P); socket.socket(1).bind(P)"),
}


def test_files_and_sockets_are_closed_to_another_user(plain: Node) -> None:
    (pid,) = plain.run(1, ["sh", "-c", "echo $SECRET; exec sleep 1000"], ranks=1).values()
    before = {path: path.stat() for path in plain.folder().rglob("*") if path.is_file()}
    for name, (path, code) in FILES.items():
        said = attack(f"import sys; P = sys.argv[1]; {code}", plain.folder() / path)
        assert "PermissionError" in said, (name, said)
    for path, status in before.items():
        assert path.stat().st_ino == status.st_ino
        assert path.stat().st_mode & 0o077 == 0, path
    assert is_alive(pid)
    plain.watch().read_until("heartbeat")


SPEAK = """
import os, socket, sys
caller = socket.socket(socket.AF_UNIX)
caller.settimeout(20)
caller.connect(sys.argv[1])
try:
    caller.sendall(sys.argv[2].encode() + b"\\n")
    print("answered", caller.recv(4096))
except ConnectionError:
    print("answered b''")
"""


def test_sockets_that_were_opened_to_all_still_take_no_order(plain: Node) -> None:
    """Someone has made the folders and sockets writable for everyone, a container for example."""
    (pid,) = plain.run(1, ranks=1).values()
    plain.watch().read_until("heartbeat")
    for path in [*plain.folder().parents[:3], plain.folder(), *plain.folder().glob("*")]:
        path.chmod(0o777)
    stop = {"stop": {"stop_grace": 0.0, "reason": "the second user"}}
    watch = {"watch": {"after_seq": 0, "heartbeat": 0.1}}
    for name, order in (("orders", stop), ("sock", watch), ("orders", {"start": {}})):
        said = attack(SPEAK, plain.folder() / name, json.dumps(order))
        assert said == "answered b''", (name, said)
    assert is_alive(pid)
    assert expect_done(plain.stop())["stopped"] == [[1, 1]], "its own user is obeyed"


def test_no_secret_is_in_a_command_line_or_a_file(plain: Node) -> None:
    command = ["sh", "-c", "exec sleep 1000"]
    (pid,) = plain.run(
        1, command, ranks=1, env={"TOKEN": SECRET}, secret=SECRET.encode().hex()
    ).values()
    plain.watch().read_until("heartbeat")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                assert SECRET.encode() not in (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
    assert SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes(), "it was given"
    for name in ("environ", "mem", "maps", "cwd"):
        read = "os.readlink(P)" if name == "cwd" else "open(P, 'rb').read()"
        said = attack(f"import os, sys; P = sys.argv[1]; {read}", f"/proc/{pid}/{name}")
        assert "PermissionError" in said, name
    for path in plain.state.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert SECRET.encode() not in data and SECRET.encode().hex().encode() not in data, path


def test_processes_of_the_node_take_no_signal_and_no_tracer(plain: Node) -> None:
    (pid,) = plain.run(1, ranks=1).values()
    plain.watch().read_until("heartbeat")
    attach = "import ctypes, os, sys; print(ctypes.CDLL(None).ptrace(16, int(sys.argv[1]), 0, 0))"
    for target in (pid, *(plain.pid(role) for role in ("shim", "supervisor", "guard"))):
        said = attack("import os, sys; os.kill(int(sys.argv[1]), 9)", target)
        assert "PermissionError" in said
        assert attack(attach, target) == "-1"
        assert is_alive(target)


# --- the port for peers ---------------------------------------------------------------------------

ASK = """
import json, socket, sys
caller = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
caller.sendall(sys.argv[2].encode() + b"\\n")
try:
    print("answered", caller.recv(4096))
except ConnectionError:
    print("answered b''")
"""


def test_the_port_for_peers_answers_only_those_with_the_secret(plain: Node) -> None:
    prepared = expect_done(plain.prepare(1, ranks=[0]))
    expect_done(plain.start(1, ranks=1))
    watch = plain.watch()
    watch.read_until("heartbeat")

    def make_question(secret: str, **more: Any) -> Json:
        text = "default/j/1/1"
        question = {"token": token(1), "from": "n2", "nonce": "aa" * 16, "clock": True, **more}
        mac = compute_mac(secret, "ask", text, question["from"], question["nonce"])
        return {**question, "mac": mac}

    port, supervisor = prepared["peer_port"], plain.pid("supervisor")
    right = attack(ASK, port, json.dumps(make_question("c0ffee")))
    assert '"alive"' in right or "alive" in right, "a peer is answered"
    for question in (
        make_question("00"),
        {**make_question("c0ffee"), "mac": ""},
        {**make_question("c0ffee"), "from": "n3"},
        {**make_question("c0ffee"), "nonce": "bb" * 16},
        {"vouch": True},
        {"highest": [9, 9], "stopped": [9, 9], "mac": "00"},
        {**make_question("c0ffee"), "mac": "é"},
        {**make_question("c0ffee"), "from": "\ud800"},
    ):
        assert attack(ASK, port, json.dumps(question)) == "answered b''", question
    assert plain.pid("supervisor") == supervisor, "none of them ends it"
    # Connections that say nothing are dropped after a second, and a peer gets its turn again.
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    wait_for(lambda: "alive" in attack(ASK, port, json.dumps(make_question("c0ffee"))))
    for each in held:
        each.close()
    assert expect_done(plain.stop())["stopped"] == [[1, 1]]


# --- the agent's own file -------------------------------------------------------------------------


def plant_nothing(path: Path, data: bytes) -> None:
    pass


def plant_other_content(path: Path, data: bytes) -> None:
    path.write_bytes(b"#!/usr/bin/env python3\nprint('the attacker')\n")
    os.chown(path, ATTACKER, ATTACKER)


def plant_right_content_of_the_attackers(path: Path, data: bytes) -> None:
    """The hash is right now, and its owner can write something else the moment after."""
    path.write_bytes(data)
    path.chmod(0o755)
    os.chown(path, ATTACKER, ATTACKER)


def plant_link(path: Path, data: bytes) -> None:
    theirs = path.parents[2] / "theirs.pyz"
    theirs.write_bytes(data)
    os.chown(theirs, ATTACKER, ATTACKER)
    path.symlink_to(theirs)


def plant_hard_link(path: Path, data: bytes) -> None:
    plant_link(path, data)
    theirs = path.resolve()
    path.unlink()
    os.link(theirs, path)


def plant_truncated(path: Path, data: bytes) -> None:
    path.write_bytes(data[:1000])
    os.chown(path, OWNER, OWNER)


def plant_writable(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.chown(path, OWNER, OWNER)
    path.chmod(0o666)


def plant_pipe(path: Path, data: bytes) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "plant",
    [
        plant_nothing,
        plant_other_content,
        plant_right_content_of_the_attackers,
        plant_link,
        plant_hard_link,
        plant_truncated,
        plant_writable,
        plant_pipe,
    ],
)
def test_an_agent_that_another_user_could_change_is_sent_again(
    public: Path, agent: Path, plant: Callable[[Path, bytes], None]
) -> None:
    artifact = Artifact.read(agent)
    folder = public / "state"
    for path in (folder, folder / "agents"):
        path.mkdir(mode=0o700)
        os.chown(path, OWNER, OWNER)
    path = folder / "agents" / artifact.name
    plant(path, artifact.data)
    done = begin_session(folder, artifact)
    assert b'"want"' in done and b'"session"' in done, done
    status = path.lstat()
    assert (status.st_uid, status.st_mode & 0o7777, status.st_nlink) == (OWNER, 0o600, 1)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == artifact.sha256
    again = begin_session(folder, artifact)
    assert b'"want"' not in again and b'"session"' in again, "what is whole is not sent again"


def begin_session(state: Path, artifact: Artifact, wrapped: tuple[str, ...] = ()) -> bytes:
    """Log in as the owner, as a worker does; return all that it said until the session's end."""
    environment = {"PATH": os.environ["PATH"], "RELAUNCH_AGENT_STATE": str(state)}
    stub = 'import os;f=os.fdopen(0,"rb",0);exec(f.readline())'
    with subprocess.Popen(
        [*wrapped, *as_user(OWNER, SYSTEM_PYTHON, "-E", "-S", "-c", stub)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(first_line(artifact, {}))
        process.stdin.flush()
        said = b""
        while not said.endswith(b"}\n") or MARK not in said:
            line = process.stdout.readline()
            said += line
            if not line:
                break
        if b'"want"' in said:
            process.stdin.write(artifact.data)
        process.stdin.close()
        return said + process.stdout.read()


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        ("chown 4244 {place}", "uid 4244, who owns"),
        ("chmod 777 {place}", "`chmod +t"),
        ("mkdir {place}/state && chown 4244 {place}/state", "belongs to uid 4244"),
        ("ln -s /tmp {place}/state && chown -h 4244 {place}/state", "a link that uid 4244 made"),
        (
            "mkdir {place}/x && ln -s {place}/x {place}/state && chown -h 4244 {place}/state",
            "a link that uid 4244 made",
        ),
    ],
)
def test_a_login_starts_nothing_where_another_user_can_write(
    public: Path, agent: Path, prepare: str, says: str
) -> None:
    place = public / "place"
    place.mkdir(mode=0o755)
    os.chown(place, OWNER, OWNER)
    subprocess.run(["sh", "-c", prepare.format(place=place)], check=True)
    said = begin_session(place / "state", Artifact.read(agent))
    assert b'"cannot"' in said and says.encode() in said, said
    assert b'"want"' not in said and b'"session"' not in said


# --- a node of root's: root reads what every process says of itself -------------------------------

PRETEND = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.prctl(15, sys.argv[1].encode(), 0, 0, 0)
if sys.argv[2]:
    os.makedirs(os.path.dirname(sys.argv[2]), exist_ok=True)
    lock = open(sys.argv[2], "w")
libc.prctl(4, int(sys.argv[3]), 0, 0, 0)  # not dumpable: /proc/PID belongs to root
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def pretend() -> Iterator[Callable[..., int]]:
    """Start processes of the second user that say what they like about themselves."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        environment: dict[str, str], name: str = "python3", lock: str = "", dumpable: bool = True
    ) -> int:
        words = as_user(ATTACKER, SYSTEM_PYTHON, "-c", PRETEND, name, lock, str(int(dumpable)))
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("dumpable", [True, False])
def test_a_process_that_claims_to_be_a_rank_keeps_no_node(
    node: Node, pretend: Callable[..., int], dumpable: bool
) -> None:
    pids = [
        pretend(
            {"RELAUNCH_TOKEN": f"default/x/1/{number}", "RELAUNCH_NODE_STATE": str(node.state)},
            dumpable=dumpable,
        )
        for number in range(1, 4)
    ]
    assert expect_done(node.order("list"))["jobs"] == []
    assert expect_done(node.order("probe", within=5.0, kernel_since=None))["jobs"] == []
    assert refusal(node.order("reboot", **node.make_reboot_order())) == "cannot_reboot", (
        "it came as far as the command, which is `false` in tests"
    )
    assert all(map(is_alive, pids))


@pytest.mark.parametrize("dumpable", [True, False])
def test_a_process_that_claims_to_be_a_shim_is_none(
    node: Node, public: Path, pretend: Callable[..., int], dumpable: bool
) -> None:
    key = JobState(node.state, "default", "j").path.name
    theirs = public / "theirs"
    theirs.mkdir()
    os.chown(theirs, ATTACKER, ATTACKER)
    lock = theirs / "jobs" / key / "9-9" / "shim.lock"
    pid = pretend(
        {"RELAUNCH_AGENT_STATE": str(node.state)}, "relaunch-shim", str(lock), dumpable=dumpable
    )
    prepared = expect_done(node.prepare(1, ranks=[0]))
    assert prepared["stopped"] == []
    expect_done(node.stop())
    assert is_alive(pid)


def test_a_gpu_program_that_claims_to_be_the_agents_is_foreign(
    node: Node, pretend: Callable[..., int]
) -> None:
    from relaunch.agent import search, tools
    from relaunch.agent.node import gpu_users

    claims = {tools.HOLD_VARIABLE: "diagnose", "RELAUNCH_NODE_STATE": str(node.state)}
    pid = pretend(claims, dumpable=False)
    assert gpu_users.select_own(node.state, [pid]) == []
    assert search.find_leftovers(node.state, since=0)[0] == []
    (node.state / "held.json").write_text("{}")  # an examination was killed
    expect_done(node.prepare(1, ranks=[0]))
    assert is_alive(pid)


def test_a_recycled_pid_or_group_of_another_user_gets_no_signal(node: Node) -> None:
    """The records are of ranks that are dead; their numbers belong to another user by now."""
    node.run(1, ranks=1)
    code = (
        "import os, time\nif os.fork() == 0:\n time.sleep(1000)\n"
        "print('up', flush=True)\ntime.sleep(float(os.environ.get('LIVES', 0)))"
    )
    started = []
    for lives in ("1000", "0"):
        process = subprocess.Popen(
            as_user(ATTACKER, SYSTEM_PYTHON, "-c", code),
            env={"LIVES": lives}, start_new_session=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        if lives == "0":
            process.wait()  # the leader is gone, and its group is not
        process.stdout.close()
        started.append(process)
    victims = [process.pid for process in started]
    members = [each for each in list_processes() if each.group in victims]
    assert len(members) == 3
    os.kill(node.pid("guard"), signal.SIGKILL)
    launch = node.folder() / "started.json"
    record = json.loads(launch.read_text())
    os.kill(node.pid("shim"), signal.SIGKILL)
    wait_for(lambda: not is_alive(next(iter(record["pids"].values()))[0]))
    record["pids"] = {str(rank): [pid, 1000] for rank, pid in enumerate(victims)}
    record["cgroup"] = None
    launch.write_text(json.dumps(record))
    for role in ("shim", "supervisor", "guard"):
        identity = {"pid": victims[0], "started": 1000, "boot_id": read_boot_id(node.state)}
        (node.folder() / f"{role}.json").write_text(json.dumps(identity))
    expect_done(node.stop())
    try:
        assert all(is_alive(each.pid) for each in members)
    finally:
        for each in members:
            processes.kill(each, signal.SIGKILL)
        for process in started:
            process.wait()


def list_processes() -> list[processes.Process]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [process for process in map(processes.read_process, pids) if process is not None]


def test_a_signal_goes_to_the_process_that_was_looked_at() -> None:
    with subprocess.Popen(["sleep", "1000"]) as one:
        seen = processes.read_process(one.pid)
        assert seen is not None
        assert processes.kill(seen._replace(started=seen.started - 1), signal.SIGKILL)
        assert one.poll() is None, "another start time: another process"
        assert processes.kill(seen, signal.SIGKILL)


# --- what a rank, or a link of a rank's, can have the agent read ----------------------------------


def test_links_of_a_rank_show_no_file_of_another_user(plain: Node) -> None:
    theirs = plain.state.parent / "theirs"
    theirs.write_text(json.dumps({"step": 7, "message": SECRET}))
    theirs.chmod(0o600)
    os.chown(theirs, ATTACKER, ATTACKER)
    script = (
        f'ln -s {theirs} "$RELAUNCH_PROGRESS_FILE"; ln -s {theirs} "$TORCHELASTIC_ERROR_FILE"; '
        'until [ -e "$CUE" ]; do sleep 0.05; done; exit 3'
    )
    cue = plain.state.parent / "cue"
    plain.run(1, ["sh", "-c", script], ranks=1, env={"CUE": str(cue)})
    watch = plain.watch()
    beat = watch.read_until("heartbeat", lambda beat: beat["progress"])
    assert beat["progress"] == {"0": {"unreadable": "Permission denied"}}
    cue.touch()
    exited = watch.read_observation("RankExited")
    assert exited["error"] == {"unreadable": "Permission denied"}
    expect_done(plain.stop())
    assert json.loads(theirs.read_text())["message"] == SECRET
    assert (theirs.stat().st_uid, theirs.stat().st_mode & 0o777) == (ATTACKER, 0o600)


CONNECT = """
import os, socket, sys
try:
    os.chdir(sys.argv[1])  # the path may be too long for an address
    socket.socket(socket.AF_UNIX).connect("orders")
    print("it connected", flush=True)
except OSError as error:
    print("refused:", error.strerror, flush=True)
os.execvp("sleep", ["sleep", "1000"])
"""


def test_a_rank_that_became_another_user_orders_nothing(node: Node) -> None:
    """Of an agent of root's, whose rank gives up root before it runs what a person wrote."""
    inner = f"{SYSTEM_PYTHON} -c '{CONNECT}' $(dirname $(dirname $RELAUNCH_PROGRESS_FILE))"
    dropped = f"cd /; exec {' '.join(as_user(ATTACKER))} {inner}"
    node.run(1, ["sh", "-c", dropped], ranks=1)
    wait_for(lambda: "\n" in node.log())
    assert node.log() == "refused: Permission denied\n"
    assert expect_done(node.stop())["stopped"] == [[1, 1]]


# --- the kernel log -------------------------------------------------------------------------------


def make_crashing_program() -> bytes:
    """Return an x86-64 program that writes to address 0 (elf(5); one segment, no libraries)."""
    code = b"\x31\xc0\x89\x00"  # xor %eax,%eax; mov %eax,(%rax)
    base, head = 0x400000, 64 + 56
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + head, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = head + len(code)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return ident + header + segment + code


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the program is one for x86-64")
def test_a_program_that_crashes_with_the_name_of_an_xid_is_none(public: Path) -> None:
    if Path("/proc/sys/debug/exception-trace").read_text().strip() != "1":
        pytest.skip("this kernel does not log programs that crash")
    forged = f"NVRM: Xid (PCI:0000:65:00): 79, pid={os.getpid()}, GPU has fallen off the bus. x"
    (public / forged).write_bytes(make_crashing_program())
    (public / forged).chmod(0o755)
    since = kernel_log.record_position()
    if since.handle < 0:
        pytest.skip("the kernel log cannot be read here")
    theirs = os.open(kernel_log.DEVICE, os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(theirs, 0, os.SEEK_END)
    done = subprocess.run(as_user(ATTACKER, str(public / forged)), check=False)
    assert done.returncode == -signal.SIGSEGV

    def is_logged() -> bool:
        try:
            return forged.encode() in os.read(theirs, 8192)
        except BlockingIOError:
            return False

    wait_for(is_logged, "the kernel logs the name of the file", timeout=20.0)
    os.close(theirs)
    reading = kernel_log.read(since, timeout=5.0)
    assert not [line for line in reading["kernel"] if forged in line], sys.executable
