"""The tests of this directory with new examples until the time is up: `make fuzz MINUTES=30`.

Stops at the first failure, whose examples pytest prints. Each round has another seed, which is printed too.
"""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = 200
"""Of each test in a round."""


def main(minutes: float) -> int:
    """The status of the round that failed; 0 when none did."""
    ends_at = time.monotonic() + 60 * minutes
    while time.monotonic() < ends_at:
        seed = secrets.randbelow(2**32)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "fault or not fault", f"--hypothesis-seed={seed}"]
        print(f"seed {seed}, {(ends_at - time.monotonic()) / 60:.1f} minutes are left", flush=True)
        environment = {**os.environ, "RLCORE_FUZZ_EXAMPLES": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
        code = subprocess.run([*command, "--timeout=3600", str(Path(__file__).parent)], env=environment).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
