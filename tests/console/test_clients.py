"""Commands that have a daemon or other hosts do the work of a rank: refused, or a word is said."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.agent.ranks.clients import CLIENTS, find_in_command
from relaunch.cli import clients
from relaunch.cli.files import job_from_flags
from relaunch.config import ConfigError
from tests.console.commands import one_sentence, starter
from tests.pages import sections

OPTIONS = "-e RELAUNCH_TOKEN -e RELAUNCH_NODE_STATE"
REFUSED = (
    "docker run --rm --gpus all image python train.py",
    "/usr/bin/docker --context x container run image",
    "sudo -E docker run image",
    "sudo -u alice -n docker run image",
    "env A=1 docker exec -it box python train.py",
    "timeout -s INT 30m nerdctl run image",
    "bash -c 'exec docker run image'",
    "podman --remote run image",
    f"sudo docker run {OPTIONS} image",
    "docker run -e RELAUNCH_TOKEN image",
    "systemd-run --pipe --wait python train.py",
    "docker compose -f x.yaml run trainer",
    "docker-compose run trainer",
)
REFUSED_ALIKE = (
    "podman --url ssh://x run image",
    "podman -c remote run image",
    "flock /tmp/lock docker run image",
    "flock -n lock -c 'docker run image'",
    "tini -g -- docker run image",
    "dumb-init docker run image",
    "docker -H tcp://x -D run image",
    "docker start -ai box",
    "bash -c 'cd /x && docker run image'",
    "bash -c 'set -e; docker run image'",
    "bash -c 'A=1 docker run image; code=$?; exit $code'",
    "bash -c 'set -e\nexec docker run image 2>&1 | tee log; exit $?'",
    "bash -c 'docker run -v $(pwd):/x image python train.py'",
    "bash -c 'while ! docker run --name $NAME image; do date; done'",
)
"""With a sentence that another of these has."""
MARKED = "-e RELAUNCH_TOKEN=$RELAUNCH_TOKEN -e RELAUNCH_NODE_STATE=$RELAUNCH_NODE_STATE"
ACCEPTED = (
    f"docker run --init --rm {OPTIONS} image python train.py",
    f"sudo -E docker run {OPTIONS} image",
    f"bash -c 'docker run {OPTIONS} image'",
    "docker build .",
    "docker ps",
    "docker pull run",
    "docker start box",
    "docker compose up -d",
    "podman run --rm image torchrun -r 3 train.py",
    "podman run image python train.py --remote http://x",
    "bash -c 'docker compose up -d redis && torchrun train.py'",
    "bash -c 'docker start redis; python train.py'",
    "bash -c 'docker pull image && python main.py run'",
    "bash -c '# not in docker run image\npython train.py'",
    "bash -c 'cat > file <<END\ndocker run image\nEND'",
    f"bash -c 'sudo docker run {MARKED} image'",
    f"bash -c 'sudo {MARKED.replace('-e ', '')} docker run {OPTIONS} image'",
    f"sudo -nE docker run {OPTIONS} image",
    f"bash -c 'docker run --user $(id -u):$(id -g) {OPTIONS} image'",
    "podman run image",
    "systemd-run --scope python train.py",
    "python docker.py run",
    "python train.py docker run",
    "apptainer exec image.sif python train.py",
    "mpirun -np 8 python train.py",
    "bash train.sh",
    "bash -c 'open \"'",
    "sudo",
)
NOTICED = (
    "srun python train.py",
    "nice -n 5 kubectl exec pod -- python train.py",
    "mpirun --hostfile hosts python train.py",
    "ssh n2 python train.py",
    "docker compose up trainer",
)
UNSURE = (
    "docker-compose up trainer",
    "docker run --env-file file image",
    "bash -c 'docker run -d redis && python train.py'",
    "bash -c 'docker run image prepare; python train.py'",
    "bash -c 'docker run $OPTIONS image'",
    "bash -c 'docker run \"$@\"'",
)
"""Not refused: what they start may be no work of the rank, or have the variables."""


def words_of(line: str) -> list[str]:
    return shlex.split(line)


def test_clients_of_daemons_are_refused_with_what_to_write(page: SnapshotAssertion) -> None:
    said = {}
    for line in REFUSED:
        with pytest.raises(ConfigError) as refused:
            job_from_flags({"name": "a", "command": words_of(line)})
        said[line] = str(refused.value)
    said |= {line: str(clients.find_notice(words_of(line))) for line in NOTICED}
    assert "None" not in said.values()
    assert sections(said) == page


@pytest.mark.parametrize("line", REFUSED_ALIKE)
def test_clients_are_refused_behind_other_words(line: str) -> None:
    assert clients.find_refusal(words_of(line)) is not None


@pytest.mark.parametrize("line", UNSURE)
def test_what_may_be_right_is_not_refused_but_named(line: str) -> None:
    assert clients.find_refusal(words_of(line)) is None
    notice = clients.find_notice(words_of(line))
    assert notice is not None
    assert "RELAUNCH_TOKEN" in notice


@pytest.mark.parametrize("line", ACCEPTED)
def test_other_commands_are_taken_without_a_word(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    spec, _ = job_from_flags({"name": "a", "command": words_of(line)})
    assert clients.find_notice(spec.command) is None


def test_a_user_learns_that_containers_of_root_are_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    command = words_of(f"docker run {OPTIONS} image")
    assert clients.find_notice(command) == clients.BLIND
    assert clients.find_notice([*command, "python", "-u", "train.py", "--user"]) == clients.BLIND
    for user in (["--user=1000:1000"], ["--user", "1000:1000"], ["-u1000:1000"], ["-itu", "1:1"]):
        assert clients.find_notice([*command[:2], *user, *command[2:]]) is None


def test_what_is_accepted_is_searched_for_by_the_agent() -> None:
    assert {*clients.ENGINES, "systemd-run", "srun"} == CLIENTS
    for line in (*REFUSED, *REFUSED_ALIKE, *UNSURE):
        assert find_in_command(words_of(line)), line


@pytest.mark.parametrize("command", ["run", "init", "submit"])
async def test_each_way_to_a_job_refuses_a_client(tmp_path: Path, command: str) -> None:
    words = ["--", *words_of(REFUSED[0])]
    if command == "submit":
        (tmp_path / "job.yaml").write_text(f"name: a\ncommand: [{', '.join(words[1:])}]\n")
        words = ["job.yaml"]
    done = await starter(tmp_path, command, *words, RELAUNCH_STATE=str(tmp_path / "state"))
    one_sentence(done, "docker", "-e RELAUNCH_TOKEN -e RELAUNCH_NODE_STATE")
    assert command != "submit" or "job.yaml:2: command: " in done.err
    assert command == "submit" or not (tmp_path / "job.yaml").exists()


async def test_init_says_what_other_hosts_do_with_a_job(tmp_path: Path) -> None:
    done = await starter(tmp_path, "init", "--", "srun", "python", "train.py")
    assert done.code == 0, done
    assert "srun has Slurm's daemons do the work" in done.err
