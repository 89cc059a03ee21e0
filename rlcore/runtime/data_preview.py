"""Reads the data of a plan, if that is quick: rows, columns, steps per epoch, the longest prompt."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from rlcore.config import RunConfig, SourceConfig
from rlcore.contracts.model_files import decoder_settings, model_directory
from rlcore.data import load_prompts, refuse_overlap, training_sources
from rlcore.data.chat_template import read_chat_template
from rlcore.data.conversation import text_of
from rlcore.data.json_rows import JSON, JSON_LINES
from rlcore.data.rows import check_path
from rlcore.data.tokenizer import BYTES, require_directory
from rlcore.data.window import fits, fits_evaluation
from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.plan.catalog import install_hint, library_of
from rlcore.reward.canary import NUM_EXAMPLES
from rlcore.runtime.canary_preview import NOT_CALLED, preview_canary
from rlcore.runtime.data_check import check_data, question_start
from rlcore.runtime.reward_imports import missing_imports
from rlcore.types import Prompt

MAX_BYTES = 1 << 26
"""Files that exceed this together are read only when training starts."""
NUM_LONGEST = 8
"""Number of prompts, longest in characters, whose tokens are always counted."""
MAX_COUNTED = 1 << 22
"""Bytes of possibly too long prompts whose tokens are counted; takes about a second."""


@dataclass(frozen=True)
class SourcePreview:
    """One source of prompts."""

    key: str
    """'data.sources.train'."""
    rows: int
    answered: int
    """Rows that have an answer."""
    columns: tuple[str, ...]
    """Columns other than prompt and answer."""
    longest_tokens: int | None
    """Tokens of the longest prompt's text, without the chat template; None if no tokenizer is available."""
    too_long: int = 0
    """Prompts whose text alone exceeds `data.max_prompt_tokens`: training leaves them out."""


@dataclass(frozen=True)
class DataPreview:
    """The data of a run before it starts."""

    sources: tuple[SourcePreview, ...] = ()
    unread: tuple[str, ...] = ()
    """Keys of sources that are read only when training starts: the Hub's, tables, tasks, large files."""
    steps_per_epoch: int | None = None
    """None if a training source is unread."""
    notes: tuple[str, ...] = field(default=())

    @property
    def longest_tokens(self) -> int | None:
        """Facts of the training prompts."""
        found = [source.longest_tokens for source in self.sources if source.key.startswith("data.")]
        return max((tokens for tokens in found if tokens is not None), default=None)


def preview_data(plan: RunPlan) -> DataPreview:
    """Reads the data that is quick to read, and checks it as training does.

    ConfigError for a file, column or model directory that does not exist, for held-out questions that occur in
    training, and for data that a reward function cannot take. RewardError if the canary scores too low.
    """
    config = plan.config
    if config.model.tokenizer != BYTES:
        require_directory(config.model.path)
        if config.model.chat_template:
            read_chat_template(config.model.chat_template)
    quick: dict[str, dict[str, SourceConfig]] = {}
    unread: list[str] = []
    for section, sources in (
        ("data.sources", training_sources(config.data)),
        ("eval.sources", config.eval.sources),
    ):
        quick[section] = {name: source for name, source in sources.items() if _is_quick(source, f"{section}.{name}")}
        unread += [f"{section}.{name}" for name in sources if name not in quick[section]]
    prompts = load_prompts(quick["data.sources"], config.data, "data.sources")
    heldout = load_prompts(quick["eval.sources"], config.data, "eval.sources")
    refuse_overlap(prompts, heldout)
    whole = not any(key.startswith("data.") for key in unread)
    previews, notes = list[SourcePreview](), [*missing_libraries(plan), *missing_imports(plan)]
    window = _window(config)
    check = fits(window, config.rollout.max_tokens, "rollout.max_tokens", templated=False)
    check_heldout = fits_evaluation(config, window, templated=False)
    for section, loaded, check_prompt in (
        ("data.sources", prompts, check),
        ("eval.sources", heldout, check_heldout),
    ):
        for name, rows in loaded.items():
            key, lengths = f"{section}.{name}", _lengths(plan, rows)
            for prompt in rows:
                if 0 < lengths.get(prompt.id, 0) <= config.data.max_prompt_tokens:
                    check_prompt(prompt, lengths[prompt.id])
            previews.append(_preview(key, rows, lengths, config.data.max_prompt_tokens))
            notes += _left_out(key, rows, lengths, config.data.max_prompt_tokens)
    if whole:
        notes += check_data(plan, prompts, heldout)
        examples = [prompt for rows in prompts.values() for prompt in rows[:NUM_EXAMPLES]]
        notes += filter(None, [preview_canary(plan, examples)])
    elif config.reward.canary:
        notes.append(f"{NOT_CALLED}the plan does not read all training prompts")
    num_prompts = sum(found.rows - found.too_long for found in previews if found.key.startswith("data."))
    return DataPreview(
        sources=tuple(previews),
        unread=tuple(unread),
        steps_per_epoch=num_prompts // config.train.prompts_per_step if whole else None,
        notes=tuple(notes),
    )


