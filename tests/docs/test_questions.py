"""Twenty questions of readers, each with the page that answers it and the words of the answer."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

QUESTIONS = {
    "How is a reward called, and what may it return?": ("rewards.md", "f(prompts, completions, **columns)"),
    "What happens when a reward fails?": ("concepts/failures.md", "on_failure"),
    "What is my batch size in TRL's words?": ("coming-from-trl.md", "samples per optimizer step"),
    "What is my batch size in verl's words?": ("coming-from-verl.md", "count prompts in verl"),
    "Why is my run off-policy?": ("faq.md", "Why is my run off-policy?"),
    "Which file do I open to change the advantage?": ("faq.md", "algo.advantage"),
    "What does reward/zero_std_frac mean?": ("metrics.md", "`reward/zero_std_frac`"),
    "How do I train on my own data?": ("tutorial.md", "train.jsonl"),
    "Which columns may my data have?": ("data.md", "`prompt`, `messages` or `question`"),
    "How do I resume a run?": ("how-to.md", "rlcore resume"),
    "How do I evaluate a checkpoint?": ("how-to.md", "rlcore eval"),
    "How do I merge a LoRA adapter?": ("how-to.md", "--form merged"),
    "How do I use several GPUs?": ("scaling.md", "actor.data_parallel"),
    "Does the model fit into memory?": ("concepts/plan.md", "memory of a rank"),
    "Why does nothing learn?": ("troubleshooting.md", "## It does not learn"),
    "How do I call tools?": ("agents.md", "## Tools"),
    "How do I write a plugin?": ("writing-a-plugin.md", "hookimpl"),
    "How do I test my plugin?": ("testing-a-plugin.md", "RewardFunctionSuite"),
    "Is my run repeatable?": ("concepts/reproducibility.md", "the same bits"),
    "What is in the run directory?": ("run-directory.md", "`metrics.jsonl`"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_page_answers(question: str) -> None:
    page, words = QUESTIONS[question]
    assert words in (DOCS / page).read_text("utf-8")


def test_there_are_twenty_questions_and_the_start_page_leads_to_every_answer() -> None:
    start = (DOCS / "index.md").read_text("utf-8")
    assert len(QUESTIONS) == 20
    assert [page for page, _ in QUESTIONS.values() if page not in start] == []
