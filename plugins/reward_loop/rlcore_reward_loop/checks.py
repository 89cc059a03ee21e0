"""Checks the plugin's settings before anything starts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rlcore import ConfigError, PlanError, RunConfig
from rlcore.contracts.model_files import saved_tensors
from rlcore.contracts.reward_models import headless, serves_scores
from rlcore.errors import boundary, nearest
from rlcore_reward_loop.settings import JudgeSettings, ModelSettings, RewardLoopSettings, RewardSettings

WHERE = "plugins.reward_loop"
HEAD = "score"
"""The head of a decoder that classifies sequences."""


def check(config: RunConfig, settings: RewardLoopSettings) -> None:
    """ConfigError for settings that cannot work, PlanError for a service or model that no reward uses."""
    if not settings.rewards and not (settings.expose and config.reward.functions):
        raise ConfigError(
            f"{WHERE}.rewards: empty; needs at least one, such as {WHERE}.rewards.helpful.served_by=scorer and "
            f"{WHERE}.services.scorer.urls=[http://127.0.0.1:8000/score]"
        )
    for name in sorted(set(settings.services) & set(settings.models)):
        raise ConfigError(f"{WHERE}: '{name}' is both in services and in models; needs two names")
    for name in settings.services:
        _check_service(name, settings)
    for name, reward in settings.rewards.items():
        _check_reward(name, reward, config, settings)
    if config.cluster.device == "cuda":
        for name, model in settings.models.items():
            _check_devices(f"{WHERE}.models.{name}", model)
    _check_used(settings)


def _check_devices(key: str, model: ModelSettings) -> None:
    if model.gpus > 1 and model.gpus != int(model.gpus):
        raise ConfigError(f"{key}.gpus: found {model.gpus:g}; needs a share of one device, or a whole number of them")
    if model.backend == "hf" and model.gpus > 1:
        raise ConfigError(
            f"{key}.gpus: found {model.gpus:g}, and backend=hf computes on one; needs at most 1, for several devices "
            f"with {key}.data_parallel={model.gpus:g} {key}.sharding=fsdp2, or another backend"
        )
    if model.nodes > 1 and model.gpus % model.nodes:
        raise ConfigError(
            f"{key}.nodes={model.nodes}: does not divide {key}.gpus={model.gpus:g}; needs as many devices on each"
        )
    if model.data_parallel > 1 and model.gpus != 1:
        raise ConfigError(
            f"{key}.gpus: found {model.gpus:g}, and data_parallel={model.data_parallel} ranks exchange what they "
            f"compute, each on a whole device; needs {key}.gpus=1, or data_parallel=1"
        )


def check_scores(path: str, directory: Path, key: str) -> None:
    """ConfigError when the files of a model of several ranks are on this machine, and without a head that they
    compute; `key` names the model's settings."""
    if not (directory / "config.json").is_file():
        return
    with boundary(f"reward model '{path}': reading its config.json and its safetensors files", ConfigError):
        architectures = json.loads((directory / "config.json").read_text("utf-8")).get("architectures") or ()
        names = saved_tensors(directory)
    serves_scores(path, architectures, ["model"])
    if any(name.startswith("classifier.") for name in names):
        raise ConfigError(
            f"{key}.path: '{path}' has a head 'classifier', and several ranks compute the head 'score' of a decoder; "
            f"needs such a model, or {key}.data_parallel=1"
        )
    if names and f"{HEAD}.weight" not in names:
        raise headless(path, f"{HEAD}.weight")


def _check_service(name: str, settings: RewardLoopSettings) -> None:
    service, key = settings.services[name], f"{WHERE}.services.{name}"
    if not service.urls:
        raise ConfigError(f"{key}.urls: empty; needs an address, such as {key}.urls=[http://127.0.0.1:8000/score]")
    for url in service.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{key}.urls: found '{url}'; needs an address such as http://127.0.0.1:8000/score")
        if parts.username or parts.password:
            raise ConfigError(f"{key}.urls: an address holds a password; needs {key}.token=${{oc.env:NAME}} instead")
    if any(name.isspace() or not name.isprintable() for name in service.token):
        raise ConfigError(
            f"{key}.token: holds white space or a control character, such as a newline at its end, and no header may; "
            "needs the token alone"
        )


