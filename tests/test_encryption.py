"""Keys, the codec, and the server that decrypts for the web UI."""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from temporalio.activity import _CompleteAsyncError
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.failure.v1 import Failure
from temporalio.exceptions import ApplicationError

from relaunch.cli.codec_server import CodecServer, CodecServerOptions, choose_options
from relaunch.config import KEYRING_VARIABLE, ConfigError, Settings, describe_settings
from relaunch.converter import MAX_PLAIN_BYTES
from relaunch.encryption import ActivityCodec, UnreadablePayloadError, read_codec
from relaunch.messages.seals import REQUIRED, SEALED
from relaunch.temporal import data_converter

PLANTED = "planted-text"
ORIGIN = "http://127.0.0.1:8233"
TOKEN = "t" * 40


def make_key() -> str:
    return base64.b64encode(os.urandom(32)).decode()


def write_key(path: Path, text: str | None = None, mode: int = 0o600) -> Path:
    path.unlink(missing_ok=True)
    path.write_text(make_key() + "\n" if text is None else text)
    path.chmod(mode)
    return path


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.startswith("RELAUNCH_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    for id in ("first", "second"):
        write_key(folder / id)
    return folder


def settings(keys: Path, active: str | None = "first") -> Settings:
    return Settings(encryption_keys=keys, encryption_key=active)


async def test_the_server_gets_no_text_and_another_process_reads_it(keys: Path) -> None:
    ours, others = data_converter(settings(keys)), data_converter(settings(keys, "second"))
    values = [{"text": PLANTED}, PLANTED * (MAX_PLAIN_BYTES // 10), None]
    payloads = await ours.encode(values)
    assert all(PLANTED.encode() not in one.SerializeToString() for one in payloads)
    assert {one.metadata["encryption-key-id"] for one in payloads} == {b"first"}
    assert payloads[0].data != (await ours.encode(values))[0].data, "nonces differ"
    assert await others.decode(payloads) == values
    # What was written without keys is read, and a process that only has keys to read writes so.
    plain = await data_converter(Settings()).encode(values)
    assert await ours.decode(plain) == values
    reader = data_converter(settings(keys, "none"))
    assert await reader.encode(values) == plain
    assert await reader.decode(payloads) == values


async def test_failures_keep_their_message_and_stack_from_the_server(keys: Path) -> None:
    converter, failure = data_converter(settings(keys)), Failure()
    try:
        raise ApplicationError(PLANTED, {"detail": PLANTED}, type="JobFailed")
    except ApplicationError as error:
        await converter.encode_failure(error, failure)
    text = failure.SerializeToString()
    assert PLANTED.encode() not in text and b"test_encryption.py" not in text
    assert b"JobFailed" in text, "types are read by programs, and stay readable"
    read = await converter.decode_failure(failure)
    assert isinstance(read, ApplicationError)
    assert (read.message, read.details) == (PLANTED, ({"detail": PLANTED},))
    plain = Failure()
    await data_converter(Settings()).encode_failure(ApplicationError(PLANTED), plain)
    assert plain.message == PLANTED


async def test_a_missing_or_wrong_key_is_named_and_found_once_there(
    keys: Path,
) -> None:
    (payload,) = await data_converter(settings(keys, "second")).encode([PLANTED])
    content = (keys / "second").read_text()
    (keys / "second").unlink()
    converter = data_converter(settings(keys))
    with pytest.raises(UnreadablePayloadError, match=rf"key 'second', which folder {keys} does"):
        await converter.decode([payload])
    write_key(keys / "second")
    with pytest.raises(UnreadablePayloadError, match="written with another key of this id"):
        await converter.decode([payload])
    write_key(keys / "second", content)
    assert await converter.decode([payload]) == [PLANTED]
    with pytest.raises(UnreadablePayloadError, match="key 'second', and there are no keys here"):
        await data_converter(Settings()).decode([payload])
    damaged = Payload(metadata=dict(payload.metadata), data=payload.data[:-1] + b"\0\0")
    for bad in (damaged, Payload(metadata=dict(payload.metadata), data=b"short")):
        with pytest.raises(UnreadablePayloadError, match="or is damaged"):
            await converter.decode([bad])
    strange = Payload(metadata={**payload.metadata, "encryption-key-id": b"../second"})
    with pytest.raises(UnreadablePayloadError, match=r"'\.\./second', which"):
        await converter.decode([strange])


async def test_an_activity_that_cannot_be_read_is_left_and_not_failed(keys: Path) -> None:
    (payload,) = await data_converter(settings(keys)).encode([PLANTED])
    said: list[str] = []
    codec = ActivityCodec(read_codec(Settings()), said.append)
    with pytest.raises(_CompleteAsyncError):
        await codec.decode([payload])
    assert "key 'first'" in said[0]
    assert await ActivityCodec(read_codec(settings(keys)), said.append).decode([payload])


async def test_a_plain_activity_is_left_where_keys_are_required(
    keys: Path,
) -> None:
    required = settings(keys).model_copy(update={"encryption_required": True})
    (plain,) = await data_converter(Settings()).encode([PLANTED])
    plain.metadata[SEALED] = b"1"
    said: list[str] = []
    with pytest.raises(_CompleteAsyncError):
        await ActivityCodec(read_codec(required), said.append).decode([plain])
    assert "its input is not encrypted" in said[0]
    (payload,) = await data_converter(required).encode([PLANTED])
    (read,) = await ActivityCodec(read_codec(required), said.append).decode([payload])
    assert SEALED in read.metadata and REQUIRED in read.metadata
    # A process that does not ask for it reads both.
    assert await data_converter(settings(keys)).decode([payload, plain]) == [PLANTED, PLANTED]
    for active in (None, "none"):
        with pytest.raises(ConfigError, match="REQUIRED is set, and nothing is encrypted"):
            read_codec(required.model_copy(update={"encryption_key": active}))


async def test_keys_may_be_in_a_variable_that_nothing_prints(
    monkeypatch: pytest.MonkeyPatch, keys: Path
) -> None:
    key = (keys / "first").read_text().strip()
    (payload,) = await data_converter(settings(keys)).encode([PLANTED])
    monkeypatch.setenv(KEYRING_VARIABLE, f"other:{make_key()} first:{key}")
    chosen = Settings(encryption_key="first")
    assert await data_converter(chosen).decode([payload]) == [PLANTED]
    assert key not in str(describe_settings(chosen)) and key not in repr(chosen)
    with pytest.raises(ConfigError, match="are both set: expected one"):
        read_codec(settings(keys))
    for bad in (key, f"first:{key[4:]}", f"a/b:{key}"):
        monkeypatch.setenv(KEYRING_VARIABLE, bad)
        with pytest.raises(ConfigError, match=rf"{KEYRING_VARIABLE}.*openssl") as caught:
            read_codec(chosen)
        assert key not in str(caught.value)


def test_keys_that_cannot_be_used_are_one_sentence(tmp_path: Path, keys: Path) -> None:
    def refusal(active: str | None = "first", folder: Path | None = keys) -> str:
        with pytest.raises(ConfigError) as caught:
            read_codec(Settings(encryption_keys=folder, encryption_key=active))
        return str(caught.value)

    assert refusal(None).endswith("expected one of first, second, none")
    assert "'third', which folder" in refusal("third")
    assert "there are no keys: set RELAUNCH_ENCRYPTION_KEYS" in refusal(folder=None)
    assert f"{tmp_path / 'none'}, which cannot be read" in refusal(None, tmp_path / "none")
    write_key(keys / "first", mode=0o604)
    assert "has mode 0604, expected 0600" in refusal()
    for text in ("", "short", make_key()[:20], "x" * 2000):
        write_key(keys / "first", text)
        assert refusal().endswith("as `openssl rand -base64 32` writes them")
        assert not text or text not in refusal()
    (keys / "first").unlink()
    os.mkfifo(keys / "first", 0o600)
    assert "is not a file" in refusal()
    assert read_codec(Settings()).encrypt(Payload(data=b"x")).data == b"x"
    assert not read_codec(Settings(encryption_key="none")).has_keys


@pytest.fixture
def served(keys: Path) -> Iterator[tuple[CodecServer, list[str]]]:
    said: list[str] = []
    options = CodecServerOptions("127.0.0.1", 0, ORIGIN, TOKEN)
    with CodecServer(read_codec(settings(keys)), options, said.append) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.01))
        thread.start()
        yield server, said
        server.shutdown()
        thread.join()


def call(
    server: CodecServer, path: str, payloads: object, method: str = "POST", **headers: str
) -> tuple[int, Any, Any]:
    """Return the status, what was answered, and its headers."""
    body = payloads if isinstance(payloads, bytes) else json.dumps(payloads).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.server_port}/{path}", body, headers, method=method
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"null"), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


