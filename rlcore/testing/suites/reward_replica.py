"""The suite of reward replicas, the workers that serve a reward model."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from rlcore.contracts.reward_replica import RawScore, RewardReplica, ScoreRequest
from rlcore.testing.suites.harness import extra
from rlcore.testing.suites.workers import Work, WorkerSuite
from rlcore.types import FrozenDict, Message

TOLERANCE = 1e-4


class RewardReplicaSuite(WorkerSuite):
    """A replica of a reward model; `target` is its class, and `role` the name of its role in the settings."""

    interface = RewardReplica
    role = "reward"
    conversations: Sequence[Sequence[Message]] = tuple(
        (
            FrozenDict({"role": "user", "content": f"question {index}"}),
            FrozenDict({"role": "assistant", "content": "an answer " + "and more of it " * index}),
        )
        for index in range(5)
    )
    """The conversations to judge."""
    unreadable: Sequence[Message] = ()
    """Claim: a conversation that cannot be answered, such as one that is too long."""
    deterministic: bool = True
    """Claim: a conversation gets the same answer alone and in a batch."""
    sleeps: bool = False
    """Claim: it answers nothing while it sleeps."""
    asleep_s: float = 0.1
    """Seconds that it sleeps in a check: longer than an answer takes when it is awake."""

    def requests(self) -> list[ScoreRequest]:
        """One request per conversation."""
        return [
            ScoreRequest(f"r/{index}", tuple(conversation)) for index, conversation in enumerate(self.conversations)
        ]

    async def ask(self, replica: Any, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """One answer per request, in their order."""
        found = await replica.call(RewardReplica.score, requests)
        good = isinstance(found, list) and all(isinstance(answer, RawScore) for answer in found)
        self.need(good, f"score() returned {found!r:.80}; needs a list of RawScore")
        ids = [trajectory.id for trajectory in found]
        self.need(ids == [request.id for request in requests], f"score() answered {ids}; needs the requests' order")
        return list(found)

    def test_each_request_is_answered_in_order(self) -> None:
        """Each answer has a finite score or text, and not an error. No requests give no answers."""

        async def main(work: Work) -> None:
            replica = await work.start()
            for answer in await self.ask(replica, self.requests()):
                self._is_whole(answer)
            self.need(await self.ask(replica, []) == [], "score([]) is not []")

        self.use(main)

    def _is_whole(self, answer: RawScore) -> None:
        self.need(answer.error == "", f"'{answer.id}' has the error {answer.error!r}")
        num_fields = (answer.score is not None) + bool(answer.text)
        self.need(
            num_fields == 1, f"'{answer.id}' has score {answer.score} and text {answer.text!r:.40}; needs one of them"
        )
        number = answer.score is None or (isinstance(answer.score, float) and math.isfinite(answer.score))
        self.need(number, f"'{answer.id}' has the score {answer.score!r}; needs a finite float")

    @extra("deterministic")
    def test_a_batch_is_answered_as_one_by_one(self) -> None:
        """Answers are the same in one call, in single calls one after another, and in many concurrent calls."""

        async def main(work: Work) -> None:
            replica = await work.start()
            together = await self.ask(replica, self.requests())
            alone = [(await self.ask(replica, [request]))[0] for request in self.requests()]
            calls = await asyncio.gather(*(self.ask(replica, [request]) for request in self.requests()))
            for found, how in ((alone, "one by one"), ([call[0] for call in calls], "in calls at the same time")):
                for batched, other in zip(together, found, strict=True):
                    same = (
                        batched.text == other.text and abs((batched.score or 0.0) - (other.score or 0.0)) <= TOLERANCE
                    )
                    self.need(
                        same, f"'{batched.id}' is {shown(batched)} in a batch and {shown(other)} {how}; needs the same"
                    )
            self.need(len({shown(answer) for answer in together}) > 1, "all conversations get the same answer")

        self.use(main)

    @extra("unreadable")
    def test_what_is_wrong_with_a_request_is_its_own_error(self) -> None:
        """The other requests are answered."""

        async def main(work: Work) -> None:
            replica = await work.start()
            requests = self.requests()
            requests.insert(1, ScoreRequest("bad", tuple(self.unreadable)))
            found = {answer.id: answer for answer in await self.ask(replica, requests)}
            self.need(bool(found["bad"].error), f"the unreadable request has no error: {found['bad']}")
            for name, answer in found.items():
                if name != "bad":
                    self._is_whole(answer)

        self.use(main)

    def test_it_says_what_it_serves(self) -> None:
        """`health` returns words, `address` a URL or None."""

        async def main(work: Work) -> None:
            replica = await work.start()
            health = await replica.call(RewardReplica.health)
            self.need(isinstance(health, str) and bool(health), f"health() returned {health!r}; needs words")
            address = await replica.call(RewardReplica.address)
            good = address is None or (isinstance(address, str) and address.startswith("http"))
            self.need(good, f"address() returned {address!r}; needs a URL or None")

        self.use(main)

    def test_it_serves_again_after_it_slept(self) -> None:
        """Waking twice changes nothing."""

        async def main(work: Work) -> None:
            replica = await work.start()
            await replica.call(RewardReplica.sleep)
            for _ in range(2):
                await replica.call(RewardReplica.wake)
            for answer in await self.ask(replica, self.requests()):
                self._is_whole(answer)

        self.use(main)

    @extra("sleeps")
    def test_it_answers_nothing_while_it_sleeps(self) -> None:
        """Requests wait until it wakes."""

        async def main(work: Work) -> None:
            replica = await work.start()
            await replica.call(RewardReplica.sleep)
            asking = asyncio.create_task(self.ask(replica, self.requests()))
            done, _ = await asyncio.wait({asking}, timeout=self.asleep_s)
            await replica.call(RewardReplica.wake)
            await asking
            self.need(not done, "it answered while it slept")

        self.use(main)


def shown(answer: RawScore) -> str:
    """The answer in errors: its score or its text."""
    return repr(answer.text) if answer.score is None else f"{answer.score:.4f}"
