"""Print the pip option that finds the CPU build of torch; nothing on a machine with a GPU, or without that index.

pip then takes torch from where it is set up to look: PyPI, whose build is for CUDA, a local folder of wheels, a mirror.

    python requirements/torch_index.py [--cpu]     # --cpu: also on a machine with a GPU
"""

import sys
import urllib.request
from pathlib import Path

INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = Path("/dev/nvidiactl")
"""A file of NVIDIA's driver, which is there if a process may use a GPU."""


def reachable(url: str) -> bool:
    """True if the index answers within five seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if sys.platform.startswith("linux") and ("--cpu" in sys.argv or not DRIVER.exists()) and reachable(f"{INDEX}/torch/"):
    sys.stdout.write(f"--extra-index-url {INDEX}\n")
