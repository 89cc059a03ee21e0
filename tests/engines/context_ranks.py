"""One of several processes that share out a model or sequences, compared with a process that has all of them.

    python context_ranks.py RANK NUM DIRECTORY CASES

CASES: JSON, one object per case: model, context_parallel, sharding and other settings of the engine, and of the ranks
"nodes", how many nodes they pretend to be on in turn. Prints what was compared as one JSON line; a difference ends the
process with an error.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore.algo.loss import gspo
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.data.batch import select
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.testing.tiny import batch_of_rows, random_batch, random_conversations
from rlcore.types import Batch, SharedPrefix

REAL = os.uname()


def batches() -> dict[str, Batch]:
    """Batches by what is special about them."""
    rng = np.random.default_rng(3)
    whole = random_batch(num_groups=4, samples=3, seed=5)
    prompts = random_batch(num_groups=1, samples=1, seed=6)
    return {
        "conversations": batch_of_rows([random_conversations(rng) for _ in range(4)]),
        "twelve": whole,
        "one": select(whole, [6]),
        "two tokens": batch_of_rows([[[7, 9]]]),  # one is computed: ranks have nothing but what fills their slice
        "another": prompts,
    }


def engine_of(case: dict[str, Any], num: int, ranks: Ranks | None) -> TrainEngine:
    """The engine of a case; its loss spans rows, and has an entropy bonus."""
    settings = dict(case)
    lora = LoraConfig(enabled=settings.pop("lora", False), rank=2)
    model, context_parallel = ModelConfig(path=settings.pop("model")), settings.pop("context_parallel")
    if ranks is None:
        settings = {name: value for name, value in settings.items() if name not in ("sharding", "dp_replicate")}
    config = EngineConfig(
        data_parallel=num, micro_batch_tokens=40, lr=1e-2, lora=lora, context_parallel=context_parallel, **settings
    )
    loss = PolicyLoss(gspo, AlgoConfig(entropy_coef=0.1))
    engine = TrainEngine(
        "causal_lm", model, config, loss, seed=3, shared_prefix=SharedPrefix.TREE, ranks=ranks, temperature=0.7
    )
    engine.expect(100)
    return engine


def near(what: str, found: Any, expected: Any, tolerance: float) -> float:
    """The largest difference; ValueError where it is more than `tolerance`."""
    difference = float(np.abs(np.asarray(found) - np.asarray(expected)).max())
    if not difference <= tolerance:
        raise ValueError(f"{what}: differs by {difference}")
    return difference


def compare(case: dict[str, Any], ranks: Ranks) -> dict[str, float]:
    """Scores, metrics of updates and weights of the ranks and of one process."""
    alone, together = engine_of(case, 1, None), engine_of(case, ranks.num, ranks)
    found = {}
    for name, batch in batches().items():
        expected, scores = alone.token_scores(batch), together.token_scores(batch)
        found[f"{name}: log-probs"] = near(name, scores.logprobs_BT, expected.logprobs_BT, 2e-5)
        found[f"{name}: entropy"] = near(name, scores.entropy_BT, expected.entropy_BT, 2e-5)
        metrics = [engine.update(batch) for engine in (alone, together)]
        if metrics[0].keys() != metrics[1].keys():
            raise ValueError(f"{name}: metrics {metrics[0].keys() ^ metrics[1].keys()}")
        for key, value in metrics[0].items():
            if not key.startswith("time/"):
                near(f"{name}: {key}", metrics[1][key], value, 1e-4 * max(1.0, abs(value)))
        found[f"{name}: norm"] = metrics[0]["actor/grad_norm"]
    if case.get("lora"):
        base = [engine.base_logprobs(batches()["twelve"], 40) for engine in (alone, together)]
        found["base"] = near("base", base[1], base[0], 2e-5)
    with together.whole():
        pairs = zip(together.model.named_parameters(), alone.model.parameters(), strict=True)
        found["weights"] = max(
            near(name, weight.detach().clone().numpy(), expected.detach().numpy(), 2e-4)
            for (name, weight), expected in pairs
        )
    return found


def main(rank: str, num: str, directory: str, cases: str) -> None:
    """One rank's part in all cases."""
    torch.set_num_threads(1)
    results = {}
    for index, case in enumerate(json.loads(cases)):
        node = os.uname_result((REAL.sysname, f"node{int(rank) % case.pop('nodes', 1)}", *REAL[2:]))
        setattr(os, "uname", lambda node=node: node)  # noqa: B010 - a node that is not there
        meet = f"file://{Path(directory) / f'meet{index}'}"
        ranks = Ranks(int(rank), int(num), meet, torch.device("cpu"), case["context_parallel"])
        results[str(index)] = compare(case, ranks)
        ranks.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
