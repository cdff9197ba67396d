"""All mutants, by row."""

from tests.mutants import s1, s2, s3, s4

MUTANTS = (*s1.MUTANTS, *s2.MUTANTS, *s3.MUTANTS, *s4.MUTANTS)
