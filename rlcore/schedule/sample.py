"""The first half of a step: prompts become groups of scored samples, ready to be trained on."""

from dataclasses import dataclass

from rlcore.algo.reward_shaping import rewards_all_equal
from rlcore.data import PromptOrder
from rlcore.launch import Run
from rlcore.reward.metrics import reward_metrics
from rlcore.reward.policy import apply_failures
from rlcore.schedule.collector import Group, collect
from rlcore.schedule.prompts import tasks_for, training_sampling
from rlcore.types import Finish, Lane, Metrics, Scored, TrajectoryId


@dataclass(frozen=True, eq=False)
class Sampled:
    """What a step sampled."""

    groups: list[Group]
    """Groups to train on, without failed samples."""
    everything: list[Scored]
    """Every scored trajectory, also failed and replaced ones."""
    metrics: Metrics

    def rows(self) -> list[TrajectoryId]:
        """The ids of the batch's rows, in its order."""
        return [scored.trajectory.id for group in self.groups for scored in group]


async def sample_groups(run: Run, order: PromptOrder) -> Sampled:
    """Groups for one step, from the next prompts of `order`.

    With `algo.dynamic_sampling`, groups whose rewards are all equal are replaced by groups of further prompts of the
    same order, for at most `algo.max_resample_rounds` rounds (arXiv 2503.14476, section 3.2); equal groups fill what is
    then missing, with advantage 0.
    """
    algo, wanted = run.plan.config.algo, run.plan.config.train.prompts_per_step
    groups, spare, everything = list[Group](), list[Group](), list[Scored]()
    metrics: Metrics = {"time/generate_s": 0.0, "time/reward_wait_s": 0.0}
    rounds = 0
    while True:
        kept, arrived = await _one_round(run, order, wanted - len(groups), metrics)
        everything += arrived
        if not algo.dynamic_sampling:
            groups = kept
            break
        equal = rewards_all_equal(kept)
        groups += [group for group, same in zip(kept, equal, strict=True) if not same]
        spare += [group for group, same in zip(kept, equal, strict=True) if same]
        if len(groups) >= wanted or rounds >= algo.max_resample_rounds:
            groups += spare[: wanted - len(groups)]
            break
        rounds += 1
    if algo.dynamic_sampling:
        metrics["data/resample_rounds"] = float(rounds)
        metrics["data/equal_groups"] = float(len(spare))
    return Sampled(groups, everything, metrics | reward_metrics(everything) | completion_metrics(everything))


async def _one_round(
    run: Run, order: PromptOrder, num_prompts: int, metrics: Metrics
) -> tuple[list[Group], list[Scored]]:
    """Groups that the failure policies leave, and everything that was scored; adds to `metrics`."""
    config = run.plan.config
    tasks = tasks_for(order.take(num_prompts), config.rollout.samples_per_prompt, config.train.seed)
    groups, timeline = await collect(run.agent, run.reward, tasks, training_sampling(config.rollout), Lane.TRAIN)
    arrived = [scored for group in groups for scored in group]
    kept, counts = apply_failures(groups, config.reward)
    for name, value in counts.items():
        metrics[name] = metrics.get(name, 0.0) + value
    metrics["time/generate_s"] += timeline.generated_s
    metrics["time/reward_wait_s"] += timeline.scored_s - timeline.generated_s
    return kept, arrived


def completion_metrics(scored: list[Scored]) -> Metrics:
    """Lengths, in sampled tokens, and how many completions were cut off by the token budget."""
    if not scored:
        return {}
    lengths = [each.trajectory.num_sampled for each in scored]
    cut = [each.trajectory.finish is Finish.LENGTH for each in scored]
    return {
        "completion/length_mean": sum(lengths) / len(lengths),
        "completion/length_max": float(max(lengths)),
        "completion/length_min": float(min(lengths)),
        "completion/clipped_frac": sum(cut) / len(cut),
        "data/num_tokens": float(sum(len(each.trajectory.token_ids) for each in scored)),
    }
