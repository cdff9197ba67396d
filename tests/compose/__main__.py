"""docker-compose.yml in a real Docker engine, from the build to the restore: `make compose-test`.

It uses the machine's engine where one answers, with the images that the files name. Elsewhere it
starts an engine in namespaces (engine.sh), where no image can be pulled: images/Dockerfile then
stands in for them. Two containers with nothing but sshd and Python are the nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaunch.cli.service import find_server
from tests.backends.sshd import make_key
from tests.deploy.compose import FILES_ON_THE_PAGE, METRICS, PAGE, ROOT, SERVICES, WORKERS

HERE = Path(__file__).parent
ENGINE = HERE / "engine.sh"
LEAST_ENGINE = 28
LEAST_COMPOSE = (2, 24)
PROJECT = "relaunch-compose-test"
"""Its containers, volumes and image have this name, and those of the user's service have not."""
NODES = ("gpu-01", "gpu-02")
PASSWORD = "5ec2e7ofthecomposetest"
RANK = ["python3", "-c", "import time; time.sleep(864000)", "compose-test-rank"]
ALL = ("postgres", "temporal", "ui", *WORKERS)
HANGS_AFTER = 600.0
"""Seconds after which something that was waited for never happens; not a measure of speed."""
STAND_INS = {
    "python": re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0],
    "postgres": SERVICES["postgres"]["image"],
    "admin-tools": SERVICES["schema"]["image"],
    "server": SERVICES["temporal"]["image"],
    "ui": SERVICES["ui"]["image"],
    "prometheus": SERVICES["prometheus"]["image"],
    "alertmanager": SERVICES["alertmanager"]["image"],
}


class CannotRunError(Exception):
    """The machine lacks what the test needs."""


def has_engine() -> bool:
    """Return whether the machine's own Docker engine answers.

    Raises:
        CannotRunError: it does, and it or its Compose is too old.
    """
    words = ["docker", "version", "--format", "{{.Server.Version}}"]
    if shutil.which("docker") is None:
        return False
    engine = subprocess.run(words, capture_output=True, text=True)
    if engine.returncode != 0:
        return False
    version = engine.stdout.strip()
    if int(version.split(".")[0]) < LEAST_ENGINE:
        raise CannotRunError(
            f"this machine's Docker engine is {version}, expected {LEAST_ENGINE} or newer"
        )
    compose = subprocess.run(
        ["docker", "compose", "version", "--short"], capture_output=True, text=True
    )
    found = re.match(r"v?(\d+)\.(\d+)", compose.stdout)
    if found is None or (int(found[1]), int(found[2])) < LEAST_COMPOSE:
        raise CannotRunError(
            f"this machine's Docker has Compose {compose.stdout.strip() or 'of no version'},"
            f" expected {'.'.join(map(str, LEAST_COMPOSE))} or newer"
        )
    return True


