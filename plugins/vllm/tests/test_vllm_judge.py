"""A generative judge on vLLM: bound to its JSON, and one bad request costs no other sample anything.

Runs with the Python of .venv-vllm (`make vllm`).
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_vllm.replica import VllmReplica

from rlcore.contracts.reward_models import RewardModel
from rlcore.contracts.reward_replica import RawScore, ScoreRequest
from rlcore.contracts.workers import WorkerContext
from rlcore.testing.marks import needs
from rlcore.types import FrozenDict

MODEL = Path(__file__).resolve().parents[3] / ".models" / "smollm2-135m-instruct"
QUESTION = {"role": "user", "content": "How good is the answer '4' to 'What is 2 + 2?', from 0 to 10?"}

SCHEMA = {
    "type": "object",
    "properties": {"grade": {"type": "number"}},
    "required": ["grade"],
    "additionalProperties": False,
}


@pytest.mark.real
@pytest.mark.timeout(240)
@needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real")
def test_a_judge_is_bound_to_its_json_and_refuses_bad_requests_one_by_one(tmp_path: Path) -> None:
    """In a separate process, for vLLM warns."""
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def request(message: Any = QUESTION, **options: Any) -> ScoreRequest:
    return ScoreRequest("p/0/0", (FrozenDict(message),), FrozenDict(options))


async def ask(replica: VllmReplica) -> list[RawScore]:
    requests = [
        request(max_tokens=64, temperature=0.0, json=SCHEMA),
        request(temperature=-1.0),
        request(max_tokens="many"),
        request(json={"type": "no such type"}),
        request({"role": "user", "content": ["no", "text"]}),
        request(max_tokens=4),
        request(response_format={}),
        request(temperature=0.0, choice=["7"]),
    ]
    answers = await replica.score(requests)
    assert "on vLLM" in await replica.health()
    return answers


def check(answers: list[RawScore]) -> None:
    bound, negative, word, schema, unreadable, cut, unknown, chosen = answers
    assert bound.error == ""
    assert list(json.loads(bound.text)) == ["grade"]
    assert isinstance(json.loads(bound.text)["grade"], (int, float))
    assert "temperature" in negative.error
    assert "max_tokens=many" in word.error
    assert schema.error
    assert "the conversation cannot be read" in unreadable.error
    assert cut.error == "the answer was cut off; raise judge.max_tokens"
    assert "option 'response_format' is not known" in unknown.error
    assert (chosen.text, chosen.error) == ("7", "")


def main(directory: Path) -> None:
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 2**27, "max_num_seqs": 8}
    spec = RewardModel(str(MODEL), max_tokens=256, kinds=frozenset({"judge"}), options=options)
    config = SimpleNamespace(cluster=SimpleNamespace(in_process=True))
    replica = VllmReplica(WorkerContext("judge", 0, 0, 1, config, None, {}, directory, 0, 1, "cpu", spec=spec))
    replica.setup()
    try:
        check(asyncio.run(ask(replica)))
    finally:
        replica.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
