"""The changes that take rows out of the code fit the code of today, and are judged as they should.

`python -m tests.mutants` makes them, which takes an hour.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import copy_checkout, judge, list_runs, read_outcomes, run
from tests.mutants.mutant import ROOT, Mutant, names_row
from tests.mutants.rows import MUTANTS

ROWS = re.findall(r"^\| (S\d\.\d+) \|", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)


def test_each_row_has_a_mutant() -> None:
    assert len(set(ROWS)) == 49
    assert set(ROWS) == {one.row for one in MUTANTS}


def test_each_mutant_fits_the_code_of_today() -> None:
    for mutant in MUTANTS:
        changed = mutant.change(ROOT)
        assert mutant.new != mutant.old and len(mutant.what) <= 80, mutant
        if mutant.file.endswith(".py"):
            ast.parse(changed)
    twice = [
        key for key, count in Counter(one.key for one in list_runs(MUTANTS)).items() if count > 1
    ]
    assert twice == []


def test_each_mutant_names_tests_of_its_row() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant
        for test in mutant.tests:
            file, _, name = test.partition("[")[0].partition("::")
            assert re.search(
                rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE
            ), f"{mutant.row}: there is no test {test}"
            assert any(names_row(test, row) for row in ROWS), f"{test} is named after no row"
        assert any(names_row(test, mutant.row) for test in mutant.tests), mutant


def test_a_name_of_a_test_may_have_several_rows() -> None:
    several = "tests/e2e/test_ecs.py::test_s1_3_s1_10_from_fault_to_end"
    rows = ("S1.3", "S1.10", "S1.1", "S1.0", "S10.1")
    assert [names_row(several, row) for row in rows] == [True, True, False, False, False]
    assert not names_row("tests/x.py::test_a_host_s1_3_is_lost", "S1.3")


OUTPUT = """\
collecting ... collected 5 items

tests/recovery/test_x.py::test_a[1 of 2] PASSED                          [ 20%]
tests/recovery/test_x.py::test_a[2] FAILED                               [ 40%]
tests/recovery/test_x.py::test_b PASSED                                  [ 60%]
tests/recovery/test_x.py::test_c SKIPPED (no GPU here)                   [ 80%]
tests/recovery/test_x.py::test_e """


def test_a_test_fails_if_one_of_its_variants_does() -> None:
    tests = [f"tests/recovery/test_x.py::test_{letter}" for letter in "abcde"]
    outcomes = read_outcomes(OUTPUT, tests)
    assert list(outcomes.values()) == ["failed", "passed", "skipped", "not found", "never ended"]
    before, after = list_runs([Mutant("S1.1", "nothing", "a.py", "a", "b", tuple(tests))])
    assert [line.split(": ")[1] for line in judge(before, outcomes)] == [
        "failed",
        "skipped",
        "not found",
        "never ended",
    ]
    assert [line.split(": ")[1] for line in judge(after, outcomes)] == [
        "passed",
        "skipped",
        "not found",
    ]


def test_a_change_that_is_not_there_any_more_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\na = 1\n")
    with pytest.raises(ValueError, match=r"S1.1.* a\.py has its text 2 times"):
        Mutant("S1.1", "nothing", "a.py", "a = 1", "a = 2", ()).change(tmp_path)


def test_a_mutant_is_found_by_the_test_of_its_row(tmp_path: Path) -> None:
    copy_checkout(tmp_path)
    mutant = next(one for one in MUTANTS if one.tests[0].startswith("tests/recovery/"))
    before, after = list_runs([replace(mutant, tests=mutant.tests[:1])])
    for one in (before, after):
        assert judge(one, run(one, tmp_path)) == []
    assert (tmp_path / mutant.file).read_text() == (ROOT / mutant.file).read_text()
