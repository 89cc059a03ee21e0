"""An rlcore plugin: a value model on the core's training engine."""

from collections.abc import Sequence

from rlcore.config import RunConfig
from rlcore.critic import CriticEngine, CriticWorker
from rlcore.hookspecs import hookimpl
from rlcore.plan import BuildContext, Component, ConfigSection, WorkerClass, WorkerRequest
from rlcore_critic_engine.critic import CRITIC, ValueCritic
from rlcore_critic_engine.settings import CriticSettings
from rlcore_critic_engine.worker import HfCritic

BYTES_PER_PARAMETER = {"float64": 32.0, "float32": 16.0, "bfloat16": 16.0}
"""Weights, gradients and Adam's two moments; half-precision weights have float32 masters."""


def requests(config: RunConfig, section: CriticSettings) -> Sequence[WorkerRequest]:
    """One worker beside the actor."""
    same = section.path in ("", config.model.path)
    return [
        WorkerRequest(
            CRITIC,
            section.backend,
            gpus=1.0 if config.cluster.device == "cuda" else 0.0,
            threads=config.cluster.threads,
            references={"value_loss": "rlcore_critic_engine.loss:ValueLoss"},
            bytes_per_parameter=BYTES_PER_PARAMETER[section.dtype] if same else 0.0,
        )
    ]


def build(context: BuildContext) -> CriticEngine:
    return ValueCritic(context.workers(CRITIC), context.section)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("critic_engine", CriticSettings, {"critic.engine": "critic_engine"})]


@hookimpl
def rlcore_critic_engines() -> Sequence[Component[CriticEngine]]:
    return [Component("critic_engine", build, requests)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(CriticWorker, "hf", HfCritic)]
