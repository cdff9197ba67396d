"""known_hosts, read as OpenSSH reads it; its own ssh-keygen says what is in the files."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from relaunch.backends.ssh.known_hosts import (
    KeyStatus,
    algorithms,
    append,
    fingerprint,
    judge,
    kind,
    line_for,
    name_of,
    read,
)

ONE, TWO = (b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + letter * 32 for letter in (b"1", b"2"))
RSA = b"\0\0\0\x07ssh-rsa" + b"\0\0\0\x01\3" * 8


def line(names: str, blob: bytes = ONE) -> str:
    return (
        f"{names} {'ssh-rsa' if blob is RSA else 'ssh-ed25519'} {base64.b64encode(blob).decode()}"
    )


@pytest.mark.parametrize(
    ("lines", "host", "port", "standing"),
    [
        ([line("gpu-01")], "gpu-01", 22, KeyStatus.KNOWN),
        ([line("gpu-01")], "GPU-01", 22, KeyStatus.KNOWN),
        ([line("gpu-01,10.0.0.11")], "10.0.0.11", 22, KeyStatus.KNOWN),
        ([line("gpu-*")], "gpu-77", 22, KeyStatus.KNOWN),
        ([line("gpu-0?")], "gpu-77", 22, KeyStatus.UNKNOWN),
        ([line("gpu-*,!gpu-07")], "gpu-07", 22, KeyStatus.UNKNOWN),
        ([line("[gpu-01]:2222")], "gpu-01", 2222, KeyStatus.KNOWN),
        ([line("[gpu-01]:2222")], "gpu-01", 22, KeyStatus.UNKNOWN),
        ([line("gpu-01")], "gpu-01", 2222, KeyStatus.KNOWN),  # as OpenSSH has it
        ([line("gpu-01", TWO)], "gpu-01", 2222, KeyStatus.UNKNOWN),
        ([line("gpu-01", TWO)], "gpu-01", 22, KeyStatus.CHANGED),
        ([line("gpu-01", RSA)], "gpu-01", 22, KeyStatus.CHANGED),
        ([line("gpu-01", TWO), line("gpu-01")], "gpu-01", 22, KeyStatus.KNOWN),
        ([line("gpu-01"), "@revoked " + line("*")], "gpu-01", 22, KeyStatus.REVOKED),
        (["@revoked " + line("*", TWO), line("gpu-01")], "gpu-01", 22, KeyStatus.KNOWN),
        (["@cert-authority " + line("gpu-01")], "gpu-01", 22, KeyStatus.UNKNOWN),
        (
            ["# " + line("gpu-01"), "", "garbage", "gpu-01 ssh-ed25519 ???"],
            "gpu-01",
            22,
            KeyStatus.UNKNOWN,
        ),
        ([line("|1|not|base64"), line("|1|x")], "gpu-01", 22, KeyStatus.UNKNOWN),
        (["\t" + line("gpu-01").replace(" ", "\t") + " a comment"], "gpu-01", 22, KeyStatus.KNOWN),
    ],
)
def test_a_key_is_judged_by_the_lines_that_speak_of_its_host(
    tmp_path: Path, lines: list[str], host: str, port: int, standing: KeyStatus
) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("\n".join(lines))
    assert judge(read([str(tmp_path / "absent"), str(file)]), host, port, ONE).standing is standing


def test_an_expected_host_key_is_of_the_same_kind_if_any(
    tmp_path: Path,
) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"{line('gpu-01', RSA)}\n{line('gpu-01', TWO)}\n")
    entries = read([str(file)])
    entry = judge(entries, "gpu-01", 22, ONE).entry
    assert entry is not None
    assert (entry.file, entry.line, entry.blob) == (str(file), 2, TWO)
    assert algorithms(entries, "gpu-01") == ("ssh-rsa", "ssh-ed25519")
    assert (kind(RSA), kind(ONE), kind(b"\0\0\0\x13ecdsa-sha2-nistp256")) == (
        "RSA",
        "ED25519",
        "ECDSA",
    )


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("port", [22, 2222])
def test_a_line_that_is_added_is_found_by_openssh(tmp_path: Path, port: int, hashed: bool) -> None:
    file = tmp_path / "folder" / "known_hosts"
    append(str(file), line("other"))
    file.write_text(file.read_text().rstrip("\n"))  # the last writer did not end the line
    append(str(file), line_for("gpu-01", port, "ssh-ed25519", ONE, hashed))
    assert file.read_text().count("\n") == 2
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    words = ["ssh-keygen", "-F", name_of("gpu-01", port), "-f", str(file)]
    assert (
        base64.b64encode(ONE).decode()
        in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    )
    assert judge(read([str(file)]), "gpu-01", port, ONE).standing is KeyStatus.KNOWN
    words = ["ssh-keygen", "-lf", str(file)]
    assert (
        fingerprint(ONE) in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    )
