"""A judge without a model: a backend for reward replicas that reads what it is asked, and grades by rules."""

import json
import re
from collections.abc import Sequence

from rlcore import RawScore, RewardReplica, ScoreRequest, WorkerClass, hookimpl

RLCORE_API = "1"
ANSWER = re.compile(r"^The known answer: (.*)$", re.MULTILINE)
RESPONSE = re.compile(r"<(response-[0-9a-f]+)>\n(.*)\n</\1>", re.DOTALL)


class RulesReplica(RewardReplica):
    """Gives 10 for the number alone, 7 for a response that ends with it, 0 for anything else."""

    def setup(self) -> None:
        """Does nothing: there is nothing to load."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """One answer per request, as from a language model: text in which the caller finds the score."""
        return [RawScore(request.id, text=json.dumps({"score": grade(request)})) for request in requests]

    async def health(self) -> str:
        return "rules"


def grade(request: ScoreRequest) -> int:
    """The rules' verdict on the response in the judge's last message."""
    question = str(request.messages[-1]["content"])
    answer, response = ANSWER.search(question), RESPONSE.search(question)
    if answer is None or response is None:
        return 0
    text, wanted = response.group(2).strip(), answer.group(1).strip()
    if text == wanted:
        return 10
    return 7 if re.search(rf"(?<![\d.,/-]){re.escape(wanted)}\W*$", text) else 0


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(RewardReplica, "rules", RulesReplica)]
