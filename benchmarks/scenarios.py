"""The scenarios of comparisons: prompts, lengths, the options that choose them, and the arithmetic of a step."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import MODEL

NEVER = "<|never|>"
"""An end-of-sequence token that no model has learned: its id is above those of the tokenizer."""
_TEXT = """river stone market window letter garden engine winter paper bridge simple yellow morning silver music number
forest kitchen travel ocean summer doctor pencil mountain village history ticket corner button island"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Scenario:
    """The sizes of a step."""

    name: str
    prompt_tokens: int
    new_tokens: int
    """New tokens of the longest row."""
    varying: bool = False
    """True if the length of each row is drawn once, with a mean of about a third of `new_tokens`."""
    prompts: int = 8
    samples: int = 8
    rounds: int = 3

    @property
    def rows(self) -> int:
        """Samples of a step."""
        return self.prompts * self.samples

    @property
    def group_tokens(self) -> int:
        """Tokens of a whole group whose prompt is computed once. This is our micro-batch."""
        return self.prompt_tokens + self.samples * self.new_tokens

    def lengths(self) -> list[int]:
        """The number of new tokens of each row, prompt by prompt; every call returns the same."""
        if not self.varying:
            return [self.new_tokens] * self.rows
        drawn = np.random.default_rng(20).exponential(0.40 * self.new_tokens, self.rows)
        return [int(value) for value in np.clip(np.ceil(drawn), 1, self.new_tokens)]

    def facts(self) -> dict[str, Any]:
        """The sizes, for the JSON line."""
        return {**asdict(self), "new_tokens_total": sum(self.lengths())}


SCENARIOS = {
    "E1": Scenario("E1", prompt_tokens=45, new_tokens=64),
    "E2": Scenario("E2", prompt_tokens=45, new_tokens=64, varying=True),
    "E3": Scenario("E3", prompt_tokens=512, new_tokens=64, rounds=2),
}


def conversations(tokenizer: Any, num: int, num_tokens: int) -> list[list[dict[str, str]]]:
    """Different one-message conversations of exactly `num_tokens` tokens each, including template and opening.

    ValueError if there is none, for example because the template alone is longer.
    """
    return [_conversation(tokenizer, np.random.default_rng((7, index)), num_tokens) for index in range(num)]


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The token ids of the conversation as a prompt."""
    return list(
        tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True, return_dict=False)
    )


def _conversation(tokenizer: Any, rng: np.random.Generator, num_tokens: int) -> list[dict[str, str]]:
    """A message of random words while they fit, then of single letters, with or without spaces, until the number is
    exact."""

    def tried(text: str) -> tuple[int, list[dict[str, str]]]:
        messages = [{"role": "user", "content": text}]
        return len(prompt_ids(tokenizer, messages)), messages

    text = str(rng.choice(WORDS))
    while tried(longer := f"{text} {rng.choice(WORDS)}")[0] <= num_tokens:
        text = longer
    for ending in (filler * count for filler in (" a", "a") for count in range(16)):
        length, messages = tried(text + ending)
        if length == num_tokens:
            return messages
    raise ValueError(f"no prompt of exactly {num_tokens} tokens was found; the template may be longer than that")


def write_endless_model(model: Path, directory: Path) -> Path:
    """Write the same model, as links, with an end-of-sequence token that is hardly ever sampled; returns the directory.

    It is for engines that cannot ignore the end: each row then has its maximal length, which callers check. Prompts are
    encoded as by the model's tokenizer. ValueError if the vocabulary has neither a free id nor an unused special token.
    """
    from transformers import AutoTokenizer

    directory.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = str(tokenizer.chat_template)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    tokenizer.add_special_tokens({"eos_token": hardly_ever(tokenizer, template, vocabulary)})
    # The template must put nothing after an assistant's message: that would count as an end, too.
    tokenizer.chat_template = (
        "{% if messages[-1]['role'] == 'assistant' %}{{ messages[-1]['content'] }}{% else %}" + template + "{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    ends = {"eos_token_id": tokenizer.eos_token_id}
    stated = model / "generation_config.json"
    settings = json.loads(stated.read_text()) if stated.exists() else {}
    (directory / stated.name).write_text(json.dumps(settings | ends))
    for file in model.iterdir():
        if file.suffix == ".safetensors" or file.name in ("config.json", "model.safetensors.index.json"):
            (directory / file.name).symlink_to(file.resolve())
    return directory


def hardly_ever(tokenizer: Any, template: str, vocabulary: int) -> str:
    """A token below `vocabulary` that ends nothing yet: a new one, or a special one that the template does not use."""
    if len(tokenizer) < vocabulary:
        return NEVER
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    unused = [token for token in added if token not in used and token not in template]
    if not unused:
        raise ValueError(f"the vocabulary of {vocabulary} ids is full, and it has no special token without a use")
    return unused[-1]


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model, for counting FLOPs."""

    body: int
    """All parameters except for embedding and output layer."""
    head: int
    """Parameters of the output layer: vocabulary times hidden size."""

    @classmethod
    def of(cls, model: Path, num_parameters: int) -> "Sizes":
        """The sizes from the model's configuration and its number of parameters (a tied embedding counts once)."""
        config = json.loads((model / "config.json").read_text())
        head = config["vocab_size"] * config["hidden_size"]
        tied = config.get("tie_word_embeddings", True)
        return cls(num_parameters - head * (1 if tied else 2), head)


def update_flops(scenario: Scenario, sizes: Sizes) -> float:
    """FLOPs of an update that computes each prompt once for its group: forward and backward, 6 per parameter and token.

    The body counts for prompts and samples, the output layer only for sampled tokens. Attention scores are left out, so
    a rate that is computed from it is a little too low.
    """
    sampled, prompts = sum(scenario.lengths()), scenario.prompts * scenario.prompt_tokens
    return 6.0 * (sizes.body * (prompts + sampled) + sizes.head * sampled)


def generation_flops(scenario: Scenario, sizes: Sizes) -> float:
    """FLOPs of sampling with each prompt computed once for its group: 2 per parameter and token."""
    sampled, prompts = sum(scenario.lengths()), scenario.prompts * scenario.prompt_tokens
    return 2.0 * (sizes.body * (prompts + sampled) + sizes.head * sampled)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options of a comparison: scenarios and sizes, model and machine."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS), help="default: all")
    parser.add_argument("--rounds", type=int, default=0, help="timed steps of each side; 0: the scenario's own number")
    parser.add_argument("--prompts", type=int, default=0, help="groups of a step, instead of 8")
    parser.add_argument("--samples", type=int, default=0, help="samples of a group, instead of 8")
    parser.add_argument("--new-tokens", type=int, default=0, help="of the longest row, instead of 64")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="an override of our config")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="float32", help="of both sides; the gate is always in float32")
    parser.add_argument("--trl-bf16", action="store_true", help="TRL in its mixed precision, whatever --dtype says")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and tiny sizes: does it still run?")
    return parser


def sized(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """The scenario with the sizes of the command line."""
    if options.smoke:
        scenario = replace(scenario, prompts=2, samples=4, prompt_tokens=30, new_tokens=6, rounds=1)
    chosen = {"prompts": options.prompts, "samples": options.samples, "new_tokens": options.new_tokens}
    return replace(scenario, **{name: value for name, value in chosen.items() if value})
