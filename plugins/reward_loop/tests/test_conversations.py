"""One conversation that cannot be scored is one sample's failure, and no replica's."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_reward_loop import reward_model
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings

from rlcore.contracts.foreign_text import ForeignText
from rlcore.contracts.reward_models import Conversations, RewardModel, Unreadable, conversation_ids
from rlcore.contracts.reward_replica import ScoreRequest
from rlcore.contracts.templates import end_template_child
from rlcore.contracts.workers import WorkerContext
from rlcore.errors import ConfigError
from rlcore.types import FrozenDict

NO_SYSTEM = """{% for message in messages %}{% if message['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{{ message['content'] }}{% endfor %}"""


def request(*messages: dict[str, Any]) -> ScoreRequest:
    return ScoreRequest("p/0/0", tuple(FrozenDict[str, Any](message) for message in messages))


@pytest.fixture
def conversations(tmp_path: Path) -> Conversations:
    """Of a model with 100 tokens, whose 'bytes' above that it does not know."""
    config = {"model_type": "llama", "vocab_size": 100, "num_labels": 1, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Conversations(RewardModel(str(tmp_path), tokenizer="bytes"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "A" * 100}], "has 107 tokens; needs 1 to 64"),
        ([], "has 0 tokens"),
        ([{"role": "user", "content": "?"}], "holds token 117; the model knows those below 100"),
        ([["no", "message"]], "the conversation cannot be read: "),
    ],
)
def test_a_conversation_that_cannot_be_scored_says_why(
    conversations: Conversations, messages: list[Any], message: str
) -> None:
    with pytest.raises(Unreadable, match=message):
        conversations.read(messages)


@pytest.mark.real
def test_on_transformers_too_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    from rlcore_reward_loop.models.classifier import Classifier

    from rlcore.testing.tiny import write_tiny_model

    path = str(write_tiny_model(tmp_path / "policy"))
    with pytest.raises(ConfigError, match=r"'.*policy': its files have no weight 'score\.weight'"):
        Classifier(RewardModel(path, tokenizer="bytes"), "cpu", 1)


@pytest.mark.real
def test_a_template_that_refuses_system_messages_costs_the_replica_nothing(tmp_path: Path) -> None:
    from rlcore_reward_loop.models.worker import HfReplica
    from transformers import AutoTokenizer

    from rlcore.testing.tiny import write_tiny_classifier

    path = write_tiny_classifier(tmp_path / "classifier", labels=1)
    tokenizer: Any = AutoTokenizer.from_pretrained(".models/smollm2-135m-instruct")
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = ModelSettings(path=str(path), tokenizer=str(tmp_path / "tokenizer"))
    section = RewardLoopSettings(models={"reward": model})
    spec = reward_model(section, "reward")
    worker = HfReplica(WorkerContext("reward", 0, 0, 1, None, section, {}, tmp_path, 0, 1, "cpu", spec=spec))
    worker.setup()
    try:
        system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "\n"}
        [refused, good] = asyncio.run(worker.score([request(system, user), request(user)]))
        assert "TemplateError: System role not supported" in refused.error
        assert good.error == ""
        assert good.score is not None
        assert "on cpu" in asyncio.run(worker.health())
    finally:
        worker.close()


@pytest.mark.fault
def test_a_template_that_does_not_end_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = SimpleNamespace(
        chat_template=loops, special_tokens_map={}, name_or_path="models/m", added_tokens_decoder={}
    )
    monkeypatch.setattr("rlcore.contracts.templates.CPU_S", 0.5)
    end_template_child()
    with pytest.raises(Unreadable, match=r"the chat template of 'models/m': it took more than 0\.5 s"):
        conversation_ids(ForeignText(tokenizer), [{"role": "user", "content": "x"}])
    end_template_child()
