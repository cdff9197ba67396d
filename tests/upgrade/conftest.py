"""Where tests of upgrades get the package of a release."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.upgrade.services import list_wheels

BEFORE = "0.1.0"
"""The last release without processes that import ahead, `redact` and signatures."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package of the last release without what is tested here."""
    folder = tmp_path_factory.mktemp("release")
    with zipfile.ZipFile(list_wheels()[BEFORE]) as wheel:
        wheel.extractall(folder)
    return folder
