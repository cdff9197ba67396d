"""A change of the product's code that takes out what a row of another system is about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ROW = re.compile(r"S[1-5]\.\d{1,2}")


@dataclass(frozen=True, slots=True)
class Mutant:
    row: str
    """As docs/testing.md names it, such as `S2.8`."""
    what: str
    """What the changed code does."""
    file: str
    """Path from the root of the repository."""
    old: str
    """Text that the file has once."""
    new: str
    tests: tuple[str, ...]
    """Ids of the tests that have to fail. Without parameters: in one of its variants at least."""

    def change(self, root: Path) -> str:
        """Return the text of the file with the change.

        Raises:
            ValueError: The file does not have the text once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.row}, {self.what!r}: {self.file} has its text {count} times, expected "
                "once: write the mutant for the code of today"
            )
        return text.replace(self.old, self.new)


def names_row(test: str, row: str) -> bool:
    """Return whether a test is named after a row: `test_s2_8_…`, also as one of several."""
    name = test.rpartition("::")[2]
    rows = re.match(r"test((?:_s\d_\d+)+)_", name)
    return rows is not None and f"{rows[1]}_".count(f"_{row.lower().replace('.', '_')}_") > 0
