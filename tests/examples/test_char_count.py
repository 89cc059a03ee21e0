"""The example char_count: its data says the truth, its files are what the script writes, its warm-up imitates."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from rlcore.config import EngineConfig, ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf import TrainEngine
from rlcore.plugins.planning import plan_run
from rlcore.reward.scorers import last_boxed
from rlcore.testing.tiny import write_tiny_model

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "char_count"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"char_count_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_answer_is_the_count_and_every_response_spells_the_word() -> None:
    rows = script("make_data").items(2000, 5, 20, seed=3)
    assert len({row["prompt"] for row in rows}) == 2000
    lengths: Counter[int] = Counter()
    for row in rows:
        found = re.fullmatch(r"How many ([a-z]) are there in word ([a-z](?:-[a-z])*)\?", row["prompt"])
        assert found is not None
        letters = found[2].split("-")
        lengths[len(letters)] += 1
        assert row["answer"] == str(letters.count(found[1])) == last_boxed(row["response"])
        lines = row["response"].splitlines()
        assert lines[:-1] == [f"{letter} {'=' if letter == found[1] else '!='} {found[1]}" for letter in letters]
    assert set(lengths) == set(range(5, 21))
    assert max(lengths.values()) < 2 * min(lengths.values())


def test_the_sample_of_the_ci_configuration_is_what_the_script_writes(tmp_path: Path) -> None:
    arguments = ["--shortest", "3", "--longest", "5", "--items", "40"]
    command = [sys.executable, str(EXAMPLE / "make_data.py"), str(tmp_path), *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_text() == (EXAMPLE / "sample" / name).read_text()
    lines = [line for name in ("train", "heldout") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert len(lines) == len({json.loads(line)["prompt"] for line in lines}) == 40


@pytest.mark.parametrize("small", [False, True])
def test_grpo_and_ppo_plan_the_same_samples(small: bool) -> None:
    files = [EXAMPLE / "config.yaml", *([EXAMPLE / "small.yaml"] if small else [])]
    grpo, ppo = plan_run(files, []), plan_run(files, ["algo.preset=ppo"], ["critic_engine"])
    assert grpo.batch_sizes == ppo.batch_sizes
    assert grpo.batch_sizes["samples"] == (64 if small else 1024)
    assert grpo.batch_sizes["updates"] == (2 if small else 8)
    assert ppo.components["critic"].component.name == "critic_engine"


@pytest.mark.real
def test_the_warm_up_teaches_a_tiny_model_the_form_of_the_response(tmp_path: Path) -> None:
    sft, tokens = script("sft"), ByteTokens()
    rows = script("make_data").items(24, 3, 3, seed=0)

    def encode(response: str) -> list[int]:
        return [*response.encode(), ByteTokens.EOS]

    batch = sft.batch_of(rows, tokens, encode)
    arrays = batch.tokens
    for index, row in enumerate(rows):
        sampled = arrays.token_ids_BT[index][arrays.loss_mask_BT[index]].tolist()
        assert sampled == encode(row["response"])
        assert arrays.token_ids_BT[index, : batch.prompt_lengths_B[index]].tolist() == list(
            tokens.encode_prompt([{"role": "user", "content": row["prompt"]}])
        )
    source = ModelConfig(path=str(write_tiny_model(tmp_path / "tiny")))
    engine = TrainEngine("causal_lm", source, EngineConfig(lr=0.01), sft.imitation, name="sft", loss_name="loss")
    losses = [engine.update(batch)["loss"] for _ in range(12)]
    mask_BT = arrays.loss_mask_BT
    assert losses[-1] < 0.5 * losses[0]
    assert -float(engine.logprobs(batch)[mask_BT].mean()) < losses[-1] + 0.1


@pytest.mark.real
def test_ctrl_c_ends_the_warm_up_without_a_traceback(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.jsonl")  # the warm-up waits for its rows
    command = [sys.executable, str(EXAMPLE / "sft.py"), "no-model", str(tmp_path), str(tmp_path / "sft")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as warm_up:
        rows = (tmp_path / "train.jsonl").open("wb")  # returns when the other end is open
        warm_up.send_signal(signal.SIGINT)
        out, err = warm_up.communicate(timeout=60)
        rows.close()
    assert (warm_up.returncode, out, err) == (-signal.SIGINT, b"", b"")
