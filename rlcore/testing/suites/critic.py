"""The suites of the critic: of engines, which fill the slot, and of their workers."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlcore.contracts.critic import CriticEngine, CriticWorker
from rlcore.data.batch import select
from rlcore.testing.suites.harness import ComponentSuite, Suite, extra, need_metrics, run
from rlcore.testing.suites.workers import Work, WorkerSuite, batch_of, need_per_token, same_bits
from rlcore.types import Batch, Bools, Float32s

TOLERANCE = 1e-4
RETURN = 0.5
"""The return of every token in the batches of these suites."""


class CriticWorkerSuite(WorkerSuite):
    """A critic's worker; `target` is its class."""

    interface = CriticWorker
    role = "critic"
    updates: int = 8
    """Number of updates after which values must be closer to the returns."""

    def test_values_are_one_number_a_sampled_token(self) -> None:
        """(B, T) float32, finite, and 0 where the policy did not sample."""

        async def main(work: Work) -> None:
            critic, batch = await work.start(), batch_of(self.vocabulary)
            need_values(self, await critic.call(CriticWorker.values, batch), batch)

        self.use(main)

    def test_values_of_a_row_do_not_depend_on_the_others(self) -> None:
        """They depend neither on the row's place nor on the padding that the longest row adds."""

        async def main(work: Work) -> None:
            critic, batch = await work.start(), batch_of(self.vocabulary)
            await critic.call(CriticWorker.update, await targets(critic, batch))
            whole_BT = await critic.call(CriticWorker.values, batch)
            found_BT = await critic.call(CriticWorker.values, select(batch, [5, 0]))
            off = float(np.abs(found_BT - whole_BT[[5, 0], : found_BT.shape[1]]).max())
            self.need(off <= TOLERANCE, f"values of two rows alone differ by {off:g} from those in a batch")

        self.use(main)

    def test_a_value_belongs_to_the_tokens_before_it(self) -> None:
        """A changed token changes the next position's value, if any: neither that of an earlier one nor only later
        ones."""

        async def main(work: Work) -> None:
            critic, batch = await work.start(), batch_of(self.vocabulary)
            await critic.call(CriticWorker.expect, self.updates)
            for _ in range(self.updates):
                await critic.call(CriticWorker.update, await targets(critic, batch))
            first_BT, changed = await critic.call(CriticWorker.values, batch), with_another_token(batch)
            need_causal(self, first_BT, await critic.call(CriticWorker.values, changed), batch)

        self.use(main)

    def test_updates_bring_values_to_the_returns(self) -> None:
        """The mean squared distance falls, also at the first and the last sampled tokens; metrics are numbers."""

        async def main(work: Work) -> None:
            critic, batch = await work.start(), batch_of(self.vocabulary)
            await critic.call(CriticWorker.expect, self.updates)
            first_BT = await critic.call(CriticWorker.values, batch)
            for _ in range(self.updates):
                metrics = await critic.call(CriticWorker.update, await targets(critic, batch))
                need_metrics(f"{self.who}: update()", metrics)
            need_closer(self, first_BT, await critic.call(CriticWorker.values, batch), batch)

        self.use(main)

    def test_what_was_saved_is_restored_bit_for_bit(self) -> None:
        """The same weights, and the same state for the next update."""

        async def main(work: Work) -> None:
            critic, batch = await work.start(), batch_of(self.vocabulary)
            await critic.call(CriticWorker.expect, 10)
            await critic.call(CriticWorker.update, await targets(critic, batch))
            directory = work.bench.run_dir / "checkpoint"
            directory.mkdir()
            saved_BT = await critic.call(CriticWorker.values, batch)
            await critic.call(CriticWorker.save, directory)
            other = await work.start()
            await other.call(CriticWorker.expect, 10)
            await other.call(CriticWorker.restore, directory)
            found_BT = await other.call(CriticWorker.values, batch)
            self.need(same_bits(saved_BT, found_BT), "values after restore() are not those saved")
            for worker in (critic, other):
                await worker.call(CriticWorker.update, await targets(worker, batch_of(self.vocabulary, seed=1)))
            pair = [await worker.call(CriticWorker.values, batch) for worker in (critic, other)]
            self.need(same_bits(*pair), "an update after restore() differs: some state of the optimizer was not saved")

        self.use(main)

    def test_a_snapshot_is_written_as_it_was_taken(self) -> None:
        """After an update, `write_snapshot` writes the state before it. A worker without snapshots passes."""

        async def main(work: Work) -> None:
            critic, batch = await work.start(), batch_of(self.vocabulary)
            await critic.call(CriticWorker.expect, 10)
            if not await critic.call(CriticWorker.snapshot):
                return
            copied_BT = await critic.call(CriticWorker.values, batch)
            await critic.call(CriticWorker.update, await targets(critic, batch))
            directory = work.bench.run_dir / "checkpoint"
            directory.mkdir()
            await critic.call(CriticWorker.write_snapshot, directory)
            await critic.call(CriticWorker.restore, directory)
            found_BT = await critic.call(CriticWorker.values, batch)
            self.need(
                same_bits(copied_BT, found_BT),
                "write_snapshot() did not write the weights at snapshot(); copy them there",
            )

        self.use(main)


