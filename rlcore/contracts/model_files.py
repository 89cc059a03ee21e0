"""The files of a model on this machine: their directory, and the facts in their headers and config.json.

No tensor is read and torch is not imported, so a plan can use this before anything starts.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.contracts.model_experts import dense_size, experts_of
from rlcore.contracts.model_latents import attention_parameters, latents_of
from rlcore.contracts.requests import ModelShape
from rlcore.errors import ConfigError, boundary, describe

Answers = Literal["", "instruct", "thinking"]
OTHER_NAMES = {
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
"""Common names in config.json, with the names that GPT-2, GPT-J, CodeGen, GPT-Neo and OPT use instead."""

SLIDING = "sliding_attention"
"""The entry of `layer_types` in config.json for a layer with a sliding window."""
ODD = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""Errors that reading a file with arbitrary content may raise."""
CHUNKED = "chunked_attention"
"""The entry for a layer whose tokens attend to the earlier ones of their chunk."""
MAX_JSON = 64 << 20
"""Limit of config.json and of an index in bytes; those of the largest models have 10 MB."""
MAX_READ = 256 << 20
"""Limit of any file that transformers reads at once; the largest vocabularies have some 50 MB."""
READ_AT_ONCE = frozenset({".json", ".jinja", ".txt", ".model"})
"""Suffixes of a model's files that transformers reads at once."""
MAX_HEADER = 100_000_000
"""Limit of the header of a safetensors file in bytes, as in the library safetensors."""
MAX_SIZE = 1 << 50
"""The largest plausible size or number of parameters of a model."""


def model_directory(name: str, revision: str = "main") -> Path:
    """The directory of a model: a local one of that name, else its snapshot in this machine's cache of the Hub.

    Nothing is downloaded; if neither exists, the returned path does not exist. The cache is laid out as in
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    cached = _hub_cache() / f"models--{name.replace('/', '--')}"
    with suppress(OSError):  # a revision that is a commit has no such file
        revision = (cached / "refs" / revision).read_text("utf-8").strip()
    snapshot = cached / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() else directory


def _hub_cache() -> Path:
    """The directory into which the Hub's client downloads."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{home}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(named or f"{home}/hub")).expanduser()


def usual_answers(directory: Path) -> Answers:
    """'instruct' for a local model with a chat template, 'thinking' if that mentions thoughts, else empty."""
    try:
        file = directory / "chat_template.jinja"
        if file.is_file():
            template = file.read_text("utf-8")
        else:
            template = str(_json(directory / "tokenizer_config.json").get("chat_template") or "")
    except ODD:
        return ""
    if not template:
        return ""
    return "thinking" if "<think>" in template or "enable_thinking" in template else "instruct"


def num_parameters(directory: Path) -> int | None:
    """Parameters of a local model: counted in its safetensors headers, else estimated from config.json, else None."""
    try:
        files = _weights_of(directory)
        return _checked(sum(map(_count, files)) if files else _estimate(_decoder(directory)))
    except ODD:
        return None


def model_shape(directory: Path) -> ModelShape | None:
    """The architecture of a local model, from its config.json; None if unknown."""
    try:
        config = _decoder(directory)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        latents = latents_of(config)
        head = latents.head_size if latents else config.get("head_dim") or hidden // heads
        key_heads = heads if latents else config.get("num_key_value_heads") or heads
        kinds = set(config.get("layer_types") or config.get("attention_layers") or ())
        chunk = config.get("attention_chunk_size") if not kinds or CHUNKED in kinds else 0
        windowed = chunk or (config.get("sliding_window") and config.get("use_sliding_window", True))
        capped, only_windows = bool(config.get("attn_logit_softcapping")), kinds <= {"full_attention", SLIDING}
        return ModelShape(
            model_type=str(config["model_type"]),
            layers=_checked(config["num_hidden_layers"]),
            hidden_size=_checked(hidden),
            inner_size=_checked(dense_size(config) or 4 * hidden),
            kv_size=_checked(head * key_heads),
            vocabulary=_checked(config["vocab_size"]),
            full_attention=kinds <= {"full_attention", "global"} and not windowed and not capped,
            query_size=_checked(head * heads),
            heads=_checked(heads),
            window=_checked(chunk or config["sliding_window"]) if windowed else 0,
            windowed_layers=_windowed_layers(config) if windowed else 0,
            full_in_window=bool(windowed) and only_windows and not capped and not chunk,
            experts=experts_of(config),
            latents=latents,
        )
    except ODD:
        return None


