"""The suite of reference workers."""

import numpy as np

from rlcore.contracts.reference import REFERENCE, ReferenceWorker
from rlcore.data.batch import select
from rlcore.testing.suites import actor as actors
from rlcore.testing.suites.harness import extra
from rlcore.testing.suites.workers import Work, WorkerSuite, batch_of, need_per_token, same_bits


class ReferenceWorkerSuite(WorkerSuite):
    """A reference policy; with `host`, it is embedded in that actor."""

    interface = ReferenceWorker
    role = REFERENCE.name

    def test_logprobs_are_one_number_a_token(self) -> None:
        """(B, T) float32, finite and at most 0 where tokens were sampled."""

        async def main(work: Work) -> None:
            reference, batch = await work.start(), batch_of(self.vocabulary)
            found_BT = await reference.call(ReferenceWorker.logprobs, batch)
            need_per_token(self, "log-probs", found_BT, batch)
            highest = float(found_BT[batch.tokens.loss_mask_BT].max())
            self.need(highest <= actors.TOLERANCE, f"a log-prob is {highest:g}; needs at most 0")

        self.use(main)

    def test_logprobs_of_a_row_do_not_depend_on_the_others(self) -> None:
        """They depend neither on the row's place nor on the padding that the longest row adds."""

        async def main(work: Work) -> None:
            reference, batch = await work.start(), batch_of(self.vocabulary)
            whole_BT = await reference.call(ReferenceWorker.logprobs, batch)
            part = select(batch, [5, 0])
            found_BT = await reference.call(ReferenceWorker.logprobs, part)
            off_BT = np.abs(found_BT - whole_BT[[5, 0], : found_BT.shape[1]])
            off = float(off_BT[part.tokens.loss_mask_BT].max())
            self.need(off <= actors.TOLERANCE, f"log-probs of two rows alone differ by {off:g} from those in a batch")

        self.use(main)

    def test_its_weights_are_frozen(self) -> None:
        """Each call, also of another worker of the class, gives the same log-probs bit for bit."""

        async def main(work: Work) -> None:
            batch, found = batch_of(self.vocabulary), []
            for _ in range(2):
                reference = await work.start()
                for _ in range(2):
                    found.append(await reference.call(ReferenceWorker.logprobs, batch))
            self.need(
                all(same_bits(found[0], logprobs_BT) for logprobs_BT in found), "log-probs of the frozen policy differ"
            )

        self.use(main)

    @extra("host")
    def test_updates_of_its_host_do_not_reach_it(self) -> None:
        """The actor's log-probs change; the reference's stay the same bit for bit."""

        async def main(work: Work) -> None:
            reference, batch = await work.start(), batch_of(self.vocabulary)
            before_BT = await reference.call(ReferenceWorker.logprobs, batch)
            await actors.update(work.actor, batch_of(self.vocabulary, advantages=1.0))
            after_BT = await reference.call(ReferenceWorker.logprobs, batch)
            self.need(same_bits(before_BT, after_BT), "its log-probs changed with an update of the actor that hosts it")

        self.use(main)
