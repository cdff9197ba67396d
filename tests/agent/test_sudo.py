"""The lines for sudoers that docs/ssh.md proposes, tried with real sudo as a plain user.

They allow the documented commands and nothing else. In a mount namespace: /etc is a copy, so that
the machine's own rules and users stay as they are. `nvidia-smi` and `systemctl` are doubles that
say who runs them with which arguments; only their folder differs from that of the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "ssh.md").read_text()
GPU, OTHER_GPU = "00000000:3B:00.0", "00000000:AF:00.0"
OLD_RULE = "train ALL=(root) NOPASSWD: /usr/bin/nvidia-smi --gpu-reset -i *"
"""What the page proposed for release 0.1.0."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a separate /etc"),
    pytest.mark.skipif(shutil.which("sudo") is None, reason="sudo is not installed"),
    pytest.mark.skipif(shutil.which("visudo") is None, reason="visudo is not installed"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
    pytest.mark.skipif(
        subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
        reason="mount namespaces cannot be made here",
    ),
]

DOUBLE = """#!/bin/sh
if [ "$1" = --query-gpu=pci.bus_id ]; then printf '%s\\n' {gpus}; exit; fi
printf '%s ' "$(id -u)" "${{0##*/}}" "$@"; echo
env | grep -E '^(LD_|BASH_ENV|PYTHON|SYSTEMD_|PATH=.*evil)'
exit 0
"""
DRIVER = """
import json, os, subprocess, sys
rules, commands, folder = json.load(sys.stdin)
def run(*words, **more):
    return subprocess.run(words, check=True, **more)
run("mount", "--make-rprivate", "/")
run("cp", "-a", "/etc", f"{folder}/etc")
run("mount", "--bind", f"{folder}/etc", "/etc")
with open("/etc/passwd", "a") as file:
    file.write("train:x:4242:4242::/tmp:/bin/sh\\n")
with open("/etc/shadow", "a") as file:
    file.write("train:*:19000:0:99999:7:::\\n")
with open("/etc/group", "a") as file:
    file.write("train:x:4242:\\n")
with open("/etc/sudoers", "w") as file:
    file.write("Defaults env_reset\\nDefaults secure_path=/usr/sbin:/usr/bin:/sbin:/bin\\n" + rules)
os.chmod("/etc/sudoers", 0o440)
run("visudo", "-c", "-f", "/etc/sudoers", stdout=subprocess.DEVNULL)
as_train = ["setpriv", "--reuid=4242", "--regid=4242", "--clear-groups"]
for command in commands:
    done = subprocess.run([*as_train, "sh", "-c", command], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, cwd="/tmp")
    print(json.dumps([done.returncode, done.stdout, done.stderr]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter, with the doubles in `bin`."""
    path = Path(tempfile.mkdtemp(prefix="relaunch-sudo-"))
    path.chmod(0o755)
    (path / "bin").mkdir()
    for name in ("nvidia-smi", "systemctl"):
        (path / "bin" / name).write_text(DOUBLE.format(gpus=f"{GPU} {OTHER_GPU}"))
        (path / "bin" / name).chmod(0o755)
    yield path
    shutil.rmtree(path)


def attempt(folder: Path, rules: list[str], commands: list[str]) -> list[tuple[int, str, str]]:
    """Run each command as the user of these rules; return exit code, stdout and stderr of each."""
    here = f"{folder}/bin/"
    text = "".join(f"{rule}\n".replace("/usr/bin/", here) for rule in rules)
    asked = [command.replace("/usr/bin/", here) for command in commands]
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", DRIVER],
        input=json.dumps([text, asked, str(folder)]),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [(code, output.replace(here, "/usr/bin/"), errors) for code, output, errors in rows]


def documented_rules() -> list[str]:
    return [line for line in PAGE.splitlines() if line.startswith("train ALL=")]


