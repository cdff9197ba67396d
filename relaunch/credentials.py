"""TLS and API keys for the way to the server: what is configured, and why a connection failed.

The configuration is Temporal's own (`temporalio.envconfig`): TEMPORAL_* variables and profiles of
temporal.toml. What the SDK says of a failure is written for its developers; `explain_failure` makes
one sentence of it, which names the file or variable concerned.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaunch.config import ConfigError
from relaunch.text import format_time

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from temporalio.envconfig import ClientConfigProfile, ClientConnectConfig, DataSource

PREFIX = "TEMPORAL_"
CONFIG_FILE = "TEMPORAL_CONFIG_FILE"
PROFILE = "TEMPORAL_PROFILE"
EXPIRY_NOTICE = timedelta(days=14)
"""How long before a certificate ends it is reported: time to get another one from people."""
RETRYABLE = ("Unavailable", "DeadlineExceeded", "ResourceExhausted", "Aborted")
"""Codes of gRPC with which a server that is there may refuse for a while."""
REFUSED_LOGIN = ("Unauthenticated", "PermissionDenied")
BY_CERTIFICATE = (400, 495, 496)
"""How nginx answers a client certificate that it does not accept: its own 495 and 496 become 400
unless an error page says otherwise."""
AWAY = (502, 503, 504)


class ServerUnavailable(ConfigError):
    """The server does not answer now, and may do so later without any change here."""


@dataclass(frozen=True, slots=True)
class Item:
    """A certificate or key of the configuration."""

    what: str
    origin: str
    """The variable or the key of temporal.toml that sets it."""
    path: Path | None
    """None: its text is in the configuration."""
    data: bytes = field(repr=False)

    def __str__(self) -> str:
        where = self.origin if self.path is None else f"{self.path} ({self.origin})"
        return f"{self.what} {where}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the configuration says of the server and of how to prove oneself to it."""

    config: ClientConnectConfig = field(repr=False)  # it has the API key
    certificate: Item | None = None
    key: Item | None = None
    authority: Item | None = None
    """The CA certificates that the server's certificate is checked against; None: the system's."""
    server_name: str = ""
    """The name expected in the server's certificate; empty: the one in the address."""
    server_name_origin: str = ""
    api_key_origin: str = ""
    """What sets the API key; empty: there is none."""

    @property
    def has_tls(self) -> bool:
        return bool(self.config.get("tls"))


ITEMS = (
    ("client_cert", "client certificate", "client_cert"),
    ("client_private_key", "client key", "client_key"),
    ("server_root_ca_cert", "CA certificate", "server_ca_cert"),
)
"""The field of the SDK's profile, what it is, and its key in temporal.toml; the variable is
TEMPORAL_TLS_ and that key."""


def read_credentials(environment: Mapping[str, str] | None = None) -> Credentials:
    """Read Temporal's configuration; a blank variable counts as unset.

    Raises:
        ConfigError: The configuration, or a file that it names, cannot be used.
    """
    from temporalio.envconfig import ClientConfigProfile

    given = os.environ if environment is None else environment
    ours = {name: value for name, value in given.items() if not _is_blank(name, value)}
    file = _find_file(ours)
    if (named := ours.get(CONFIG_FILE)) and not os.access(named, os.R_OK):
        # The SDK takes one that is missing for an empty one.
        raise ConfigError(f"{CONFIG_FILE} is {named!r}: expected a file that can be read")
    try:
        profile = ClientConfigProfile.load(override_env_vars=ours)
    except Exception as error:
        # The SDK's ConfigError is a bare Exception subclass of its native part.
        where = f" of {file}" if file.exists() else ""
        raise ConfigError(
            f"the Temporal configuration{where} cannot be used: {_join(error)}"
        ) from None
    return _collect(profile, ours, file)


def _is_blank(name: str, value: str) -> bool:
    return name.startswith(PREFIX) and not value.strip()


def _find_file(environment: Mapping[str, str]) -> Path:
    """Return where the SDK looks for temporal.toml."""
    if named := environment.get(CONFIG_FILE):
        return Path(named)
    home = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home, "temporalio", "temporal.toml")


def _join(error: Exception) -> str:
    """Return the text of an error in one line, without the picture that a TOML parser draws."""
    lines = [line.strip() for line in str(error).splitlines()]
    return ", ".join(line for line in lines if line and not re.match(r"\d*\s*\|", line))


