"""Print the pip option that finds the CPU build of torch, or nothing where its index cannot be reached.

Without the index, pip takes torch from where it is set up to look (a local folder of wheels, a mirror).
"""

import sys
import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"


def reachable(url: str) -> bool:
    """True if the index answers within five seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if sys.platform.startswith("linux") and reachable(f"{INDEX}/torch/"):
    sys.stdout.write(f"--extra-index-url {INDEX}\n")
