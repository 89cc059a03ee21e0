"""Evaluation: samples and scores held-out prompts with the current weights, without affecting training."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.config import RunConfig
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.reward_manager import RewardManager
from rlcore.train.pending import Group, collect
from rlcore.train.tasks import evaluation_sampling, tasks_for
from rlcore.types import Lane, Metrics, Prompt, RewardStatus, ScoredTrajectory


class HasConfig(Protocol):
    """The part of a `RunPlan` that an evaluation needs."""

    @property
    def config(self) -> RunConfig: ...


class EvaluatedRun(Protocol):
    """The part of a `Run` that an evaluation needs."""

    @property
    def plan(self) -> HasConfig: ...

    @property
    def agent(self) -> AgentLoop: ...

    @property
    def reward(self) -> RewardManager: ...


@dataclass(frozen=True, eq=False)
class EvalResult:
    """An evaluation."""

    metrics: Metrics
    rows: tuple[ScoredTrajectory, ...]
    """Every trajectory with its reward, failed ones too, in canonical order."""


async def evaluate(run: EvaluatedRun, prompts: Mapping[str, Sequence[Prompt]], seed: int) -> EvalResult:
    """Sample each prompt `eval.samples_per_prompt` times and score the samples; see `source_metrics` for the result.

    Prompts are issued under separate ids ('eval/...'): names in `data.sources` and `eval.sources` may be the same. A
    sample's seed depends on `seed` and its prompt's id, so evaluations differ only by the weights.
    """
    config = run.plan.config
    issued = [
        (dataclasses.replace(prompt, id=f"eval/{prompt.id}"), 0) for listed in prompts.values() for prompt in listed
    ]
    tasks = tasks_for(issued, config.eval.samples_per_prompt, seed)
    groups, _ = await collect(run.agent, run.reward, tasks, evaluation_sampling(config.eval, config.rollout), Lane.EVAL)
    metrics: Metrics = {}
    begin = 0
    for source, listed in prompts.items():
        mine, begin = groups[begin : begin + len(listed)], begin + len(listed)
        found = source_metrics(mine, config.eval.samples_per_prompt, config.eval.pass_threshold)
        metrics |= {f"eval/{source}/{name}": value for name, value in found.items()}
    return EvalResult(metrics, tuple(scored for group in groups for scored in group))


def source_metrics(groups: Sequence[Group], k: int, pass_threshold: float) -> Metrics:
    """The metrics of one source; a group has the rows of a prompt's `k` samples, those of a sample being adjacent.

    * `num`: prompts; `failed`: samples without a usable reward, which count nowhere else but in `length_mean`.
    * `mean`: mean score over the samples.
    * `pass@j` for j = 1, 2, 4 .. and `k`: `pass_at_k`, mean over the prompts with at least j samples. A sample passes
      when its score is at least `pass_threshold`.
    * `maj@k`, where every sample's reward has info['answer']: share of the prompts whose most frequent answer passes.
    * `length_mean`: sampled tokens of a sample, summed over its segments.

    A metric over nothing is left out.
    """
    samples = [_samples(group) for group in groups]
    usable = [[sample for sample in group if sample.reward.status is RewardStatus.OK] for group in samples]
    scores = [scored.reward.score for group in usable for scored in group]
    num_samples = sum(map(len, samples))
    num_tokens = sum(scored.trajectory.num_sampled for group in groups for scored in group)
    metrics: Metrics = {"num": float(len(groups)), "failed": float(num_samples - len(scores))}
    if num_samples:
        metrics["length_mean"] = num_tokens / num_samples
    if scores:
        metrics["mean"] = math.fsum(scores) / len(scores)
    passes = [[scored.reward.score >= pass_threshold for scored in group] for group in usable]
    for j in _sizes(k):
        estimates = [pass_at_k(len(group), sum(group), j) for group in passes if len(group) >= j]
        if estimates:
            metrics[f"pass@{j}"] = math.fsum(estimates) / len(estimates)
    if scores and all("answer" in scored.reward.info for group in usable for scored in group):
        answers = [[scored.reward.info["answer"] for scored in group] for group in usable]
        won = [passed[majority(votes)] for votes, passed in zip(answers, passes, strict=True) if votes]
        metrics[f"maj@{k}"] = sum(won) / len(won)
    return metrics


def scored_metrics(k: int) -> frozenset[str]:
    """The names in `source_metrics` that every source has of which enough samples have a score."""
    return frozenset({"mean", *(f"pass@{j}" for j in _sizes(k))})


def _sizes(k: int) -> list[int]:
    """The j of pass@j."""
    return sorted({2**power for power in range(k.bit_length())} | {k})


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate that at least one of `k` samples passes, from `c` that passed of `n` >= k.

    1 - binomial(n - c, k) / binomial(n, k), arXiv 2107.03374, equation 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, found n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: Sequence[Any]) -> int:
    """The index at which the most frequent answer is first seen; of equally frequent ones, the first seen.

    Answers need `==` only.
    """
    if not answers:
        raise ValueError("majority needs at least one answer")
    return max(range(len(answers)), key=lambda index: (sum(other == answers[index] for other in answers), -index))


def _samples(group: Group) -> list[ScoredTrajectory]:
    """One row per sample; all its segments have the sample's reward."""
    first: dict[int, ScoredTrajectory] = {}
    for scored in group:
        first.setdefault(scored.trajectory.id.sample, scored)
    return list(first.values())
