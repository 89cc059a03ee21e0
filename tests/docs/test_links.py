"""External links of the documents: encrypted, and of hosts that were chosen."""

import importlib.util
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
HOSTS = {
    "arxiv.org",
    "docs.google.com",
    "docs.nvidia.com",
    "docs.primeintellect.ai",
    "github.com",
    "huggingface.co",
    "pypi.org",
    "raw.githubusercontent.com",
    "semver.org",
    "ui.perfetto.dev",
    "verl.readthedocs.io",
}
"""Add a host here on purpose, and open its link once: `python docs/links.py` lists all of them."""
UNENCRYPTED = {"http://joschu.net/blog/kl-approx.html"}
"""Links to pages whose authors give this form."""


def maker() -> ModuleType:
    """The script of docs/ that lists the links."""
    spec = importlib.util.spec_from_file_location("list_links", ROOT / "docs" / "links.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("docs/links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTER = maker()


def problem(link: str) -> str:
    """The reason why a link is refused; empty: none."""
    parts = urlsplit(link)
    if link in UNENCRYPTED:
        return ""
    if parts.scheme != "https":
        return "not https"
    return "" if parts.hostname in HOSTS else f"unknown host {parts.hostname}"


def test_external_links_are_https_and_of_known_hosts() -> None:
    links = [(path.name, link) for path in LISTER.documents() for link in LISTER.external_links(path)]
    assert len(links) > 15
    assert {link: problem(link) for _, link in links if problem(link)} == {}
    assert {urlsplit(link).hostname for _, link in links if link not in UNENCRYPTED} == HOSTS


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("http://arxiv.org/abs/1", "not https"),
        ("https://arxiv.org.example.com/abs/1", "unknown host arxiv.org.example.com"),
        ("https://arxiv.org/abs/1", ""),
    ],
)
def test_a_link_of_another_form_or_host_is_refused(link: str, reason: str) -> None:
    assert problem(link) == reason


def test_links_in_code_are_examples(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](https://a.org/x), <https://b.org/y>.\n`https://c.org`\n```\nhttps://d.org\n```\n")
    assert LISTER.external_links(page) == ["https://a.org/x", "https://b.org/y"]
