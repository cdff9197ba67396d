"""docs/operations.md, "TLS, mTLS and API keys", as it stands there: nginx in front of a real `up`.

Commands, a worker and jobs reach the server through it. The configuration is read from the page;
only folders and ports are others.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.console.commands import STARTER, bare_environment
from tests.tls import DAY, Authority, use_tls

ROOT = Path(__file__).parents[2]
NGINX, OPENSSL = shutil.which("nginx"), shutil.which("openssl")
TIMEOUT = 400.0
"""Seconds: only something that hangs takes as long."""
HOST = "temporal.example.com"
KEY = "key-4711-of-all"
FLEET = "name: default\nbackend: local\nnodes:\n" + "".join(
    f"  - {{name: n{n}, address: 127.0.0.{n + 1}}}\n" for n in (1, 2)
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),  # some are whole stories of processes that start
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]


def find_block(kind: str, first: str) -> str:
    """Return the block of that kind and first line of docs/operations.md."""
    page = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (found,) = [text for name, text in blocks if name == kind and text.startswith(first)]
    return str(found)


def find_words(pattern: str) -> str:
    """Return what stands between backquotes in docs/operations.md and begins as the pattern."""
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "operations.md").read_text())
    found = re.search(rf"`({pattern}[^`]*)`", page)
    assert found is not None, pattern
    return found[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for(what: str, look: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@dataclass
class Place:
    folder: Path
    ca: Authority
    server_port: int = field(default_factory=free_port)
    ui_port: int = field(default_factory=free_port)
    port: int = field(default_factory=free_port)
    web_port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def localize(self, text: str) -> str:
        for theirs, ours in (
            ("/etc/relaunch/", f"{self.folder}/"),
            (f"{HOST}:7443", self.address),
            ("listen 7443", f"listen 127.0.0.1:{self.port}"),
            ("listen 8443", f"listen 127.0.0.1:{self.web_port}"),
            ("127.0.0.1:7233", f"127.0.0.1:{self.server_port}"),
            ("127.0.0.1:8233", f"127.0.0.1:{self.ui_port}"),
        ):
            text = text.replace(theirs, ours)
        return text

    def use_nginx(self, change: Callable[[str], str] = str) -> None:
        """Start nginx with the page's configuration, in place of the one that runs."""
        self.end("nginx")
        site = change(self.localize(find_block("nginx", "# /etc/nginx")))
        paths = "".join(
            f"{name}_temp_path {self.folder}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (self.folder / "nginx.conf").write_text(
            f"{'user root;' if os.geteuid() == 0 else ''}\ndaemon off;\n"
            f"pid {self.folder}/nginx.pid;\nerror_log {self.folder}/nginx.log;\nevents {{}}\n"
            f"http {{ access_log off; {paths}\n{site}\n}}\n"
        )
        self.start("nginx", [str(NGINX), "-c", str(self.folder / "nginx.conf")], {})
        wait_for("nginx does not listen", lambda: can_connect(self.port))

    def start(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=bare_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT)

    def read(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def use_up(self) -> None:
        """Start `up` in a shell whose Temporal configuration is the one for nginx."""
        ports = ["--port", str(self.server_port), "--ui-port", str(self.ui_port)]
        words = ["up", "--state", "up", "--workers", "0", *ports]
        self.start("up", [sys.executable, STARTER, *words], self.profile())
        # The last line that it prints once the server is ready.
        count = self.read("up").count("web UI")
        wait_for("up does not start", lambda: self.read("up").count("web UI") > count)

    def use_worker(self, environment: Mapping[str, str], name: str = "worker") -> None:
        settings = {
            "RELAUNCH_STATE": str(self.folder / "state"),
            "RELAUNCH_FLEETS": str(self.folder / "fleet.yaml"),
            **environment,
        }
        self.start(name, [sys.executable, str(ROOT / "worker.py")], settings)

    def profile(self, name: str = "temporal.toml") -> dict[str, str]:
        """Return the variable that names the page's temporal.toml."""
        file = self.folder / name
        if not file.exists():
            file.write_text(self.localize(find_block("toml", "# ~/.config/temporalio")))
        return {"TEMPORAL_CONFIG_FILE": str(file)}

    def type(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {"RELAUNCH_STATE": str(self.folder / "elsewhere"), **environment}
        if not any(name.startswith("TEMPORAL_") for name in environment):
            given |= self.profile()
        return subprocess.run(
            [sys.executable, STARTER, *words],
            cwd=self.folder,
            env=bare_environment(given),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )

    def write_job(self, name: str) -> str:
        """A job that runs until the file `<name>.end` is there."""
        script = f"echo begins; while ! [ -e {self.folder}/{name}.end ]; do sleep 0.1; done"
        command = json.dumps(["sh", "-c", script])
        (self.folder / f"{name}.yaml").write_text(f"name: {name}\ncommand: {command}\nnodes: 2\n")
        return f"{name}.yaml"

    def phase(self, job: str) -> str:
        shown = self.type("show", job, "--json")
        return str(json.loads(shown.stdout)["phase"]) if shown.returncode == 0 else shown.stderr

    def wait_for_phase(self, job: str, phase: str) -> None:
        wait_for(f"{job} is not {phase}: {self.read('worker')}", lambda: self.phase(job) == phase)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("nginx")
    ca, other = Authority(folder, "ca"), Authority(folder, "other")
    place = Place(folder, ca)
    ca.issue(HOST, hosts=(HOST, "127.0.0.1"))
    ca.issue("alice")
    ca.issue("old", begins=-9 * DAY, ends=-2 * DAY)
    ca.issue("early", begins=2 * DAY)
    ca.issue("soon", ends=3 * DAY)
    ca.issue("old-server", hosts=(HOST, "127.0.0.1"), begins=-9 * DAY, ends=-2 * DAY)
    other.issue("mallory")
    (folder / "fleet.yaml").write_text(FLEET)
    try:
        place.use_nginx()
        place.use_up()
        place.use_worker(place.profile())
        # A test that refuses its certificate would end a worker that is about to connect.
        wait_for("no worker serves", lambda: "serves task queue" in place.read("worker"))
        yield place
    finally:
        for job in folder.glob("*.yaml"):
            job.with_suffix(".end").touch()  # ranks of a test that failed
        for name in ("worker", *place.processes):  # it hands back to a server that is there
            place.end(name)


def test_a_job_runs_and_every_command_works_through_mtls(place: Place) -> None:
    submitted = place.type("submit", place.write_job("llama"))
    assert submitted.returncode == 0, (submitted, place.read("worker"))
    place.wait_for_phase("llama", "RUNNING")
    assert "llama" in place.type("jobs").stdout
    wait_for("no output", lambda: "begins" in place.type("logs", "llama").stdout)
    for words in (("nodes", "list"), ("next", "llama"), ("history", "llama"), ("upgrade",)):
        done = place.type(*words)
        assert done.returncode == 0, done
    doctor = place.type("doctor")
    assert re.search(rf"server +{re.escape(place.address)}, ", doctor.stdout), doctor
    assert re.search("certificates +the first to end is", doctor.stdout), doctor
    own = place.type("run", "--name", "own", "--nodes", "2", "--", "sh", "-c", "echo from $RANK")
    assert own.returncode == 0 and "from 1" in own.stdout, own
    web = place.type("jobs", "--web", RELAUNCH_WEB_UI=f"https://{HOST}:8443")
    assert f"https://{HOST}:8443/namespaces/default/workflows" in web.stdout, web
    unknown = place.type("jobs", "--web")
    assert unknown.returncode == 2 and "RELAUNCH_WEB_UI" in unknown.stderr
    assert place.type("cancel", "llama", "--reason", "enough").returncode == 0
    place.wait_for_phase("llama", "CANCELLED")
    page = place.folder / "report.html"
    web_ui = f"https://{HOST}:8443"
    report = place.type("report", "llama", "--html", str(page), RELAUNCH_WEB_UI=web_ui)
    assert report.returncode == 0, report
    assert f"{web_ui}/namespaces/default/workflows/job%2Fllama/" in page.read_text()


def test_the_warm_process_uses_the_callers_configuration(place: Place) -> None:
    (place.folder / "warm").mkdir(mode=0o700, exist_ok=True)
    place.start("warm", [sys.executable, STARTER, "warm", str(place.folder / "warm")], {})
    wait_for("no socket", (place.folder / "warm" / "cli.sock").exists)
    try:
        warm = {"RELAUNCH_STATE": str(place.folder / "warm")}
        before = count_faults_of_children(place.processes["warm"].pid)
        assert place.type("jobs", **warm).returncode == 0
        variables = use_tls(place.folder, "mallory", TEMPORAL_ADDRESS=place.address)
        refused = place.type("jobs", **warm, **variables)
        cold = place.type("jobs", RELAUNCH_NO_WARM="1", **variables)
        assert refused.returncode == 2 and "mallory.pem" in refused.stderr
        assert refused.stderr == cold.stderr
        warm_pid = place.processes["warm"].pid
        wait_for("no fork ran a command", lambda: count_faults_of_children(warm_pid) > before)
    finally:
        place.end("warm")


def count_faults_of_children(pid: int) -> int:
    """Return how many page faults the children of a process had that have ended."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[8])


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, ("demands a client certificate", "TEMPORAL_TLS_CLIENT_CERT_PATH")),
        ({"client": "old"}, ("old.pem", "ended at")),
        ({"client": "early"}, ("early.pem", "is not valid before")),
        ({"client": "mallory"}, ("mallory.pem", "CN=mallory, issued by CN=other")),
        ({"client": "alice", "key": "mallory"}, ("mallory.key", "does not belong to")),
        ({"client": "missing"}, ("missing.pem", "cannot be read: No such file")),
        ({"client": "alice", "ca": "other"}, ("not issued by", "other.pem")),
        ({"client": "alice", "TEMPORAL_TLS_SERVER_NAME": "ui.lab"}, (HOST, "'ui.lab'")),
    ],
)
def test_a_bad_certificate_is_one_sentence_everywhere(
    place: Place, variables: dict[str, str], words: tuple[str, ...]
) -> None:
    given = use_tls(place.folder, **variables, TEMPORAL_ADDRESS=place.address)
    expect_sentence(place, given, words)


def expect_sentence(place: Place, given: Mapping[str, str], words: tuple[str, ...]) -> None:
    for command in (("jobs",), ("submit", place.write_job("never")), ("doctor",)):
        done = place.type(*command, **given)
        lines = done.stderr.splitlines()
        assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done
        assert all(word in lines[0] for word in words), lines[0]
    place.use_worker(given, "refused")
    assert place.processes["refused"].wait(TIMEOUT) == 2
    del place.processes["refused"]
    said = place.read("refused").splitlines()[-1]
    assert all(word in said for word in words), said


def test_a_server_whose_certificate_has_ended_is_named(place: Place) -> None:
    place.use_nginx(
        lambda site: site.replace(f"{HOST}.pem", "old-server.pem").replace(
            f"{HOST}.key", "old-server.key"
        )
    )
    try:
        given = use_tls(place.folder, "alice", TEMPORAL_ADDRESS=place.address)
        expect_sentence(place, given, (f"certificate of the Temporal server at {place.address}",))
    finally:
        place.use_nginx()


def test_an_api_key_is_demanded_refused_and_taken(place: Place) -> None:
    known = find_words(r"map \$http_authorization").replace("KEY", KEY)
    verify, refuse = find_words("ssl_verify_client off"), find_words(r"if \(\$known = 0\)")
    place.use_nginx(
        lambda site: (
            known
            + site.replace("ssl_verify_client on;", verify).replace(
                "grpc_pass", f"{refuse}\ngrpc_pass"
            )
        )
    )
    try:
        given = use_tls(place.folder, TEMPORAL_ADDRESS=place.address)
        expect_sentence(place, given, ("demands", "401", "TEMPORAL_API_KEY"))
        wrong = {**given, "TEMPORAL_API_KEY": f"{KEY}-no"}
        expect_sentence(place, wrong, ("refused the API key", "TEMPORAL_API_KEY"))
        assert KEY not in place.read("refused")
        assert place.type("jobs", **given, TEMPORAL_API_KEY=KEY).returncode == 0
    finally:
        place.use_nginx()


def test_a_job_outlives_server_and_proxy_and_the_worker_waits(place: Place) -> None:
    assert place.type("submit", place.write_job("long")).returncode == 0
    place.wait_for_phase("long", "RUNNING")
    place.end("up")
    away = place.type("jobs")
    assert away.returncode == 2 and len(away.stderr.splitlines()) == 1, away
    assert place.address in away.stderr and "away" in away.stderr, away
    place.use_worker(place.profile(), "second")
    wait_for("it says nothing", lambda: "tries again every" in place.read("second"))
    place.use_nginx()
    place.use_up()
    wait_for("it does not start", lambda: "serves task queue" in place.read("second"))
    place.end("second")
    (place.folder / "long.end").touch()
    place.wait_for_phase("long", "SUCCEEDED")
    assert json.loads(place.type("show", "long", "--json").stdout)["generation"] == 1


def test_a_worker_takes_a_new_certificate_while_a_job_runs(place: Place) -> None:
    place.end("worker")
    own = place.folder / "worker-1.pem"
    place.ca.issue("worker-1", ends=3 * DAY)
    place.use_worker(use_tls(place.folder, "worker-1", TEMPORAL_ADDRESS=place.address))
    assert place.type("submit", place.write_job("months")).returncode == 0
    place.wait_for_phase("months", "RUNNING")
    wait_for(
        "it is not said",
        lambda: f"{own} (TEMPORAL_TLS_CLIENT_CERT_PATH) ends at" in place.read("worker"),
    )
    doctor = place.type("doctor")
    assert doctor.returncode == 1 and "worker-1.pem" in doctor.stdout, doctor
    # From another CA, which alone is good afterwards.
    new = Authority(place.folder, "new-ca")
    both = (place.folder / "ca.pem").read_text() + new.path.read_text()
    (place.folder / "both.pem").write_text(both)
    new.issue("bob")
    place.use_nginx(lambda site: site.replace("ca.pem", "both.pem"))
    new.issue("worker-1")
    wait_for("it is not taken", lambda: "a new connection uses them" in place.read("worker"))
    place.use_nginx(lambda site: site.replace("ca.pem", "new-ca.pem"))
    try:
        bob = use_tls(place.folder, "bob", TEMPORAL_ADDRESS=place.address)
        assert place.type("submit", place.write_job("after"), **bob).returncode == 0
        for name in ("months", "after"):
            (place.folder / f"{name}.end").touch()
            followed = place.type("follow", name, **bob)
            assert followed.returncode == 0, (followed, place.read("worker"))
        assert place.type("jobs").returncode == 2, "alice is of the old CA"
        # The other order: refused first, replaced afterwards.
        place.use_nginx()
        refused = f"refused client certificate {own}"
        wait_for("it is not said", lambda: refused in place.read("worker"))
        place.ca.issue("worker-1")
        wait_for("it is not taken", lambda: place.read("worker").count("connection uses") == 2)
        assert place.type("submit", place.write_job("last")).returncode == 0
        (place.folder / "last.end").touch()
        place.wait_for_phase("last", "SUCCEEDED")
    finally:
        place.use_nginx()


def test_up_listens_on_loopback_only_and_takes_no_other_address(place: Place) -> None:
    for address in ("0.0.0.0", "10.0.0.7", "::", "lab"):
        refused = place.type("up", "--ip", address, "--state", "never")
        assert (refused.returncode, refused.stdout) == (2, ""), refused
        assert address in refused.stderr and "TLS" in refused.stderr
    assert not (place.folder / "never").exists()
    found = list_listening(place.processes["up"].pid)
    assert {f"127.0.0.1:{place.server_port}", f"127.0.0.1:{place.ui_port}"} <= found
    assert all(address.startswith("127.") for address in found), found


def list_listening(root: int) -> set[str]:
    """Return where a process and its descendants listen, by /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_bytes().rpartition(b")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    sockets = set()
    for pid in family:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                raw = bytes.fromhex(address)
                words = [raw[n : n + 4][::-1] for n in range(0, len(raw), 4)]
                family_ = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
                found.add(f"{socket.inet_ntop(family_, b''.join(words))}:{int(port, 16)}")
    return found


def test_the_web_ui_is_behind_the_same_door(place: Place) -> None:
    def get(client: str | None) -> int:
        context = ssl.create_default_context(cafile=str(place.ca.path))
        if client:
            context.load_cert_chain(place.folder / f"{client}.pem", place.folder / f"{client}.key")
        page = http.client.HTTPSConnection("127.0.0.1", place.web_port, context=context)
        with contextlib.closing(page):
            page.request("GET", "/namespaces/default/workflows")
            return page.getresponse().status

    assert (get("alice"), get(None), get("mallory")) == (200, 400, 400)


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
def test_certificates_are_made_as_typed(place: Place, tmp_path: Path) -> None:
    commands = find_block("", "openssl req").replace("DNS:$name", "DNS:$name,IP:127.0.0.1")
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    place.use_nginx(lambda site: site.replace(str(place.folder), str(tmp_path)))
    try:
        file = tmp_path / "temporal.toml"
        text = place.localize(find_block("toml", "# ~/.config/temporalio"))
        file.write_text(text.replace(str(place.folder), str(tmp_path)))
        done = place.type("jobs", TEMPORAL_CONFIG_FILE=str(file))
        assert done.returncode == 0, done
    finally:
        place.use_nginx()
