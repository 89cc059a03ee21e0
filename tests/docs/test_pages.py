"""Pages of docs/ name only keys, messages and files that exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.config import RunConfig
from rlcore.config.schema import entries_of, hints_of, section_of
from rlcore.plugins.planning import plan_run
from rlcore.report.metric_names import CORE, Metric, declared, undeclared

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PEERS = ROOT / "docs" / "coming-from-trl.md", ROOT / "docs" / "coming-from-verl.md"
SECTIONS = {"model", "data", "rollout", "reward", "algo", "actor", "reference", "schedule", "cluster", "train", "eval"}
SECTIONS |= {"checkpoint", "track"}
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".yaml", ".parquet", ".step")


def cells(page: Path) -> Iterator[str]:
    """The last cell of each row of the page's tables: rlcore's side."""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("|"):
            yield re.split(r"(?<!\\)\|", line)[-2]


def keys(text: str) -> Iterator[str]:
    """The configuration keys in backticks; a value behind '=' is not part of one."""
    for code in re.findall(r"`([^`]+)`", text):
        key = code.split("=")[0].split(" ")[0]
        if key.split(".")[0] in SECTIONS and "." in key and not key.endswith((".*", ".py")):
            yield key


def exists(key: str) -> bool:
    """A key of the core's sections."""
    hint: Any = RunConfig
    for part in key.split("."):
        section, entries = section_of(hint), entries_of(hint)
        if section is not None and part not in hints_of(section):
            return False
        hint = hints_of(section)[part] if section is not None else entries
    return True


def test_the_comparison_of_the_readme_is_part_of_the_page() -> None:
    part = (ROOT / "README.md").read_text("utf-8").split("## Compared with other trainers")[1].split("## ")[0]
    rows = [line.replace("](docs/", "](") for line in part.splitlines() if line.startswith("|")]
    page = (ROOT / "docs" / "comparison.md").read_text("utf-8").splitlines()
    assert len(rows) > 12
    assert [row for row in rows if row not in page] == []
    assert [row for row in rows if row.split("|")[2].strip().startswith("N")], "what rlcore lacks is in it"


@pytest.mark.parametrize("page", PEERS, ids=lambda page: page.stem)
def test_a_translation_names_keys_that_exist(page: Path) -> None:
    named = [key for cell in cells(page) for key in keys(cell)]
    assert len(named) > 50
    assert [key for key in named if not exists(key.replace("<name>", "x"))] == []


def test_a_key_that_does_not_exist_is_noticed() -> None:
    assert not exists("actor.learning_rate")
    assert exists("actor.lora.rank")


@pytest.mark.parametrize("page", PEERS, ids=lambda page: page.stem)
def test_the_translated_configuration_is_one(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ours = yaml.safe_load(blocks[-1])
    rows = '{"prompt": "1 + 1", "answer": "2"}\n'
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    (tmp_path / "my_rewards.py").write_text(
        "def accuracy(prompts, completions, **columns):\n    return [0.0 for _ in prompts]\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    # The policy without torch in place of a model that is not here; everything else is what the page says.
    ours["model"] = {"path": "", "tokenizer": "bytes"}
    ours.setdefault("actor", {})["backend"] = "null"
    ours["rollout"]["backend"] = "null"
    ours.pop("plugins", None)
    ours["algo"] = {name: value for name, value in ours.get("algo", {}).items() if name != "kl"}
    for section in ("data", "eval"):
        for source in ours.get(section, {}).get("sources", {}).values():
            source["path"] = source["path"].replace(".parquet", ".jsonl")
    monkeypatch.chdir(tmp_path)
    plan = plan_run([ours], [], ["null"])
    [step] = re.findall(r"```text\n(prompts .*?)```", page.read_text("utf-8"), re.DOTALL)
    shown = dict(line.rsplit(maxsplit=1) for line in step.splitlines())
    assert shown == {name.replace("_", " "): str(number) for name, number in plan.batch_sizes.items()}


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    table = page.split("## It does not start")[1].split("## It does not learn")[0]
    quoted = [part for code in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE) for part in code.split("...")]
    source = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "rlcore").rglob("*.py")))
    parts = [part.strip(" '") for part in quoted if len(part.strip(" '")) > 8]
    assert len(parts) >= 6
    # Figures and names are filled in at run time: the words before and after them are compared.
    words = [word.strip() for part in parts for word in re.split(r"\d+|;|as \w+", part)]
    assert [word for word in words if len(word) > 8 and word not in source] == []


def test_every_page_of_docs_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    shown = set(re.findall(r": ([\w/-]+\.md)|- ([\w/-]+\.md)", site))
    named = {name for pair in shown for name in pair if name}
    files = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert files - named == set()
    assert named - files <= {"configuration.md"}, "generated by docs/mkdocs_hooks.py"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    missing = [link for link in targets if not (page.parent / link).exists()]
    assert [link for link in missing if link != "configuration.md"] == []


@pytest.mark.parametrize(
    "page",
    [*(page for page in PAGES if page.name not in ("first_contact.md", "api.md")), ROOT / "README.md"],
    ids=lambda page: page.name,
)
def test_pages_name_keys_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    ours = "\n".join(
        line.split("|")[-2] if page in PEERS and line.startswith("|") else line for line in text.splitlines()
    )
    named = [key for key in keys(ours) if not key.endswith(SUFFIXES)]
    assert [key for key in named if not exists(key.replace("<name>", "x"))] == []


METRIC = re.compile(r"(?:agent|completion|critic|data|eval|policy|reward|schedule|time)/[\w/<>-]+")


def metrics_named(text: str) -> list[str]:
    """The metrics in backticks, without those whose last part is left open; a part that stands for any name is `x`."""
    codes = [
        code for code in re.findall(r"`([^`\n]+)`", text) if METRIC.fullmatch(code) and not code.endswith(("/", ">"))
    ]
    return [re.sub(r"<\w+>", "x", code) for code in codes]


@pytest.fixture(scope="module")
def known_metrics() -> list[Metric]:
    return declared([CORE, *sorted((ROOT / "plugins").glob("*/*/metrics.toml"))])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_pages_name_metrics_that_are_declared(page: Path, known_metrics: list[Metric]) -> None:
    assert undeclared(metrics_named(page.read_text("utf-8")), known_metrics) == []


def test_a_metric_that_is_not_declared_is_noticed(known_metrics: list[Metric]) -> None:
    named = metrics_named("`agent/tool_calls` and `agent/num_tool_calls`")
    assert undeclared(named, known_metrics) == ["agent/tool_calls"]
