"""Command lines of torchrun, typed after `run`: the job that is meant. No rank is started."""

from __future__ import annotations

import os
import shlex
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from syrupy.assertion import SnapshotAssertion
from typer.main import get_command

from relaunch.cli import app, run, torchrun
from relaunch.config import ConfigError
from relaunch.spec.annotations import GRACE_PERIOD
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import resolve as resolve_policy
from tests.pages import sections

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
COMMAND_LINE = get_command(app.app)
UsageError = typer.BadParameter.__mro__[1]
HERE, SSH = "local", "ssh"
SCRIPTS = ("train.py", "trainer-program.py", "examples/run_clm.py", "script")
PROGRAMS = ("python", "numactl", "lightning", "torchrun")
TWO_HOSTS = (
    "torchrun --nproc_per_node=8 --nnodes=2 --node_rank 0 --master_addr 10.10.10.16 "
    "--master_port 50000 train.py"
)
ELASTIC = (
    "torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 --rdzv-id=7 --rdzv-backend=c10d "
    "--rdzv-endpoint=node1.example.com:29400 train.py"
)
FIXED = ELASTIC.replace("1:4", "4")
NANOGPT = (
    "torchrun --nproc_per_node=8 --nnodes=2 --node_rank={rank} --master_addr=123.456.123.456 "
    "--master_port=1234 train.py"
)
DOCUMENTED: list[tuple[str, str, str]] = [
    ("torchrun --standalone --nnodes=1 --nproc-per-node=4 train.py", HERE, "4 ranks on 1 node"),
    (
        "torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=4 "
        "train.py",
        HERE,
        "4 ranks on 1 node",
    ),
    (FIXED, HERE, "--rdzv-endpoint"),
    (FIXED, SSH, "32 ranks on 4 nodes"),
    (ELASTIC, HERE, "--rdzv-endpoint"),
    (ELASTIC, SSH, "8 to 32 ranks on 1 to 4 nodes"),
    ("torchrun --nproc_per_node=2 trainer-program.py", HERE, "2 ranks on 1 node"),
    ("CUDA_VISIBLE_DEVICES=0,2 torchrun trainer-program.py", HERE, "1 rank on 1 node"),
    (
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 examples/run_clm.py --do_train",
        HERE,
        "2 ranks on 1 node",
    ),
    (
        'MIXED_PRECISION="fp16" torchrun --nproc_per_node=2 --num_machines=1 train.py',
        HERE,
        "--num-machines",
    ),
    (TWO_HOSTS, HERE, "--master-addr"),
    (TWO_HOSTS, SSH, "16 ranks on 2 nodes"),
    (TWO_HOSTS.replace("--node_rank 0", "--node_rank 1"), SSH, "--node-rank 1"),
    (
        "torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py",
        HERE,
        "8 ranks on 1 node",
    ),
    (NANOGPT.format(rank=0), HERE, "--master-addr"),
    (NANOGPT.format(rank=0), SSH, "16 ranks on 2 nodes"),
    (NANOGPT.format(rank=1), SSH, "--node-rank 1"),
]
"""Commands of docs/launchers.md, where the fleet is, and the job's size or the option refused."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts, and a PATH with python."""
    for name in (*SCRIPTS, *(f"bin/{name}" for name in PROGRAMS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(0o755 if name.startswith("bin/") else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(torchrun, "GPUS", tmp_path / "gpus")
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHON_EXEC", torchrun.SHUTDOWN_TIMEOUT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def understand(monkeypatch: pytest.MonkeyPatch, line: str) -> run.RunRequest:
    """Return what the words after `relaunch run` mean."""
    found: list[run.RunRequest] = []

    def keep(settings: Any, request: run.RunRequest, say: Any) -> int:
        found.append(request)
        return 0

    monkeypatch.setattr(run, "run", keep)
    COMMAND_LINE.main(["run", *shlex.split(line)], standalone_mode=False)
    return found[0]


def resolve(monkeypatch: pytest.MonkeyPatch, line: str, backend: str | None = HERE) -> JobSpec:
    return understand(monkeypatch, line).resolve(backend)[0]


@pytest.mark.parametrize(
    ("words", "backend", "expected"),
    [
        pytest.param("train.py", "local", 10, id="this shell's, which ranks get here"),
        pytest.param(f"--env {GRACE_PERIOD}=5 train.py", "local", 5, id="a flag wins"),
        pytest.param("train.py", SSH, 30, id="ranks elsewhere do not get this shell's"),
        pytest.param(f"--env {GRACE_PERIOD} train.py", SSH, 10, id="unless a flag sends it"),
    ],
)
def test_s4_10_run_takes_the_grace_period_that_its_ranks_get(
    words: str, backend: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GRACE_PERIOD, "10")
    _, policy = understand(monkeypatch, words).resolve(backend)
    assert policy.timeouts.stop_grace == timedelta(seconds=expected)


def test_s4_10_run_refuses_a_bad_grace_period(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    request = understand(monkeypatch, f"--env {GRACE_PERIOD}=soon train.py")
    with pytest.raises(ConfigError) as refusal:
        request.resolve("local")
    assert str(refusal.value) == snapshot


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        pytest.param("train.py", None, 30, id="as torchrun"),
        pytest.param("train.py", "", 30, id="a blank variable"),
        pytest.param("train.py", "45", 45, id="the variable"),
        pytest.param("--shutdown-timeout 120 train.py", "45", 120, id="an option wins"),
        pytest.param("--shutdown_timeout=0 train.py", None, 0, id="at once"),
        pytest.param("--policy torchelastic train.py", None, 30, id="a preset that has one"),
        pytest.param("--policy modelarts train.py", None, 30, id="a preset without"),
        pytest.param("--policy torchelastic train.py", "45", 45, id="over a preset"),
        pytest.param("--policy own.yaml train.py", None, 20, id="a file"),
        pytest.param("--policy own.yaml --shutdown-timeout 120 train.py", "45", 20, id="wins"),
        pytest.param("--policy other.yaml --shutdown-timeout 120 train.py", None, 120, id="not in"),
    ],
)
def test_ranks_have_the_time_to_end_that_torchrun_gives_them(
    words: str, variable: str | None, expected: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own.yaml").write_text("timeouts: {stop_grace: 20s}")
    (folder / "other.yaml").write_text("timeouts: {lost_after: 5m}")
    if variable is not None:
        monkeypatch.setenv(torchrun.SHUTDOWN_TIMEOUT, variable)
    _, policy = understand(monkeypatch, words).resolve(HERE)
    assert policy.timeouts.stop_grace == timedelta(seconds=expected)


def test_the_page_has_every_command_that_is_tested() -> None:
    table = PAGE.partition("## Commands of other documentation")[2].partition("\n## ")[0]
    written = {row.split("`")[1] for row in table.splitlines() if row.startswith("| `")}
    assert written == {line for line, _, _ in DOCUMENTED}


@pytest.mark.parametrize(("line", "backend", "result"), DOCUMENTED)
def test_a_documented_command_is_the_job_it_means(
    line: str, backend: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = line.partition("torchrun ")[2]
    if result.startswith("--"):
        with pytest.raises((ConfigError, UsageError)) as error:
            resolve(monkeypatch, words, backend)
        assert result in (getattr(error.value, "message", "") or str(error.value))
        return
    spec = resolve(monkeypatch, words, backend)
    script = next(word for word in words.split() if word in SCRIPTS)
    arguments = words[words.index(script) :].split()
    assert (spec.size, list(spec.command)) == (result, ["python", "-u", *arguments])
    assert spec.workdir == os.getcwd()


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("train.py --lr 1 --nproc 3", "python -u train.py --lr 1 --nproc 3"),
        ("-- python train.py", "python train.py"),
        ("python train.py", "python train.py"),
        ("-m package.train --lr 1", "python -u -m package.train --lr 1"),
        ("--module package.train", "python -u -m package.train"),
        ("--no-python numactl -N 0 python train.py", "numactl -N 0 python train.py"),
        ("script", "python -u script"),
        ("--run_path train.py", "python -u train.py"),
        ("bin/lightning fit", "bin/lightning fit"),
    ],
)
def test_scripts_modules_and_programs_are_distinguished(
    line: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " ".join(resolve(monkeypatch, line).command) == command


def test_the_python_of_the_caller_runs_scripts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "bin" / "python").rename(folder / "bin" / "python3")
    assert resolve(monkeypatch, "train.py").command[0] == "python3"
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert resolve(monkeypatch, "train.py").command[0] == "/opt/python"


@pytest.mark.parametrize(
    ("line", "visible", "gpus", "ranks"),
    [
        ("--nproc-per-node=gpu train.py", None, 3, 3),
        ("--nproc_per_node auto train.py", None, 2, 2),
        ("--nproc gpu train.py", "0,2", 8, 2),
        ("--nproc gpu train.py", "1,-1,2", 8, 1),
        ("--nproc auto train.py", "", 8, os.cpu_count()),
        ("--nproc cpu train.py", None, 8, os.cpu_count()),
    ],
)
def test_ranks_are_as_many_as_this_machine_has(
    line: str,
    visible: str | None,
    gpus: int,
    ranks: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(gpus):
        (folder / "gpus" / str(number)).mkdir(parents=True)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve(monkeypatch, line).nproc_per_node == ranks


def test_restarts_patterns_and_presets_are_those_of_a_job_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "--max_restarts=3 --log-pattern 'iter (?P<step>[0-9]+)' --policy torchelastic train.py"
    spec, policy = understand(monkeypatch, line).resolve(HERE)
    assert (policy.max_restarts, policy.healthy_for) == (
        3,
        understand(monkeypatch, "--policy torchelastic train.py").resolve(HERE)[1].healthy_for,
    )
    assert spec.progress.log_pattern == "iter (?P<step>[0-9]+)"
    assert understand(monkeypatch, "--progress megatron train.py").fields["progress"] == "megatron"
    assert understand(monkeypatch, "train.py").resolve(HERE)[1].max_restarts == 8


REFUSED = (
    ("", HERE),
    ("nothing.py", HERE),
    ("--no-python nothing", HERE),
    ("--no-python -m package.train", HERE),
    ("--nproc-per-node xpu train.py", HERE),
    ("--nproc-per-node gpu train.py", HERE),
    ("--nproc-per-node gpu train.py", SSH),
    ("--nproc-per-node auto --fleet lab train.py", None),
    ("--node-rank 1 train.py", None),
    ("--nnodes 2 --rdzv-endpoint host1 train.py", HERE),
    ("--virtual-local-rank train.py", HERE),
    ("--log-pattern x --progress y train.py", HERE),
    ("--env NOT_SET_ANYWHERE train.py", HERE),
    ("--redirects 0:3 train.py", HERE),
    ("--local-ranks-filter first train.py", HERE),
    ("--output apart train.py", HERE),
    ("--shutdown-timeout soon train.py", HERE),
    ("--shutdown-timeout 999999999 train.py", HERE),
)


def test_what_cannot_be_run_says_what_to_type_instead(
    monkeypatch: pytest.MonkeyPatch, folder: Path, page: SnapshotAssertion
) -> None:
    said = {}
    for line, backend in REFUSED:
        with pytest.raises((ConfigError, UsageError)) as error:
            resolve(monkeypatch, line, backend)
        text = getattr(error.value, "message", "") or str(error.value)
        said[f"run {line}  (fleet: {backend})"] = text.replace(str(folder), "/folder")
    assert sections(said) == page


ACCEPTED = (
    "--nproc-per-node 2 --standalone -t 3 --tee 3 --monitor-interval 5 --start-method fork "
    "--local-addr 10.0.0.1 --rdzv-conf timeout=9 --nnodes 2 train.py",
    "-r 3 --log_dir logs --local-ranks-filter 0 --role trainer --event-log-handler null "
    "--logs-specs x --log-line-prefix-template y --numa-binding node --signals-to-handle SIGUSR1 "
    "train.py",
    "--no-python torchrun --nproc-per-node 2 train.py",
    "--policy own.yaml --shutdown-timeout 120 train.py",
    "--nproc-per-node 2 train.py",
    "--nproc-per-node 2 --env OMP_NUM_THREADS=4 train.py",
)


@pytest.mark.parametrize(
    ("line", "output", "hidden", "copies"),
    [
        ("-t 3", "merged", set(), None),
        ("--tee 3 --log_dir logs", "separate", set(), "logs/llama"),
        ("-r 3", "separate", {"stdout", "stderr"}, None),
        ("-r 3 -t 2 --log-dir logs", "separate", {"stdout"}, "logs/llama"),
        ("--redirects=0 --output separate", "separate", set(), None),
    ],
)
def test_streams_are_apart_and_hidden_as_torchrun_would(
    line: str,
    output: str,
    hidden: set[str],
    copies: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = understand(monkeypatch, f"--name llama {line} train.py")
    spec, _ = request.resolve(HERE)
    _, done = torchrun.read_output(request.options, spec.name)
    where = None if copies is None else Path.cwd() / copies
    assert (spec.output, set(done.hidden), done.folder) == (output, hidden, where)


def test_what_has_no_effect_is_said_where_it_may_be_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, page: SnapshotAssertion
) -> None:
    said: dict[str, list[str]] = {}
    (folder / "own.yaml").write_text("timeouts: {stop_grace: 20s}")
    for line in ACCEPTED:
        passed_on = {"OMP_NUM_THREADS": "4"} if "--local-addr" in line else {}
        request = understand(monkeypatch, f"--name llama {line}")
        spec, policy = request.resolve(HERE)
        notices = torchrun.find_notices(spec, policy, request.options, passed_on)
        said[f"run {line}"] = [one.replace(os.getcwd(), "/folder") for one in notices]
    assert sections(said) == page


@pytest.mark.parametrize(
    ("visible", "rank", "numa", "expected"),
    [
        (None, 3, "1", ["3", "numactl --cpunodebind=1 --preferred=1 python train.py"]),
        ("4,6", 1, "0", ["6", "numactl --cpunodebind=0 --preferred=0 python train.py"]),
        (
            "GPU-aa,GPU-bb",
            0,
            "1",
            ["GPU-aa", "numactl --cpunodebind=1 --preferred=1 python train.py"],
        ),
        (None, 0, "-1", ["0", "python train.py"]),
        (None, 0, "", ["0", "python train.py"]),
    ],
)
def test_the_script_of_the_page_binds_a_rank_near_its_gpu(
    visible: str | None, rank: int, numa: str, expected: list[str], folder: Path
) -> None:
    """With programs in place of nvidia-smi, numactl and what reads sysfs: here is no GPU."""
    script = PAGE.partition("## Processors near the GPU")[2].split("```sh\n")[1].split("```")[0]
    programs = {
        "nvidia-smi": 'echo "$1" >> asked; echo 00000000:1B:00.0',
        "cat": f'[ "$1" = /sys/bus/pci/devices/0000:1b:00.0/numa_node ] && echo "{numa}"',
        "numactl": 'echo "numactl $@" >> asked',
        "python": 'echo "python $@" >> asked',
    }
    for name, text in programs.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "LOCAL_RANK": str(rank)}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    subprocess.run(
        ["/bin/sh", "-c", script, "sh", "python", "train.py"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    asked, command = (folder / "asked").read_text().splitlines()
    assert [asked.removeprefix("--id="), command] == expected


def test_a_script_that_runs_a_job_is_asked_nothing() -> None:
    policy = resolve_policy({})
    assert run.adapt_policy(policy, has_terminal=True).bad_checkpoint_ask == 2
    adapted = run.adapt_policy(policy, has_terminal=False)
    assert adapted.bad_checkpoint_ask == "off"
    assert adapted.timeouts.unwatched == policy.timeouts.lease
    stated = resolve_policy({"timeouts": {"unwatched": "10m"}})
    assert run.adapt_policy(stated, has_terminal=True) == stated
