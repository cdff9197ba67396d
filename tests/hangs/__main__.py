"""`python -m tests.hangs`: real hangs and long healthy pauses of a real training program."""

from __future__ import annotations

import sys

from tests.hangs.run import main

if __name__ == "__main__":
    sys.exit(main())