def missing_libraries(plan: RunPlan) -> list[str]:
    """Notes on enabled plugins whose library this Python does not have, with the command that installs it."""
    return [
        f"{library} is not installed in this Python, and the workers of plugin '{provider.plugin}' need it: "
        f"{install_hint(provider.plugin)}"
        for provider in plan.plugins
        if (library := library_of(provider.plugin)) and library not in sys.modules and find_spec(library) is None
    ]


def _window(config: RunConfig) -> int | None:
    """Tokens of a prompt and its response together, at most, as the model's files say.

    None if they do not, and for an agent that fits each request into the window.
    """
    if not config.model.path or config.rollout.agent != "single_turn":
        return None
    found = decoder_settings(model_directory(config.model.path, config.model.revision)).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def _is_quick(source: SourceConfig, who: str) -> bool:
    if not source.path:
        return False
    path = check_path(source, who)
    return path.suffix.lower() in JSON_LINES | {JSON} and path.stat().st_size <= MAX_BYTES


def _preview(key: str, prompts: Sequence[Prompt], lengths: Mapping[str, int], max_tokens: int) -> SourcePreview:
    return SourcePreview(
        key=key,
        rows=len(prompts),
        answered=sum(1 for prompt in prompts if prompt.answer is not None),
        columns=tuple(sorted({column for prompt in prompts for column in prompt.columns})),
        longest_tokens=max(lengths.values(), default=None),
        too_long=sum(1 for length in lengths.values() if length > max_tokens),
    )


def _left_out(key: str, prompts: Sequence[Prompt], lengths: Mapping[str, int], max_tokens: int) -> Iterator[str]:
    """The note on prompts that are too long for the run, if there are any; ConfigError when all are."""
    long = [prompt for prompt in prompts if lengths.get(prompt.id, 0) > max_tokens]
    if len(long) == len(prompts):
        raise ConfigError(
            f"{key}: every one of {len(prompts)} prompts is longer than data.max_prompt_tokens={max_tokens}, the "
            f"shortest has {min(lengths.values())} tokens; raise it or choose another source"
        )
    if long:
        first = long[0]
        yield (
            f"{key}: prompts longer than data.max_prompt_tokens={max_tokens}, which training leaves out: at least "
            f"{len(long)} of {len(prompts)}, such as {first.id} ({lengths[first.id]} tokens, {question_start(first)}); "
            "raise it, or shorten them"
        )


def _lengths(plan: RunPlan, prompts: Sequence[Prompt]) -> dict[str, int]:
    """Text tokens, by id, of prompts that may be the longest or too long, without the chat template.

    Empty if no tokenizer is available.
    """
    # tokenizers refuse a lone surrogate, half of a character that was cut; in training it becomes a question mark, too
    texts = {
        prompt.id: "\n".join(text_of(message) for message in prompt.messages).encode(errors="replace").decode()
        for prompt in prompts
    }
    chosen, num_bytes = list[str](), 0
    for id_ in sorted(texts, key=lambda id_: -len(texts[id_])):
        size = len(texts[id_].encode())
        num_bytes += size
        if len(chosen) >= NUM_LONGEST and (size <= plan.config.data.max_prompt_tokens or num_bytes > MAX_COUNTED):
            break
        chosen.append(id_)
    model = plan.config.model
    if model.tokenizer == BYTES:
        return {id_: len(texts[id_].encode()) for id_ in chosen}
    file = model_directory(model.tokenizer or model.path, model.revision) / "tokenizer.json"
    if not file.is_file():
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return {id_: len(tokenizer.encode(texts[id_], add_special_tokens=False).ids) for id_ in chosen}
