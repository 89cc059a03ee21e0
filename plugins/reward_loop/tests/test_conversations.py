"""One conversation that cannot be scored is one sample's failure, and no replica's."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_reward_loop.models.conversations import Conversations, Unreadable
from rlcore_reward_loop.models.vllm_replica import VllmReplica
from rlcore_reward_loop.settings import ModelSettings

from rlcore.contracts.reward_replica import RawScore, ScoreRequest
from rlcore.contracts.workers import WorkerContext
from rlcore.errors import WorkerError
from rlcore.types import FrozenDict

NO_SYSTEM = """{% for each in messages %}{% if each['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{{ each['content'] }}{% endfor %}"""


def request(*messages: dict[str, Any]) -> ScoreRequest:
    return ScoreRequest("p/0/0", tuple(FrozenDict[str, Any](each) for each in messages))


@pytest.fixture
def conversations(tmp_path: Path) -> Conversations:
    """Of a model with 100 tokens, whose 'bytes' above that it does not know."""
    config = {"model_type": "llama", "vocab_size": 100, "num_labels": 1, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Conversations(ModelSettings(path=str(tmp_path), tokenizer="bytes"))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "A" * 100}], "has 107 tokens; needs 1 to 64"),
        ([], "has 0 tokens"),
        ([{"role": "user", "content": "?"}], "holds token 117; the model knows those below 100"),
        ([["no", "message"]], "the conversation cannot be read: "),
    ],
)
def test_a_conversation_that_cannot_be_scored_says_why(
    conversations: Conversations, messages: list[Any], said: str
) -> None:
    with pytest.raises(Unreadable, match=said):
        conversations.read(messages)


def replica(model: Any, errored: bool) -> VllmReplica:
    config = SimpleNamespace(cluster=SimpleNamespace(in_process=True))
    found = VllmReplica(WorkerContext("reward", 0, 0, 1, config, None, {}, Path(), 0, 1, "cpu"))
    found.open_with(model, SimpleNamespace(errored=errored))
    return found


def test_what_the_engine_refuses_is_the_requests_error_unless_the_engine_has_died() -> None:
    class Model:
        async def answer(self, engine: Any, request: ScoreRequest, number: str) -> RawScore:
            if request.messages:
                raise ValueError("temperature must be non-negative, got -1")
            return RawScore(request.id, 1.0)

    bad = request({"role": "user", "content": "?"})
    [refused, good] = asyncio.run(replica(Model(), errored=False).score([bad, request()]))
    assert refused.error == "vLLM: ValueError: temperature must be non-negative, got -1"
    assert (good.error, good.score) == ("", 1.0)
    with pytest.raises(WorkerError, match=r"reward\[0\.0\]: its engine: vLLM: ValueError"):
        asyncio.run(replica(Model(), errored=True).score([bad]))


@pytest.mark.real
def test_a_template_that_refuses_system_messages_costs_the_replica_nothing(tmp_path: Path) -> None:
    from rlcore_reward_loop.models.worker import HfReplica
    from rlcore_reward_loop.settings import RewardLoopSettings
    from transformers import AutoTokenizer

    from rlcore.testing.tiny import write_tiny_classifier

    path = write_tiny_classifier(tmp_path / "classifier", labels=1)
    tokenizer: Any = AutoTokenizer.from_pretrained(".models/smollm2-135m-instruct")
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = ModelSettings(path=str(path), tokenizer=str(tmp_path / "tokenizer"))
    section = RewardLoopSettings(models={"reward": model})
    worker = HfReplica(WorkerContext("reward", 0, 0, 1, None, section, {}, tmp_path, 0, 1, "cpu"))
    worker.setup()
    try:
        system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "\n"}
        [refused, good] = asyncio.run(worker.score([request(system, user), request(user)]))
        assert "the conversation cannot be read: TemplateError: System role not supported" in refused.error
        assert good.error == ""
        assert good.score is not None
        assert "on cpu" in asyncio.run(worker.health())
    finally:
        worker.close()
