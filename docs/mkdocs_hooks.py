"""Adds to the site what is not a file of docs/: the configuration's keys, and files of the repository that pages link.

A link that leaves docs/ leads to a page with that file's content, so the site is whole without the repository and
without a network.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REPOSITORY = "repository"
"""The folder of the site that holds files from outside docs/."""
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
ANSWERS = ("how-to.md", "troubleshooting.md", "faq.md", "data.md", "rewards.md", "configuration.md")
RECORDS = ("performance.md", "api.md", "how-rlcore-is-tested.md", "architecture.md")
IMAGES = (".png", ".svg", ".jpg")
CELL = re.compile(r"(?<!<tr>\n)<td[^>]*>.*?</td>", re.DOTALL)
"""A cell of a table that is not the first of its row, where names stay whole."""
CELL_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
BREAK_AFTER = re.compile(r"([._/=])(?=\w)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the page of keys, and every file outside docs/ that some page links, pages reached by them included."""
    files.append(File.generated(config, "configuration.md", content=_configuration()))
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in added or target.is_relative_to(DOCS):
                continue
            added.add(target)
            if target.suffix in IMAGES:
                files.append(File.generated(config, _site_path(target), content=target.read_bytes()))
                continue
            files.append(File.generated(config, _site_path(target), content=_page(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/ to the pages that `on_files` added, and rank the page in the search."""
    page.meta.setdefault("search", {})["boost"] = _boost(page.file.src_uri)
    source = page.file.abs_src_path
    return _relinked(markdown, Path(source)) if source else markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Let names in tables break at their punctuation, so that narrow columns do not cut them anywhere."""
    return CELL.sub(lambda cell: CELL_CODE.sub(_breakable, cell[0]), html)


def _breakable(code: re.Match[str]) -> str:
    return BREAK_AFTER.sub(r"\1<wbr>", code[0])


def _boost(path: str) -> float:
    """The weight of a page in the search: answers before reference, reference before records and source files."""
    if path in ANSWERS:
        return 4.0
    return 0.3 if path.startswith((f"{REPOSITORY}/", "results/")) or path in RECORDS else 1.0


def _configuration() -> str:
    """Every key, section by section, from examples/reference.yaml."""
    text = (ROOT / "examples" / "reference.yaml").read_text("utf-8")
    page = [
        "# Configuration",
        "",
        "For users who look up a key. Each has its meaning and its default. `<name>` stands for any number of entries. "
        "`rlcore config KEY` says the same in a terminal, and `rlcore config FILE` prints the values of a "
        "configuration with their origins. Any key can be set on the command line as `key=value`. The same as a file: "
        "[reference.yaml](repository/examples/reference.yaml.md).",
    ]
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]:
        for key, meaning, default in _keys(part):
            level = "##" if "." not in key else "###"
            page += ["", f"{level} `{key}` {{ #{key.replace('<name>', 'name')} }}", "", meaning]
            if default:
                page += ["", f"Default: `{default}`" if default != "???" else "Required."]
    return "\n".join(page) + "\n"


def _keys(section: str) -> Iterator[tuple[str, str, str]]:
    """(dotted key, meaning, default) of each key of a section; the default of a section of keys is empty."""
    path: list[str] = []
    words: list[str] = []
    for line in section.splitlines():
        depth, text = (len(line) - len(line.lstrip())) // 2, line.strip()
        if text.startswith("## "):
            words.append(text.removeprefix("## "))
        elif found := re.fullmatch(r"(?:# )?([\w<>]+):(?: (.*))?", text):
            path[depth:] = [found[1]]
            if words:
                yield ".".join(path), " ".join(words), found[2] or ""
            words = []


def _targets(page: Path) -> list[Path]:
    """The files that a page links, directories as their README.md."""
    found = (_resolved(page, match[2]) for match in LINK.finditer(CODE.sub("", page.read_text("utf-8"))))
    return [target for target in found if target]


def _resolved(page: Path, link: str) -> Path | None:
    """The file of the repository that a relative link names; None for addresses and what is not there."""
    if re.match(r"[a-z]+:", link) or link.startswith("/"):
        return None
    target = (page.parent / link).resolve()
    if target.is_dir():
        target = target / "README.md"
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _site_path(target: Path) -> str:
    """Its path in the site's sources: that in docs/, or a page of the folder `repository`."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = PurePosixPath(REPOSITORY) / target.relative_to(ROOT).as_posix()
    return str(path) if target.suffix in (".md", *IMAGES) else f"{path}.md"


def _page(target: Path) -> str:
    """A page with the file's content, its links led to where the files are in the site."""
    text = target.read_text("utf-8")
    if target.suffix == ".md":
        return _relinked(text, target)
    language = {".py": "python", ".yaml": "yaml", ".sh": "sh"}.get(target.suffix, "text")
    return f"# {target.relative_to(ROOT).as_posix()}\n\n````{language}\n{text}````\n"


def _relinked(text: str, page: Path) -> str:
    """The text of a page of the repository, with relative links as the site's folders need them."""
    here = PurePosixPath(_site_path(page)).parent

    def led(match: re.Match[str]) -> str:
        target = _resolved(page, match[2])
        if target is None:
            return match[0]
        return f"{match[1]}{os.path.relpath(_site_path(target), here)}{match[3]}"

    pieces = CODE.split(text)
    return "".join(piece if CODE.fullmatch(piece) else LINK.sub(led, piece) for piece in pieces)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Fix what the theme leaves out: a search without the network, and the name of its dialog."""
    asset = os.path.relpath("assets/file_worker.js", PurePosixPath(page.url).parent)
    local = output.replace("https://unpkg.com/iframe-worker/shim", asset)
    return local.replace('role="dialog"', 'role="dialog" aria-label="Search"')