def _collect(
    profile: ClientConfigProfile, environment: Mapping[str, str], file: Path
) -> Credentials:
    def find_origin(variable: str, key: str) -> str:
        if variable in environment:
            return variable
        return f"{key} of profile {environment.get(PROFILE, 'default')} in {file}"

    items: dict[str, Item] = {}
    server_name, server_name_origin = "", ""
    if (tls := profile.tls) is not None and not tls.disabled:
        if tls.disabled is None and (switch := environment.get("TEMPORAL_TLS")):
            raise ConfigError(f"TEMPORAL_TLS is {switch!r}: expected true or false")
        for name, what, key in ITEMS:
            source: DataSource | None = getattr(tls, name)
            if source is not None:
                kind = "path" if isinstance(source, Path) else "data"
                variable = f"TEMPORAL_TLS_{key.upper()}_{kind.upper()}"
                items[name] = _read_item(what, find_origin(variable, f"{key}_{kind}"), source)
        texts: dict[str, Any] = {name: item.data for name, item in items.items()}
        profile = replace(profile, tls=replace(tls, **texts))
        if tls.server_name:
            server_name = tls.server_name
            server_name_origin = find_origin("TEMPORAL_TLS_SERVER_NAME", "server_name")
    certificate, secret = items.get("client_cert"), items.get("client_private_key")
    for one, other in ((certificate, "CLIENT_KEY"), (secret, "CLIENT_CERT")):
        if one is not None and (certificate is None or secret is None):
            raise ConfigError(
                f"{one} is set alone: expected TEMPORAL_TLS_{other}_PATH as well, since a client "
                "certificate and its key belong together"
            )
    api_key_origin = ""
    if profile.api_key:
        api_key_origin = find_origin("TEMPORAL_API_KEY", "api_key")
    elif "authorization" in {name.lower() for name in profile.grpc_meta}:
        api_key_origin = find_origin("TEMPORAL_GRPC_META_AUTHORIZATION", "authorization")
    return Credentials(
        profile.to_client_connect_config(),
        certificate,
        secret,
        items.get("server_root_ca_cert"),
        server_name,
        server_name_origin,
        api_key_origin,
    )


def _read_item(what: str, origin: str, source: DataSource) -> Item:
    if not isinstance(source, Path):
        return Item(what, origin, None, source.encode() if isinstance(source, str) else source)
    try:
        return Item(what, origin, source, source.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{Item(what, origin, source, b'')} cannot be read: {error.strerror}; expected a PEM "
            "file"
        ) from None


def find_defect(credentials: Credentials, now: datetime) -> str | None:
    """Return what is wrong with the client certificate or its key; None: nothing that shows here.

    Args:
        credentials: What is configured.
        now: The time, with its zone.
    """
    if credentials.certificate is None or credentials.key is None:
        return None
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if not (chain := read_certificates(credentials.certificate)):
        return f"{credentials.certificate} has no certificate: expected PEM text"
    try:
        secret = load_pem_private_key(credentials.key.data, None)
    except TypeError:
        return f"{credentials.key} is encrypted: expected a key without a passphrase"
    except (ValueError, UnsupportedAlgorithm):
        return f"{credentials.key} is not a private key: expected PEM text"
    if secret.public_key() != chain[0].public_key():
        return (
            f"{credentials.key} does not belong to {credentials.certificate}: expected the key of "
            f"{describe_certificate(chain[0])}"
        )
    for one in chain:
        if fault := _find_validity_fault(one, now):
            return f"{credentials.certificate} {fault}: expected one that is valid now"
    return None


def _find_validity_fault(certificate: Certificate, now: datetime) -> str | None:
    if now > certificate.not_valid_after_utc:
        return f"ended at {format_time(certificate.not_valid_after_utc)}"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {format_time(certificate.not_valid_before_utc)}"
    return None


def read_certificates(item: Item) -> list[Certificate]:
    """Return the certificates in PEM text; none if it has none, or one that cannot be parsed."""
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(item.data)
    except ValueError:
        return []


def describe_certificate(certificate: Certificate) -> str:
    subject, issuer = (
        one.rfc4514_string() or "no name" for one in (certificate.subject, certificate.issuer)
    )
    return f"{subject}, issued by {issuer}"


@dataclass(frozen=True, slots=True)
class Expiry:
    """When a certificate of the configuration ends."""

    item: Item
    at: datetime


