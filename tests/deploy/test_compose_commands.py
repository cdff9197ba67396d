"""The commands of docker-compose.yml, of its image and of docs/compose.md, run as they stand there.

Doubles for what only images have.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from temporalio.envconfig import ClientConfigProfile

from relaunch.spec.fleet import FleetSpec
from tests.console import page_commands
from tests.deploy.compose import (
    COMMANDS_ON_THE_PAGE,
    DOCKERFILE,
    FILES_ON_THE_PAGE,
    ROOT,
    SERVICES,
    SPECIFICATION,
    double,
    typed,
)


def test_both_databases_get_a_schema_and_commands_no_password(
    tmp_path: Path,
) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    environment = double(tmp_path / "bin", "temporal-sql-tool", 'echo "$SQL_PASSWORD@$SQL_HOST $*"')
    environment |= {
        **SERVICES["schema"]["environment"],
        "PASSWORD_FILE": str(tmp_path / "password"),
    }
    script = ROOT / "deploy/compose/schema.sh"
    done = subprocess.run(["sh", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [
        f"s3cret@postgres --db {database} {what}"
        for database, part in (("temporal", "temporal"), ("temporal_visibility", "visibility"))
        for what in (
            "create",
            "setup-schema -v 0.0",
            f"update-schema -d /etc/temporal/schema/postgresql/v12/{part}/versioned",
        )
    ]
    assert done.stdout.splitlines() == expected
    environment |= double(
        tmp_path / "bin", "temporal-sql-tool", 'echo "$*"; test "$3" != setup-schema'
    )
    failed = subprocess.run(["sh", script], env=environment, capture_output=True, text=True)
    assert (failed.returncode, len(failed.stdout.splitlines())) == (1, 2), (
        "the server does not start on half a schema"
    )


def test_the_server_gets_its_password_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    double(tmp_path, "entrypoint.sh", 'echo "$POSTGRES_PWD"')
    command = [typed(word) for word in SERVICES["temporal"]["command"]]
    assert (
        command[-1].count("/run/secrets/postgres_password")
        == command[-1].count("/etc/temporal/entrypoint.sh")
        == 1
    )
    command[-1] = command[-1].replace("/run/secrets/postgres_password", str(tmp_path / "password"))
    command[-1] = command[-1].replace(
        "/etc/temporal/entrypoint.sh", str(tmp_path / "entrypoint.sh")
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "s3cret\n")


def test_a_worker_serves_every_fleet_file_of_the_folder(tmp_path: Path) -> None:
    for name in ("b.yaml", "a b.yaml", "notes.txt"):
        (tmp_path / name).touch()
    command = [typed(word) for word in SERVICES["worker-a"]["command"]]
    command[2] = command[2].replace("/etc/relaunch/fleets", shlex.quote(str(tmp_path)))
    environment = double(tmp_path / "bin", "python", 'for word in "$@"; do echo "$word"; done')
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "worker.py",
        "--fleet",
        f"{tmp_path}/a b.yaml",
        "--fleet",
        f"{tmp_path}/b.yaml",
    ]


def test_a_worker_without_a_fleet_file_says_so(tmp_path: Path) -> None:
    command = [typed(word) for word in SERVICES["worker-a"]["command"]]
    command[2] = command[2].replace("/etc/relaunch/fleets", shlex.quote(str(tmp_path)))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"relaunch-worker: no fleet file {tmp_path}/*.yaml: write one, as docs/compose.md says\n"
    )


def site(folder: Path) -> dict[str, str]:
    """What check.sh finds nothing wrong with, and a double of Docker."""
    ours = folder / "deploy" / "compose"
    for name in ("fleets", "secrets", "ssh"):
        (ours / name).mkdir(parents=True)
    for name in ("secrets", "ssh"):
        (ours / name).chmod(0o700)
    (ours / "secrets" / "postgres_password").write_text("s3cret\n")
    (ours / "fleets" / "lab.yaml").touch()
    shutil.copy(ROOT / "deploy/compose/check.sh", ours)
    script = "case $1 in version) echo $ENGINE ;; compose) echo $COMPOSE ;; esac"
    return double(folder / "bin", "docker", script) | {"ENGINE": "28.0.4", "COMPOSE": "v2.24.0"}


def check(folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    script = folder / "deploy" / "compose" / "check.sh"
    done = subprocess.run(["sh", script], env=environment, capture_output=True, text=True)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_nothing_is_said_where_all_is_there(tmp_path: Path) -> None:
    environment = site(tmp_path)
    assert check(tmp_path, environment) == (0, "")
    assert check(tmp_path, environment | {"ENGINE": "29.1.0", "COMPOSE": "2.40.3-3"}) == (0, "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ENGINE": "27.5.1"}, "Docker Engine 27.5.1: expected 28 or newer"),
        ({"ENGINE": ""}, "no Docker engine answers"),
        ({"COMPOSE": "2.9.0"}, "Docker Compose 2.9.0: expected 2.24 or newer"),
        ({"COMPOSE": ""}, "Docker Compose is not installed"),
    ],
)
def test_a_docker_that_is_too_old_is_one_sentence(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    code, text = check(tmp_path, site(tmp_path) | changes)
    assert (code, len(text.splitlines())) == (1, 1), text
    assert text.startswith(f"check.sh: {said}")


def test_each_file_that_is_missing_or_open_is_one_sentence(tmp_path: Path) -> None:
    environment = site(tmp_path)
    ours = tmp_path / "deploy" / "compose"
    (ours / "secrets" / "postgres_password").write_text("a:b\n")
    (ours / "ssh").chmod(0o755)
    (ours / "fleets" / "lab.yaml").unlink()
    code, text = check(tmp_path, environment)
    assert (code, len(text.splitlines())) == (1, 3), text
    for word in ("letters and digits only", "chmod 700", "expected a fleet file"):
        assert word in text
    (ours / "secrets" / "postgres_password").unlink()
    assert "postgres_password is missing" in check(tmp_path, environment)[1]


def test_images_are_pinned_by_the_digests_of_the_registry(tmp_path: Path) -> None:
    for name in ("docker-compose.yml", "Dockerfile"):
        shutil.copy(ROOT / name, tmp_path)
    answer = "sha256:" + "ab" * 32
    config = json.dumps({"services": SERVICES})
    (tmp_path / "config.json").write_text(config)
    script = f"""case $1 in compose) cat {tmp_path}/config.json ;; buildx) echo $DIGEST ;; esac"""
    environment = double(tmp_path / "bin", "docker", script) | {"DIGEST": answer}
    command = ["sh", ROOT / "deploy/compose/pin.sh", tmp_path]
    subprocess.run(command, env=environment, check=True)
    written = yaml.safe_load((tmp_path / "docker-compose.digests.yml").read_text())
    assert list(jsonschema.Draft202012Validator(SPECIFICATION).iter_errors(written)) == []
    images = {name: one["image"] for name, one in written["services"].items() if "image" in one}
    assert images == {
        name: f"{one['image']}@{answer}"
        for name, one in SERVICES.items()
        if not one["image"].startswith("relaunch:")
    }
    [base] = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    context = written["services"]["namespace"]["build"]["additional_contexts"]
    assert context == {base: f"docker-image://{base}@{answer}"}
    failed = subprocess.run(command, env=environment | {"DIGEST": ""}, capture_output=True)
    assert failed.returncode == 1 and b"expected a digest of" in failed.stderr


def image(folder: Path) -> None:
    """What the Dockerfile copies, so far as .dockerignore lets it."""
    let = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        (words[:-1], words[-1])
        for words in (line.split() for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE))
    ]
    assert sorted(let) == sorted(source for sources, _ in copied for source in sources)
    for sources, to in copied:
        for source in sources:
            for path in ROOT.glob(source):
                if path.is_dir():
                    (folder / to).symlink_to(path)  # with what is compiled already
                else:
                    (folder / to).mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, folder / to)


PROGRAM = """
import sys
from pathlib import Path
import worker, starter, relaunch.worker, relaunch.cli.app, \
deploy.compose.namespace, deploy.compose.polling
from relaunch.backends.artifact import build_agent
from relaunch.spec.policy import Policy, resolve
import relaunch.backends.ssh.backend
assert isinstance(resolve({}), Policy)
build_agent(Path(sys.argv[1]))
ours = {module.__file__ for module in sys.modules.values() \
if (getattr(module, "__file__", None) or "").startswith(sys.argv[2])}
print(*ours, sep="\\n")
"""


def test_the_image_has_all_that_worker_and_command_line_need(tmp_path: Path) -> None:
    app = tmp_path / "app"
    image(app)
    command = [sys.executable, "-B", "-c", PROGRAM, str(tmp_path / "agent"), str(ROOT)]
    done = subprocess.run(command, cwd=app, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = [line for line in done.stdout.splitlines() if line and ".venv" not in line]
    assert here == [], "loaded from the checkout, not from the image"
    assert len(list((tmp_path / "agent").glob("*.pyz"))) == 1


@pytest.mark.parametrize("text", FILES_ON_THE_PAGE)
def test_files_on_the_page_can_be_used(text: str) -> None:
    read = yaml.safe_load(text)
    if "services" in read:
        assert [
            error.message
            for error in jsonschema.Draft202012Validator(SPECIFICATION).iter_errors(read)
        ] == []
        for service in read["services"].values():
            given = {
                name: value
                for name, value in service.get("environment", {}).items()
                if name.startswith("TEMPORAL_")
            }
            if not given:
                continue
            profile = ClientConfigProfile.load(disable_file=True, override_env_vars=given)
            assert profile.address == given["TEMPORAL_ADDRESS"]
            assert profile.namespace == given["TEMPORAL_NAMESPACE"]
            assert profile.tls is not None
            assert str(profile.tls.client_private_key).startswith("/run/secrets/")
    else:
        assert FleetSpec.model_validate(read).backend == "ssh"


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS_ON_THE_PAGE if line.startswith("relaunch ")]
)
def test_commands_on_the_page_are_commands(line: str) -> None:
    page_commands.take(line)


def test_services_on_the_page_are_services() -> None:
    lines = [line for line in COMMANDS_ON_THE_PAGE if line.startswith("docker compose")]
    for line in lines:
        what, *words = line.split("&&")[0].split()[2:]
        names = [word for word in words if not word.startswith("-")]
        assert set(names[:1] if what == "exec" else names) <= set(SERVICES), line
    assert len(lines) >= 10
