"""Where the state of a node lies: never in a folder of another user, never in two at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import wait_for

from relaunch.agent import folders
from relaunch.agent.node import hold
from relaunch.agent.protocol import Refusal
from relaunch.agent.ranks import cgroup, find_shims
from relaunch.agent.state import open_state
from relaunch.cli import node_check

OTHER_UID = 4242
OWN_UID = 4243
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root makes a folder of another user"
)


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Stand-ins for /var/lib, in which only root can make folders, and /var/tmp."""
    persistent, temporary = tmp_path / "lib", tmp_path / "tmp"
    for root, mode in ((persistent, 0o755), (temporary, 0o1777)):
        root.mkdir()
        root.chmod(mode)
    monkeypatch.setattr(folders, "PERSISTENT_ROOT", persistent)
    monkeypatch.setattr(folders, "TEMPORARY_ROOT", temporary)
    monkeypatch.setattr(folders, "FORGETFUL_FILE_SYSTEMS", ())  # what pytest's folder is on
    monkeypatch.delenv("RELAUNCH_AGENT_STATE", raising=False)
    return persistent, temporary


@pytest.fixture
def name() -> str:
    return f"relaunch-{os.geteuid()}"


def test_state_lies_where_no_program_removes_what_is_old(
    roots: tuple[Path, Path], name: str
) -> None:
    assert folders.choose_folder("m1") == roots[0] / name / "m1"
    assert (roots[0] / name / "m1").stat().st_mode & 0o777 == 0o700


def test_state_that_is_there_already_is_used_on(roots: tuple[Path, Path], name: str) -> None:
    old = roots[1] / name / "m1"
    old.mkdir(parents=True, mode=0o700)
    assert folders.choose_folder("m1") == old
    (roots[0] / name).mkdir(mode=0o700)
    assert folders.choose_folder("m1") == old, "a better place that appears later is not taken"
    assert folders.choose_folder("m2") == roots[0] / name / "m2"


def test_a_file_system_that_others_share_is_not_chosen(
    roots: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "find_mount", lambda path: {"type": "nfs4", "mounted": "/"})
    assert folders.choose_folder("m1") == roots[1] / name / "m1"


@needs_root
def test_a_name_that_another_user_took_first_stops_no_order(
    roots: tuple[Path, Path], name: str
) -> None:
    roots[0].chmod(0o555)
    for taken in (roots[0] / name, roots[1] / name):
        taken.mkdir()
        os.chown(taken, OTHER_UID, OTHER_UID)
    target = roots[1] / "of another"
    target.mkdir()
    (roots[1] / f"{name}.1").symlink_to(target)
    chosen = roots[1] / f"{name}.2" / "m1"
    assert folders.choose_folder("m1") == chosen
    assert list(target.iterdir()) == [], "a link is not followed"
    shutil.rmtree(roots[1] / name)
    assert folders.choose_folder("m1") == chosen, (
        "the name is free, and ranks may live in the other"
    )


@needs_root
def test_a_node_on_which_every_name_is_taken_says_what_to_do(
    roots: tuple[Path, Path], name: str
) -> None:
    for path in folders.list_candidates(os.geteuid()):
        path.mkdir()
        os.chown(path, OTHER_UID, OTHER_UID)
    with pytest.raises(Refusal) as refused:
        open_state()
    answer = refused.value.answer
    assert answer["why"] == "cannot_start"
    assert f"uid {OTHER_UID}" in answer["reason"]
    assert "RELAUNCH_AGENT_STATE" in answer["reason"]


def test_a_parent_in_which_every_user_can_rename_is_refused(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = roots[1] / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("RELAUNCH_AGENT_STATE", str(open_to_all / "state"))
    with pytest.raises(Refusal) as refused:
        open_state()
    assert "world-writable" in refused.value.answer["reason"]
    assert not (open_to_all / "state").exists()
    open_to_all.chmod(0o1777)
    assert open_state() == open_to_all / "state"


def configure(monkeypatch: pytest.MonkeyPatch, state: Path) -> str:
    """Open a configured state folder; return why it is refused, or ""."""
    monkeypatch.setenv("RELAUNCH_AGENT_STATE", str(state))
    try:
        assert open_state() == state.resolve()
    except Refusal as refused:
        return str(refused.answer["reason"])
    return ""


def test_a_folder_far_above_that_every_user_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "open" / "a" / "b" / "state"
    state.parent.mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    reason = configure(monkeypatch, state)
    assert f"chmod +t {tmp_path / 'open'}`" in reason and "RELAUNCH_AGENT_STATE" in reason
    assert not state.exists()
    monkeypatch.setenv("RELAUNCH_AGENT_TRUSTED_FOLDER", str(tmp_path / "open" / "a"))
    assert configure(monkeypatch, state) == "", "the worker's own folder is where people want it"
    (tmp_path / "open" / "a" / "b").chmod(0o777)
    assert "world-writable" in configure(monkeypatch, state)
    monkeypatch.setenv("RELAUNCH_AGENT_TRUSTED_FOLDER", str(state))
    assert "world-writable" in configure(monkeypatch, state), "only what lies below it"
    monkeypatch.delenv("RELAUNCH_AGENT_TRUSTED_FOLDER")
    for folder in (tmp_path / "open", tmp_path / "open" / "a" / "b"):
        folder.chmod(0o1777)
    assert configure(monkeypatch, state) == ""


@needs_root
def test_a_folder_above_that_belongs_to_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "theirs" / "a" / "state"
    state.parent.mkdir(parents=True)
    os.chown(tmp_path / "theirs", OTHER_UID, OTHER_UID)
    reason = configure(monkeypatch, state)
    assert f"uid {OTHER_UID}, who owns {tmp_path / 'theirs'}" in reason and "`chown root" in reason
    assert not state.exists()


@needs_root
def test_a_link_above_that_another_user_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "a").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to("real/../real")
    assert configure(monkeypatch, link / "a" / "state") == ""
    os.chown(link, OTHER_UID, OTHER_UID, follow_symlinks=False)
    assert f"{link}, above the state folder, is a link that uid {OTHER_UID} made" in configure(
        monkeypatch, link / "a" / "state"
    )
    os.unlink(link)
    link.symlink_to(link)
    assert configure(monkeypatch, link / "a" / "state")


