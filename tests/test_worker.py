"""The worker's fleet files, read again while it runs: what changed is served, what cannot be used changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import Settings
from worker import WorkerFleets, make_fleets

FLEET = """\
name: lab
backend: local
repairs: act
nodes:
  - {name: n1, address: 127.0.0.2}
  - {name: n2, address: 127.0.0.3}
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return file


@pytest.fixture
def fleets(fleet_file: Path, tmp_path: Path) -> WorkerFleets:
    return make_fleets(Settings(state=tmp_path / "state", fleets=(fleet_file,)))


def test_a_fleet_file_that_did_not_change_is_served_by_the_same_backend(fleets: WorkerFleets) -> None:
    spec, backend = fleets.spec("lab"), fleets.backend("lab")
    assert fleets.read_again("lab") == spec
    assert fleets.backend("lab") is backend


async def test_a_changed_fleet_file_is_served_and_what_goes_on_over_the_old_backend_is_closed_with_the_worker(
    fleets: WorkerFleets, fleet_file: Path
) -> None:
    before = fleets.backend("lab")
    fleet_file.write_text(FLEET + "  - {name: n3, address: 127.0.0.4, gpus: 8}\n")
    assert [node.name for node in fleets.read_again("lab").nodes] == ["n1", "n2", "n3"]
    assert [node.name for node in fleets.spec("lab").nodes] == ["n1", "n2", "n3"]
    assert fleets.backend("lab").node("n3").gpus == 8
    assert fleets.replaced == [before]
    await fleets.close()


async def test_a_worker_that_nobody_told_to_read_its_changed_fleet_file_serves_the_new_node_too(
    fleets: WorkerFleets, fleet_file: Path
) -> None:
    fleet_file.write_text(FLEET + "  - {name: n3, address: 127.0.0.4}\n")
    assert fleets.backend("lab").node("n3").address == "127.0.0.4"
    fleet_file.write_text("name: lab\n")
    assert fleets.backend("lab").node("n3").address == "127.0.0.4"
    assert len(fleets.replaced) == 1
    await fleets.close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: lab\nbackend: local\nnodes: []\n", "fleet.yaml:3:"),
        (FLEET.replace("name: lab", "name: other"), "it is of fleet 'other' now, expected 'lab' until the worker is started anew"),
        (FLEET.replace("backend: local", "backend: ecs"), "ecs.cluster is missing"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_fleet_file_that_cannot_be_used_is_said_in_a_sentence_and_the_fleet_stays_as_it_was(
    fleets: WorkerFleets, fleet_file: Path, text: str | None, sentence: str
) -> None:
    if text is None:
        fleet_file.unlink()
    else:
        fleet_file.write_text(text)
    with pytest.raises(ValueError, match=r"fleet\.yaml") as wrong:
        fleets.read_again("lab")
    assert sentence in str(wrong.value)
    assert [node.name for node in fleets.spec("lab").nodes] == ["n1", "n2"]


def test_a_fleet_that_no_file_names_is_refused(fleets: WorkerFleets) -> None:
    with pytest.raises(KeyError, match="fleet 'other' is not known to this worker, it serves lab"):
        fleets.read_again("other")
