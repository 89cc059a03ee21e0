"""A sequence classifier or scalar head of transformers. Imported in the replica's process only.

Shape letters: B rows, T token positions, L outputs of the head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from rlcore import ConfigError, WorkerError
from rlcore.contracts.reward_models import Conversations, RewardModel, headless
from rlcore.errors import boundary


class Classifier:
    """Loads the model and scores rows of token ids."""

    def __init__(self, model: RewardModel, device: str, threads: int) -> None:
        if threads > 0:
            torch.set_num_threads(threads)
        self._device = device
        self.conversations = Conversations(model)
        with boundary(f"reward model '{model.path}' cannot be loaded", WorkerError):
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                model.path,
                dtype=getattr(torch, model.dtype),
                trust_remote_code=False,
                output_loading_info=True,
            )
        loaded_model, info = loaded
        if info["missing_keys"]:
            raise headless(model.path, min(info["missing_keys"]))
        if self.conversations.pad_id is None:
            raise ConfigError(f"reward model '{model.path}': neither it nor its tokenizer names a padding token")
        self._pad_id = self.conversations.pad_id
        # The model must know the padding token: it scores the last token that is not padding.
        loaded_model.config.get_text_config().pad_token_id = self._pad_id
        self._model = loaded_model.to(device).eval()

    def scores(self, rows: list[Sequence[int]]) -> list[float]:
        """The configured output of each row."""
        longest = max(len(row) for row in rows)
        token_ids_BT = torch.full((len(rows), longest), self._pad_id, dtype=torch.long)
        mask_BT = torch.zeros((len(rows), longest), dtype=torch.long)
        for index, row in enumerate(rows):
            token_ids_BT[index, : len(row)] = torch.tensor(list(row))
            mask_BT[index, : len(row)] = 1
        with torch.inference_mode():
            output = self._model(input_ids=token_ids_BT.to(self._device), attention_mask=mask_BT.to(self._device))
        return [self.conversations.score(logits_L) for logits_L in output.logits.float().tolist()]

    def offload(self) -> None:
        """Move the weights to host memory."""
        self._model.to("cpu")
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move the weights back."""
        self._model.to(self._device)
