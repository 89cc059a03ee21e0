"""A reference sees the policy's token ids, so a tokenizer with other ids is refused."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig
from rlcore.contracts.tokens import Tokens
from rlcore.data.tokenizer import ByteTokens, check_reference_ids, load_tokens
from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing.null import SETTINGS
from rlcore.testing.tiny import write_tiny_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token per letter, 'a' 64 and 'b' 65 among them, and one that ends a turn: 257 tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


@pytest.fixture
def tokens(directory: Path) -> Tokens:
    return load_tokens(ModelConfig(path=str(directory)), "")


def copy_of(directory: Path, path: Path, **ids: int | None) -> Path:
    """The model in another directory, where the tokens have these ids; None: the token is missing."""
    shutil.copytree(directory, path)
    file = path / "tokenizer.json"
    saved: dict[str, Any] = json.loads(file.read_text())
    vocabulary = saved["model"]["vocab"] | ids
    saved["model"]["vocab"] = {token: id_ for token, id_ in vocabulary.items() if id_ is not None}
    file.write_text(json.dumps(saved))
    return path


def test_other_ids_are_refused_with_an_example(directory: Path, tmp_path: Path, tokens: Tokens) -> None:
    swapped = copy_of(directory, tmp_path / "swapped", a=65, b=64)
    found = r"swapped': 2 of the policy's 257 tokens have other ids or none in its tokenizer, such as 'a', which"
    with pytest.raises(ConfigError, match=rf"{found} has id 64 and there has id 65; needs a model with the tokenizer"):
        check_reference_ids(tokens, str(swapped))
    lacking = copy_of(directory, tmp_path / "lacking", b=None)
    with pytest.raises(ConfigError, match=r"of the policy's 257 tokens .*'b', which has id 65 and there does not"):
        check_reference_ids(tokens, str(lacking))


def test_more_tokens_or_no_tokenizer_are_accepted(directory: Path, tmp_path: Path, tokens: Tokens) -> None:
    from transformers import AutoTokenizer

    larger, bare = copy_of(directory, tmp_path / "larger"), copy_of(directory, tmp_path / "bare")
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(larger)
    for path in bare.glob("tokenizer*.json"):
        path.unlink()
    for teacher in (directory, larger, bare):
        check_reference_ids(tokens, str(teacher))
    check_reference_ids(ByteTokens(), str(copy_of(directory, tmp_path / "swapped", a=65, b=64)))


@pytest.mark.slow
def test_a_run_compares_its_ids_with_those_of_its_teacher(directory: Path, tmp_path: Path) -> None:
    swapped = copy_of(directory, tmp_path / "swapped", a=65, b=64)
    teacher = [f"reference.path={swapped}", "reference.backend=null", "algo.preset=distillation"]
    plan = plan_run([], [*SETTINGS, f"model.path={directory}", "model.tokenizer=", *teacher], ["null"])

    async def start(plan: RunPlan) -> None:
        async with launch(plan, tmp_path / "run"):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"reference\.path=.*swapped': 2 of the policy's 257 tokens have other ids"):
        asyncio.run(start(plan))