class CriticEngineSuite(ComponentSuite):
    """A critic engine; `target` is its `build`, `workers` holds the classes of the roles that it requests."""

    interface = CriticEngine
    vocabulary: int = 256
    """Token ids are below this."""
    updates: int = 8
    estimates: bool = False
    """Claim: it estimates values, which updates bring closer to the returns."""

    async def warm_up(self, component: Any) -> None:
        """Update once."""
        await component.update(await self._targets(component, batch_of(self.vocabulary)))

    async def _targets(self, critic: CriticEngine, batch: Batch) -> Batch:
        values = await critic.values(batch)
        mask_BT = batch.tokens.loss_mask_BT
        values_BT = np.zeros(mask_BT.shape, dtype=np.float32) if values is None else values
        return with_targets(batch, values_BT)

    def test_it_says_when_the_actor_may_update(self) -> None:
        """`actor_may_update` returns a bool. `expect` returns no more updates than the run has."""

        async def main(critic: CriticEngine) -> None:
            left = await critic.expect(1000)
            good = isinstance(left, int) and 0 <= left <= 1000
            self.need(good, f"expect(1000) returned {left!r}; needs how many of these the actor updates in")
            await self.warm_up(critic)
            may = critic.actor_may_update()
            self.need(isinstance(may, bool), f"actor_may_update() returned {may!r}; needs True or False")

        self.use(main)

    def test_an_update_returns_metrics(self) -> None:
        """Metrics are a dict of str to finite float."""

        async def main(critic: CriticEngine) -> None:
            metrics = await critic.update(await self._targets(critic, batch_of(self.vocabulary)))
            need_metrics(f"{self.who}: update()", metrics)

        self.use(main)

    def test_it_writes_and_reads_its_own_directory(self) -> None:
        """`save`, or `snapshot` and `write_snapshot`, fill an empty directory; `restore` brings the same values bit for
        bit."""

        async def main() -> None:
            async with self.context() as context:
                critic, directory = self.load()(context), context.run_dir / "checkpoint"
                directory.mkdir()
                batch = batch_of(self.vocabulary)
                await critic.start()
                try:
                    await self.warm_up(critic)
                    saved = await critic.values(batch)
                    if await critic.snapshot():
                        await self.warm_up(critic)
                        await critic.write_snapshot(directory)
                    else:
                        await critic.save(directory)
                    if not any(directory.iterdir()):  # an engine that saves nothing: a checkpoint has no such directory
                        directory.rmdir()
                    await self.warm_up(critic)
                    await critic.restore(directory)
                    found = await critic.values(batch)
                finally:
                    await critic.close()
                same = saved is None if found is None else saved is not None and same_bits(saved, found)
                self.need(same, "values after restore() are not those at save()")

        run(main())

    @extra("estimates")
    def test_values_are_one_number_a_sampled_token(self) -> None:
        """(B, T) float32, finite, and 0 where the policy did not sample."""

        async def main(critic: CriticEngine) -> None:
            batch = batch_of(self.vocabulary)
            values = await critic.values(batch)
            need_values(self, values, batch)

        self.use(main)

    @extra("estimates")
    def test_a_value_belongs_to_the_tokens_before_it(self) -> None:
        """A changed token changes the next position's value, if any: neither that of an earlier one nor only later
        ones."""

        async def main(critic: CriticEngine) -> None:
            batch = batch_of(self.vocabulary)
            await critic.expect(1000)
            for _ in range(self.updates):
                await critic.update(await self._targets(critic, batch))
            first, last = await critic.values(batch), await critic.values(with_another_token(batch))
            if first is not None and last is not None:
                need_causal(self, first, last, batch)

        self.use(main)

    @extra("estimates")
    def test_updates_bring_values_to_the_returns(self) -> None:
        """The mean squared distance falls, also at the first and the last sampled tokens."""

        async def main(critic: CriticEngine) -> None:
            batch = batch_of(self.vocabulary)
            await critic.expect(1000)
            first = await critic.values(batch)
            for _ in range(self.updates):
                await critic.update(await self._targets(critic, batch))
            last = await critic.values(batch)
            self.need(first is not None and last is not None, "values() returned None; needs (B, T) values")
            if first is not None and last is not None:
                need_closer(self, first, last, batch)

        self.use(main)


