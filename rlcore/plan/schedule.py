"""The schedule of a run: the phases that overlap, and the restrictions of algorithm and rewards."""

from collections.abc import Mapping, Sequence

from rlcore.config import RunConfig
from rlcore.contracts.clusters import WorkerPlan
from rlcore.contracts.components import ResolvedReward
from rlcore.contracts.offers import Scope
from rlcore.errors import PlanError
from rlcore.plan.run_plan import AlgorithmPlan, OldLogprobs, SchedulePlan
from rlcore.plan.skipped_rows import why_all_rows


def plan_schedule(
    config: RunConfig,
    algorithms: Mapping[str, AlgorithmPlan],
    rewards: Sequence[ResolvedReward],
    workers: Sequence[WorkerPlan],
    arithmetic: Mapping[str, int],
) -> SchedulePlan:
    """The schedule; PlanError naming the estimator, reward or setting that it cannot be combined with."""
    schedule = config.schedule
    drop = schedule.on_stale == "drop" and schedule.max_staleness > 0
    rollout = next((plan for plan in workers if plan.request.role.name == "rollout"), None)
    inside = None if rollout is None else rollout.request.embedded_in
    embedded = inside is not None and inside.name == "actor"
    if rollout is not None and config.rollout.on_new_weights == "continue" and not rollout.keeps_cache:
        raise PlanError(
            f"rollout.on_new_weights=continue: {rollout.offered_by} computes keys and values again when weights change "
            "(its offer's keeps_cache); choose rollout.on_new_weights=restart, or rollout.backend=hf"
        )
    _check_top_entropy(config)
    old = _old_logprobs(config, arithmetic["updates"], embedded)
    passes = []
    if any(plan.request.role.name == "reference" for plan in workers):
        passes.append("reference")
    if old is OldLogprobs.PASS:
        passes.append("old log-probs")
    if config.critic.engine != "none":
        passes.append("values")
    if schedule.stream_minibatches:
        _check_streaming(config, algorithms, rewards)
    if drop:
        _check_drop(config, rewards, passes)
    return SchedulePlan(
        name=schedule_name(schedule.max_staleness, schedule.stream_minibatches),
        max_staleness=schedule.max_staleness,
        stream=schedule.stream_minibatches,
        drop=drop,
        old_logprobs=old,
        passes=tuple(passes),
        embedded=embedded,
        all_rows=why_all_rows(config, algorithms),
    )


def schedule_notes(config: RunConfig, schedule: SchedulePlan, arithmetic: Mapping[str, int]) -> list[str]:
    """The notes of a plan about its schedule."""
    return [
        *_precision_notes(config, schedule),
        *_top_entropy_notes(config),
        *_streaming_notes(config, schedule, arithmetic),
    ]


def _precision_notes(config: RunConfig, schedule: SchedulePlan) -> list[str]:
    """Notes on the consequences of half precision and TF32."""
    actor = config.actor
    if actor.repeats_logprobs:
        return []
    rounded = {
        "stochastic": "rounded stochastically, so that they move as their float32 masters do on average",
        "nearest": "rounded to nearest: a weight stands still until its float32 master has moved by half a unit in the "
        "last place; actor.rounding=stochastic moves it",
    }
    notes = [f"actor.dtype={actor.dtype}: weights are {rounded[actor.rounding]}"] if actor.is_half else []
    if schedule.old_logprobs is not OldLogprobs.SAMPLED and schedule.embedded:
        setting = f"actor.dtype={actor.dtype}" if actor.is_half else "actor.tf32=true"
        notes.append(
            f"{setting}: recorded log-probs differ from the trainer's by rounding, so pi_old is "
            f"{schedule.old_logprobs.value} and the loss has the factor pi_old / mu (algo.importance)"
        )
    return notes


def _streaming_notes(config: RunConfig, schedule: SchedulePlan, arithmetic: Mapping[str, int]) -> list[str]:
    if not schedule.stream:
        return []
    if arithmetic["minibatches"] == 1:
        return ["a step is one mini-batch, so there is nothing to stream: set actor.minibatch_prompts"]
    if config.algo.whiten_advantages:
        return [
            "schedule.stream_minibatches=true: advantages are whitened over each mini-batch, not over the step; a "
            "larger actor.minibatch_prompts gives steadier statistics"
        ]
    return []


def schedule_name(max_staleness: int, stream: bool) -> str:
    """The name of the combination."""
    if max_staleness == 0:
        return "mini-batch pipeline" if stream else "synchronous"
    name = "one-step off-policy" if max_staleness == 1 else f"asynchronous, at most {max_staleness} versions old"
    return name + (", mini-batch pipeline" if stream else "")


