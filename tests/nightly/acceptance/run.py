"""Command of the acceptance harnesses: ``python -P tests/nightly/acceptance/run.py HARNESS``.

See tests/nightly/README.md.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve()

if __name__ == "__main__":
    folders = ("common", "launch", "worker")
    sys.path[:0] = [str(HERE.parent), *(str(HERE.parents[2] / "support" / name) for name in folders)]
    from harness import main

    main()
