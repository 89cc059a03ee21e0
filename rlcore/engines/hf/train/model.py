"""Transformers models, split into a backbone and a head that is applied at chosen positions only.

Letters: B rows, T positions, N chosen (row, position) pairs, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlcore.config import LoraConfig, ModelConfig
from rlcore.contracts.stored_formats import check_not_quantised, check_stored
from rlcore.engines.hf.train.adapter import add_adapter, checkpoint_gradients
from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.classifier_model import ClassifierModel, check_classifier
from rlcore.engines.hf.train.gradients import sum_holder
from rlcore.engines.hf.train.head import Head, check_head, find_head, token_scores
from rlcore.engines.hf.train.rounding import HALF
from rlcore.engines.hf.train.sharded_load import Rows, open_rows, take_rows
from rlcore.engines.hf.train.sharded_tensors import put
from rlcore.engines.hf.train.state_files import StateFile, check_restored
from rlcore.engines.hf.train.stored_weights import (
    check_activations,
    check_range,
    start_masters,
)
from rlcore.engines.hf.train.tensor_names import check_tensors
from rlcore.errors import CheckpointError, ConfigError, boundary

if TYPE_CHECKING:
    from rlcore.engines.hf.train.microbatch import MicroBatch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
VALUE_HEAD_FILE = "value_head.safetensors"
HEAD_SETTINGS = "rlcore.value_head"
"""Entry of the metadata of that file, as JSON."""


class ModelKind(StrEnum):
    """The kind of a model's output per token."""

    CAUSAL_LM = "causal_lm"
    """Its log-probability given the tokens before it."""
    VALUE = "value"
    """The value of the state before it is sampled."""
    CLASSIFIER = "classifier"
    """The outputs of a sequence classifier after the token before it."""