@dataclass
class Site:
    """A copy of the project in a folder that the engine sees, and commands there."""

    folder: Path
    own_engine: bool
    path: str
    steps: list[tuple[str, float]] = field(default_factory=list)

    def run(self, line: str, *, online: bool = False, ok: bool = True, given: str = "") -> str:
        """Run a shell command there and return what it prints.

        Raises:
            AssertionError: it fails, and `ok` is set.
        """
        environment = {**os.environ, "PATH": self.path, "ENGINE": "online" if online else "exec"}
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=environment,
            input=given,
            capture_output=True,
            text=True,
        )
        if ok and done.returncode != 0:
            raise AssertionError(
                f"`{line}` ended with {done.returncode}:\n"
                f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done.stdout

    @property
    def near(self) -> str:
        """What a command begins with that runs on the machine of the engine, not in a container."""
        if not self.own_engine:
            return ""
        return f"nsenter -t {(self.folder.parents[1] / 'pid').read_text().strip()} -n"

    def compose(self, line: str, **how: Any) -> str:
        return self.run(f"docker compose {line}", **how)

    def relaunch(self, line: str, worker: str = "worker-b", **how: Any) -> str:
        return self.compose(f"exec -T {worker} relaunch {line}", **how)

    def containers(self) -> dict[str, dict[str, Any]]:
        """Return what `docker inspect` says of each service's container."""
        ids = self.compose("ps --all --quiet").split()
        found = json.loads(self.run(f"docker inspect {' '.join(ids)}"))
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}

    def ids(self) -> dict[str, str]:
        return {name: one["Id"] for name, one in self.containers().items()}

    def signed(self, line: str, **how: Any) -> str:
        """Run relaunch on this machine, as a person whose key is that of the nodes."""
        key = self.folder / "deploy/compose/ssh/id_ed25519"
        here = f"TEMPORAL_ADDRESS=127.0.0.1:7233 RELAUNCH_STATE={self.folder}/state"
        program = Path(sys.executable).with_name("relaunch")
        return self.run(f"{self.near} env {here} RELAUNCH_SSH_KEY={key} {program} {line}", **how)

    def unhealthy(self, names: Iterable[str] = ALL) -> list[str]:
        found = self.containers()
        return [
            name
            for name in names
            if name not in found
            or found[name]["State"].get("Health", {}).get("Status") != "healthy"
        ]

    def until_healthy(self, names: Iterable[str] = ALL) -> None:
        until(lambda: not self.unhealthy(names), lambda: f"not healthy: {self.unhealthy(names)}")

    def ranks(self) -> dict[str, list[str]]:
        """Return the process ids of the job's ranks on each node."""
        pattern = shlex.quote(re.escape(" ".join(RANK)).replace("\\ ", " ").replace("\\-", "-"))
        return {
            node: self.compose(f"exec -T {node} pgrep -f -x {pattern}", ok=False).split()
            for node in NODES
        }

    def job(self, name: str = "lab-job") -> dict[str, Any]:
        for worker in WORKERS:
            said = self.relaunch(f"show {name} --json", worker, ok=False)
            if said:
                shown: dict[str, Any] = json.loads(said)
                return shown
        return {}

    def is_running(self, generation: int, name: str = "lab-job") -> bool:
        job = self.job(name)
        return job.get("phase") == "RUNNING" and job.get("generation") == generation


