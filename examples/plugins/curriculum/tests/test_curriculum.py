"""The order keeps its contract, and hard prompts come later."""

from collections import Counter
from pathlib import Path

import pytest
from rlcore_curriculum import rlcore_prompt_orders
from rlcore_curriculum.frontier import CurriculumSection

from rlcore.config import DataConfig
from rlcore.contracts.prompt_orders import OrderContext, RowResults
from rlcore.testing import PromptOrderSuite
from rlcore.testing.packages import write_metadata
from rlcore.testing.rewards import make_prompt

[OFFER] = rlcore_prompt_orders()
PROMPTS = {name: [make_prompt(index, source=name) for index in range(10)] for name in ("easy", "hard")}


def issued(skill_per_step: float, steps: int, least_share: float = 0.1) -> list[Counter[str]]:
    """Rows of each source in every step of a policy whose skill grows; hard rows are solved from a skill of 1 on."""
    order = OFFER.cls(OrderContext("frontier", PROMPTS, DataConfig(), seed=0, section=CurriculumSection(least_share)))
    results: dict[str, RowResults] = {}
    found = []
    for step in range(steps):
        rows = order.next(4, results)
        found.append(Counter(row.split("/")[0] for row in rows))
        for row in rows:
            solved = 0.5 if row.startswith("easy") or skill_per_step * step >= 1 else 0.0
            results[row] = RowResults(1, 8, 8 * solved, int(8 * solved), int(not solved), solved, solved, step)
    return found


def test_hard_prompts_come_later() -> None:
    steps = issued(skill_per_step=1 / 60, steps=240)
    survey, early, late = (sum(steps[part], Counter[str]()) for part in (slice(5), slice(5, 60), slice(150, 240)))
    assert survey == {"easy": 10, "hard": 10}, "each is tried once"
    assert early["easy"] > 5 * early["hard"] > 0, "what no sample solves is tried rarely, but tried"
    assert abs(late["easy"] - late["hard"]) < 0.1 * late.total(), "what can be learned comes as often as the rest"


def test_the_share_of_hopeless_prompts_is_a_setting() -> None:
    few = sum(issued(0.0, 100), Counter[str]())["hard"]
    assert sum(issued(0.0, 100, 0.5), Counter[str]())["hard"] > 2 * few


class TestFrontier(PromptOrderSuite):
    target = OFFER
    plugins = ("curriculum",)
    covers_within = 20

    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the metadata that an installer leaves."""
        write_metadata(tmp_path, Path(__file__).parents[1])
        monkeypatch.syspath_prepend(tmp_path)
