"""Reward models on every backend: which output is the score, and which models are refused."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlcore.contracts.reward_models import (
    Conversations,
    RewardModel,
    activated,
    check_head,
    check_outputs,
    model_of,
    serves_scores,
    until_padding,
)
from rlcore.contracts.workers import WorkerContext
from rlcore.errors import ConfigError, WorkerError


def test_the_score_is_one_output_after_the_activation() -> None:
    logits = [math.log(1.0), math.log(3.0), math.log(4.0)]
    assert activated(logits, RewardModel(path="m", label=1)) == pytest.approx(math.log(3.0))
    assert activated(logits, RewardModel(path="m", label=1, activation="sigmoid")) == pytest.approx(0.75)
    assert activated(logits, RewardModel(path="m", label=2, activation="softmax")) == pytest.approx(0.5)
    assert activated([-1000.0], RewardModel(path="m", activation="sigmoid")) == 0.0
    assert activated([1000.0, 1000.0], RewardModel(path="m", activation="softmax")) == pytest.approx(0.5)


def test_a_conversation_is_scored_at_its_last_token_that_is_no_padding() -> None:
    assert until_padding([5, 7, 5, 7, 7], 7) == [5, 7, 5]
    assert until_padding([5, 7], None) == [5, 7]
    assert until_padding([7, 7], 7) == [7]


def test_an_output_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"reward model 'm': label=1, but it has 1 outputs"):
        check_outputs(RewardModel(path="m", label=1), 1)
    with pytest.raises(ConfigError, match=r"softmax of its one output is always 1; needs sigmoid"):
        check_outputs(RewardModel(path="m", activation="softmax"), 1)


def test_a_model_of_the_other_sort_than_its_reward_needs_is_named_with_the_way_out() -> None:
    assert serves_scores("m", ["Qwen2ForSequenceClassification"], {"model"})
    assert not serves_scores("m", ["Qwen2ForCausalLM"], {"judge"})
    assert serves_scores("m", ["Qwen2ForSequenceClassification"], ()), "asked over the endpoint only"
    with pytest.raises(ConfigError, match=r"'m': it is Qwen2ForCausalLM, which has no score head; .* or kind=judge"):
        serves_scores("m", ["Qwen2ForCausalLM"], {"model"})
    with pytest.raises(
        ConfigError, match=r"'m': it is LlamaForSequenceClassification, which gives numbers, .*kind=mod"
    ):
        serves_scores("m", ["LlamaForSequenceClassification"], {"judge"})


@pytest.mark.parametrize("sharded", [False, True])
def test_files_without_the_weights_of_a_head_are_refused(tmp_path: Path, sharded: bool) -> None:
    check_head(str(tmp_path / "a hub name"))
    for head in ("lm_head.weight", "score.weight"):
        names = ["model.embed_tokens.weight", head]
        if sharded:
            index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "model.safetensors")
        if head.startswith("score."):
            check_head(str(tmp_path))
        else:
            with pytest.raises(ConfigError, match=r"no weight 'score\.weight', so its scores would be random"):
                check_head(str(tmp_path))


@pytest.mark.timeout(60)
def test_a_model_whose_configuration_is_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"^reward model '.*' cannot be loaded: 'config\.json' is a pipe"):
        Conversations(RewardModel(str(tmp_path)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"'config\.json' is a pipe"):
        Conversations(RewardModel(str(tmp_path / "model"), tokenizer=str(tmp_path)))


def test_a_worker_gets_its_model_and_reports_when_it_gets_none() -> None:
    def context(spec: object) -> WorkerContext:
        return WorkerContext("judge", 0, 0, 1, None, None, {}, Path(), 0, 1, "cpu", spec=spec)

    assert model_of(context(RewardModel("m", label=2))).label == 2
    with pytest.raises(WorkerError, match=r"judge\[0\.0\]: found None to serve; needs .*RewardModel"):
        model_of(context(None))
