"""TRL's side of a comparison: its GRPOTrainer, one step per request. Runs in TRL's environment.

The spec: `model`, `dtype`, `prompts` (conversations), `prompts_per_step`, `samples`, `new_tokens`, `micro_batch`, `lr`,
`threads`, `seed`, `reward` (a function of benchmarks/reward.py), `lengths` (of each row; absent: the model ends rows),
`heldout` (conversations), `work_dir`. Optional: `bf16` (TRL's mixed precision), `gradient_checkpointing`,
`lr_schedule`, `vllm` (colocated vLLM samples), `answers` and `heldout_answers` (of each conversation, for the reward),
`greedy` (held-out completions are not sampled). TRL is used as documented. The only addition is a logits processor that
forces the rows' lengths.
"""

import gc
import sys
import time
from typing import Any

import reward as rewards
import torch
from channel import Channel
from datasets import Dataset
from force_lengths import with_forced_lengths
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

QUIET = {"report_to": [], "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
"""TRL's settings for vLLM on the trainer's device."""


class TimedTrainer(GRPOTrainer):
    """Records begin, end and results of generation with its rewards."""

    generate_s = 0.0
    new_tokens = 0
    reward_mean = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.generate_s = time.perf_counter() - began
        self.new_tokens = int(output["num_items_in_batch"])
        self.reward_mean = float(self._metrics["train"]["reward"][-1])
        return output


class Closed(Exception):
    """The parent has closed the channel."""


class OneStepAtATime(TrainerCallback):
    """Takes a step when the parent requests one, and answers other questions between two steps."""

    def __init__(self, side: "TrlSide") -> None:
        self._side = side

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._side.answer_until_step()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step_s = time.perf_counter() - self._began
        trainer = self._side.trainer
        entropies = trainer._metrics["train"]["entropy"][-args.gradient_accumulation_steps :]
        self._side.channel.send(
            {
                "step_s": step_s,
                "generate_s": trainer.generate_s,
                "update_s": step_s - trainer.generate_s,
                "new_tokens": trainer.new_tokens,
                "reward": trainer.reward_mean,
                "entropy": sum(entropies) / len(entropies),
            }
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._side.answer_until_step()


class TrlSide:
    """The trainer, and the answers to questions about it."""

    def __init__(self, channel: Channel, spec: dict[str, Any]) -> None:
        self.channel = channel
        self._spec = spec
        torch.set_num_threads(spec["threads"])
        self._reward = getattr(rewards, spec["reward"])
        self.tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
        steps = spec["prompts_per_step"] * spec["samples"] // spec["micro_batch"]
        config = GRPOConfig(
            output_dir=spec["work_dir"],
            per_device_train_batch_size=spec["micro_batch"],
            gradient_accumulation_steps=steps,
            num_generations=spec["samples"],
            max_completion_length=spec["new_tokens"],
            learning_rate=spec["lr"],
            lr_scheduler_type=spec.get("lr_schedule", "constant"),
            max_steps=spec.get("max_steps", 10_000),
            use_cpu=spec.get("device", "cpu") == "cpu",
            bf16=spec.get("bf16", False),
            gradient_checkpointing=spec.get("gradient_checkpointing", False),
            num_iterations=1,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            max_grad_norm=1.0,
            temperature=1.0,
            shuffle_dataset=False,
            seed=spec["seed"],
            **QUIET,
            model_init_kwargs={"dtype": spec["dtype"]},
            **(COLOCATED if spec.get("vllm") else {}),
        )
        self.trainer = TimedTrainer(
            model=spec["model"],
            reward_funcs=self._reward,
            args=config,
            train_dataset=Dataset.from_list(
                [
                    {"prompt": prompt, "answer": answer}
                    for prompt, answer in zip(spec["prompts"], self._answers("answers", "prompts"), strict=True)
                ]
            ),
            processing_class=self.tokenizer,
            callbacks=[OneStepAtATime(self)],
        )
        if spec.get("lengths"):
            model = self.trainer.model
            model.generate = with_forced_lengths(model.generate, spec["lengths"], self.tokenizer.eos_token_id)

    def _answers(self, key: str, of: str) -> list[str]:
        """The answers for the reward; empty ones if the spec has none."""
        return list(self._spec.get(key) or [""] * len(self._spec[of]))

    def serve(self) -> None:
        """Answer until the channel is closed."""
        model = self.trainer.model
        ids = [
            self.tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True, return_dict=False)
            for prompt in self._spec["prompts"]
        ]
        facts = {"num_parameters": sum(parameter.numel() for parameter in model.parameters())}
        self.channel.send({"facts": facts, "prompt_ids": ids})
        try:
            self.trainer.train()
        except Closed:
            return

    def answer_until_step(self) -> None:
        """Answer questions until one requests a step; Closed when the channel has ended."""
        while (question := self.channel.receive()) is not None:
            match question["do"]:
                case "step":
                    return
                case "warm":
                    self._warm(question)
                    self.channel.send({})
                case "evaluate":
                    self.channel.send(self._evaluate())
                case "gate":
                    self.channel.send(self._gate(question))
                case unknown:
                    raise ValueError(f"trl_side: the question '{unknown}' is unknown")
        raise Closed

    def _warm(self, question: dict[str, Any]) -> None:
        """Sample two tokens per row, and run one micro-batch forward and backward. As on the other side, this is not
        timed."""
        self._gate(question)
        ids = [ids for ids in question["distinct_prompt_ids"] for _ in range(self._spec["samples"])]
        padded, mask = self._padded_left(ids)
        with torch.no_grad():
            self.trainer.model.generate(
                input_ids=padded, attention_mask=mask, max_new_tokens=2, do_sample=True, pad_token_id=0
            )
        gc.collect()

    def _gate(self, question: dict[str, Any]) -> dict[str, Any]:
        """Loss, norm of its gradient and log-probs of one fixed batch, as the trainer computes them."""
        trainer, model = self.trainer, self.trainer.model
        inputs = self._inputs(question)
        steps, trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation, 1
        trainer.args.steps_per_generation = 1
        model.train()
        try:
            loss = trainer.compute_loss(model, inputs)
            loss.backward()
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in grads]))
            with torch.no_grad():
                logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
                    model,
                    torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                    torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                    inputs["completion_ids"].shape[1],
                )
        finally:
            trainer.args.steps_per_generation = steps
            trainer.current_gradient_accumulation_steps = steps
            model.zero_grad(set_to_none=True)
        lengths = [len(id_) for id_ in question["completion_ids"]]
        return {
            "loss": float(loss.detach()),
            "grad_norm": float(norm),
            "logprobs": [row[:length].tolist() for row, length in zip(logprobs, lengths, strict=True)],
        }

    def _inputs(self, question: dict[str, Any]) -> dict[str, Any]:
        """The question's rows in the trainer's form: prompts padded on the left, completions on the right."""
        completions = question["completion_ids"]
        longest = max(map(len, completions))
        prompt_ids, prompt_mask = self._padded_left(question["prompt_ids"])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in completions])
        inputs = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": torch.tensor([row + [0] * (longest - len(row)) for row in completions]),
            "completion_mask": mask,
            "advantages": torch.tensor(question["advantages"]),
            "num_items_in_batch": mask.sum(),
        }
        if "old_logprobs" in question:
            padded = [row + [0.0] * (longest - len(row)) for row in question["old_logprobs"]]
            inputs["old_per_token_logps"] = torch.tensor(padded)
        return {name: value.to(self.trainer.accelerator.device) for name, value in inputs.items()}

    def _padded_left(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest, device = max(map(len, rows)), self.trainer.accelerator.device
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        return ids, mask

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """The mean reward of one completion of every held-out prompt, sampled or greedy."""
        heldout = self._spec["heldout"]
        ids = [
            self.tokenizer.apply_chat_template(question, tokenize=True, add_generation_prompt=True, return_dict=False)
            for question in heldout
        ]
        padded, mask = self._padded_left(ids)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec["seed"])
            rows = self.trainer.model.generate(
                input_ids=padded,
                attention_mask=mask,
                generation_config=self.trainer.generation_config,
                **({"do_sample": False} if self._spec.get("greedy") else {}),
            )
        texts = self.tokenizer.batch_decode(rows[:, padded.shape[1] :], skip_special_tokens=True)
        answers = self._answers("heldout_answers", "heldout")
        scores = self._reward(prompts=heldout, completions=texts, answer=answers)
        return {"reward": sum(scores) / len(scores)}


def main() -> None:
    """Serve the parent of this process."""
    channel = Channel()
    spec = channel.receive()
    if spec is None:
        sys.exit("trl_side: it is started by a benchmark, which tells it what to do")
    try:
        TrlSide(channel, spec).serve()
    except torch.OutOfMemoryError as error:  # the parent may go on with a smaller micro-batch
        channel.send({"out_of_memory": str(error).split(". ")[0]})


if __name__ == "__main__":
    main()
