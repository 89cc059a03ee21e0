"""A tiny random model with a byte tokenizer of transformers. Every trainer can load it, and runs take seconds."""

from pathlib import Path

from rlcore.testing.tiny import write_tiny_model

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_task(directory: Path, seed: int = 0, **settings: int) -> Path:
    """Write model, tokenizer and chat template; returns the directory. Tokenizer and model have the end-of-turn id
    256."""
    write_tiny_model(directory, seed=seed, **settings)
    return write_byte_tokenizer(directory)


def write_byte_tokenizer(directory: Path) -> Path:
    """Write the tokenizer and its chat template into a model's directory. Returns the directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)
    return directory
