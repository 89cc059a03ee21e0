"""Reads the data of a plan, as far as that takes a moment: rows, columns, steps per epoch, the longest prompt."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rlcore.config import SourceConfig
from rlcore.contracts.model_files import model_directory
from rlcore.data import load_prompts, refuse_overlap
from rlcore.data.conversation import text_of
from rlcore.data.rows import JSON, JSON_LINES, check_path
from rlcore.data.tokenizer import BYTES, require_directory
from rlcore.plan import RunPlan
from rlcore.plan.catalog import install_hint, library_of
from rlcore.runtime.data_check import check_data
from rlcore.types import Prompt

MAX_BYTES = 1 << 26
"""Files that are larger, together, are read when training starts."""
NUM_LONGEST = 8
"""Prompts, those with the most characters, whose tokens are counted."""


@dataclass(frozen=True)
class SourcePreview:
    """One source of prompts."""

    key: str
    """'data.sources.train'."""
    rows: int
    answered: int
    """Rows that have an answer."""
    columns: tuple[str, ...]
    """All but those of prompt and answer."""
    longest_tokens: int | None
    """Tokens of the longest prompt's text, without the chat template; None where no tokenizer is at hand."""


@dataclass(frozen=True)
class DataPreview:
    """The data of a run before it starts."""

    sources: tuple[SourcePreview, ...] = ()
    unread: tuple[str, ...] = ()
    """Keys of sources that are read when training starts: the Hub's, tables, tasks, large files."""
    steps_per_epoch: int | None = None
    """None where a training source is unread."""
    notes: tuple[str, ...] = field(default=())

    @property
    def longest_tokens(self) -> int | None:
        """Of the training prompts."""
        found = [source.longest_tokens for source in self.sources if source.key.startswith("data.")]
        return max((tokens for tokens in found if tokens is not None), default=None)


def preview_data(plan: RunPlan) -> DataPreview:
    """Reads what is quick to read, and checks it as training does.

    ConfigError for a file, column or model directory that does not exist, for held-out questions that occur in
    training, and for data that a reward function cannot take.
    """
    config = plan.config
    if config.model.tokenizer != BYTES:
        require_directory(config.model.path)
    quick: dict[str, dict[str, SourceConfig]] = {}
    unread: list[str] = []
    for section, sources in (("data.sources", config.data.sources), ("eval.sources", config.eval.sources)):
        quick[section] = {name: source for name, source in sources.items() if _is_quick(source, f"{section}.{name}")}
        unread += [f"{section}.{name}" for name in sources if name not in quick[section]]
    prompts = load_prompts(quick["data.sources"], config.data, "data.sources")
    heldout = load_prompts(quick["eval.sources"], config.data, "eval.sources")
    refuse_overlap(prompts, heldout)
    whole = not any(key.startswith("data.") for key in unread)
    num_prompts = sum(map(len, prompts.values()))
    return DataPreview(
        sources=(*_previews(plan, "data.sources", prompts), *_previews(plan, "eval.sources", heldout)),
        unread=tuple(unread),
        steps_per_epoch=num_prompts // config.train.prompts_per_step if whole else None,
        notes=(*missing_libraries(plan), *(check_data(plan, prompts, heldout) if whole else ())),
    )


def missing_libraries(plan: RunPlan) -> list[str]:
    """Notes on enabled plugins whose library this Python does not have, with the command that installs it."""
    return [
        f"{library} is not installed in this Python, and the workers of plugin '{provider.plugin}' need it: "
        f"{install_hint(provider.plugin)}"
        for provider in plan.plugins
        if (library := library_of(provider.plugin)) and library not in sys.modules and find_spec(library) is None
    ]


def _is_quick(source: SourceConfig, who: str) -> bool:
    if not source.path:
        return False
    path = check_path(source, who)
    return path.suffix.lower() in JSON_LINES | {JSON} and path.stat().st_size <= MAX_BYTES


def _previews(plan: RunPlan, section: str, sources: Mapping[str, Sequence[Prompt]]) -> list[SourcePreview]:
    return [
        SourcePreview(
            key=f"{section}.{name}",
            rows=len(prompts),
            answered=sum(1 for prompt in prompts if prompt.answer is not None),
            columns=tuple(sorted({column for prompt in prompts for column in prompt.columns})),
            longest_tokens=_longest(plan, prompts),
        )
        for name, prompts in sources.items()
    ]


def _longest(plan: RunPlan, prompts: Sequence[Prompt]) -> int | None:
    texts = ["\n".join(text_of(message) for message in prompt.messages) for prompt in prompts]
    texts = sorted(texts, key=len)[-NUM_LONGEST:]
    model = plan.config.model
    if model.tokenizer == BYTES:
        return max(len(text.encode(errors="replace")) for text in texts)
    file = model_directory(model.tokenizer or model.path, model.revision) / "tokenizer.json"
    return _count(file, texts) if file.is_file() else None


def _count(file: Path, texts: Sequence[str]) -> int:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return max(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