def with_targets(batch: Batch, values_BT: Float32s) -> Batch:
    """The batch with these values from the step's start, and the same return for every token."""
    mask_BT = batch.tokens.loss_mask_BT
    returns_BT = np.where(mask_BT, RETURN, 0.0).astype(np.float32)
    return replace(batch, values_BT=values_BT, returns_BT=returns_BT)


async def targets(critic: Any, batch: Batch) -> Batch:
    """The batch with the targets that an update of the worker needs."""
    return with_targets(batch, await critic.call(CriticWorker.values, batch))


def need_values(suite: Suite, values_BT: Any, batch: Batch) -> None:
    """`Breach` unless these are valid values of the batch."""
    need_per_token(suite, "values", values_BT, batch)
    outside = values_BT[~batch.tokens.loss_mask_BT]
    suite.need(not outside.any(), "a value stands where the policy did not sample; needs 0 there")


def need_closer(suite: Suite, first_BT: Float32s, last_BT: Float32s, batch: Batch) -> None:
    """`Breach` unless the last values are closer to the returns than the first: at all tokens, and at the ends of rows,
    where values of other positions would show."""
    mask_BT = batch.tokens.loss_mask_BT
    places_BT = mask_BT.cumsum(axis=1)
    ends = {"first sampled": places_BT == 1, "last sampled": places_BT == places_BT[:, -1:]}
    for which, chosen_BT in {"sampled": mask_BT, **ends}.items():
        here_BT = mask_BT & chosen_BT
        before, after = (float(np.square(values_BT[here_BT] - RETURN).mean()) for values_BT in (first_BT, last_BT))
        suite.need(
            after < before,
            f"updates took the mean squared error of values of the {which} tokens from {before:g} to {after:g}; needs "
            "less",
        )


def changed_places(batch: Batch) -> Bools:
    """(B, T) True at the middle sampled token of each row with at least three."""
    mask_BT = batch.tokens.loss_mask_BT
    places_BT, num_B1 = mask_BT.cumsum(axis=1), mask_BT.sum(axis=1, keepdims=True)
    found_BT: Bools = mask_BT & (places_BT == (num_B1 + 1) // 2) & (num_B1 >= 3)
    return found_BT


def with_another_token(batch: Batch) -> Batch:
    """The batch with another token at `changed_places`."""
    ids_BT = batch.tokens.token_ids_BT
    others_BT = np.where(changed_places(batch), ids_BT ^ 1, ids_BT).astype(np.int32)
    return replace(batch, tokens=replace(batch.tokens, token_ids_BT=others_BT))


def need_causal(suite: Suite, one_BT: Float32s, other_BT: Float32s, batch: Batch) -> None:
    """`Breach` unless `with_another_token` changes values from the position after the changed token on, or none."""
    moved_BT = np.abs(one_BT - other_BT)
    for row, place in np.argwhere(changed_places(batch)):
        most = float(moved_BT[row].max())
        if most <= TOLERANCE:  # the critic does not look at tokens, or not at this one
            continue
        early, next_ = float(moved_BT[row, : place + 1].max()), float(moved_BT[row, place + 1])
        suite.need(
            early <= most / 100,
            f"another token at {place} changes a value at or before it by {early:g}; position t needs the value of the "
            "state before token t",
        )
        suite.need(
            next_ > most / 100,
            f"another token at {place} does not change the value at {place + 1}, but later ones; position t needs the "
            "value of the state before token t",
        )