@needs_root
def test_only_a_link_of_the_same_owner_to_a_folder_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    monkeypatch.setenv("RELAUNCH_AGENT_STATE", str(link))
    assert open_state() == target
    os.chown(link, OTHER_UID, OTHER_UID, follow_symlinks=False)
    with pytest.raises(Refusal, match=f"a link that uid {OTHER_UID} made"):
        open_state()


def test_the_places_of_one_node_are_all_its_candidates(roots: tuple[Path, Path], name: str) -> None:
    places = folders.list_places(str(roots[1] / name / "m1"))
    assert len(places) == 2 + folders.MAX_ALTERNATIVES
    assert places[:2] == [str(roots[0] / name / "m1"), str(roots[1] / name / "m1")]
    assert folders.list_places("/elsewhere/m1") == ["/elsewhere/m1"]


HOLDS = """import sys, time
from relaunch.agent import processes
processes.set_name('relaunch-shim')
lock = open(sys.argv[1], 'w')
print('up', flush=True)
time.sleep(1000)"""


def test_state_that_was_removed_whole_is_restored_by_its_shim(
    roots: tuple[Path, Path], name: str
) -> None:
    old = roots[1] / name / "m1"
    generation = old / "jobs" / "0123456789abcdef" / "1-1"
    generation.mkdir(parents=True)
    words = [sys.executable, "-c", HOLDS, str(generation / "shim.lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as shim:
        try:
            assert shim.stdout is not None and shim.stdout.readline() == b"up\n"
            shutil.rmtree(old)
            assert folders.choose_folder("m1", find_shims.find_used_place) == old
            assert folders.choose_folder("m2", find_shims.find_used_place) == roots[0] / name / "m2"
        finally:
            shim.kill()


def test_the_agent_and_the_checks_know_the_same_file_systems() -> None:
    assert folders.SHARED_FILE_SYSTEMS == node_check.SHARED_FILE_SYSTEMS
    assert folders.FORGETFUL_FILE_SYSTEMS == node_check.VOLATILE_FILE_SYSTEMS


TAKEN = """
set -e
mount -t tmpfs -o mode=755 tmpfs /var/lib
mount -t tmpfs -o mode=1777 tmpfs /var/tmp
mkdir /var/tmp/relaunch-{own} && chown {other} /var/tmp/relaunch-{own}
for i in 1 2; do
    echo '{{"protocol": 1}}' | setpriv --reuid {own} --regid {own} --clear-groups {agent} list
    ls -d /var/tmp/relaunch-{own}.1/*
done
"""


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_a_user_whose_folder_another_made_first_is_served(tmp_path: Path, agent: Path) -> None:
    """The whole agent as a plain user, in a mount namespace with private /var/lib and /var/tmp."""
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mount namespaces cannot be made here")
    python = _find_public_python()
    if python is None:
        pytest.skip(f"no Python that user {OWN_UID} may run")
    script = TAKEN.format(own=OWN_UID, other=OTHER_UID, agent=f"{python} -S -")
    environment = {key: value for key, value in os.environ.items() if key != "RELAUNCH_AGENT_STATE"}
    done = _run_as_user(script, agent, environment)
    lines = done.stdout.splitlines()
    assert [json.loads(line)["outcome"] for line in lines[::2]] == ["done", "done"], done
    assert lines[1] == lines[3], "both find the same folder"


def _find_public_python() -> str | None:
    """Return a Python that a plain user may run: ours may be in root's home."""
    for python in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        command = ["setpriv", f"--reuid={OWN_UID}", "--clear-groups", python, "-S", "-c", ""]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    return None


def _run_as_user(script: str, agent: Path, environment: dict[str, str]) -> Any:
    """Run a script with the agent in a folder that its user can read: pytest's are root's alone."""
    public = Path("/tmp") / f"relaunch-test-{os.getpid()}"
    public.mkdir(mode=0o755)
    try:
        copy = public / agent.name
        shutil.copy(agent, copy)
        copy.chmod(0o644)
        script = script.replace(" -S -", f" -S {copy}")
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", script],
            check=True, capture_output=True, text=True, env=environment, timeout=60,
        )  # fmt: skip
    finally:
        shutil.rmtree(public)


@needs_root
def test_a_mount_whose_name_is_not_text_is_no_obstacle(tmp_path: Path) -> None:
    """As a share or a stick may have it. Their names are bytes, in the kernel's lists too."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    words: list[str | bytes] = ["mount", "-t", "tmpfs", "tmpfs", folder]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        found = folders.find_mount(Path(os.fsdecode(folder)))
        assert found == {"type": "tmpfs", "mounted": f"{tmp_path}/caf\ufffd"}
        assert "unreadable" not in folders.find_mount(tmp_path)
        cgroup._find_own()
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_process_whose_name_is_not_text_is_no_obstacle() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'caf\\xe9', 0, 0, 0); print(input())"
    words = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")
        wait_for(lambda: b"caf\xe9" in status.read_bytes())
        assert not hold.is_kill_pending(process.pid)
        process.kill()
