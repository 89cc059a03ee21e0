"""Loads a critic's starting point: a model, a saved critic, or the trunk of the actor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rlcore.config import ModelConfig
from rlcore.contracts.model_files import check_model_files, model_directory
from rlcore.contracts.workers import WorkerContext
from rlcore.engines.hf import (
    VALUE_HEAD_FILE,
    TrainEngine,
    ValueModel,
    actor_engine,
    load_value_head,
    prepare_process,
    ranks_of,
)
from rlcore.errors import CheckpointError, ConfigError, boundary
from rlcore.imports import import_function
from rlcore_critic_engine.heads import StartingHead, starting_head
from rlcore_critic_engine.settings import SECTION, CriticSettings
from rlcore_critic_engine.trunk import TrunkValueModel

MODEL_DIR = "model"
"""Directory of the model in a training engine's checkpoint."""


def start_engine(context: WorkerContext) -> tuple[TrainEngine, str]:
    """The critic's training engine, and a description of what its value head starts from.

    CheckpointError or ConfigError when that cannot be used.
    """
    settings = context.settings(CriticSettings)
    model: ModelConfig = context.config.model
    head = starting_head(model, settings)
    if head.kind == "saved":
        _check_saved(Path(settings.path or model.path), settings)
    start: ModelConfig | ValueModel
    if settings.trunk == "actor":
        start = _on_trunk(context, settings, head)
    else:
        prepare_process(context)
        start = starting_model(model, settings)
        _check_model(start, model, settings)
    engine = TrainEngine(
        "value",
        start,
        settings.engine(context.config.actor),
        import_function(context.targets["value_loss"])(settings.value_clip),
        name="critic",
        loss_name="critic/loss",
        device=context.device,
        seed=context.seed,
        section=SECTION,
        path_key=f"{SECTION}.path" if settings.path else "model.path",
        peak_tflops=context.config.cluster.peak_tflops,
        shared_prefix=context.shared_prefix,
        # A process is in one group of ranks: a critic inside an actor is in the actor's.
        ranks=actor_engine(context).ranks
        if settings.trunk == "actor"
        else ranks_of(context, settings.context_parallel),
    )
    if settings.trunk == "actor":  # in the actor's process, and so in its memory
        engine.before_work = actor_engine(context).before_work
    if head.kind == "unknown":  # its files are here now
        head = starting_head(model, settings)
        if head.kind == "saved":
            load_value_head(_value_model(engine), _directory(model, settings))
    if head.weight is not None:
        _take_head(_value_model(engine), head)
    return engine, head.text


def _value_model(engine: TrainEngine) -> ValueModel:
    if not isinstance(engine.model, ValueModel):
        raise TypeError(f"a critic's model is a {type(engine.model).__name__}")
    return engine.model


def _directory(policy: ModelConfig, settings: CriticSettings) -> Path:
    start = starting_model(policy, settings)
    return model_directory(start.path, start.revision)


def _take_head(model: ValueModel, head: StartingHead) -> None:
    """Copy a classifier's head of any number format; without a bias it is 0."""
    tensors: list[Any] = []
    for saved in (head.weight, head.bias):
        if saved is None:
            tensors.append(None)
            continue
        where = f"{SECTION}.path: tensor '{saved.name}' of '{saved.file}'"
        with boundary(where, ConfigError), safe_open(saved.file, framework="pt") as opened:
            tensors.append(opened.get_tensor(saved.name))
        if not bool(tensors[-1].to(model.value_head.weight.dtype).isfinite().all()):
            raise ConfigError(
                f"{where} has numbers that are not finite; needs a head that was trained, or {SECTION}.head=new"
            )
    model.set_head(*tensors)


def starting_model(policy: ModelConfig, settings: CriticSettings) -> ModelConfig:
    """The model that a critic with separate weights starts from. The policy's revision is for its repository only."""
    return replace(policy, path=settings.path, revision=settings.revision) if settings.path else policy


def _on_trunk(context: WorkerContext, settings: CriticSettings, head: StartingHead) -> ValueModel:
    actor = actor_engine(context)
    actor.stay_on_device()
    policy = actor.policy
    value_model = TrunkValueModel(policy, settings.lora, context.seed)
    if head.kind == "saved":
        load_value_head(value_model, Path(settings.path))
    return value_model


