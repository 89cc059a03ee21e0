"""A sequence classifier or scalar head of transformers. Imported in the replica's process only.

Shape letters: B rows, T token positions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlcore import ConfigError, Message, WorkerError
from rlcore.errors import boundary
from rlcore_reward_loop.settings import ModelSettings

BYTES = "bytes"


class Classifier:
    """Loads the model and scores rows of token ids."""

    def __init__(self, settings: ModelSettings, device: str, threads: int) -> None:
        if threads > 0:
            torch.set_num_threads(threads)
        self._settings, self._device = settings, device
        with boundary(f"reward model '{settings.path}' cannot be loaded", WorkerError):
            config = AutoConfig.from_pretrained(settings.path, trust_remote_code=False)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                settings.path, dtype=getattr(torch, settings.dtype), trust_remote_code=False
            )
            self._tokenizer: Any = None
            if settings.tokenizer != BYTES:
                where = settings.tokenizer or settings.path
                self._tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        if settings.label >= model.config.num_labels:
            raise ConfigError(
                f"reward model '{settings.path}': label={settings.label}, but it has {model.config.num_labels} outputs"
            )
        if settings.activation == "softmax" and model.config.num_labels < 2:
            raise ConfigError(f"reward model '{settings.path}': softmax of its one output is always 1; needs sigmoid")
        self._model = model.to(device).eval()
        self._pad_id = self._padding(config)
        self.max_tokens = min(settings.max_tokens, getattr(config, "max_position_embeddings", settings.max_tokens))

    def _padding(self, config: Any) -> int:
        """The id that fills rows up, which the model must know, for it scores the last token that is not padding."""
        pad_id = config.pad_token_id
        if pad_id is None and self._tokenizer is not None:
            pad_id = self._tokenizer.pad_token_id
            pad_id = self._tokenizer.eos_token_id if pad_id is None else pad_id
        if pad_id is None:
            raise ConfigError(
                f"reward model '{self._settings.path}': neither it nor its tokenizer names a padding token"
            )
        self._model.config.pad_token_id = pad_id
        return int(pad_id)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation: by the chat template if there is one, else 'role: content' lines."""
        plain = [dict(each) for each in messages]
        if self._tokenizer is None:
            return list("".join(f"{each.get('role')}: {each.get('content') or ''}\n" for each in plain).encode())
        if self._tokenizer.chat_template:
            ids = self._tokenizer.apply_chat_template(plain, tokenize=True, return_dict=False)
        else:
            text = "\n".join(f"{each.get('role')}: {each.get('content') or ''}" for each in plain)
            ids = self._tokenizer.encode(text)
        return [int(each) for each in ids]

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
        logits_BL = output.logits.float()
        if self._settings.activation == "sigmoid":
            logits_BL = logits_BL.sigmoid()
        elif self._settings.activation == "softmax":
            logits_BL = logits_BL.softmax(-1)
        return [float(each) for each in logits_BL[:, self._settings.label].cpu()]

    def offload(self) -> None:
        """Move the weights to host memory."""
        self._model.to("cpu")
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move the weights back."""
        self._model.to(self._device)
