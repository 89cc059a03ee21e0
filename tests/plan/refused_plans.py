"""Plans that are refused because a model exceeds its devices; the tests of what is advised then share them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from gpu_machines import H100, loaded, planned

from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan
from rlcore.plan.fitting import with_settings_that_fit
from rlcore.plan.fitting_candidates import Candidate, scoring_candidates, training_candidates
from rlcore.plan.machine_cards import facts_of, machine_like, machine_of
from rlcore.plan.machine_plan import Lengths, step_layout, step_size
from rlcore.plan.machine_times import estimate_step
from rlcore.plan.memory_limits import DeviceMemoryError

VLLM = ("rollout.backend=vllm", "plugins.vllm={}")
LONG = ("data.max_prompt_tokens=1024", "rollout.max_tokens=4096", "rollout.samples_per_prompt=16")
MANY = (*LONG, "train.prompts_per_step=64")
LENGTHS = Lengths()


def facts_on(text: str) -> Facts:
    return replace(facts_of(machine_of(text)), parameters=H100.parameters, shape=H100.shape)


class Planning:
    """Plans that are refused, with what is advised and the number of plans that it took."""

    def __init__(self, facts: Facts, *overrides: str) -> None:
        self.facts, self.overrides, self.plans = facts, overrides, 0
        with pytest.raises(DeviceMemoryError) as caught:
            planned(*overrides, facts=facts)
        self._error = caught.value
        self.config = loaded(*overrides, facts=facts).config
        self.is_set = {override.partition("=")[0] for override in overrides}

    def replan(self, further: Sequence[str]) -> RunPlan:
        self.plans += 1
        return planned(*self.overrides, *further, facts=self.facts)

    def line(self, lengths: Lengths = LENGTHS) -> str:
        return str(with_settings_that_fit(self._error, self.replan, self.config, self.is_set, self.facts, lengths))

    def advised(self, lengths: Lengths = LENGTHS) -> tuple[str, ...]:
        before, found, after = self.line(lengths).partition("shard it over devices (")
        assert found, before
        return tuple(after.partition(")")[0].split())

    def seconds(self, settings: Sequence[str], lengths: Lengths = LENGTHS) -> float:
        plan = planned(*self.overrides, *settings, facts=self.facts)
        size, layout = step_size(plan, lengths), step_layout(plan, lengths)
        return estimate_step(size, layout, machine_like(self.facts)).total

    def num_ways(self) -> int:
        return sum(len(candidate.ways) for candidate in self._candidates())

    def all_that_fit(self) -> dict[tuple[str, ...], float]:
        """The seconds of a step of every candidate that is accepted."""
        found = {}
        for candidate in self._candidates():
            for way in candidate.ways:
                try:
                    found[way] = self.seconds(way)
                except PlanError:
                    continue
        return found

    def _candidates(self) -> Iterator[Candidate]:
        if self._error.trains:
            return training_candidates(self._error.settings, self.config, self.is_set, self.facts)
        return scoring_candidates(self._error.settings, self.facts)