def _check_saved(directory: Path, settings: CriticSettings) -> None:
    """CheckpointError unless the directory is a saved critic that can be loaded."""
    if not (directory / VALUE_HEAD_FILE).is_file():
        raise CheckpointError(
            f"{SECTION}.path='{directory}': {SECTION}.head=saved, but it holds no {VALUE_HEAD_FILE}, so it is not "
            f"a value model or was saved without its head; needs critic/model of a checkpoint, or {SECTION}.head=new"
        )
    if settings.trunk == "own" and not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{SECTION}.path='{directory}': it holds a value head without a model, as a critic with LoRA or on the "
            f"actor's trunk leaves it; needs a critic that was trained whole, or {SECTION}.trunk=actor for a head alone"
        )


def check_has_head(directory: Path) -> None:
    """CheckpointError unless the directory is a critic's checkpoint with its value head."""
    if not directory.is_dir():
        raise CheckpointError(
            f"checkpoint '{directory.parent}': it has no '{directory.name}/', so it is of a run without a critic; "
            "nothing was loaded; continue from a checkpoint of a run with one, or leave the critic out here, too"
        )
    file = directory / MODEL_DIR / VALUE_HEAD_FILE
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint '{directory}': it has no {MODEL_DIR}/{VALUE_HEAD_FILE}, so the critic was saved without "
            "its head; nothing was loaded; continue from another checkpoint"
        )


def check_same_trunk(directory: Path, settings: CriticSettings) -> None:
    """CheckpointError unless the critic's checkpoint was written with the same `trunk`, and on the actor's trunk with
    or without `lora` as here."""
    own = (directory / MODEL_DIR / "config.json").is_file() or (directory / "adapter").is_dir()
    saved = {"trunk": "own" if own else "actor"}
    found: dict[str, str] = {"trunk": settings.trunk}
    if saved == found == {"trunk": "actor"}:
        file = directory / MODEL_DIR / VALUE_HEAD_FILE
        with boundary(f"value head '{file}'", CheckpointError), safe_open(file, framework="pt") as opened:
            has_adapters = any(name.startswith("adapters.") for name in opened.keys())  # noqa: SIM118
        saved["lora.enabled"], found["lora.enabled"] = str(has_adapters).lower(), str(settings.lora.enabled).lower()
    for name, value in saved.items():
        if value != found[name]:
            raise CheckpointError(
                f"checkpoint '{directory}': its critic was trained with {SECTION}.{name}={value}, and this run has "
                f"{found[name]}; nothing was loaded; resume with {SECTION}.{name}={value}, or begin a new run"
            )


def _check_model(start: ModelConfig, policy: ModelConfig, settings: CriticSettings) -> None:
    """ConfigError for a model that cannot read the policy's tokens, or a value head that would be dropped."""
    if settings.head == "new" and (Path(start.path) / VALUE_HEAD_FILE).is_file():
        raise ConfigError(
            f"{SECTION}.path='{start.path}' is a saved critic, and {SECTION}.head=new would leave its head out; set "
            f"{SECTION}.head=saved, or name a model without {VALUE_HEAD_FILE}"
        )
    if start.path == policy.path:
        return
    sizes = [_vocabulary_size(tensors) for tensors in (start, policy)]
    if sizes[0] < sizes[1]:
        raise ConfigError(
            f"{SECTION}.path='{start.path}': its vocabulary has {sizes[0]} tokens, that of model.path={policy.path} "
            f"{sizes[1]}; a critic reads the policy's tokens, so it needs a model with the same tokenizer"
        )
    tokens = [_tokens(Path(tensors.path)) for tensors in (start, policy)]
    if all(tokens) and tokens[0] != tokens[1]:
        raise ConfigError(
            f"{SECTION}.path='{start.path}': its tokenizer is another than that of model.path={policy.path}; a critic "
            "reads the policy's tokens, so it needs a model with the same tokenizer"
        )


def _vocabulary_size(model: ModelConfig) -> int:
    from transformers import AutoConfig

    whose = f"{SECTION}.path or model.path '{model.path}'"
    with boundary(whose, ConfigError):
        check_model_files(whose, Path(model.path))
        config: Any = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
        return int(config.get_text_config().vocab_size)


def _tokens(directory: Path) -> Any:
    """The vocabulary of the directory's tokenizer; None without a tokenizer.json."""
    file = directory / "tokenizer.json"
    return json.loads(file.read_text("utf-8"))["model"].get("vocab") if file.is_file() else None