def until(holds: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + HANGS_AFTER
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(1)


def commands(heading: str, block: int) -> list[str]:
    """Return the commands of a block below a heading of docs/compose.md, without comments."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(f"{heading}\n")]
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [code for language, code in fenced if not language][block].splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines]


# --- before


def lay_out(folder: Path) -> None:
    """Copy what belongs to the project, and fill in what docs/compose.md says."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    shutil.rmtree(folder, ignore_errors=True)
    for name in listing.stdout.decode().split("\0"):
        if name and (ROOT / name).exists() and not name.startswith(("tests/", "docs/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    ours = folder / "deploy" / "compose"
    for name, mode in (("fleets", 0o755), ("secrets", 0o700), ("ssh", 0o700)):
        (ours / name).mkdir(mode=mode)
    (ours / "secrets" / "postgres_password").write_text(PASSWORD + "\n")
    (ours / "secrets" / "postgres_password").chmod(0o644)
    keys = folder / "keys"
    login = make_key(ours / "ssh" / "id_ed25519")
    for node in NODES:
        make_key(keys / node)
    shutil.copy(login.with_suffix(".pub"), keys / "id.pub")
    (ours / "fleets" / "lab.yaml").write_text(
        "name: default\nbackend: ssh\nnodes:\n"
        + "".join(f"  - {{name: {node}, address: {node}}}\n" for node in NODES)
        + "ssh: {user: train, key: ~/.ssh/id_ed25519}\n"
    )
    (folder / "job.yaml").write_text(
        f"name: lab-job\ncommand: {json.dumps(RANK)}\nnodes: {len(NODES)}\n"
    )
    # The workers read the key as the user who owns it; root's would be any user's in a container.
    user = os.getuid() or 1000
    for path in (ours / "ssh", *(ours / "ssh").iterdir()):
        os.chown(path, user, user if os.getuid() == 0 else -1)
    (folder / ".env").write_text(f"WORKER_UID={user}\nCOMPOSE_PROJECT_NAME={PROJECT}\n")
    node = {
        "image": f"{PROJECT}-node",
        "pull_policy": "never",
        "volumes": ["./keys:/keys:ro"],
        "init": True,
    }
    services: dict[str, Any] = {name: {**node, "hostname": name} for name in NODES}
    services |= {name: {"image": PROJECT} for name in ("namespace", *WORKERS)}
    override = {"services": services, "volumes": {}}
    (folder / "docker-compose.override.yml").write_text(json.dumps(override))


def keep_sqlite(folder: Path) -> None:
    """Give Temporal's stand-in a volume, as its database is not PostgreSQL."""
    path = folder / "docker-compose.override.yml"
    override = json.loads(path.read_text())
    override["services"]["temporal"] = {"volumes": ["sqlite:/data"]}
    override["volumes"]["sqlite"] = {}
    path.write_text(json.dumps(override))


def make_images(site: Site) -> None:
    context = site.folder.parent / "images"
    shutil.rmtree(context, ignore_errors=True)
    shutil.copytree(HERE / "images", context)
    targets = {"node": f"{PROJECT}-node"}
    if site.own_engine:
        targets |= STAND_INS
        shutil.copy2(find_server(), context / "temporal")
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", context)
    for target, tag in targets.items():
        site.run(f"docker build --target {target} --tag {shlex.quote(tag)} {context}", online=True)


@contextmanager
def open_site() -> Iterator[Site]:
    """Yield a place to run in.

    Raises:
        CannotRunError: there is no engine, and none can be started.
    """
    if has_engine():
        with tempfile.TemporaryDirectory(prefix=f"{PROJECT}-") as folder:
            site = Site(Path(folder) / "project", False, os.environ["PATH"])
            lay_out(site.folder)
            yield site
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    state = Path(os.environ.get("STATE") or cache / "relaunch" / "compose-test")
    environment = {**os.environ, "STATE": str(state)}
    for word in ("up", "base"):
        if subprocess.run([ENGINE, word], env=environment).returncode != 0:
            raise CannotRunError  # it has said why
    try:
        (state / "bin").mkdir(exist_ok=True)
        docker = state / "bin" / "docker"
        docker.write_text(
            f"#!/bin/sh\nexport STATE={shlex.quote(str(state))}\n"
            f'exec {shlex.quote(str(ENGINE))} "${{ENGINE:-exec}}" docker "$@"\n'
        )
        docker.chmod(0o755)
        site = Site(state / "work" / "project", True, f"{docker.parent}:{os.environ['PATH']}")
        lay_out(site.folder)
        keep_sqlite(site.folder)
        yield site
    finally:
        subprocess.run([ENGINE, "down"], env=environment)


# --- the steps, in their order


def build(site: Site) -> None:
    make_images(site)
    site.compose("build", online=True)


def start(site: Site) -> None:
    for node in NODES:
        site.compose(f"up --detach {node}")
    known = site.compose(
        "run --rm -T --no-deps -e HOME=/tmp worker-a"
        " sh -c 'relaunch nodes trust --yes --file /etc/relaunch/fleets/lab.yaml >&2"
        " && cat /tmp/.ssh/known_hosts'"
    )
    assert len(known.splitlines()) == len(NODES), known
    (site.folder / "deploy/compose/ssh/known_hosts").write_text(known)
    site.compose("up --detach")
    site.until_healthy()


def start_again(site: Site) -> None:
    """A later `up`, also after a build of the same, recreates nothing."""
    before = site.ids()
    site.compose("up --detach")
    site.compose("build", online=True)
    site.compose("up --detach")
    after = site.ids()
    assert {name: after[name] for name in ALL} == {name: before[name] for name in ALL}
    site.until_healthy()


def check_limits(found: dict[str, dict[str, Any]]) -> None:
    for name in SERVICES:
        if name not in found:
            continue
        host = found[name]["HostConfig"]
        assert host["Memory"] > 0 and host["PidsLimit"] > 0, name
        assert host["CapDrop"] == ["ALL"], name
        assert host["ReadonlyRootfs"] is (name != "ui"), name


def measure(site: Site) -> None:
    """Prometheus reads both workers and has an Alertmanager; without them all goes on."""
    before = site.ids()
    names = [name for name in METRICS if not site.own_engine or name in STAND_INS]
    site.compose(f"--profile metrics up --detach {' '.join(names)}")
    site.until_healthy((*ALL, *names))
    check_limits(site.containers())

    def ask(what: str) -> dict[str, Any]:
        address = f"http://127.0.0.1:9090/api/v1/{what}"
        said = site.compose(f"exec -T prometheus wget -q -O - {shlex.quote(address)}")
        found: dict[str, Any] = json.loads(said)["data"]
        return found

    def workers() -> list[str]:
        query = "query?query=up%7Bjob%3D%22relaunch%22%7D%3D%3D1"
        return sorted(one["metric"]["instance"] for one in ask(query)["result"])

    wanted = [f"{worker}:9464" for worker in WORKERS]
    until(lambda: workers() == wanted, lambda: f"it reads {workers()}, expected {wanted}")
    until(lambda: len(ask("alertmanagers")["activeAlertmanagers"]) == 1, lambda: "no Alertmanager")
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    assert rules and all(rule["health"] != "err" for rule in rules), rules
    metrics = " ".join(names)
    site.compose(f"--profile metrics stop {metrics}")
    site.compose(f"--profile metrics rm --force {metrics}")
    assert site.ids() == before and not site.unhealthy()


def confined(site: Site) -> None:
    """No secret is in sight, and each container has its limits."""
    found = site.containers()
    key = (site.folder / "deploy/compose/ssh/id_ed25519").read_text().splitlines()[2]
    images = " ".join(sorted({one["Image"] for one in found.values()}))
    seen = json.dumps(found) + site.run(f"docker inspect {images}")
    seen += "".join(
        site.run(f"docker history --no-trunc {image}") for image in images.split()
    ) + site.run(f"docker run --rm --entrypoint sh {PROJECT} -c 'env; cat deploy/compose/*.py'")
    assert PASSWORD not in seen and key not in seen
    check_limits(found)
    for worker in WORKERS:
        said = site.compose(
            f"exec -T {worker} sh -c 'grep CapEff /proc/self/status; touch /app/x 2>&1 || true'"
        )
        assert "CapEff:\t0000000000000000" in said and "Read-only file system" in said, said


def loopback_only(site: Site) -> None:
    """Another machine on the bridge, with a route to the containers, reaches no published port."""
    address = next(iter(site.containers()["temporal"]["NetworkSettings"]["Networks"].values()))[
        "IPAddress"
    ]
    near = site.near
    process = near.split()[2]
    other = "ip netns exec relaunch-compose-test"
    ask = f"{sys.executable} -c " + shlex.quote(
        "import socket, sys\n"
        "for place in sys.argv[1:]:\n"
        "    host, port = place.split(':')\n"
        "    try: socket.create_connection((host, int(port)), 3).close(); print(place)\n"
        "    except OSError: pass\n"
    )
    try:
        subprocess.run(
            "ip netns add relaunch-compose-test && ip link add rct0 type veth peer name rct1"
            f" && ip link set rct0 netns {process} && ip link set rct1 netns relaunch-compose-test"
            f" && {near} ip address add 192.0.2.1/24 dev rct0 && {near} ip link set rct0 up"
            f" && {other} ip address add 192.0.2.2/24 dev rct1 && {other} ip link set rct1 up"
            f" && {other} ip route add {address}/32 via 192.0.2.1",
            shell=True,
            check=True,
        )
        site.run(f"docker run --detach --name {PROJECT}-open --publish 9000:8080 {STAND_INS['ui']}")
        places = [f"{address}:7233", "192.0.2.1:7233", "192.0.2.1:8080", "192.0.2.1:9000"]
        line = f"{other} {ask} {' '.join(places)}"
        reached = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        assert reached.stdout.split() == ["192.0.2.1:9000"], reached.stdout
    finally:
        site.run(f"docker rm --force {PROJECT}-open", ok=False)
        subprocess.run("ip netns delete relaunch-compose-test", shell=True)


def submit(site: Site) -> None:
    job = (site.folder / "job.yaml").read_text()
    site.compose("exec -T worker-a sh -c 'cat > /tmp/job.yaml'", given=job)
    site.relaunch("submit /tmp/job.yaml", "worker-a")
    until(lambda: site.is_running(1), lambda: f"the job does not run: {site.job()}")
    assert all(len(pids) == 1 for pids in site.ranks().values()), site.ranks()


def obey(site: Site) -> None:
    """With `access:` in the fleet file only a signed order counts, and no worker is restarted."""
    ranks = site.ranks()
    path = site.folder / "deploy/compose/fleets/lab.yaml"
    before = path.read_text()
    key = " ".join((site.folder / "deploy/compose/ssh/id_ed25519.pub").read_text().split()[:2])
    people = {"alice": {"role": "admin", "keys": [key]}}
    path.write_text(f"{before}access: {json.dumps({'people': people})}\n")
    site.relaunch("nodes apply")
    order = f"nodes quarantine {NODES[1]} --reason fan"
    said = site.relaunch(f"{order} 2>&1", ok=False)
    assert "relaunch@worker-b (claimed) may not" in said, said
    site.signed(order)
    site.signed(f"nodes release {NODES[1]} --reason mended")
    path.write_text(before)
    site.relaunch("nodes apply")
    assert "claimed" not in site.relaunch(order)
    site.relaunch(f"nodes release {NODES[1]} --reason mended")
    assert site.is_running(1) and site.ranks() == ranks


MARK = "mark-of-the-compose-test"
HAS_MARK = f"""
import asyncio, sys
from temporalio.client import Client
from relaunch.interpreter import leave
async def main():
    client = await Client.connect("temporal:7233")
    history = await client.get_workflow_handle("job/" + sys.argv[1]).fetch_history()
    print(any({MARK.encode()!r} in event.SerializeToString() for event in history.events))
    return 0
leave(asyncio.run(main()))
"""


def encrypt(site: Site) -> None:
    """The documented file and commands, while a job runs: the server then reads nothing of jobs."""
    ranks = site.ranks()
    [text] = [one for one in FILES_ON_THE_PAGE if "RELAUNCH_ENCRYPTION_KEYS" in one]
    (site.folder / "encryption.yml").write_text(text)
    files = "docker-compose.yml:docker-compose.override.yml:encryption.yml"
    with (site.folder / ".env").open("a") as file:
        file.write(f"COMPOSE_FILE={files}\n")

    def has_mark(name: str) -> bool:
        """Submit a job that asks for too many nodes, and look for its words in its history."""
        job = f"name: {name}\ncommand: [sleep]\nnodes: 5\nenv: {{MARK: {MARK}}}\n"
        site.compose("exec -T worker-a sh -c 'cat > /tmp/mark.yaml'", given=job)
        site.relaunch("submit /tmp/mark.yaml", "worker-a")
        until(lambda: bool(site.job(name)), lambda: f"{name} is not there")
        said = site.compose(f"exec -T worker-b python -c {shlex.quote(HAS_MARK)} {name}")
        return {"True": True, "False": False}[said.strip()]

    assert has_mark("plain"), "nothing is found there that could be missing"
    make, *first, switch, second_a, second_b = commands("Encryption", 0)
    site.run(make)
    keys = site.folder / "deploy/compose/secrets/keys"
    owner = (site.folder / "deploy/compose/ssh").stat().st_uid
    for one in (keys, *keys.iterdir()):
        os.chown(one, owner, -1)
    for line in (*first, switch, second_a, second_b):
        site.run(line)
        site.until_healthy()
        assert site.is_running(1) and site.ranks() == ranks, line
    assert not has_mark("hidden")


def break_fleet_file(site: Site) -> None:
    """Workers that start serve the fleet as it last was, and its job."""
    ranks = site.ranks()
    path = site.folder / "deploy/compose/fleets/lab.yaml"
    good = path.read_text()
    path.write_text("name: default\nnodes: [\n")
    site.compose(f"restart {' '.join(WORKERS)}")
    site.until_healthy()
    for worker in WORKERS:
        said = site.compose(f"logs --no-log-prefix {worker} 2>&1")
        assert "fleet default is served as it last was" in said, said[-2000:]
    assert site.is_running(1) and site.ranks() == ranks
    path.write_text(good)


def kill_each(site: Site) -> None:
    """Ranks outlive each container; the workers that are left go on."""
    ranks = site.ranks()
    for name in ALL:
        site.compose(f"kill {name}")
        time.sleep(5)  # what would stop ranks has begun by then
        assert site.ranks() == ranks, f"without {name}"
        site.compose(f"start {name}")
        site.until_healthy()
        assert site.is_running(1) and site.ranks() == ranks, f"after {name}"


def crash(site: Site) -> None:
    """A worker that crashes is started again by Docker, and a fault in between is handled."""
    before = site.containers()["worker-a"]["RestartCount"]
    program = (
        "import os, pathlib\n"
        "for one in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    if b'worker.py' in one.read_bytes().split(b'\\0'): os.kill(int(one.parts[2]), 9)\n"
    )
    site.compose(f"exec -T worker-a python -c {shlex.quote(program)}", ok=False)
    pids = site.ranks()
    site.compose(f"exec -T {NODES[0]} kill -9 {pids[NODES[0]][0]}")
    until(lambda: site.is_running(2), lambda: f"no generation 2: {site.job()}")
    site.until_healthy()
    assert site.containers()["worker-a"]["RestartCount"] > before
    assert not set(pids[NODES[0]]) & set(site.ranks()[NODES[0]])


def kill_all(site: Site) -> None:
    ranks = site.ranks()
    site.compose(f"kill {' '.join(ALL)}")
    time.sleep(5)
    assert site.ranks() == ranks
    site.compose("up --detach")
    site.until_healthy()
    assert site.is_running(2) and site.ranks() == ranks


def restart(site: Site) -> None:
    ranks = site.ranks()
    site.compose(f"restart {' '.join(ALL)}")
    site.until_healthy()
    assert site.is_running(2) and site.ranks() == ranks
    # `down` but for the nodes, which are no part of the service
    site.compose(f"rm --stop --force {' '.join((*ALL, 'schema', 'namespace'))}")
    assert site.ranks() == ranks
    site.compose("up --detach")
    site.until_healthy()
    assert site.is_running(2) and site.ranks() == ranks


def upgrade(site: Site) -> None:
    """The documented commands, one worker at a time, to another build."""
    ranks, before = site.ranks(), site.ids()
    with (site.folder / "relaunch" / "__init__.py").open("a") as file:
        file.write("# another build\n")
    build_it, first, move, second = commands("What may fail", 0)
    site.run(build_it, online=True)
    site.run(first)
    after = site.ids()
    assert {name for name in ALL if after[name] != before[name]} == {"worker-a"}
    site.until_healthy()
    said = site.run(f"{move} 2>&1")
    assert "nothing is left on another build" in said, said
    site.run(second)
    after = site.ids()
    assert {name for name in ALL if after[name] != before[name]} == set(WORKERS)
    site.until_healthy()
    assert site.is_running(2) and site.ranks() == ranks


def restore(site: Site) -> None:
    """The documented commands: what was there is there again, and what came later is not."""
    before = site.ranks()
    for line in commands("Backup", 0):
        site.run(line)
    sqlite = site.own_engine
    if sqlite:
        site.compose("exec -T temporal sqlite3 /data/temporal.db '.backup /data/backup.db'")
    for file in ("temporal.dump", "visibility.dump", "archive.tar.gz"):
        assert (site.folder / file).stat().st_size > 0, file
    site.compose("exec -T worker-a sh -c 'cat > /tmp/job.yaml'", given=LATER)
    site.relaunch("submit /tmp/job.yaml --name later", "worker-a")
    until(lambda: bool(site.job("later")), lambda: "the later job is not there")
    psql = "exec -T postgres psql --username=temporal --no-align --tuples-only --command"
    if sqlite:
        site.compose(f"{psql} 'DELETE FROM schema_version'")
    stop, *load, server, cancel, up = commands("Backup", 1)
    site.run(stop)
    for line in load:
        site.run(line)
    if sqlite:
        assert "/temporal/versioned" in site.compose(f"{psql} 'SELECT * FROM schema_version'")
        site.compose(
            "run --rm -T --no-deps temporal"
            " sh -c 'cp /data/backup.db /data/temporal.db && rm -f /data/temporal.db-*'"
        )
    site.run(server)
    until(lambda: "temporal" not in site.unhealthy(), lambda: "the server is not back")
    words = cancel.replace("llama-7b", "lab-job")
    site.compose(f"run --rm -T --no-deps worker-a {words}")
    site.run(up)
    site.until_healthy()
    until(lambda: site.job().get("phase") == "CANCELLED", lambda: f"it runs on: {site.job()}")
    assert not any(site.ranks().values()), site.ranks()
    site.relaunch("retry lab-job")
    until(lambda: site.job().get("phase") == "RUNNING", lambda: f"not retried: {site.job()}")
    after = site.ranks()
    assert all(len(after[node]) == 1 and after[node] != before[node] for node in NODES), after
    assert not site.job("later")


LATER = 'name: later\ncommand: ["sleep", "1"]\nnodes: 5\n'
STEPS: tuple[tuple[str, Callable[[Site], None]], ...] = (
    ("the image is built, its packages by hash", build),
    ("up: all healthy", start),
    ("up again, and after a build of the same: nothing is recreated", start_again),
    ("no secret in sight; read-only, limited, without capabilities", confined),
    ("Prometheus reads both workers, with an Alertmanager", measure),
    ("ports on loopback are not reached from another host on the bridge", loopback_only),
    ("a job runs on two nodes", submit),
    ("roles: a signed order counts, another is refused", obey),
    ("payloads are encrypted, one worker after the other: ranks continue", encrypt),
    ("a fleet file is broken and the workers restarted: ranks continue", break_fleet_file),
    ("each container killed: ranks continue", kill_each),
    ("a worker crashed and a rank killed: generation 2", crash),
    ("all containers killed: ranks continue", kill_all),
    ("restarted, removed and up again: ranks continue", restart),
    ("upgraded one worker at a time: ranks continue", upgrade),
    ("backed up, restored, cancelled and retried: no job runs twice", restore),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the containers where it failed")
    options = parser.parse_args()
    try:
        with open_site() as site:
            print(
                f"engine {site.run('docker version --format {{.Server.Version}}').strip()}"
                f", Compose {site.compose('version --short').strip()}"
            )
            if site.own_engine:
                print("Stand-ins, as no image can be pulled: " + "; ".join(STAND_IN_WORDS))
            site.compose("down --volumes --timeout 0")
            try:
                for what, step in STEPS:
                    if step is loopback_only and not site.own_engine:
                        print(f"--  not asked of this machine's engine: {what}", flush=True)
                        continue
                    began = time.monotonic()
                    step(site)
                    print(f"ok {time.monotonic() - began:5.0f} s  {what}", flush=True)
            except AssertionError as error:
                print(f"FAILED after {time.monotonic() - began:.0f} s  {what}\n{error}")
                print(site.compose("ps --all", ok=False))
                print(site.compose("logs --tail 20", ok=False)[-8000:])
                if options.keep:
                    input("containers are kept until you press return ")
                return 1
            finally:
                site.compose("down --volumes --timeout 0", ok=False)
    except CannotRunError as error:
        if error.args:
            sys.stderr.write(f"compose-test: {error}\n")
        return 2
    return 0


STAND_IN_WORDS = (
    "Temporal's dev server of the same version, on SQLite, for temporalio/server",
    "the web UI in it for temporalio/ui",
    "a program that makes databases and one table for temporalio/admin-tools",
    "Debian's PostgreSQL 17 for postgres",
    "Debian's Python 3.13 for python",
    "Debian's packages for prom/prometheus and prom/alertmanager",
    "nothing for grafana/grafana, which is not started",
)


if __name__ == "__main__":
    sys.exit(main())