def _windowed_layers(config: dict[str, Any]) -> int:
    """Layers with a sliding window or chunks; without a list of kinds by the rules of Llama 4, Qwen and Gemma, else all
    of them."""
    kinds, layers = config.get("layer_types"), _checked(config["num_hidden_layers"])
    if kinds:
        return sum(kind in (SLIDING, CHUNKED) for kind in kinds)
    if config.get("attention_chunk_size"):  # layers without rotation attend to everything
        if rotated := config.get("no_rope_layers"):
            return sum(map(bool, rotated[:layers]))
        return layers - layers // _checked(config.get("no_rope_layer_interval") or 4)
    if pattern := int(config.get("sliding_window_pattern") or 0):  # every pattern-th layer attends to everything
        return layers - layers // pattern
    return max(0, layers - int(config.get("max_window_layers") or 0))


def _checked(size: Any) -> int:
    if not 0 < (whole := int(size)) < MAX_SIZE:
        raise ValueError(f"{size} is not a size of a model")
    return whole


def _json(path: Path) -> Any:
    """The value in the file. ValueError when it is too large or nested too deep, OSError when it is not a file."""
    if not path.is_file():  # opening a pipe waits for its other end
        raise FileNotFoundError(path)
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"'{path}' has more than {MAX_JSON >> 20} MiB")
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError as cause:
        raise ValueError(f"'{path}' is nested too deep") from cause


def decoder_settings(directory: Path) -> Mapping[str, Any]:
    """config.json of a local model, with the names that most models use; for one that also sees images, the text part.

    Empty if it cannot be read.
    """
    try:
        return _decoder(directory)
    except ODD:
        return {}


def _decoder(directory: Path) -> dict[str, Any]:
    """`decoder_settings`; one of ODD if the file cannot be read."""
    config = _json(directory / "config.json")
    config = {**config, **config.get("text_config", {})}
    for name, others in OTHER_NAMES.items():
        values = [config[other] for other in others if config.get(other) is not None]
        if name not in config and values:
            config[name] = values[0]
    return config


def _weights_of(directory: Path) -> list[Path]:
    """The files of the weights; none if some are missing, as in a cache during a download."""
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        files = {directory / name for name in _named_by(index)}
        return sorted(files) if all(path.is_file() for path in files) else []
    # opening a pipe would wait for its other end
    return [whole] if whole.is_file() else sorted(filter(Path.is_file, directory.glob("*.safetensors")))


