"""Estimates the order of magnitude of a step's time, from operations and an assumed rate, before anything runs."""

from dataclasses import dataclass

from rlcore.plan.experts import computed_parameters, used_parameters
from rlcore.plan.run_plan import RunPlan

CPU_GFLOPS = 40.0
"""Rate per core for matrix products in float32: two thirds of the rate of a single server core."""
CPU_BFLOAT16_GFLOPS = 60.0
"""Rate per core in bfloat16 if the CPU multiplies it: a step takes two thirds of its time in float32."""
GPU_TFLOPS = {"float32": 15.0, "float64": 5.0, "bfloat16": 120.0, "float16": 120.0}
"""Rate per device if cluster.peak_tflops is not set."""
PEAK_SHARE = 0.4
"""Share of cluster.peak_tflops that a step reaches."""
PROMPT_TOKENS = 128
"""Assumed tokens of a prompt whose length is not known."""
SLOW_S = 120.0
"""Steps on a CPU that take longer than this get a note."""
BACKENDS = ("hf",)
"""Engines whose steps are estimated."""


@dataclass(frozen=True)
class StepTime:
    """An estimate; `assumed` lists every number that it is based on."""

    sampling_s: float
    updates_s: float
    assumed: str

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.sampling_s + self.updates_s


def expected_step_time(plan: RunPlan, prompt_tokens: int | None) -> StepTime | None:
    """The time of a step whose responses all have `rollout.max_tokens` tokens; None if the model is unknown.

    Per token and weight that it uses, 2 operations are counted for sampling and for a forward pass, 6 for an update (4
    with LoRA, whose frozen weights have no gradient). A prompt counts once per group. `prompt_tokens`: length of the
    longest prompt.
    """
    config, facts = plan.config, plan.facts
    if facts.parameters is None or config.actor.backend not in BACKENDS or config.rollout.backend not in BACKENDS:
        return None
    prompt = PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    sampled = plan.batch_sizes["samples"] * config.rollout.max_tokens
    tokens = sampled + plan.batch_sizes["prompts"] * prompt
    passes = (4 if config.actor.lora.enabled else 6) * config.actor.epochs + 2 * len(plan.schedule.passes)
    rate, rate_text = _rate(plan)
    shape, used, computed = facts.shape, float(facts.parameters), float(facts.parameters)
    if shape is not None:
        used = used_parameters(facts.parameters, shape.hidden_size, shape.experts)
        computed = computed_parameters(facts.parameters, shape.hidden_size, shape.experts)
    sampling_s = 2 * used * sampled / rate
    updates_s = passes * computed * tokens / rate
    per_token = " per token" if shape is not None and shape.experts else ""
    assumed = (
        f"{used / 1e6:.0f} M parameters{per_token}, {plan.batch_sizes['samples']} samples of rollout.max_tokens="
        f"{config.rollout.max_tokens} tokens, prompts of {prompt}, {rate_text}"
    )
    return StepTime(sampling_s, updates_s, assumed)


def _rate(plan: RunPlan) -> tuple[float, str]:
    """Operations per second of all training devices, and the assumptions behind it."""
    config = plan.config
    if config.cluster.device != "cuda":
        cores = config.cluster.threads or plan.facts.cpus
        multiplies = config.actor.dtype == "bfloat16" and bool(plan.facts.cpu_bfloat16)
        gflops = CPU_BFLOAT16_GFLOPS if multiplies else CPU_GFLOPS
        return cores * gflops * 1e9, f"{cores} cores of {gflops:g} GFLOP/s"
    devices = config.actor.data_parallel
    if config.cluster.peak_tflops:
        tflops = PEAK_SHARE * config.cluster.peak_tflops
        return devices * tflops * 1e12, f"{devices} GPUs of {tflops:g} TFLOP/s ({PEAK_SHARE:.0%} of the peak)"
    tflops = GPU_TFLOPS[config.actor.dtype]
    return devices * tflops * 1e12, f"{devices} GPUs of {tflops:g} TFLOP/s"


def slow_step_note(plan: RunPlan, time: StepTime | None) -> str:
    """The note on a step that takes minutes on a CPU, with the keys that shorten it; '' otherwise."""
    if time is None or plan.config.cluster.device == "cuda" or time.step_s < SLOW_S:
        return ""
    rollout, train = plan.config.rollout, plan.config.train
    return (
        f"a step takes about {in_words(time.step_s)} on this CPU; lower rollout.max_tokens={rollout.max_tokens}, "
        f"rollout.samples_per_prompt={rollout.samples_per_prompt} or train.prompts_per_step={train.prompts_per_step}, "
        "or choose a smaller model"
    )


def in_words(seconds: float) -> str:
    """A duration with two digits: 0.3 ms, 8.5 s, 45 s, 3.2 min, 12 h."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
