"""What this machine has and how large a model is, found without torch: the facts that the planner is given."""

import ctypes
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config import RunConfig
from rlcore.contracts.requests import ModelShape
from rlcore.plan import Facts

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


NVIDIA = Path("/proc/driver/nvidia/gpus")


NVML = "libnvidia-ml.so.1"
"""The library of NVIDIA's driver that tells of devices."""


OTHER_NAMES = {
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
"""What GPT-2, GPT-J, CodeGen, GPT-Neo and OPT write in their config.json for the names that others have."""


def gather_facts(config: RunConfig) -> Facts:
    """Cores, memory and devices that this process may use, and the parameters of `model.path`; unknown is None."""
    directory, on_gpus = model_directory(config.model.path, config.model.revision), config.cluster.device == "cuda"
    return Facts(
        cpus=num_cpus(),
        gpus=num_gpus() if on_gpus else 0,
        memory_bytes=memory_bytes(),
        gpu_memory_bytes=gpu_memory_bytes() if on_gpus else None,
        parameters=num_parameters(directory),
        shape=model_shape(directory),
    )


def model_directory(name: str, revision: str = "main") -> Path:
    """Where a model lies: the directory of that name, else what the Hub's cache of this machine holds of it.

    The cache is only looked at, as https://huggingface.co/docs/huggingface_hub/guides/manage-cache lays it out; what is
    not in it is a directory that does not exist.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    cached = _hub_cache() / f"models--{name.replace('/', '--')}"
    with suppress(OSError):  # a commit has no such file
        revision = (cached / "refs" / revision).read_text("utf-8").strip()
    snapshot = cached / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() else directory


def _hub_cache() -> Path:
    """Where the Hub's client keeps what it has loaded."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{home}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(named or f"{home}/hub")).expanduser()


def num_cpus() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory of the machine, or of the container if that has less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def num_gpus() -> int:
    """Devices that CUDA_VISIBLE_DEVICES leaves of those the driver lists."""
    try:
        listed = len(list(NVIDIA.iterdir()))
    except OSError:
        listed = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed
    return min(listed, len([each for each in visible.split(",") if each.strip() not in ("", "-1")]))


def gpu_memory_bytes(nvml: Any = None) -> int | None:
    """Memory of the smallest device that CUDA_VISIBLE_DEVICES leaves, as the driver says; None when it does not.

    `nvml` stands for the driver's library. A variable that names devices in another way than by their numbers leaves
    all of them.
    """
    try:
        sizes = _device_bytes(ctypes.CDLL(NVML) if nvml is None else nvml)
    except (OSError, AttributeError):
        return None
    named = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    chosen = [sizes[int(each)] for each in named if each.isdecimal() and int(each) < len(sizes)]
    return min(chosen or sizes, default=None)


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _device_bytes(nvml: Any) -> list[int]:
    """The memory of each device; empty when the library refuses any call."""
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        sizes = []
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), _NvmlMemory()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
                return []
            if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
                return []
            sizes.append(int(memory.total))
        return sizes
    finally:
        nvml.nvmlShutdown()


def num_parameters(directory: Path) -> int | None:
    """Parameters of a local model: counted in its safetensors headers, else reckoned from config.json, else None."""
    try:
        files = _weights_of(directory)
        if files:
            return sum(_count(path) for path in files)
        return _reckon(_decoder(directory))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def model_shape(directory: Path) -> ModelShape | None:
    """The architecture of a local model, by its config.json; None when that does not say."""
    try:
        config = _decoder(directory)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        kinds = set(config.get("layer_types") or config.get("attention_layers") or ())
        windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
        return ModelShape(
            model_type=str(config["model_type"]),
            layers=int(config["num_hidden_layers"]),
            hidden_size=int(hidden),
            inner_size=int(config.get("intermediate_size") or 4 * hidden),
            kv_size=int(head * (config.get("num_key_value_heads") or heads)),
            vocabulary=int(config["vocab_size"]),
            full_attention=kinds <= {"full_attention", "global"}
            and not windowed
            and not config.get("attn_logit_softcapping"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _decoder(directory: Path) -> dict[str, Any]:
    """config.json of a model, of one that also sees images what it says of text, under the names most models use."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config = {**config, **config.get("text_config", {})}
    for name, others in OTHER_NAMES.items():
        said = [config[other] for other in others if config.get(other) is not None]
        if name not in config and said:
            config[name] = said[0]
    return config


def _weights_of(directory: Path) -> list[Path]:
    """The files of the weights; none when a part of them is missing, as in a cache that is being filled."""
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        files = {directory / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
        return sorted(files) if all(path.is_file() for path in files) else []
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a model's files, of which the header is known."""

    file: Path
    name: str
    shape: tuple[int, ...]


def saved_tensors(directory: Path) -> dict[str, SavedTensor]:
    """The tensors of a local model by name, from the headers of its safetensors files; empty when a file is missing.

    OSError, ValueError, KeyError or TypeError for files that are damaged.
    """
    files = _weights_of(directory)
    return {
        name: SavedTensor(file, name, tuple(int(size) for size in each["shape"]))
        for file in files
        for name, each in _header(file).items()
    }


def _count(path: Path) -> int:
    """Numbers in a safetensors file."""
    return sum(math.prod(each["shape"]) for each in _header(path).values())


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of each tensor: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(size))
    return {name: each for name, each in header.items() if name != "__metadata__"}


def _reckon(config: dict[str, Any]) -> int:
    """Matrices of a decoder; norms and biases, under 0.1 %, are left out.

    Feed-forward layers are gated, three matrices, but those of models that still say `n_embd`: two.
    """
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head * (heads + config.get("num_key_value_heads", heads))
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    matrices, inner = 2 if "n_embd" in config else 3, config.get("intermediate_size") or 4 * hidden
    return int(embeddings + layers * (attention + matrices * hidden * inner))
