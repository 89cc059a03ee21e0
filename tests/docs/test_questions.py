"""Fifty questions of readers: the page of questions leads to the section that answers each, and it has the words."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "faq.md"

WORDS = {
    "How is a reward called, and what may it return?": "f(trajectory) -> float \\| Reward",
    "What happens when a reward fails?": "`drop_sample` (default)",
    "What is my batch size in TRL's words?": "samples per optimizer step",
    "What is my batch size in verl's words?": "count prompts in verl",
    "Why is my run off-policy?": "schedule.max_staleness",
    "Which file do I open to change the advantage?": "`rlcore/algo/advantage.py`",
    "What does `reward/zero_std_frac` mean?": "share of the groups whose rewards, token scores included, are all equal",
    "How do I train on my own data?": "One JSON object per line",
    "Which columns may my data have?": "`prompt`, `messages` or `question`",
    "How do I resume a run?": "rlcore resume",
    "How do I evaluate a checkpoint?": "rlcore eval --checkpoint",
    "How do I merge a LoRA adapter?": "--form merged",
    "How do I use several GPUs?": "`actor.data_parallel=N` trains on N devices",
    "Does the model fit into memory?": "A run that does not fit is refused",
    "Why does nothing learn?": "`reward/zero_std_frac` near 1",
    "How do I call tools?": "becomes a schema",
    "How do I write a plugin?": "rlcore plugins new",
    "How do I test my plugin?": "RewardFunctionSuite",
    "Is my run repeatable?": "schedule.max_staleness=0",
    "What is in the run directory?": "`metrics.jsonl`",
    "How do I log to Weights & Biases?": "track.to=[wandb]",
    "How do I evaluate during training?": "eval.every_steps=10",
    "How do I start from the weights of another run?": "--resume-from",
    "How do I sample with vLLM?": "backend: vllm",
    "Where is TRL's `beta`, the weight of the KL term?": "`algo.kl.placement`",
    "How do I read the samples while a run trains?": "--serve",
    "What do I lower when memory runs out?": "`actor.micro_batch_tokens`",
    "How do I use a reward model?": "**A reward model**",
    "How do I debug my reward function?": "`log.txt`",
    "How do I turn thinking off?": "enable_thinking=false",
    "How do I install it in my environment?": "pip install ./view",
    "What may I change when I resume?": "Other prompts, another order of them or another seed are refused",
    "How do I keep the run directory small?": "`train.record_tokens=none`",
    "How do I stop early and keep the best checkpoint?": "train.stop.metric",
    "How do I use an API key?": "${oc.env:NAME}",
    "Where do I set the learning-rate schedule?": "`actor.lr_schedule`",
    "How do I mix several data sets?": "Sources are mixed by `weight`",
    "How do I write a curriculum?": "such as a curriculum",
    "How do I limit the calls to a judge?": "`requests_per_minute`",
    "Where does a failed reward say why?": "log.txt has its traceback",
    "How do I write an environment of several turns?": "class Guess(Environment)",
    "How do I train an agent that exists already?": "using the `openai` client or any framework",
    "Which schedule suits slow rewards?": "first `stream_minibatches=true`",
    "How many GPUs do I need, and how long does a step take?": "seconds of each phase of a step",
    "Why is a step slow?": "name what bounds it",
    "What is in a line of `trajectories/`?": "`num_sampled`",
    "Can it do SFT or DPO, or train a reward model?": "SFT, DPO, reward model training | N |",
    "How fast is it?": "ratio of medians",
    "Is it safe to run code that I do not trust?": "it is not a sandbox",
    "Does it run on macOS or Windows?": "tested on Linux",
}
"""Words of the answer to each question, as the section that the page links has them."""


def answers(page: Path = PAGE) -> dict[str, str]:
    """The links of the table by question; '' for the page itself in front of '#'."""
    table = page.read_text("utf-8").split("## Fifty questions")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| (.+?\?) \| .+ \| \[[^\]]+\]\(([^)]+)\) \|$", table, re.MULTILINE))


def anchor_of(heading: str) -> str:
    """The anchor that the site and forges make of a heading."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def section(link: str) -> str:
    """The text below the heading that a link names, up to the next one as high; ValueError where there is none."""
    name, _, anchor = link.partition("#")
    text = (DOCS / name if name else PAGE).read_text("utf-8")
    headings = list(re.finditer(r"^(#+) (.+)$", re.sub(r"^```.*?^```", _blanks, text, flags=re.M | re.S), re.MULTILINE))
    for number, heading in enumerate(headings):
        if anchor_of(heading[2]) == anchor:
            ends = (later.start() for later in headings[number + 1 :] if len(later[1]) <= len(heading[1]))
            return text[heading.end() : next(ends, len(text))]
    raise ValueError(f"{link}: the page has no such heading")


def _blanks(code: re.Match[str]) -> str:
    return " " * len(code[0])


def test_the_page_has_the_fifty_questions() -> None:
    assert list(answers()) == list(WORDS)
    assert len(WORDS) == 50


@pytest.mark.parametrize("question", WORDS)
def test_the_linked_section_answers(question: str) -> None:
    assert WORDS[question] in " ".join(section(answers()[question]).split())


def test_the_start_page_leads_to_every_page_of_an_answer() -> None:
    start = (DOCS / "index.md").read_text("utf-8")
    pages = {link.partition("#")[0] or PAGE.name for link in answers().values()}
    assert [page for page in pages if page not in start] == []


def test_a_section_ends_with_the_next_heading_and_must_exist() -> None:
    assert "rlcore eval" not in section("how-to.md#find-continue-and-stop-runs")
    assert anchor_of("Policy loss: `algo.policy_loss`") == "policy-loss-algopolicy_loss"
    with pytest.raises(ValueError, match="no such heading"):
        section("how-to.md#nothing")
