"""The model and the tokenizer of a checkpoint, for transformers."""

from pathlib import Path

import pytest

from rlcore.engines.hf.load_saved import load_tokenizer
from rlcore.errors import ConfigError
from rlcore.testing.tiny import write_tiny_model


def test_a_checkpoint_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"found no tokenizer in '.*model', as in runs with model\.tokenizer=bytes"):
        load_tokenizer(tmp_path)
