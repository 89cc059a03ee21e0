"""Scorecard case 40: code that lies in a model's directory is never run."""

import json
from pathlib import Path

import pytest

from rlcore.config import EngineConfig, ModelConfig
from rlcore.data.tokenizer import load_tokens
from rlcore.engines.hf import TrainEngine
from rlcore.errors import RlcoreError
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import SharedPrefix

CODE = """
from pathlib import Path

Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_the_code_of_a_models_directory_is_not_run_and_the_model_is_refused(tmp_path: Path) -> None:
    path, mark = write_tiny_model(tmp_path / "model"), tmp_path / "it ran"
    (path / "own.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.OwnModel", None]}}))
    with pytest.raises(RlcoreError):
        TrainEngine("causal_lm", ModelConfig(path=str(path)), EngineConfig(), None, shared_prefix=SharedPrefix.NONE)
    with pytest.raises(RlcoreError):
        load_tokens(ModelConfig(path=str(path)), "")
    assert not mark.exists()
