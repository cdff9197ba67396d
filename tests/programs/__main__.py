"""`python -m tests.programs`: real training programs with real faults, beside torchrun."""

from __future__ import annotations

import sys

from tests.programs.run import main

if __name__ == "__main__":
    sys.exit(main())
