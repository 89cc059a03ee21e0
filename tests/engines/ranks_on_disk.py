"""One of four processes that save and restore one model as 1, 2, 4, two copies on 4, and 1 ranks.

    python ranks_on_disk.py RANK DIRECTORY MODEL

DIRECTORY/STAGE has the files of n ranks, from which the next number of ranks continues.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train import engine as engine_module
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.ranks import Ranks, check_shared
from rlcore.engines.hf.train.state_files import StateFile
from rlcore.errors import ConfigError
from rlcore.testing.tiny import random_batch

STAGES = {"a1": (1, 1), "b2": (2, 1), "c4": (4, 1), "d4": (4, 2), "e1": (1, 1)}
"""Numbers of ranks and of copies of the weights, by directory."""


def refuse(*args: Any, **settings: Any) -> None:
    """In place of what gathers a whole model on a rank."""
    raise AssertionError("the whole model was gathered")


def run(stage: str, num: int, copies: int, before: str, rank: int, directory: Path, path: str) -> None:
    """Go on from the stage before and save; the first one begins with an update."""
    ranks = Ranks(rank, num, f"file://{directory / f'meet-{stage}'}", torch.device("cpu")) if num > 1 else None
    config = EngineConfig(
        dtype="bfloat16",
        data_parallel=num,
        sharding="none" if num == 1 else "fsdp2",
        dp_replicate=copies,
        lr=1e-2,
        micro_batch_tokens=40,
    )
    policy_loss = PolicyLoss(clip, AlgoConfig())
    engine = TrainEngine("causal_lm", ModelConfig(path=path), config, policy_loss, seed=3, ranks=ranks)
    engine.expect(100)
    if before:
        engine.restore(directory / before)
    else:
        engine.update(random_batch(seed=5))
    engine.save(directory / stage)
    engine.snapshot()
    engine.update(random_batch(seed=6))
    engine.write_snapshot(directory / f"{stage}-copied")
    if ranks is not None:
        ranks.gather({})
        ranks.close()


def look(rank: int, directory: Path) -> None:
    """Ranks whose run directories are not the same one."""
    ranks = Ranks(rank, 4, f"file://{directory / 'meet-look'}", torch.device("cpu"))
    check_shared(ranks, directory / "run", 20.0)
    try:
        check_shared(ranks, directory / f"run-{rank % 2}", 0.2)
    except ConfigError as error:
        (directory / f"refused-{rank}").write_text(str(error))
    ranks.close()


def main(rank: str, directory: str, start: str) -> None:
    """One process's part: ranks with numbers beyond a stage's wait for the next stage's meeting."""
    torch.set_num_threads(1)
    setattr(engine_module, "weights_by_unit", refuse)  # noqa: B010 - it is imported there
    write = StateFile.write

    def noting(file: StateFile, target: Path) -> None:
        if not isinstance(file.content, bytes) and file.path.startswith("model/") and target.name in STAGES:
            with (Path(directory) / f"written-by-{rank}").open("a") as notes:
                notes.write(f"{(target / file.path).relative_to(directory)}\n")
        write(file, target)

    setattr(StateFile, "write", noting)  # noqa: B010 - as above
    before = ""
    for stage, (num, copies) in STAGES.items():
        if int(rank) < num:
            run(stage, num, copies, before, int(rank), Path(directory), start)
        before = stage
    look(int(rank), Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
