"""Run a few failed tests again, in a single process: ``python tools/run_failed_again.py STATUS``.

When more than 9,000 tests share two cores, a test can fail because an operation took much longer than usual. A test
that passes when it is repeated is reported as unstable and does not fail ``make test-all``. If more than three tests
fail, they are not repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LIMIT = 3
TESTS_FAILED = 1
"""Exit status of pytest if tests failed. Other statuses mean that it was interrupted or could not run."""


def main() -> int:
    status = int(sys.argv[1])
    cache = Path(".pytest_cache/v/cache/lastfailed")
    if status != TESTS_FAILED or not cache.exists():
        return status
    failed = list(json.loads(cache.read_text("utf-8")))
    if not 0 < len(failed) <= LIMIT:
        return status
    print("\nrunning the failed tests again, alone:", *failed, sep="\n  ", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *failed], check=False).returncode
    if again == 0:
        print("\nUNSTABLE: these tests failed among the others and passed alone. Please fix them:", *failed, sep="\n  ")
    return again


if __name__ == "__main__":
    sys.exit(main())
