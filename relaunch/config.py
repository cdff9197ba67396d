"""Settings that the operator can change: read once from the environment and one file, then fixed.

How to reach Temporal is not configured here but by Temporal's own configuration (see `connect`).
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

PREFIX = "RELAUNCH_"
FILE_VARIABLE = "RELAUNCH_SETTINGS"
MAX_BYTES = 1 << 20
DEFAULT_FILE = "relaunch.toml"
NO_WARM = "RELAUNCH_NO_WARM"
"""Makes the command line start without the help of a running `up`, to measure or debug."""
KEYRING_VARIABLE = "RELAUNCH_ENCRYPTION_KEYRING"
"""Keys themselves, `ID:KEY` separated by blanks, where there are no files for them. Not a setting:
no settings file may have it, and nothing prints it."""
NO_KEY = "none"
"""As the setting `encryption_key`: keys are there to read, and what is written is not encrypted."""
OF_RANKS = (
    "RELAUNCH_JOB",
    "RELAUNCH_GENERATION",
    "RELAUNCH_TOKEN",
    "RELAUNCH_PROGRESS_FILE",
    "RELAUNCH_NODE",
    "RELAUNCH_NODE_STATE",
    "RELAUNCH_AGENT_STATE",
    "RELAUNCH_WARM_DELAY",
)
"""Variables that relaunch, or a test, sets for ranks and agents. They are not settings, and they
are not rejected as unknown when a rank runs the command line."""


class ConfigError(Exception):
    """Configuration that cannot be used.

    The message is one sentence: the item, its value, what is expected.
    """


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Path = Path(".relaunch")
    """Folder of the embedded server, of local nodes and of archived incidents."""
    jobs: int = Field(default=100, ge=1, le=10_000)
    """How many jobs this worker watches at once; each job holds one activity slot until it ends."""
    task_queue: str = Field(default="relaunch", min_length=1)
    """The task queue of workers, which the command line uses as well."""
    build: str = Field(default="", max_length=100)
    """What the server calls this installation's build; default: its release. An image that
    contains other changes needs another id."""
    graceful_shutdown: float = Field(default=5.0, ge=0)
    """Seconds that running activities are given to finish when the worker is stopped."""
    answer_within: float = Field(default=5.0, gt=0)
    """Seconds to wait for an answer that a node can give at once; a node that takes longer counts
    as unreachable for that call."""
    metrics: str | None = None
    """IP address and port on which the worker serves Prometheus metrics."""
    web_ui: str | None = None
    """Address of Temporal's web UI as people reach it, for links in notices: `http://ui:8080`."""
    encryption_keys: Path | None = None
    """Folder of the keys with which payloads are encrypted before Temporal's server gets them: a
    file for each, named by the key's id, with 32 bytes in base64. All of them can decrypt."""
    encryption_key: str | None = Field(default=None, max_length=63)
    """Id of the key that encrypts what is written from now on; `none`: nothing is encrypted, and
    keys are only there to read."""
    encryption_required: bool = False
    """Whether only what is encrypted is obeyed and believed: workflows and activities with another
    input are not run, messages without a key are refused, and answers to activities count as none
    (docs/encryption.md)."""
    search_attributes: Literal["all", "ids"] = "all"
    """What the search attributes of jobs that are submitted from here show; they are never
    encrypted. `ids`: phase, generation and whether there is an incident, but no cause, strategy or
    nodes."""
    temporal_bin: Path | None = None
    """Temporal's program, which `up` and `run` start; default: the one installed with relaunch. A
    database that another version wrote needs that version's."""
    ssh_key: Path | None = None
    """The SSH key that signs your orders, where a fleet file says who may do what; its `.pub` file
    if ssh-agent has it. Read by the command line only."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Of the worker's log."""
    fleets: tuple[Path, ...] = ()
    """Fleet files. In the environment they are separated by `:`, as in PATH."""

    @property
    def hides_causes(self) -> bool:
        return self.search_attributes == "ids"

    @field_validator("fleets", mode="before")
    @classmethod
    def _as_in_path(cls, value: Any) -> Any:
        return (
            [item for item in value.split(os.pathsep) if item] if isinstance(value, str) else value
        )

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    @field_validator("web_ui")
    @classmethod
    def _check_web_ui(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", value):
            raise ValueError("expected the web UI's address, such as http://ui.example.com:8080")
        return value

    @field_validator("metrics")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None and not (
            re.fullmatch(r".+:\d{1,5}", value) and int(value.rpartition(":")[2]) < 2**16
        ):
            raise ValueError("expected host:port, such as 127.0.0.1:9464")
        return value


def find_trace_endpoint() -> tuple[str, str] | None:
    """Return where traces of incidents are sent, and the variable that says so; None: nowhere.

    The variables are OpenTelemetry's own. It ignores one that is blank.

    Raises:
        ConfigError: the endpoint cannot be used.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporters = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if "otlp" not in (one.strip() for one in exporters.split(",")):
        return None
    variable, path = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""
    if not (value := os.environ.get(variable, "").strip()):
        variable, path = "OTEL_EXPORTER_OTLP_ENDPOINT", "/v1/traces"
        if not (value := os.environ.get(variable, "").strip()):
            return None
    if not re.fullmatch(r"https?://[^\s/?#]+([/?#]\S*)?", value):
        raise ConfigError(
            f"{variable} is {value!r}: expected an address such as http://collector:4318"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name, "").strip():
            if protocol != "http/protobuf":
                raise ConfigError(f"{name} is {protocol!r}: expected http/protobuf, or none")
            break
    return (value.rstrip("/") + path if path else value), variable


def settings_file() -> Path | None:
    """Return the settings file: the one $RELAUNCH_SETTINGS names, or ./relaunch.toml."""
    named = os.environ.get(FILE_VARIABLE, "")
    if named:
        return Path(named)
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None


def read_settings(*, strict: bool = True, **overrides: Any) -> Settings:
    """Read the settings.

    Args:
        strict: Whether a variable that is no setting is an error; commands and workers check that
            before anything else.
        overrides: The values given on the command line.

    Raises:
        ConfigError: a value, a key or the file itself cannot be used.
    """
    file = settings_file()
    written: dict[str, Any] = {}
    if file is not None:
        try:
            with file.open("rb") as opened:
                content = opened.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ConfigError(f"settings file {file} has more than {MAX_BYTES >> 10} KiB")
            written = tomllib.loads(content.decode())
        except OSError as error:
            raise ConfigError(f"settings file {file} cannot be read: {error.strerror}") from None
        except RecursionError:
            raise ConfigError(f"settings file {file} is nested too deeply") from None
        except ValueError as error:  # no TOML, no UTF-8, or a number of 5,000 digits
            raise ConfigError(f"settings file {file} is not TOML: {error}") from None
    known = {f"{PREFIX}{name.upper()}": name for name in Settings.model_fields}
    exported = {
        variable: value
        for variable, value in os.environ.items()
        if variable.startswith(PREFIX) and value
    }
    for variable in exported if strict else ():
        if variable not in (*known, *OF_RANKS, FILE_VARIABLE, NO_WARM, KEYRING_VARIABLE):
            raise ConfigError(
                f"unknown setting {variable}: expected one of {', '.join(sorted(known))}"
            )
    typed = {name: value for name, value in overrides.items() if value is not None}
    in_environment = {
        known[variable]: value for variable, value in exported.items() if variable in known
    }
    values = {**written, **in_environment, **typed}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"settings file {file}: unknown setting {name}: "
                f"expected one of {', '.join(Settings.model_fields)}"
            ) from None
        in_file = f"settings file {file}: {name}"
        where = (
            f"setting {name}"
            if name in typed
            else f"{PREFIX}{name.upper()}"
            if name in in_environment
            else in_file
        )
        raise ConfigError(f"{where} is {values[name]!r}: {what}") from None


def describe_settings(
    settings: Settings, overrides: tuple[str, ...] = ()
) -> list[tuple[str, str, str]]:
    """Return (name, value, source) of each setting, for `relaunch-worker --show-settings`."""
    file = settings_file()
    written = tomllib.loads(file.read_text()) if file else {}
    rows = []
    for name in Settings.model_fields:
        value = getattr(settings, name)
        variable = f"{PREFIX}{name.upper()}"
        if name in overrides:
            source = "command line"
        elif os.environ.get(variable):
            source = variable
        elif name in written:
            source = str(file)
        else:
            source = "default"
        shown = (
            os.pathsep.join(str(item) for item in value)
            if isinstance(value, tuple)
            else ""
            if value is None
            else str(value)
        )
        rows.append((name, shown, source))
    return rows