REBOOT, RESET = "sudo -n /usr/bin/systemctl reboot", "sudo -n /usr/bin/nvidia-smi --gpu-reset"
ALLOWED = {
    REBOOT: "0 systemctl reboot",
    RESET: "0 nvidia-smi --gpu-reset",
    f"{RESET} -i {GPU}": f"0 nvidia-smi --gpu-reset -i {GPU}",
    f"{RESET} -i {GPU},{OTHER_GPU}": f"0 nvidia-smi --gpu-reset -i {GPU},{OTHER_GPU}",
}
REFUSED = [
    "sudo -n -s",
    "sudo -n -i",
    "sudo -n sh -c id",
    "sudo -n -u root true",
    "sudoedit -n /usr/bin/systemctl",
    # other options of the two programs
    "sudo -n /usr/bin/systemctl",
    "sudo -n /usr/bin/systemctl reboot --force",
    "sudo -n /usr/bin/systemctl --root=/tmp reboot",
    "sudo -n /usr/bin/systemctl edit ssh",
    "sudo -n /usr/bin/systemctl poweroff",
    "sudo -n /usr/bin/nvidia-smi",
    "sudo -n /usr/bin/nvidia-smi -f /etc/passwd",
    f"{RESET} -f /etc/passwd",
    f"{RESET} -i 0 -f /etc/passwd",
    f"{RESET} -i 0 --filename=/etc/passwd",
    f"{RESET} -i '0 -f /etc/passwd'",
    f"{RESET} -i 0 -x /etc/passwd",
    f'{RESET} -i "$(printf "0\\n-f\\n/etc/passwd")"',
    f"{RESET} -i 0 ''",
    f"{RESET} -i ../../etc/passwd",
    f"{RESET} -i --filename",
    # another program in the place of the two, by PATH, by a link and by a copy
    "mkdir -p /tmp/evil-$$ && cp /bin/sh /tmp/evil-$$/systemctl &&"
    " PATH=/tmp/evil-$$:$PATH sudo -n systemctl reboot; e=$?; rm -r /tmp/evil-$$; exit $e",
    "mkdir -p /tmp/evil-$$ && ln -s /bin/sh /tmp/evil-$$/systemctl &&"
    " sudo -n /tmp/evil-$$/systemctl reboot; e=$?; rm -r /tmp/evil-$$; exit $e",
    # what the loader, a shell, Python or systemd would read
    f"{REBOOT.replace('-n', '-n LD_PRELOAD=/tmp/x.so')}",
    f"LD_PRELOAD=/tmp/x.so {REBOOT.replace('-n', '-n -E')}",
    f"{REBOOT.replace('-n', '-n SYSTEMD_PAGER=/tmp/x')}",
    f"{REBOOT.replace('-n', '-n -D /')}",
    f"{REBOOT.replace('-n', '-n -R /tmp')}",
    f"{REBOOT.replace('-n', '-n -u train')}",
    # a program that the user can write, as root: the agent itself
    f"sudo -n {sys.executable} /tmp/agent.pyz session",
]


def test_the_documented_commands_run_and_nothing_else_does(folder: Path) -> None:
    rows = attempt(folder, documented_rules(), [*ALLOWED, *REFUSED])
    for (command, says), (code, output, errors) in zip(ALLOWED.items(), rows, strict=False):
        assert (code, output.strip()) == (0, says), (command, errors)
    for command, (code, output, errors) in zip(REFUSED, rows[len(ALLOWED) :], strict=True):
        assert code != 0 and output == "", (command, output)
        assert "sudo" in errors, (command, errors)


def test_variables_of_the_caller_do_not_reach_the_command(folder: Path) -> None:
    given = "LD_PRELOAD= BASH_ENV=/tmp/x PYTHONPATH=/tmp/x SYSTEMD_EDITOR=/tmp/x"
    ((code, output, errors),) = attempt(folder, documented_rules(), [f"{given} {REBOOT}"])
    assert (code, output) == (0, "0 systemctl reboot \n"), errors


def test_a_check_asks_for_what_the_lines_allow_and_runs_nothing(folder: Path) -> None:
    asked = [each.replace("sudo -n", "sudo -n -l") for each in ALLOWED]
    for command, (code, output, errors) in zip(
        asked, attempt(folder, documented_rules(), asked), strict=True
    ):
        assert code == 0 and output.startswith("/usr/bin/"), (command, output, errors)


def test_the_lines_for_each_gpu_allow_one_or_all(folder: Path) -> None:
    """Of an older sudo: what the commands of the page print on the node."""
    found = re.search(r"^echo 'train .*?\|'\n", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    printed = subprocess.run(
        ["sh", "-c", found[0]], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(printed) == 3
    commands = [*ALLOWED, f"{RESET} -i {OTHER_GPU}", *REFUSED]
    rows = attempt(folder, [documented_rules()[0], *printed], commands)
    ran = [command for command, row in zip(commands, rows, strict=True) if row[0] == 0]
    both = f"{RESET} -i {GPU},{OTHER_GPU}"
    assert ran == [*(each for each in ALLOWED if each != both), f"{RESET} -i {OTHER_GPU}"]


def test_the_line_of_release_0_1_0_let_root_write_any_file(folder: Path) -> None:
    """Why the page has another one. Without this, the test above could pass for a typing error."""
    ((code, output, _),) = attempt(folder, [OLD_RULE], [f"{RESET} -i 0 -f /etc/passwd"])
    assert (code, output.strip()) == (0, "0 nvidia-smi --gpu-reset -i 0 -f /etc/passwd")
