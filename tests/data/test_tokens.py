"""Tokens: one owner of tokenizer and chat template."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens, TemplateTokens, load_tokens
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing.null import SETTINGS
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import FrozenDict, GenerateRequest, Sampling, frozen_messages

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ opening | default('') }}{% endif %}"
)
SPECIALS = ["<eos>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<other>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a character tokenizer, a chat template, and its generation configuration."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [fast.convert_tokens_to_ids("<other>")]}))
    return path


def tokens_of(directory: Path, system_prompt: str = "", **settings: object) -> TemplateTokens:
    tokens = load_tokens(ModelConfig(path=str(directory), **settings), system_prompt)  # type: ignore[arg-type]
    assert isinstance(tokens, TemplateTokens)
    return tokens


def raw(directory: Path, ids: tuple[int, ...]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(directory).decode(list(ids)))


@pytest.mark.slow
def test_a_prompt_is_the_templated_conversation_with_the_next_turn_opened(directory: Path) -> None:
    ids = tokens_of(directory).encode_prompt(frozen_messages([{"role": "user", "content": "1+1?"}]))
    assert raw(directory, ids) == "<|user|>1+1?<|end|>\n<|assistant|>"
    assert all(type(id_) is int for id_ in ids)


TEXT = "Vier \N{GRINNING FACE} mal 四 = 16.\n"


@pytest.mark.slow
def test_the_pieces_of_a_texts_tokens_joined_are_the_text(directory: Path) -> None:
    tokens = tokens_of(directory)
    ids = tokens._encode_text(f"<|user|>{TEXT}<|end|>")
    assert b"".join(map(tokens.piece, ids)).decode() == f"<|user|>{TEXT}<|end|>"
    assert tokens.piece(10**6) == b""
    assert b"".join(map(ByteTokens().piece, TEXT.encode())).decode() == TEXT


def test_the_pieces_of_a_tokenizer_of_text_have_their_spaces_and_bytes(directory: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<0xE5>": 0, "<0x9B>": 1, "<0x9B2>": 2, "\N{LOWER ONE EIGHTH BLOCK}4": 3, "<eos>": 4, "<unk>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    tokens = TemplateTokens(fast)
    assert [tokens.piece(id_) for id_ in range(5)] == [b"\xe5", b"\x9b", b"<0x9B2>", b" 4", b"<eos>"]


def test_several_messages_are_continued(directory: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    ids = tokens_of(directory).encode_prompt(messages)
    assert raw(directory, ids) == "<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>"


def test_the_system_prompt_is_put_first_unless_the_conversation_has_one(directory: Path) -> None:
    tokens = tokens_of(directory, "be brief")
    assert raw(directory, tokens.encode_prompt([{"role": "user", "content": "x"}])).startswith(
        "<|system|>be brief<|end|>"
    )
    own = [FrozenDict({"role": "system", "content": "own"}), FrozenDict({"role": "user", "content": "x"})]
    assert raw(directory, tokens.encode_prompt(own)) == "<|system|>own<|end|>\n<|user|>x<|end|>\n<|assistant|>"


def test_a_response_ends_with_the_tokenizers_the_models_and_the_templates_end_token(directory: Path) -> None:
    tokens = tokens_of(directory)
    names = ["<eos>", "<other>", "<|end|>"]
    assert {raw(directory, (id_,)) for id_ in tokens.eos_ids} == set(names)
    assert raw(directory, (tokens.pad_id,)) == "<pad>"
    assert tokens.context_length == 256


def test_special_tokens_are_left_out_of_decoded_text(directory: Path) -> None:
    tokens = tokens_of(directory)
    ids = tokens.encode_prompt([{"role": "user", "content": "grüß"}])
    assert tokens.decode(ids) == "grüß\n"


def test_a_stop_string_that_spells_a_special_token_is_refused_with_the_way_out(directory: Path) -> None:
    tokens = tokens_of(directory)
    tokens.check_stop(("\n\n", "<|en", "system", ""))
    ended = r"^rollout\.stop: the string '\.<\|end\|>' holds '<\|end\|>', a special .*leave it out: '<\|end\|>' ends"
    with pytest.raises(ConfigError, match=ended):
        tokens.check_stop(("\n\n", ".<|end|>"))
    with pytest.raises(ConfigError, match=r"^request 1: the string '<\|user\|>' .*eos_token_id"):
        tokens.check_stop(("<|user|>",), "request 1")
    ByteTokens().check_stop(("<|end|>",))


def test_a_run_with_such_a_stop_string_does_not_start(directory: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, f"model.path={directory}", f"model.tokenizer={directory}", "rollout.stop=['<|end|>']")

    async def start() -> None:
        async with launch(plan_run([], settings, ["null"]), tmp_path):
            pytest.fail("started")

    with pytest.raises(ConfigError, match=r"rollout\.stop: the string '<\|end\|>'"):
        asyncio.run(start())


def test_a_stop_string_of_a_turn_comes_through_the_same_door(directory: Path) -> None:
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(directory)), dtype="float32", device="cpu")
    assert isinstance(model, PolicyModel)
    sampler = EmbeddedSampler(model, tokens_of(directory), max_rows=4, device=torch.device("cpu"))

    async def generate(*stop: str) -> int:
        request = GenerateRequest("p/1", (5, 6), Sampling(max_tokens=2, stop=stop), 1, 0)
        return len([completion async for completion in sampler.generate([request])])

    assert asyncio.run(generate("x", "|>")) == 1
    with pytest.raises(ConfigError, match=r"stop strings of request 'p/1': the string '<\|user\|>' holds"):
        asyncio.run(generate("x", "<|user|>"))


def test_a_template_file_and_its_arguments_replace_the_tokenizers_own(directory: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }};{% endfor %}{{ opening }}")
    tokens = tokens_of(directory, chat_template=str(own), chat_template_kwargs={"opening": "go:"})
    assert raw(directory, tokens.encode_prompt([{"role": "user", "content": "x"}])) == "x;go:"


def test_each_prompt_shows_the_schemas_as_they_are_written(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text("{% for key in tools[0] %}{{ key }} {{ tools[0][key] }};{% endfor %}")
    tokens = tokens_of(directory, chat_template=str(tmp_path / "tools.jinja"))
    messages = [FrozenDict({"role": "user", "content": "Hi."})]
    for schema in ({"x": 1, "y": "<eos>"}, {"x": True, "y": "<eos>"}, {"y": "<eos>", "x": True}, {"x": 1.0}):
        for _ in range(2):
            ids = tokens.encode_prompt(messages, [FrozenDict(schema)])
            assert raw(directory, ids) == "".join(f"{key} {value};" for key, value in schema.items())
            assert tokens.eos_ids.isdisjoint(ids)
    assert tokens.encode_prompt(messages) == ()


def test_saved_files_open_as_the_same_tokenizer(directory: Path, tmp_path: Path) -> None:
    tokens = tokens_of(directory)
    tokens.save(tmp_path / "saved")
    messages = [{"role": "user", "content": "1+1?"}]
    (tmp_path / "saved" / "config.json").write_text((directory / "config.json").read_text())
    assert tokens_of(tmp_path / "saved").encode_prompt(messages) == tokens.encode_prompt(messages)


def test_a_tokenizer_without_a_template_is_refused(directory: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no chat template.*model\.chat_template"):
        load_tokens(ModelConfig(path=str(directory), tokenizer=str(tmp_path)), "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "{missing}"}, r"model\.path: found no directory '.*missing'"),
        (
            {"path": "runs/sft/model"},
            r"model\.path: found no directory 'runs/sft/model' \(looked for /.*/runs/sft/model\)",
        ),
        ({"path": "{empty}"}, r"model\.path: the directory '.*' holds no model: needs one with a config\.json"),
        ({"path": "{model}", "tokenizer": "{missing}"}, r"tokenizer '.*missing'"),
        ({"path": "{model}", "chat_template": "{missing}"}, r"model\.chat_template='.*missing'"),
    ],
)
def test_missing_files_are_named(directory: Path, tmp_path: Path, settings: dict[str, str], message: str) -> None:
    places = {"model": directory, "missing": tmp_path / "missing", "empty": tmp_path}
    filled = {key: value.format(**places) for key, value in settings.items()}
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokens(ModelConfig(**filled), "")  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["x", ["x"], [[1]], {"a": 1}])
def test_an_end_token_that_is_not_an_id_is_one_line(directory: Path, tmp_path: Path, end: object) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with pytest.raises(
        ConfigError, match=r"^model\.path='.*': eos_token_id, max_position_embeddings, vocab_size: \w+Error"
    ) as caught:
        tokens_of(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "3", '{"eos_token_id": NaN}'])
def test_a_generation_configuration_that_is_not_one_is_one_line(directory: Path, tmp_path: Path, content: str) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^model\.path='.*': (generation_config\.json|eos_token_id.*): \w+Error"):
        tokens_of(tmp_path)


@pytest.mark.parametrize("of", ["model", "tokenizer"])
def test_a_vocabulary_that_fits_no_memory_is_refused_before_it_is_read(
    directory: Path, tmp_path: Path, of: str
) -> None:
    shutil.copytree(directory, tmp_path / "huge")
    with (tmp_path / "huge" / "vocab.json").open("wb") as file:
        file.truncate(1 << 36)
    settings = {"path": directory, "tokenizer": directory, ("path" if of == "model" else of): tmp_path / "huge"}
    with pytest.raises(ConfigError, match=r"'vocab.json' has 65536 MiB; needs at most 256 MiB") as refused:
        load_tokens(ModelConfig(**{key: str(path) for key, path in settings.items()}), "")  # type: ignore[arg-type]
    assert f"'{tmp_path / 'huge'}'" in str(refused.value)


@pytest.mark.timeout(60)
def test_a_template_in_a_pipe_is_not_waited_for(directory: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat.jinja")
    with pytest.raises(ConfigError, match=r"^model\.chat_template='.*chat\.jinja': it is a pipe; needs a Jinja file$"):
        tokens_of(directory, chat_template=str(tmp_path / "chat.jinja"))


def test_end_and_padding_are_tokens_that_the_model_has(directory: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>", "<c>", "<beyond>"]})
    tokenizer.pad_token = "<beyond>"
    tokenizer.save_pretrained(tmp_path)
    tokens = tokens_of(directory, tokenizer=str(tmp_path))
    beyond = tokenizer.convert_tokens_to_ids("<beyond>")
    assert beyond >= 264
    assert tokens.pad_id in tokens.eos_ids
    tokenizer.eos_token, tokenizer.chat_template = "<beyond>", "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 1 << 70]}))
    with pytest.raises(
        ConfigError, match=rf"below 264, the model's vocabulary, among \[-1, {beyond}, {1 << 70}\], so no response"
    ):
        tokens_of(tmp_path)


def test_a_template_that_fails_on_a_conversation_is_a_config_error(directory: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ raise_exception('roles must alternate') }}")
    tokens = tokens_of(directory, chat_template=str(own))
    with pytest.raises(ConfigError, match="roles must alternate"):
        tokens.encode_prompt([{"role": "user", "content": "x"}])


def test_byte_tokens_round_trip_and_end_with_their_own_token() -> None:
    tokens = load_tokens(ModelConfig(path="none", tokenizer="bytes"), "be brief")
    assert isinstance(tokens, ByteTokens)
    ids = tokens.encode_prompt([{"role": "user", "content": "grüß"}])
    assert tokens.decode([*ids, *tokens.eos_ids]) == "system: be brief\nuser: grüß\nassistant: "
    assert tokens.eos_ids == {256}


@pytest.mark.slow
def test_byte_tokens_need_no_torch() -> None:
    script = (
        "import sys; from rlcore.config import ModelConfig; from rlcore.data.tokenizer import load_tokens; "
        "load_tokens(ModelConfig(path='none', tokenizer='bytes'), ''); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False).returncode == 0
