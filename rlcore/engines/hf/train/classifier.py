"""Scores rows with a sequence classifier, on one rank or several.

Letters: B rows, T positions, L outputs of the classifier.
"""

from collections.abc import Sequence

import numpy as np

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engines.hf.train.classifier_model import ClassifierModel
from rlcore.engines.hf.train.engine import TrainEngine
from rlcore.engines.hf.train.model import ModelKind
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.types import Batch, Float32s, SharedPrefix, TokenArrays


class ClassifierEngine(TrainEngine):
    """A frozen sequence classifier of transformers, with the mesh of a `TrainEngine`.

    With `sharding` each rank reads and keeps only its shard. With `offload` the weights are on the device from
    `begin_updates` to `end_updates`, and while rows are scored.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        name: str,
        device: str = "cpu",
        section: str = "",
        path_key: str = "model.path",
        shared_prefix: SharedPrefix = SharedPrefix.NONE,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the model of `model.path`, with arguments as for a `TrainEngine`.

        ConfigError if its files lack the head, or if it is not a decoder with a linear head at a row's last token.
        """
        super().__init__(
            ModelKind.CLASSIFIER,
            model,
            config,
            None,
            name=name,
            device=device,
            section=section,
            path_key=path_key,
            shared_prefix=shared_prefix,
            ranks=ranks,
        )

    def outputs(self, rows: Sequence[Sequence[int]]) -> Float32s:
        """(B, L) outputs at the last token of each row, of at least one token; all ranks must call this together, with
        the same rows."""
        if not isinstance(self.model, ClassifierModel):
            raise TypeError(f"a classifier's model is a {type(self.model).__name__}")
        scores_LBT = self._scores(self.model, _batch(rows), self.config.micro_batch_tokens)
        return np.asarray(np.asarray(scores_LBT).sum(axis=2).T)  # a row has one loss token, and zeros elsewhere


def _batch(rows: Sequence[Sequence[int]]) -> Batch:
    """The rows, each a group and with one more token, whose loss asks for the outputs before it."""
    lengths_B = np.array([len(row) + 1 for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths_B.max(initial=1)))
    columns_T = np.arange(shape[1])
    token_ids_BT = np.zeros(shape, dtype=np.int32)
    for index, row in enumerate(rows):
        token_ids_BT[index, : len(row)] = row
    tokens = TokenArrays(
        token_ids_BT,
        columns_T < lengths_B[:, None],
        columns_T == lengths_B[:, None] - 1,
        np.zeros(shape, dtype=np.float32),
    )
    return Batch(
        tokens=tokens,
        sample_B=np.arange(len(rows)),
        group_B=np.arange(len(rows)),
        lengths_B=lengths_B,
        num_sampled_B=np.ones(len(rows), dtype=np.int64),
        prompt_lengths_B=lengths_B - 1,
        rewards_B=np.zeros(len(rows), dtype=np.float32),
    )