def _check_reward(name: str, reward: RewardSettings, config: RunConfig, settings: RewardLoopSettings) -> None:
    key = f"{WHERE}.rewards.{name}"
    if name in config.reward.functions:
        raise ConfigError(f"{key}: reward.functions.{name} has the same name; each part of the reward needs its own")
    if "/" in name:
        raise ConfigError(f"{key}: a '/' in the name of a reward would make it look like a part of another")
    choices = {
        "service": list(settings.services),
        "model": list(settings.models),
        "judge": [*settings.services, *settings.models],
    }[reward.kind]
    if reward.served_by not in choices:
        where = {"service": "services", "model": "models", "judge": "services or .models"}[reward.kind]
        raise ConfigError(
            f"{key}.served_by: found '{reward.served_by}'; kind={reward.kind} needs an entry of {WHERE}.{where}; "
            f"{nearest(reward.served_by, choices)}"
        )
    if reward.post_process and reward.scope != "sample":
        raise ConfigError(f"{key}.post_process: scope={reward.scope} sees the whole group already; needs scope=sample")
    if reward.post_process and ":" not in reward.post_process:
        raise ConfigError(f"{key}.post_process: found '{reward.post_process}'; needs module:name or file.py:name")
    waits = [
        setting
        for setting, on in (
            ("schedule.stream_minibatches=true", config.schedule.stream_minibatches),
            ("schedule.on_stale=drop", config.schedule.on_stale == "drop" and config.schedule.max_staleness > 0),
        )
        if on
    ]
    if reward.scope == "batch" and waits:
        raise PlanError(
            f"{key}.scope=batch: the service sees a whole step at once, but {waits[0]} trains on what is scored first; "
            f"choose scope=sample or group, or leave {waits[0].partition('=')[0]} as it is by default"
        )
    if reward.kind == "judge":
        model = settings.models.get(reward.served_by)
        if model is not None and model.backend == "hf":
            raise ConfigError(
                f"{key}.served_by: model '{reward.served_by}' has backend=hf, which gives numbers, and kind=judge "
                "reads text; choose kind=model, or backend=vllm with a generative model"
            )
        _check_judge(f"{key}.judge", reward.judge)


def _check_judge(key: str, judge: JudgeSettings) -> None:
    if "{response}" not in template_of(key, judge):
        raise ConfigError(f"{key}.template: has no {{response}} in it, so the judge would not see what it judges")
    if judge.lowest >= judge.highest:
        raise ConfigError(f"{key}: lowest={judge.lowest:g} is not below highest={judge.highest:g}")
    if not judge.pattern:
        return
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as cause:
        raise ConfigError(f"{key}.pattern: '{judge.pattern}' is not a regular expression: {cause}") from cause
    if groups < 1:
        raise ConfigError(f"{key}.pattern: found '{judge.pattern}'; needs a group around the score, such as (\\d+)")


def template_of(key: str, judge: JudgeSettings) -> str:
    """The template's text, read if the setting names a file. ConfigError when the file does not exist."""
    text = judge.template
    if "\n" in text or not text.endswith((".txt", ".md")):
        return text
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"{key}.template: found no file '{text}'; looked for {path.resolve()}")
    return path.read_text("utf-8")


def _check_used(settings: RewardLoopSettings) -> None:
    used = {reward.served_by for reward in settings.rewards.values()}
    for where, name in _served(settings):
        if name not in used and not settings.expose:
            raise PlanError(f"{WHERE}.{where}.{name}: no reward is served_by it; name it in one, or leave it out")


def _served(settings: RewardLoopSettings) -> Iterator[tuple[str, str]]:
    yield from (("services", name) for name in settings.services)
    yield from (("models", name) for name in settings.models)