def find_expiry(credentials: Credentials) -> Expiry | None:
    """Return which certificate of the configuration ends first, the client's or a CA's.

    Of several CA certificates only the last to end counts: a file with an old and a new one is how
    a CA is replaced.
    """
    ends: list[Expiry] = []
    if (mine := credentials.certificate) is not None:
        dates = [one.not_valid_after_utc for one in read_certificates(mine)]
        ends += [Expiry(mine, min(dates))] if dates else []
    if (ca := credentials.authority) is not None:
        dates = [one.not_valid_after_utc for one in read_certificates(ca)]
        ends += [Expiry(ca, max(dates))] if dates else []
    return min(ends, key=lambda one: one.at, default=None)


def read_server_expiry(target: str, server_name: str = "") -> Expiry | None:
    """Ask a server with TLS for its certificate, without trusting it, and return when it ends.

    Return None if it shows none within 3 s: some want to see the client's first.
    """
    import ssl

    host, _, port = target.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), 3.0) as raw,
            context.wrap_socket(raw, server_hostname=server_name or host.strip("[]")) as wrapped,
        ):
            der = wrapped.getpeercert(binary_form=True)
    except (OSError, ValueError):
        return None
    from cryptography.x509 import load_der_x509_certificate

    if der is None:
        return None
    item = Item("the certificate of the server at", target, None, b"")
    return Expiry(item, load_der_x509_certificate(der).not_valid_after_utc)


def describe_expiry(expiry: Expiry, now: datetime) -> str | None:
    """Return a sentence about a certificate that has ended or ends soon; None if it does not."""
    if now > expiry.at:
        return f"{expiry.item} ended at {format_time(expiry.at)}"
    if expiry.at - now < EXPIRY_NOTICE:
        return f"{expiry.item} ends at {format_time(expiry.at)}"
    return None


def explain_failure(
    error: str, target: str, credentials: Credentials, now: datetime
) -> ConfigError:
    """Return the error to raise for a connection that the SDK did not get.

    It is a ServerUnavailable if the same configuration may be enough later.

    Args:
        error: The SDK's text.
        target: The address.
        credentials: What was presented there.
        now: The time, with its zone.
    """
    server = f"the Temporal server at {target}"
    if "tcp connect error" in error or "dns error" in error:
        found = re.search(r'(?:message|error): "([^"]+)"', error)
        why = found[1] if found else "it does not answer"
        return ServerUnavailable(
            f"{server} cannot be reached: {why}; expected the host:port of a running server"
        )
    if invalid := re.search(r"InvalidCertificate\((\w+)(.*)", error):
        return ConfigError(_explain_server_certificate(target, invalid[1], invalid[2], credentials))
    status = re.search(r'Status \{ code: (\w+), message: "((?:[^"\\]|\\.)*)"', error)
    answer = explain_answer(status[1], status[2], target, credentials) if status else None
    if isinstance(answer, ServerUnavailable):
        return answer
    if defect := find_defect(credentials, now):
        return ConfigError(f"{defect} ({server})")
    if alert := re.search(r"(?:AlertReceived\(|received fatal alert: )(\w+)", error):
        return ConfigError(_explain_certificate(server, f"TLS alert {alert[1]}", credentials))
    if "InvalidContentType" in error or "CorruptMessage" in error:
        return ConfigError(
            f"{server} does not speak TLS, which the configuration demands: expected another port, "
            "or no TEMPORAL_TLS… and no API key"
        )
    if answer is not None:
        return answer
    if re.search("connection closed|ConnectionReset|BrokenPipe|UnexpectedEof", error):
        if credentials.has_tls and not credentials.certificate and not credentials.api_key_origin:
            # How OpenSSL refuses in TLS 1.3: its alert comes together with the end.
            why = "it closed the connection"
            return ConfigError(_explain_certificate(server, why, credentials))
        accepts = f" that accepts {credentials.certificate}" if credentials.certificate else ""
        return ServerUnavailable(
            f"{server} closed the connection: expected a running server{accepts}"
        )
    if status is None:
        return ConfigError(
            f"{server} cannot be used: {_join(Exception(error))}; expected the host:port of a "
            "running server"
        )
    if not credentials.has_tls and "http2 error" in error:
        return ConfigError(
            f"{server} does not answer as one without TLS does: if it has TLS, set TEMPORAL_TLS to "
            "true, or TEMPORAL_TLS_SERVER_CA_CERT_PATH to its CA"
        )
    return ConfigError(f"{server} cannot be used: {status[2]} ({status[1]})")


