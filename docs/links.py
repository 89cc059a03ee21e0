"""Lists the external links of the documents, one per line with its file, for a person to check: `python docs/links.py`.

No test opens them, because tests need no network. `tests/docs/test_links.py` checks their form and their hosts.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("docs", "plugins", "view", "examples")
LINK = re.compile(r"https?://[^\s)>\]\"'`|,]+")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")


def documents() -> list[Path]:
    """Every document of the repository, without what a build left there."""
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.md")]
    return sorted(path for path in [*found, *ROOT.glob("*.md")] if not {"build", "node_modules"} & set(path.parts))


def external_links(document: Path) -> list[str]:
    """Its links to other sites, in order; addresses in code are examples and left out."""
    text = CODE.sub("", FENCED.sub("", document.read_text("utf-8")))
    return [link.rstrip(".;:") for link in LINK.findall(text)]


if __name__ == "__main__":
    lines = [f"{path.relative_to(ROOT)}: {link}\n" for path in documents() for link in external_links(path)]
    sys.stdout.writelines(lines)
