"""A curriculum: prompts that are solved half the time come often, those that teach nothing come rarely."""

from collections.abc import Sequence

from rlcore import ConfigSection, PromptOrderOffer, hookimpl
from rlcore_curriculum.frontier import CurriculumSection, Frontier


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("curriculum", CurriculumSection)]


@hookimpl
def rlcore_prompt_orders() -> Sequence[PromptOrderOffer]:
    return [PromptOrderOffer("frontier", Frontier)]
