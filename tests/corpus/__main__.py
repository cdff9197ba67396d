"""`python -m tests.corpus`: the real endings, played through the whole service."""

from __future__ import annotations

import sys

from tests.corpus.run import main

if __name__ == "__main__":
    sys.exit(main())