def explain_answer(
    code: str, message: str, target: str, credentials: Credentials
) -> ConfigError | None:
    """Return what an answer in place of the server's own means; None if it means nothing here.

    Args:
        code: The code of gRPC, as the SDK writes it: `Unauthenticated`.
        message: Its message. That of a proxy which answered in HTTP has the status.
        target: The address.
        credentials: What was presented there.
    """
    server = f"the Temporal server at {target}"
    http = re.search(r"response with status: ((\d{3})[^\"\\]*)", message)
    number = int(http[2]) if http else 0
    said = http[1].strip() if http else message or code
    if number in AWAY:
        return ServerUnavailable(
            f"{server} is behind a proxy that does not reach it: {said}; expected a running server"
        )
    if code in RETRYABLE and not number:
        return ServerUnavailable(f"{server} refuses for now: {said} ({code})")
    if number in BY_CERTIFICATE and credentials.has_tls:
        return ConfigError(_explain_certificate(server, said, credentials))
    if code not in REFUSED_LOGIN and number not in (401, 403):
        return None if not number else ConfigError(f"{server} cannot be used: {said}")
    if credentials.api_key_origin:
        return ConfigError(
            f"{server} refused the API key: {said}; expected one that it accepts in "
            f"{credentials.api_key_origin}"
        )
    if credentials.certificate is not None:
        expected = "one that it lets in, or TEMPORAL_API_KEY"
        return ConfigError(_explain_certificate(server, said, credentials, expected))
    return ConfigError(
        f"{server} demands that you prove who you are: {said}; expected TEMPORAL_API_KEY, or a "
        "client certificate in TEMPORAL_TLS_CLIENT_CERT_PATH with its key in "
        "TEMPORAL_TLS_CLIENT_KEY_PATH"
    )


def _explain_certificate(
    server: str,
    said: str,
    credentials: Credentials,
    expected: str = "one of a CA that it trusts",
) -> str:
    mine = credentials.certificate
    if mine is None:
        return (
            f"{server} demands a client certificate: {said}; expected one in "
            "TEMPORAL_TLS_CLIENT_CERT_PATH and its key in TEMPORAL_TLS_CLIENT_KEY_PATH"
        )
    chain = read_certificates(mine)
    which = f", which is of {describe_certificate(chain[0])}" if chain else ""
    return f"{server} refused {mine}{which}: {said}; expected {expected}"


def _explain_server_certificate(
    target: str, kind: str, details: str, credentials: Credentials
) -> str:
    certificate = f"the certificate of the Temporal server at {target}"
    ca = credentials.authority
    if kind.startswith("NotValidForName"):
        names = ", ".join(re.findall(r'(?:DnsName|IpAddress)\(\\?"?([^"\\)]+)', details)[1:])
        expected = credentials.server_name or target.rpartition(":")[0]
        origin = credentials.server_name_origin or "the address"
        return (
            f"{certificate} is for {names or 'no name'}, and not for {expected!r} of {origin}: "
            "expected one of its names in TEMPORAL_TLS_SERVER_NAME"
        )
    if kind.startswith("Expired"):
        after = re.search(r"not_after: UnixTime\((\d+)\)", details)
        when = f" at {format_time(datetime.fromtimestamp(int(after[1]), UTC))}" if after else ""
        return f"{certificate} ended{when}: expected the server to have a new one"
    if kind.startswith("NotValidYet"):
        return f"{certificate} is not valid yet: expected correct clocks on both sides"
    if kind in ("UnknownIssuer", "BadSignature"):
        if ca is not None and not read_certificates(ca):
            return f"{ca} has no certificate: expected the PEM text of the CA of {target}"
        if ca is not None:
            names = "; ".join(one.subject.rfc4514_string() for one in read_certificates(ca))
            return (
                f"{certificate} is not issued by {ca}, which is of {names}: expected the CA "
                "that issued it"
            )
        return (
            f"{certificate} is not issued by a CA of this system: expected its CA in "
            "TEMPORAL_TLS_SERVER_CA_CERT_PATH"
        )
    return f"{certificate} cannot be used: {kind}; expected the server to have another one"
