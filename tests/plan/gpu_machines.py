"""Plans for machines with GPUs that are not there; the tests of defaults and of one GPU share them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcore.config import LoadedConfig
from rlcore.contracts.requests import ModelShape
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure

GIB = 2**30
SETTINGS = (
    "model.path=none",
    "model.tokenizer=bytes",
    "data.sources.all.path=prompts.jsonl",
    "reward.functions.exact_match.fn=exact_match",
)
QWEN = ModelShape("qwen2", 28, 1536, 8960, 256, 151936, full_attention=True)
H100 = Facts(cpus=52, gpus=1, gpu_memory_bytes=80 * GIB, gpu_free_bytes=79 * GIB, parameters=1_540_000_000, shape=QWEN)


def machine(gpus: int, **more: Any) -> Facts:
    return replace(H100, gpus=gpus, **({} if gpus else {"gpu_memory_bytes": None, "gpu_free_bytes": None}), **more)


def loaded(*overrides: str, facts: Facts = H100) -> LoadedConfig:
    return configure([], [*SETTINGS, *overrides], machine=facts)[1]


def planned(*overrides: str, facts: Facts = H100) -> RunPlan:
    hooks, config = configure([], [*SETTINGS, *overrides], machine=facts)
    return make_plan(config, hooks, facts)


def write_header(directory: Path, *shape: int) -> Path:
    """A model directory without weights: config.json, and the header of a file with one tensor of this shape."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.up_proj.weight": entry}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def chosen(found: LoadedConfig | RunPlan) -> dict[str, Any]:
    """The choices other than the device, by key; each has a reason."""
    choices = [choice for choice in found.choices if not choice.set_by]
    assert all(choice.reason for choice in choices)
    return {choice.key: choice.value for choice in choices if choice.key != "cluster.device"}
