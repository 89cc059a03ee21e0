"""Contents that are lists of parts, as OpenAI's protocol has them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import DataConfig, SourceConfig
from rlcore.data.read_prompts import load_prompts
from rlcore.errors import ConfigError
from rlcore.types import Prompt, plain


def loaded(directory: Path, content: Any) -> Prompt:
    path = directory / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content, "name": "a"}]}) + "\n")
    [prompt] = load_prompts({"rows": SourceConfig(path=str(path))}, DataConfig())["rows"]
    return prompt


def test_parts_of_text_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]
    assert [dict(message) for message in loaded(tmp_path, parts).messages] == [
        {"role": "user", "content": "What is 1 + 1?", "name": "a"}
    ]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "a.png"}}],
        [{"type": "text", "text": "What is this?"}, {"type": "image"}],
        [{"type": "text", "text": None}],
        ["What is this?"],
    ],
)
def test_a_part_that_is_not_text_is_refused_in_one_line(tmp_path: Path, content: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"line 1 has list .*; needs .* content, which is a text or parts") as caught:
        loaded(tmp_path, content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", None, "text"])
def test_other_contents_are_as_they_were(tmp_path: Path, content: str | None) -> None:
    assert loaded(tmp_path, content).messages[0]["content"] == content


def test_a_table_adds_no_arguments_to_calls_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # writing, tqdm starts a thread that stays

    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {
            "messages": [{"role": "user", "content": "?"}, message, {"role": "tool", "content": "4"}],
            "answer": None,
        }

    rows = [row("add", {"a": 2, "b": 2}), row("search", {"q": "x"})]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    found = load_prompts({"x": SourceConfig(path=str(tmp_path / "a.parquet"))}, DataConfig())["x"]
    calls = [plain(prompt.messages[1]["tool_calls"]) for prompt in found]
    assert calls == [made["messages"][1]["tool_calls"] for made in rows]
    assert [prompt.answer for prompt in found] == [None, None]