class PolicyModel(Model):
    """A causal language model; `forward` gives log-probs and entropy."""

    def __init__(self, transformer: Any, head: Head, adapter: Any = None) -> None:
        super().__init__(transformer, adapter)
        self._head = (head,)  # in a tuple: the layer is registered with `transformer`

    @property
    def head(self) -> Head:
        """The output layer, which turns hidden states into logits."""
        return self._head[0]

    def forward(self, micro: MicroBatch, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """(N,) log-prob and (N,) entropy of the loss tokens, under softmax(logits / temperature)."""
        hidden_NH = self.hidden_at(micro)
        scores = token_scores(
            hidden_NH,
            micro.targets_N,
            self.head,
            temperature,
            with_entropy=with_entropy,
            holder_VH=None if self._masters is None else sum_holder(self.head.linear.weight, self._masters),
        )
        return micro.of_all(*scores)


class ValueModel(Model):
    """A backbone with one output: the value of the state before a token. The new head starts at zero.

    The head computes in float32 at least: bfloat16 would round a value near 1 to a multiple of 2^-8.
    """

    def __init__(self, transformer: Any, adapter: Any = None) -> None:
        super().__init__(transformer, adapter)
        weight = next(transformer.parameters())
        hidden = transformer.config.get_text_config().hidden_size
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.value_head = nn.Linear(hidden, 1, device=weight.device, dtype=dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.eval()

    def forward(self, micro: MicroBatch, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """(N,) value before each loss token, and (N,) zeros in place of the entropy."""
        hidden_NH = self.hidden_at(micro)
        values_N = self.value_head(hidden_NH.to(self.value_head.weight.dtype))[:, 0]
        return micro.of_all(values_N, torch.zeros_like(values_N))

    def set_head(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copy a head's (1, H) weight and (1,) bias, in any number format; None: the bias is 0."""
        put(self.value_head.weight, weight)
        put(self.value_head.bias, torch.zeros(1) if bias is None else bias)

    def head_settings(self) -> dict[str, str]:
        """Settings, by key, without which the head's tensors mean something else; saved with them."""
        return {}

    def head_tensors(self) -> dict[str, Tensor]:
        """The tensors outside of the backbone, by name: the contents of a value head file."""
        return {
            name: parameter.detach() for name, parameter in self.value_head.named_parameters()
        }  # state_dict has shards


AnyModel = PolicyModel | ValueModel | ClassifierModel
"""A model of any `ModelKind`."""


def load_model(
    kind: ModelKind,
    model: ModelConfig,
    *,
    dtype: str,
    device: str,
    lora: LoraConfig | None = None,
    gradient_checkpointing: bool = False,
    section: str = "actor",
    path_key: str = "model.path",
) -> AnyModel:
    """The model of `model.path` on `device`; ConfigError if it cannot be opened or its head is not supported.

    Errors name the settings by `section` and the path by `path_key`.
    """
    loaded, _ = load_rows(
        kind,
        model,
        dtype=dtype,
        device=device,
        lora=lora,
        gradient_checkpointing=gradient_checkpointing,
        section=section,
        path_key=path_key,
    )
    check_model(loaded, path_key, model.path, section)
    return loaded


def load_rows(
    kind: ModelKind,
    model: ModelConfig,
    *,
    dtype: str,
    device: str,
    lora: LoraConfig | None = None,
    gradient_checkpointing: bool = False,
    section: str = "actor",
    path_key: str = "model.path",
    mesh: DeviceMesh | None = None,
) -> tuple[AnyModel, Rows]:
    """`load_model` without `check_model`; with a mesh this rank's rows of the parameters that the files hold.

    These parameters are then placeholders, and the rows have their names. Without a mesh there are no rows.
    """
    transformer = open_transformer(
        kind, model.path, model.revision, attention=model.attention, dtype=dtype, path_key=path_key, mesh=mesh
    )
    rows = {} if mesh is None else take_rows(transformer, mesh)
    weights = dict(transformer.named_parameters()) if mesh is None else rows
    check_range(path_key, model.path, f"{section}.dtype", weights, mesh)
    if mesh is None:
        transformer.to(device)
    else:  # on the device there are only placeholders
        for buffer in transformer.buffers():
            buffer.data = buffer.data.to(device)
    if gradient_checkpointing:
        checkpoint_gradients(transformer)
    adapter = None
    if lora is not None and lora.enabled:
        adapter = add_adapter(transformer, lora, model, section, causal=kind == ModelKind.CAUSAL_LM)
    transformer.eval()
    names = {name.replace(".base_layer.", "."): f"transformer.{name}" for name, _ in transformer.named_parameters()}
    named = {names[name]: tensor for name, tensor in rows.items()}
    if kind == ModelKind.VALUE:
        value_model = ValueModel(transformer, adapter)
        if (Path(model.path) / VALUE_HEAD_FILE).is_file():
            load_value_head(value_model, Path(model.path))
        return value_model, named
    if kind == ModelKind.CLASSIFIER:
        return ClassifierModel(transformer, f"{path_key}='{model.path}'"), named
    return PolicyModel(transformer, find_head(transformer), adapter), named


def check_model(model: AnyModel, path_key: str, path: str, section: str) -> None:
    """ConfigError when activations overflow, or the head is not of the supported form."""
    check_activations(path_key, path, f"{section}.dtype", model.transformer)
    if isinstance(model, PolicyModel):
        check_head(model.transformer, model.head)
    if isinstance(model, ClassifierModel):
        check_classifier(model, f"{path_key}='{path}'")


def load_masters(
    kind: ModelKind,
    model: ModelConfig,
    loaded: AnyModel,
    path_key: str,
    mesh: DeviceMesh | None = None,
) -> dict[str, Tensor]:
    """The float32 values that the files of `loaded` hold for its trainable half-precision weights, by parameter name.

    Empty without such weights, and with an adapter, whose values are not in the files. With a mesh this rank's rows.
    """
    half = [parameter.requires_grad and parameter.dtype in HALF for parameter in loaded.transformer.parameters()]
    if loaded.adapter is not None or not any(half):
        return {}
    stored = open_transformer(
        kind, model.path, model.revision, attention=model.attention, dtype="float32", path_key=path_key, mesh=mesh
    )
    tensors = dict(stored.named_parameters()) if mesh is None else take_rows(stored, mesh)
    masters = start_masters(loaded.transformer, tensors)
    return {f"transformer.{name}": master for name, master in masters.items()}


def open_transformer(
    kind: ModelKind,
    path: str,
    revision: str,
    *,
    attention: str,
    dtype: str,
    path_key: str = "model.path",
    mesh: DeviceMesh | None = None,
) -> Any:
    """The transformers model of a directory or hub name: of a value model the backbone, else with its head.

    With a mesh its parameters are as `open_rows` says.

    ConfigError when its files lack weights, which transformers would fill with random numbers, or hold tensors that the
    model does not have.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the terminal is the trainer's
    with boundary(f"{path_key}='{path}'", ConfigError):
        check_stored(path_key, path)
    openers: dict[ModelKind, Any] = {
        ModelKind.VALUE: AutoModel,
        ModelKind.CLASSIFIER: AutoModelForSequenceClassification,
        ModelKind.CAUSAL_LM: AutoModelForCausalLM,
    }
    with boundary(f"{path_key}='{path}'", ConfigError):
        arguments: dict[str, Any] = {
            "revision": revision,
            "dtype": DTYPES[dtype],
            "attn_implementation": attention,
            "trust_remote_code": False,
            "ignore_mismatched_sizes": True,  # checked below, where they are named
        }
        if dtype == "float64":  # torch's products of grouped matrices do not exist in it
            arguments["experts_implementation"] = "eager"
        with _naming_attention(attention):
            if mesh is None:
                model, loaded = openers[kind].from_pretrained(path, output_loading_info=True, **arguments)
            else:
                model, loaded = open_rows(openers[kind], path, mesh, **arguments)
    check_not_quantised(path_key, path, getattr(model.config, "quantization_config", None))
    check_tensors(f"{path_key}='{path}'", type(model).__name__, loaded, new_head=kind != ModelKind.CAUSAL_LM)
    if model.base_model is model and isinstance(getattr(model, "model", None), nn.Module):
        model.base_model_prefix = "model"  # of a causal model within a larger one, transformers says the latter's
    return model


@contextmanager
def _naming_attention(attention: str) -> Iterator[None]:
    """ConfigError in terms of our settings if transformers lacks this attention for the model."""
    try:
        yield
    except ValueError as error:
        architecture, lacks, what = str(error).partition(" does not support ")
        if not lacks or "ttention" not in what:
            raise
        other = "sdpa or eager" if attention == "flash_attention_2" else "eager"
        raise ConfigError(
            f"model.attention={attention}: transformers does not have it for {architecture}; choose "
            f"model.attention={other}"
        ) from error


def value_head_file(model: ValueModel) -> StateFile:
    """The value head file: tensors, the type of model whose hidden states it reads, and the settings of adapters.

    One entry of metadata has them all: safetensors writes several in a random order, and equal runs write equal files.
    """
    settings = {"model_type": model.transformer.config.model_type, **model.head_settings()}
    tensors = model.head_tensors()
    return StateFile(VALUE_HEAD_FILE, tensors, {HEAD_SETTINGS: json.dumps(settings, sort_keys=True)}, tuple(tensors))


@torch.no_grad()
def load_value_head(model: ValueModel, directory: Path) -> None:
    """Load the value head file of `directory`; CheckpointError if it is missing, damaged or of another model."""
    from safetensors import safe_open

    file, own = directory / VALUE_HEAD_FILE, model.head_tensors()
    with boundary(f"value head '{file}'", CheckpointError), safe_open(file, framework="pt") as opened:
        saved = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        settings = json.loads((opened.metadata() or {}).get(HEAD_SETTINGS, "{}"))
        of_type = _type_of_head(settings, directory)
    own_type = model.transformer.config.model_type
    if of_type not in ("", own_type):
        raise CheckpointError(
            f"value head '{file}': it reads the hidden states of a model of type '{of_type}', and this critic's is a "
            f"'{own_type}'; start from the one that it was saved with"
        )
    for name in sorted(saved.keys() | own.keys()):
        found, needed = (list(tensors[name].shape) if name in tensors else "nothing" for tensors in (saved, own))
        if found != needed:
            raise CheckpointError(
                f"value head '{file}': of '{name}' it holds {found}, this critic needs {needed}; it is the head of "
                "another model: start from the one that it was saved with"
            )
    for key, setting in model.head_settings().items():
        if settings.get(key, setting) != setting:  # of another trainer it has none
            raise CheckpointError(
                f"value head '{file}': it was trained with {key}={settings[key]}, and this critic's is {setting}; "
                f"needs {key}={settings[key]}, or a new run"
            )
    check_restored(file, saved)
    for name, tensor in own.items():
        put(tensor, saved[name])


def _type_of_head(settings: dict[str, str], directory: Path) -> str:
    """The model type of a saved head: from its file, else from the model in the same directory; empty if neither
    says."""
    config_file = directory / "config.json"
    if "model_type" in settings or not config_file.is_file():
        return settings.get("model_type", "")
    return str(json.loads(config_file.read_text("utf-8")).get("model_type", ""))