async def test_the_codec_server_converts_for_one_page_and_one_token(
    served: tuple[CodecServer, list[str]], keys: Path
) -> None:
    server, said = served
    plain = await data_converter(Settings()).encode([{"text": PLANTED}])
    long = await data_converter(settings(keys)).encode([PLANTED * (MAX_PLAIN_BYTES // 10)])
    ours = MessageToDict(Payloads(payloads=plain))

    status, coded, _ = call(server, f"{TOKEN}/encode", ours, Origin=ORIGIN)
    assert status == 200 and coded != ours
    status, read, headers = call(server, f"{TOKEN}/decode", coded, Origin=ORIGIN)
    assert (status, read) == (200, ours)
    assert headers["Access-Control-Allow-Origin"] == ORIGIN
    bearer = {"Authorization": f"Bearer {TOKEN}", "X-Namespace": "default"}
    assert call(server, "decode", coded, **bearer)[:2] == (200, ours)
    # Long ones are compressed before they are encrypted, and the web UI knows only JSON.
    status, read, _ = call(server, f"{TOKEN}/decode", MessageToDict(Payloads(payloads=long)))
    assert base64.b64decode(read["payloads"][0]["metadata"]["encoding"]) == b"json/plain"
    assert PLANTED.encode() in base64.b64decode(read["payloads"][0]["data"])

    for path, more in (
        ("decode", {}),
        (f"{TOKEN[:-1]}/decode", {}),
        ("decode", {"Authorization": f"Bearer {TOKEN}x"}),
        (f"{TOKEN}/x/decode", {}),
    ):
        assert call(server, path, coded, **more)[0] == 401
    for other in ("http://127.0.0.1:8234", "null", "http://127.0.0.1:8233.evil.example"):
        status, _, headers = call(server, f"{TOKEN}/decode", coded, Origin=other)
        assert status == 403 and "Access-Control-Allow-Origin" not in headers
        status, _, headers = call(server, "x/decode", {}, "OPTIONS", Origin=other)
        assert status == 403 and "Access-Control-Allow-Origin" not in headers
    status, _, headers = call(server, f"{TOKEN}/decode", {}, "OPTIONS", Origin=ORIGIN)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, ORIGIN)
    assert "X-Namespace" in headers["Access-Control-Allow-Headers"]

    assert call(server, f"{TOKEN}/other", coded)[0] == 404
    for bad in (b"{", b"null", b"[1]", b'{"payloads": 3}', b"[" * 100_000):
        assert call(server, f"{TOKEN}/decode", bad)[0] == 400
    assert said == []
    # One that cannot be read does not keep the others from being shown.
    lost = await data_converter(settings(keys, "second")).encode([1])
    (keys / "second").unlink()
    both = MessageToDict(Payloads(payloads=[*lost, *plain]))
    assert call(server, f"{TOKEN}/decode", both)[:2] == (200, both)
    assert len(said) == 1 and "key 'second'" in said[0]
    assert call(server, f"{TOKEN}/decode", both)[:2] == (200, both) and len(said) == 1


def test_the_codec_server_is_not_reached_without_tls(tmp_path: Path) -> None:
    chosen = Settings(state=tmp_path / "state")

    def choose(listen: str = "127.0.0.1:0", ui: str | None = ORIGIN, **files: Path) -> Any:
        return choose_options(
            chosen,
            listen,
            ui,
            files.get("token"),
            files.get("certificate"),
            files.get("key"),
        )

    made = choose()
    file = tmp_path / "state" / "codec-token"
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text().strip() == made.token
    assert choose().token == made.token, "browsers keep it"
    assert choose(ui="HTTP://127.0.0.1:8233/namespaces").origin == ORIGIN
    for listen in ("0.0.0.0:8081", "[::]:8081"):
        with pytest.raises(ConfigError, match="which others can reach without TLS"):
            choose(listen)
    for listen in ("8081", "localhost:8081", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="expected an IP address and a port"):
            choose(listen)
    with pytest.raises(ConfigError, match="--ui is not given"):
        choose(ui=None)
    with pytest.raises(ConfigError, match=r"--ui is '\*'"):
        choose(ui="*")
    for text, mode, words in (("short", 0o600, "22 to 200"), (TOKEN, 0o644, "has mode 0644")):
        with pytest.raises(ConfigError, match=words):
            choose(token=write_key(tmp_path / "token", text, mode))
    with pytest.raises(ConfigError, match="expected both, or none"):
        choose(key=file)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_codec_server_speaks_tls(tmp_path: Path, keys: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=codec"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    options = CodecServerOptions("127.0.0.1", 0, ORIGIN, TOKEN, certificate, key)
    codec = read_codec(settings(keys))
    with CodecServer(codec, options, print) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.01))
        thread.start()
        with urllib.request.urlopen(
            f"https://127.0.0.1:{server.server_port}/{TOKEN}/decode",
            b'{"payloads": []}',
            context=ssl.create_default_context(cafile=str(certificate)),
        ) as answer:
            assert json.loads(answer.read()) == {}
        server.shutdown()
        thread.join()
    with pytest.raises(ConfigError, match="cannot be used"):
        CodecServer(codec, replace(options, certificate=keys / "first"), print)
