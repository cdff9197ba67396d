"""`python -m tests.gpu`: a real GPU, its driver, and programs that fail on it."""

from __future__ import annotations

import sys

from tests.gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
