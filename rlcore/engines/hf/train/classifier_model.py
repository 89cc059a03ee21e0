"""Sequence classifiers of transformers: a decoder with a linear layer, which reads the last token of a row.

Letters: B rows, T positions, N rows' last tokens, H hidden size, L outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlcore.engines.hf.train.backbone import Model
from rlcore.errors import ConfigError
from rlcore.types import SharedPrefix

if TYPE_CHECKING:
    from rlcore.engines.hf.train.microbatch import MicroBatch

HEAD = "score"
"""The name of the head in transformers' classifiers on decoders."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Largest difference from transformers' own outputs, relative to the largest."""


class ClassifierModel(Model):
    """A decoder with the head of a sequence classifier, which belongs to `transformer`.

    The outputs of a row are those that predict its loss token: a token of any id after the last one that is read.
    """

    def __init__(self, transformer: Any, who: str) -> None:
        """ConfigError naming `who` when the model has no such head."""
        super().__init__(transformer)
        if type(getattr(transformer, HEAD, None)) is not nn.Linear:
            raise ConfigError(
                f"{who}: a {type(transformer).__name__} has no linear layer '{HEAD}' on a decoder, so several ranks "
                "cannot compute it; needs a sequence classifier on a decoder, or data_parallel=1"
            )

    @property
    def num_outputs(self) -> int:
        """Outputs of the head."""
        return int(self.transformer.config.num_labels)

    def hidden_at(self, micro: MicroBatch) -> Tensor:
        """(N, H) as `Model.hidden_at`, without computing the last column, which predicts nothing.

        So a row may have as many tokens as the window holds.
        """
        if micro.shared_prefix is not SharedPrefix.NONE:
            return super().hidden_at(micro)
        ids_BT = micro.token_ids_BT
        hidden_BTH: Tensor = self.transformer.base_model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
        return hidden_BTH[micro.flat_N // ids_BT.shape[1], micro.flat_N % ids_BT.shape[1] - 1]

    def forward(self, micro: MicroBatch, temperature: float, with_entropy: bool) -> tuple[Tensor, ...]:
        """(N,) of each of the L outputs."""
        logits_NL = getattr(self.transformer, HEAD)(self.hidden_at(micro))
        return micro.whole(logits_NL.T.contiguous()).unbind()


@torch.no_grad()
def check_classifier(model: ClassifierModel, who: str) -> None:
    """ConfigError naming `who` unless the head on the last token's hidden state gives the model's own outputs."""
    transformer = model.transformer
    weight = next(model.parameters())
    config = transformer.config.get_text_config()
    ids_T = torch.arange(1, 9, device=weight.device) * 7919 % config.vocab_size
    ids_T[ids_T == config.pad_token_id] += 1 if config.pad_token_id == 0 else -1
    theirs_L = transformer(input_ids=ids_T[None], use_cache=False).logits[0]
    hidden_1TH = transformer.base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state
    ours_L = getattr(transformer, HEAD)(hidden_1TH[0, -1])
    earlier_1TH = transformer.base_model(input_ids=ids_T[None, :4], use_cache=False).last_hidden_state
    scale = float(hidden_1TH.abs().max().clamp_min(1e-3))
    sees_later = float((hidden_1TH[:, :4] - earlier_1TH).abs().max()) / scale
    difference = float((theirs_L - ours_L).abs().max() / theirs_L.abs().max().clamp_min(1e-3))
    if not max(difference, sees_later) <= TOLERANCES[weight.dtype]:
        raise ConfigError(
            f"{who}: the outputs of a {type(transformer).__name__} are not those of its head '{HEAD}' at the last "
            "token of a decoder, so several ranks cannot compute it; needs such a sequence classifier, or "
            "data_parallel=1"
        )
