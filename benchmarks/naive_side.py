"""A plain GRPO step with transformers: `generate`, then full logits, row by row of a micro-batch.

It is the other side of `gpu_check.py` on machines without TRL. The spec and the questions are those of `trl_side.py`,
without `gate` and `evaluate`.
"""

import sys
import time
from typing import Any

import reward as rewards
import torch
from channel import Channel
from force_lengths import with_forced_lengths
from transformers import AutoModelForCausalLM, AutoTokenizer


class NaiveSide:
    """A model and an optimizer; the samples of a prompt share no computation."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self._spec = spec
        self._device = torch.device(spec["device"])
        self.tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]))
        self.model.to(self._device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=spec["lr"], weight_decay=0.0)
        self._reward = getattr(rewards, spec["reward"])
        self.prompt_ids = [
            self.tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True, return_dict=False)
            for prompt in spec["prompts"]
        ]

    def sample(self, new_tokens: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, T) ids and (rows, T) mask of the sampled tokens; every prompt is computed for each of its samples."""
        rows = [ids for ids in self.prompt_ids for _ in range(self._spec["samples"])]
        prompts = torch.tensor(rows, device=self._device)  # all prompts of a scenario have the same length
        generate = with_forced_lengths(self.model.generate, lengths, self.tokenizer.eos_token_id)
        with torch.no_grad():
            ids_BT = generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        places_T = torch.arange(ids_BT.shape[1], device=self._device) - prompts.shape[1]
        ends_B = torch.tensor(lengths, device=self._device)
        return ids_BT, (places_T[None] >= 0) & (places_T[None] < ends_B[:, None])

    def step(self) -> dict[str, Any]:
        """Sample, reward, one optimizer step."""
        began = time.perf_counter()
        ids_BT, mask_BT = self.sample(self._spec["new_tokens"], self._spec["lengths"])
        texts = [self.tokenizer.decode(row[mask]) for row, mask in zip(ids_BT, mask_BT, strict=True)]
        scores_B = torch.tensor(self._reward(prompts=texts, completions=texts), device=self._device)
        sampled = time.perf_counter()
        grouped = scores_B.view(-1, self._spec["samples"])
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        self._update(ids_BT, mask_BT, advantages.flatten())
        ended = time.perf_counter()
        return {
            "step_s": ended - began,
            "generate_s": sampled - began,
            "update_s": ended - sampled,
            "new_tokens": int(mask_BT.sum()),
            "reward": float(scores_B.mean()),
        }

    def _update(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, advantages_B: torch.Tensor) -> None:
        size = self._spec["micro_batch"]
        for start in range(0, len(ids_BT), size):
            rows = slice(start, start + size)
            logits_BTV = self.model(input_ids=ids_BT[rows]).logits[:, :-1].float()
            logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[rows, 1:, None])[..., 0]
            ratio_BT = torch.exp(logprobs_BT - logprobs_BT.detach())
            loss = -(ratio_BT * advantages_B[rows, None] * mask_BT[rows, 1:]).sum() / mask_BT.sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def warm(self) -> dict[str, Any]:
        """Sample two tokens per row, so that one-time allocation and compilation are not timed."""
        self.sample(2, [2] * len(self.prompt_ids) * self._spec["samples"])
        return {}


def main() -> None:
    """Serve the parent of this process."""
    channel = Channel()
    spec = channel.receive()
    if spec is None:
        sys.exit("naive_side: it is started by a benchmark, which tells it what to do")
    side = NaiveSide(spec)
    channel.send({"facts": {}, "prompt_ids": side.prompt_ids})
    while (question := channel.receive()) is not None:
        channel.send(side.step() if question["do"] == "step" else side.warm())


if __name__ == "__main__":
    main()
