"""The commands of docker-compose.yml, of its image and of docs/compose.md, run as they stand there.

Doubles for what only images have.
"""

from __future__ import annotations

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