def missing_weights(directory: Path) -> list[str]:
    """Names of the files of weights that an index of the directory names and that are not there. Raises one of `ODD`
    for a damaged index."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists() or not index.is_file():
        return []
    return sorted(name for name in _named_by(index) if not (directory / name).is_file())


def _named_by(index: Path) -> set[str]:
    """The names of the files of an index. ValueError if one is in another directory."""
    names = set(_json(index)["weight_map"].values())
    outside = next((name for name in names if Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"it names the file '{outside}' of another directory; needs files next to it")
    return names


def check_model_files(who: str, directory: Path) -> None:
    """ConfigError if transformers must not read the files of a local model; a name on the Hub passes.

    Checked are files of JSON and text, which are regular and not too large for memory, and each index of weights, which
    names only files of the directory.
    """
    if not directory.is_dir():
        return
    for file in sorted(directory.iterdir()):
        if file.suffix not in READ_AT_ONCE or file.is_dir() or not file.exists():
            continue
        if not file.is_file():
            raise ConfigError(f"{who}: '{file.name}' is a pipe, a device or a socket; needs a file")
        if (size := file.stat().st_size) > MAX_READ:
            raise ConfigError(
                f"{who}: '{file.name}' has {size >> 20} MiB; needs at most {MAX_READ >> 20} MiB, since such files are "
                "read at once; move it to another directory if it does not belong to the model"
            )
        if file.name.endswith(".index.json"):
            with boundary(f"{who}: '{file.name}'", ConfigError):
                _named_by(file)


def check_settings(path_key: str, path: str, directory: Path) -> None:
    """ConfigError if the model has a config.json that is not a JSON object. `path` is the value of the key."""
    if not (directory / "config.json").is_file():  # `check_model_files` refuses a pipe
        return
    who, needed = f"{path_key}='{path}': its config.json", "needs that of the model: copy or download it again"
    try:
        found = _json(directory / "config.json")
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{who} is not JSON ({describe(cause)}); {needed}") from cause
    if not isinstance(found, dict):
        raise ConfigError(f"{who} holds {type(found).__name__}, not an object; {needed}")


def stated_size(path: Path) -> int:
    """The size in bytes that a safetensors file has according to its header; 0 if the header is damaged.

    A file that ends within its header has at least that header's size.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= MAX_HEADER:
        return 0
    if path.stat().st_size < 8 + length:
        return 8 + length
    try:
        ends = [int(tensor["data_offsets"][1]) for tensor in _header(path).values()]
    except ODD:
        return 0
    return 8 + length + max(ends, default=0)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a model's files, known from its header."""

    file: Path
    name: str
    shape: tuple[int, ...]


def saved_tensors(directory: Path) -> dict[str, SavedTensor]:
    """The tensors of a local model by name, from the headers of its safetensors files; empty when a file is missing.

    Raises one of `ODD` for damaged files.
    """
    files = _weights_of(directory)
    return {
        name: SavedTensor(file, name, tuple(int(size) for size in tensor["shape"]))
        for file in files
        for name, tensor in _header(file).items()
    }


def _count(path: Path) -> int:
    """Numbers in a safetensors file."""
    return sum(math.prod(tensor["shape"]) for tensor in _header(path).values())


def _header(path: Path) -> dict[str, Any]:
    """The entry of each tensor in a safetensors file, whose header is eight bytes of length, then JSON."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(MAX_HEADER, path.stat().st_size):
            raise ValueError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(size))
        except RecursionError as cause:
            raise ValueError(f"the header of {path} is nested too deep") from cause
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def _estimate(config: dict[str, Any]) -> int:
    """Parameters of a decoder's matrices; norms and biases, under 0.1 %, are left out.

    Feed-forward layers have three matrices (gated); those of models that still use `n_embd` have two. The experts of a
    layer and their router count.
    """
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head * (heads + config.get("num_key_value_heads", heads))
    if latents := latents_of(config):
        attention = attention_parameters(latents, hidden, heads)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    matrices, inner = 2 if "n_embd" in config else 3, dense_size(config) or 4 * hidden
    feed_forward = layers * matrices * inner
    if experts := experts_of(config):
        each = matrices * (experts.number * experts.inner_size + experts.shared_size) + experts.number
        feed_forward = (layers - experts.layers) * matrices * inner + experts.layers * each
    return int(embeddings + layers * attention + hidden * feed_forward)


def readable_as(like: Path, directory: Path) -> None:
    """Gives every file below `directory` the permissions of `like`, which was written with this process's umask.

    Libraries write weights to a temporary file that only its owner may read, and rename it.
    """
    mode = like.stat().st_mode & 0o666
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o666 != mode:
            with suppress(OSError):
                path.chmod(mode)
