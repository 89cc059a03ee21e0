"""The suite of actor workers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.data.batch import select
from rlcore.testing.suites.harness import extra, need_metrics
from rlcore.testing.suites.workers import Work, WorkerSuite, batch_of, need_per_token, same_bits
from rlcore.types import Batch, Float32s, Metrics, TokenScores

SKIPPED = "actor/skipped"
TOLERANCE = 1e-4
"""The most by which log-probs of the same tokens may differ in another batch."""


class ActorWorkerSuite(WorkerSuite):
    """An actor; `target` is its class, and `settings` its configuration, such as a tiny `model.path`."""

    interface = ActorWorker
    role = ACTOR.name
    model_directory: str = "model"
    """Directory of the weights below that of `save`; an adapter's is 'adapter'."""
    hands_out_weights: bool = False
    """Claim: `weights` writes or sends them to replicas that hold a copy."""

    def test_logprobs_are_one_number_a_token(self) -> None:
        """(B, T) float32, finite and at most 0 where tokens were sampled, 0 at position 0."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary)
            found_BT = await logprobs(actor, batch)
            need_per_token(self, "log-probs", found_BT, batch)
            mask_BT = batch.tokens.loss_mask_BT
            highest = float(found_BT[mask_BT].max())
            self.need(highest <= TOLERANCE, f"a log-prob is {highest:g}; needs at most 0")
            self.need(not found_BT[:, 0].any(), "position 0 has a log-prob; nothing comes before it, so it needs 0")

        self.use(main)

    def test_logprobs_of_a_row_do_not_depend_on_the_others(self) -> None:
        """They depend neither on the row's place nor on the padding that the longest row adds."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary)
            whole_BT = await logprobs(actor, batch)
            for rows in ([3], [5, 0]):
                part = select(batch, rows)
                mask_BT = part.tokens.loss_mask_BT
                found_BT = await logprobs(actor, part)
                off = np.abs(found_BT - whole_BT[rows, : found_BT.shape[1]])[mask_BT].max()
                self.need(off <= TOLERANCE, f"log-probs of rows {rows} alone differ by {off:g} from those in a batch")

        self.use(main)

    def test_token_scores_are_the_same_logprobs_with_their_entropy(self) -> None:
        """The log-probs equal those of `logprobs` bit for bit. An entropy, if there is one, is 0 to log(vocabulary)
        nats."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary)
            scores = await actor.call(ActorWorker.token_scores, batch)
            self.need(isinstance(scores, TokenScores), f"token_scores() is {type(scores).__name__}; needs TokenScores")
            same = same_bits(scores.logprobs_BT, await logprobs(actor, batch))
            self.need(same, "log-probs of token_scores() are not those of logprobs()")
            if scores.entropy_BT is not None:
                need_per_token(self, "entropies", scores.entropy_BT, batch)
                entropy_N = scores.entropy_BT[batch.tokens.loss_mask_BT]
                low, high = float(entropy_N.min()), float(entropy_N.max())
                most = math.log((await actor.call(ActorWorker.facts))["vocabulary"])
                self.need(
                    low >= -TOLERANCE and high <= most + 0.01,
                    f"entropies are {low:g} to {high:g}; needs 0 to {most:g} nats, log(vocabulary)",
                )

        self.use(main)

    def test_an_update_makes_what_was_good_more_likely(self) -> None:
        """With an advantage of 1 for every token, the tokens' log-probs rise. Metrics are numbers; the update is not
        skipped."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary, advantages=1.0)
            before = await weighted(actor, batch)
            metrics = await update(actor, batch)
            need_metrics(f"{self.who}: update()", metrics)
            skipped = metrics.get(SKIPPED, 0.0)
            self.need(skipped == 0.0, f"update() counts a healthy update as skipped ({skipped:g})")
            after = await weighted(actor, batch)
            self.need(
                after > before, f"log-probs of tokens with advantage 1 went from {before:g} to {after:g}; need to rise"
            )

        self.use(main)

    def test_logprobs_change_nothing(self) -> None:
        """Two calls give the same bits."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary)
            pair = [await logprobs(actor, batch) for _ in range(2)]
            self.need(same_bits(*pair), "log-probs differ the second time, without an update between")

        self.use(main)

    def test_a_gradient_that_is_not_finite_is_skipped_and_counted(self) -> None:
        """The weights stay the same bit for bit, and the next update changes them."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary)
            before_BT = await logprobs(actor, batch)
            metrics = await update(actor, batch_of(self.vocabulary, advantages=float("nan")))
            count = metrics.get(SKIPPED)
            self.need(count == 1.0, f"'{SKIPPED}' is {count} after an update that is not finite; needs 1.0")
            self.need(same_bits(before_BT, await logprobs(actor, batch)), "an update that is not finite moved weights")
            count = (await update(actor, batch)).get(SKIPPED, 0.0)
            self.need(count == 0.0, "the update after a skipped one is skipped, too")

        self.use(main)

    def test_what_was_saved_is_restored_bit_for_bit(self) -> None:
        """The same weights, and the same state for the next update."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary)
            await actor.call(ActorWorker.expect, 10)
            await update(actor, batch)
            directory = work.bench.run_dir / "checkpoint"
            directory.mkdir()
            saved_BT = await logprobs(actor, batch)
            await actor.call(ActorWorker.save, directory)
            there = (directory / self.model_directory).is_dir()
            self.need(there, f"save() wrote no directory '{self.model_directory}'")
            other = await work.start()
            await other.call(ActorWorker.expect, 10)
            await other.call(ActorWorker.restore, directory)
            self.need(
                same_bits(saved_BT, await logprobs(other, batch)), "log-probs after restore() are not those saved"
            )
            for worker in (actor, other):
                await update(worker, batch_of(self.vocabulary, seed=1))
            pair = [await logprobs(worker, batch) for worker in (actor, other)]
            self.need(same_bits(*pair), "an update after restore() differs: some state of the optimizer was not saved")

        self.use(main)

    def test_a_snapshot_is_written_as_it_was_taken(self) -> None:
        """After an update, `write_snapshot` writes the state before it. A worker without snapshots passes."""

        async def main(work: Work) -> None:
            actor, batch = await work.start(), batch_of(self.vocabulary)
            await actor.call(ActorWorker.expect, 10)
            await update(actor, batch)
            saved, written = (work.bench.run_dir / name for name in ("saved", "written"))
            for directory in (saved, written):
                directory.mkdir()
            if not await actor.call(ActorWorker.snapshot):
                return
            copied_BT = await logprobs(actor, batch)
            await actor.call(ActorWorker.save, saved)
            await update(actor, batch_of(self.vocabulary, seed=1))
            await actor.call(ActorWorker.write_snapshot, written)
            names = [
                sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))
                for directory in (saved, written)
            ]
            self.need(names[0] == names[1], f"write_snapshot() wrote {names[1]}, save() {names[0]}; needs the same")
            await actor.call(ActorWorker.restore, written)
            same = same_bits(copied_BT, await logprobs(actor, batch))
            self.need(same, "write_snapshot() did not write the weights at snapshot(); copy them there")

        self.use(main)

    def test_it_knows_itself_and_takes_a_version(self) -> None:
        """`facts` gives num_parameters and context_length; `publish` returns nothing."""

        async def main(work: Work) -> None:
            actor = await work.start()
            facts = await actor.call(ActorWorker.facts)
            num, window = facts.get("num_parameters"), facts.get("context_length", 0)
            self.need(isinstance(num, int) and num > 0, f"facts(): num_parameters is {num!r}; needs a positive int")
            good = window is None or (isinstance(window, int) and window > 0)
            self.need(good, f"facts(): context_length is {window!r}; needs a positive int or None")
            self.need(await actor.call(ActorWorker.publish, 1) is None, "publish() returned something; needs None")

        self.use(main)

    @extra("hands_out_weights")
    def test_weights_are_written_under_their_version(self) -> None:
        """The handle names the version and an existing directory."""

        async def main(work: Work) -> None:
            actor = await work.start()
            await actor.call(ActorWorker.publish, 3)
            directory = work.bench.run_dir / "weights"
            handle = await actor.call(ActorWorker.weights, 3, directory)
            self.need(handle.version == 3, f"weights(3) gave version {handle.version}")
            known = handle.kind == "tcp" or Path(handle.path).is_dir()
            self.need(known, f"weights(): '{handle.path}' of kind '{handle.kind}' is not there")

        self.use(main)


async def logprobs(actor: Any, batch: Batch) -> Float32s:
    """(B, T) log-probs of the actor's current weights."""
    found: Float32s = await actor.call(ActorWorker.logprobs, batch)
    return found


async def update(actor: Any, batch: Batch) -> Metrics:
    """Metrics of an update whose pi_old is the policy that recorded the log-probs, as in the first update of a step."""
    current_BT = await logprobs(actor, batch)
    mask_BT = batch.tokens.loss_mask_BT
    tokens = replace(batch.tokens, rollout_logprobs_BT=np.where(mask_BT, current_BT, 0.0).astype(np.float32))
    metrics: Metrics = await actor.call(ActorWorker.update, replace(batch, tokens=tokens))
    return metrics


async def weighted(actor: Any, batch: Batch) -> float:
    """The sum of the sampled tokens' log-probs."""
    found_BT = await logprobs(actor, batch)
    return float(found_BT[batch.tokens.loss_mask_BT].astype(np.float64).sum())
