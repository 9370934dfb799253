"""Command of the acceptance harnesses: ``python -P tests/acceptance/run.py HARNESS``.

See README.md here.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support/common"))
    from harness import main

    main()
