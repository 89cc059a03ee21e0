"""Facts about a machine and its models, read without torch, a network or a GPU."""

import json
from pathlib import Path

import pytest
from huggingface_hub import try_to_load_from_cache

from rlcore.config import ModelConfig, RunConfig
from rlcore.contracts.model_files import model_directory, num_parameters
from rlcore.runtime.machine import gather_facts

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 10,
    "intermediate_size": 16,
}
PARAMETERS = 2 * 10 * 8 + 2 * (4 * 8 * 8 + 3 * 8 * 16)


def write_safetensors(path: Path, numbers: int) -> None:
    """A file that has its header only, as large as a counter needs it."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub's cache with 'someone/llama' at the commit of its branch 'main'; its blobs are symbolic links."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--llama"
    directory = repository / "snapshots" / "0a1b2c"
    directory.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "c0ffee").write_text(json.dumps(LLAMA))
    (directory / "config.json").symlink_to(Path("../../blobs/c0ffee"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0a1b2c")
    return directory


def test_a_model_of_the_hub_is_known_when_this_machine_has_it_in_its_cache(snapshot: Path) -> None:
    facts = gather_facts(RunConfig(model=ModelConfig(path="someone/llama")))
    assert facts.parameters == PARAMETERS
    assert facts.shape is not None
    assert (facts.shape.model_type, facts.shape.layers, facts.shape.full_attention) == ("llama", 2, True)
    assert model_directory("someone/llama", "0a1b2c") == snapshot, "a commit is its own name"
    for revision in ("main", "0a1b2c"):
        found = try_to_load_from_cache("someone/llama", "config.json", snapshot.parents[2], revision)
        assert found == str(snapshot / "config.json"), "the client of the Hub reads it so"


@pytest.mark.parametrize(
    ("name", "revision"), [("someone/llama", "v2"), ("someone/other", "main"), ("llama", "main"), ("none", "main")]
)
def test_what_is_not_in_the_cache_is_unknown(snapshot: Path, name: str, revision: str) -> None:
    facts = gather_facts(RunConfig(model=ModelConfig(path=name, revision=revision)))
    assert (facts.parameters, facts.shape) == (None, None)


def test_the_cache_is_where_the_hubs_client_looks_for_it(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert model_directory("someone/llama") == snapshot
    monkeypatch.delenv("HF_HOME")
    (tmp_path / "huggingface").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_directory("someone/llama").samefile(snapshot)


def test_a_directory_of_that_name_comes_before_the_cache(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "llama").mkdir(parents=True)
    assert model_directory("someone/llama") == Path("someone/llama")


def test_parameters_are_counted_in_the_files_of_the_weights_and_estimated_while_one_of_them_is_missing(
    snapshot: Path,
) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(snapshot / names[0], 100)
    assert num_parameters(snapshot) == PARAMETERS
    write_safetensors(snapshot / names[1], 23)
    write_safetensors(snapshot / "consolidated.safetensors", 123)
    assert num_parameters(snapshot) == 123, "what the index does not name is another copy"
