"""Environment files: what is written is read again, and nothing else passes for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from relaunch.spec.environment import parse_environment, serialize_environment
from tests.recovery.generated import searched

NAMES = st.text(
    st.characters(blacklist_characters="=\0", blacklist_categories=("Cs",)), min_size=1
).filter(lambda name: not name.startswith(("RELAUNCH_", "TORCHELASTIC_")))
VALUES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))


@searched(400)
@given(st.dictionaries(NAMES, VALUES))
def test_what_is_written_is_read_again(variables: dict[str, str]) -> None:
    assert parse_environment(serialize_environment(variables)) == variables


@pytest.mark.parametrize(
    ("content", "variables"),
    [
        pytest.param(b"", {}, id="nothing"),
        pytest.param(b"A=1\0BASH_FUNC_x%%=() {\n}\0", {"A": "1", "BASH_FUNC_x%%": "() {\n}"}),
        pytest.param(b"A=b=c\n\n# D=1\nE= f \n", {"A": "b=c", "E": " f "}, id="lines"),
        pytest.param(b"A=\xff\0", {"A": "\udcff"}, id="bytes that are no text"),
        pytest.param(b"A=1\nA=2\n", {"A": "2"}, id="the last of two"),
    ],
)
def test_both_forms_are_read(content: bytes, variables: dict[str, str]) -> None:
    assert parse_environment(content) == variables
    assert parse_environment(serialize_environment(variables)) == variables


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"A=1\nexport B=hush\n", id="a shell script"),
        pytest.param(b"A=1\nhush\n", id="no equals sign"),
        pytest.param(b"=hush\0", id="no name"),
        pytest.param(b"A=1\0RELAUNCH_JOB=hush\0", id="a variable of relaunch"),
        pytest.param(b"TORCHELASTIC_RUN_ID=hush", id="a variable of TorchElastic"),
    ],
)
def test_what_is_no_environment_is_refused_without_values(
    content: bytes, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValueError, match="line") as error:
        parse_environment(content)
    assert "hush" not in str(error.value)
    assert str(error.value) == snapshot
