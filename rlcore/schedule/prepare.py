"""Groups become a batch with everything the update needs, and the batch mini-batches."""

from dataclasses import replace

import numpy as np

from rlcore.algo.kl import FixedKl
from rlcore.algo.step import weigh, with_advantages
from rlcore.batch import collate, minibatches
from rlcore.launch import Run
from rlcore.reference import ReferenceWorker
from rlcore.schedule.collector import Group
from rlcore.types import Batch, Metrics, Ref


async def prepare(run: Run, groups: list[Group], kl: FixedKl) -> tuple[Batch, Metrics]:
    """The groups as a batch with old log-probs, reference log-probs, values and advantages, as the plan needs them.

    The embedded sampler draws from the very weights that are trained, in the same dtype, so the recorded log-probs are
    those of pi_old: no pass of their own. With a single update, pi_old is the detached pi and they are not used either.
    """
    config = run.plan.config
    batch = collate(groups, run.tokens.pad_id)
    if run.plan.arithmetic["updates"] > 1:
        batch = replace(batch, old_logprobs=Ref(batch.tokens.get().rollout_logprobs_BT))
    if run.reference is not None:
        reference = await run.reference.replicas[0].call(ReferenceWorker.logprobs, batch)
        batch = replace(batch, reference_logprobs=reference)
    values = await run.critic.values(batch)
    if values is not None:
        batch = replace(batch, values=values)
    per_token = run.advantage_algorithm.per_token
    return with_advantages(batch, run.advantage, per_token, config.algo, config.rollout.max_tokens, kl)


def epoch_minibatches(run: Run, batch: Batch, step: int, epoch: int) -> list[Batch]:
    """The mini-batches of one pass over the batch, weighed; their order depends on (run seed, step, epoch) alone."""
    config = run.plan.config
    order = np.random.default_rng((config.train.seed, step, epoch))
    return [weigh(each, config.algo) for each in minibatches(batch, config.actor.minibatch_prompts, order)]