def _old_logprobs(config: RunConfig, num_updates: int, embedded: bool) -> OldLogprobs:
    """The source of pi_old: a pass unless pi_old equals a policy whose log-probs exist already.

    The embedded sampler draws from the weights that are trained, so on-policy its log-probs in float32 or float64 are
    those of pi_old. In half precision and TF32, rounding changes them by more than an update does. With a single update
    per step, pi_old is the detached pi. Recorded log-probs of samples from a truncated vocabulary (top-k, top-p) are
    not those of any policy. Entropies are computed by the pass, too.
    """
    if config.schedule.old_logprobs == "behaviour":
        return OldLogprobs.SAMPLED
    if config.rollout.truncates or config.algo.top_entropy_quantile < 1.0:
        return OldLogprobs.PASS
    if num_updates == 1:
        return OldLogprobs.DETACHED
    exact = embedded and config.schedule.max_staleness == 0 and config.actor.repeats_logprobs
    return OldLogprobs.SAMPLED if exact else OldLogprobs.PASS


def _check_top_entropy(config: RunConfig) -> None:
    """PlanError where the policy loss cannot be restricted to the tokens of highest entropy."""
    algo = config.algo
    if algo.top_entropy_quantile == 1.0:
        return
    who = f"algo.top_entropy_quantile={algo.top_entropy_quantile:g}"
    if algo.policy_loss == "gmpo":
        raise PlanError(
            f"{who}: algo.policy_loss=gmpo gives each token the loss of its row, so none can be left out; choose "
            "another algo.policy_loss, or algo.top_entropy_quantile=1"
        )
    if config.schedule.old_logprobs == "behaviour":
        raise PlanError(
            f"{who}: entropies are computed by the pass for old log-probs, which schedule.old_logprobs=behaviour "
            "leaves out; choose schedule.old_logprobs=recompute, or algo.top_entropy_quantile=1"
        )


def _top_entropy_notes(config: RunConfig) -> list[str]:
    share = config.algo.top_entropy_quantile
    if share == 1.0:
        return []
    whole = "a mini-batch" if config.schedule.stream_minibatches else "a step"
    return [
        f"algo.top_entropy_quantile={share:g}: the policy loss trains that share of the tokens of {whole}, those at "
        "which the policy's entropy is highest when the step begins; a pass computes it"
    ]


def _check_streaming(
    config: RunConfig, algorithms: Mapping[str, AlgorithmPlan], rewards: Sequence[ResolvedReward]
) -> None:
    what = "schedule.stream_minibatches=true: updates begin before all rewards of a step are in"
    for plan in algorithms.values():
        if plan.algorithm.scope is Scope.BATCH:
            raise PlanError(
                f"{what}, but {plan.algorithm.kind.value} '{plan.algorithm.name}' of {plan.provided_by} needs the "
                "whole batch; choose an estimator that needs a sample or a group, or schedule.stream_minibatches=false"
            )
    for reward in rewards:
        if reward.scope is Scope.BATCH:
            raise PlanError(
                f"{what}, but reward '{reward.name}' of {reward.provided_by} scores the whole batch at once; set "
                f"reward.functions.{reward.name}.scope=sample or group, or schedule.stream_minibatches=false"
            )
    if config.algo.dynamic_sampling:
        raise PlanError(
            f"{what}, but algo.dynamic_sampling=true chooses by all of them which prompts to replace; choose one of "
            "the two"
        )


def _check_drop(config: RunConfig, rewards: Sequence[ResolvedReward], passes: Sequence[str]) -> None:
    for reward in rewards:
        if reward.scope is Scope.BATCH:
            raise PlanError(
                f"schedule.on_stale=drop: a step takes the prompts whose rewards are in first, but reward "
                f"'{reward.name}' of {reward.provided_by} scores the whole batch at once; choose on_stale=wait"
            )
    late = [pass_ for pass_ in passes if pass_ != "reference"]
    if config.schedule.stream_minibatches and late:
        needed = late != ["old log-probs"] or config.rollout.truncates or config.algo.top_entropy_quantile < 1.0
        sampled = "" if needed else " or old_logprobs=behaviour"
        raise PlanError(
            f"schedule.on_stale=drop with stream_minibatches=true: {' and '.join(late)} need a pass over a step's "
            "samples before its first update, when it is not known which they are; choose on_stale=wait"
            f"{',' if sampled else ' or'} stream_minibatches=false{sampled}"
        )
