"""Examples run, and what the documents show is what is in the tree."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore import ScoreRequest
from rlcore.data import load_prompts, refuse_overlap
from rlcore.imports import import_target
from rlcore.plugins.planning import plan_run
from rlcore.reward.scorers import gsm8k
from rlcore.testing.rewards import make_trajectory

ROOT = Path(__file__).parent.parent.parent
ARITHMETIC = ROOT / "examples" / "arithmetic"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
JUDGE = ROOT / "docs" / "tutorials" / "judge.md"
SHOWING = [ROOT / "README.md", ROOT / "docs" / "writing-a-plugin.md", ROOT / "docs" / "rewards.md", JUDGE]
DOCUMENTS = [*SHOWING, ROOT / "docs" / "how-to.md", *(page for page in TUTORIALS if page != JUDGE)]
# Without torch: the policy is a unigram over bytes. It replaces what is named before it on the command line.
NULL = (
    "--plugin null model.path= model.tokenizer=bytes actor.backend='null' rollout.backend='null' train.max_steps=1 "
    "train.prompts_per_step=2 rollout.samples_per_prompt=2 eval.sources.heldout.limit=2"
)


def rlcore(arguments: str, directory: Path) -> str:
    """The command's output, stderr included; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", *shlex.split(arguments)],
        cwd=directory,
        env={**os.environ, "COLUMNS": "200"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"rlcore {arguments}\n{done.stdout}"
    return done.stdout


def shown_files(document: Path) -> list[tuple[str, str]]:
    """(path, text) of every file that the document shows: '<!-- file: path -->' and a fenced block."""
    return re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", document.read_text(), re.DOTALL)


def commands(document: Path) -> list[str]:
    """The lines that begin with 'rlcore ' in the document's fenced blocks of shell, without that word.

    A line that ends in a backslash continues in the next one.
    """
    blocks = re.findall(r"```sh\n(.*?)```", re.sub(r"\\\n *", "", document.read_text()), re.DOTALL)
    return [
        line.removeprefix("rlcore ") for block in blocks for line in block.splitlines() if line.startswith("rlcore ")
    ]


@pytest.mark.parametrize("document", SHOWING, ids=lambda document: document.name)
def test_a_file_in_a_document_is_the_file_in_the_tree(document: Path) -> None:
    shown = shown_files(document)
    assert shown
    for path, text in shown:
        assert text == (ROOT / path).read_text(), f"{document.name} shows another {path}"


def test_the_readme_shows_a_plugin_of_ten_lines() -> None:
    [(_, text)] = shown_files(ROOT / "README.md")
    code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    body = [line for line in code.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(body) <= 10


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with the examples, their model, and the reward file that the README shows."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".models").symlink_to(ROOT / ".models")
    [reward] = re.findall(r"Save this as `my_rewards.py`:\n\n```python\n(.*?)```", DOCUMENTS[0].read_text(), re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(reward)
    return tmp_path


@pytest.mark.real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_command_of_a_document_runs(document: Path, workplace: Path) -> None:
    found = commands(document)
    assert found
    for command in found:
        null = f"{NULL} plugins.critic_engine.backend='null'" if "critic_engine" in command else NULL
        output = rlcore(f"{command} {null}" if command.startswith("train ") else command, workplace)
        assert output.strip(), command
    if document.name == "README.md":
        log = (workplace / "runs" / "sums" / "log.txt").read_text()
        assert (workplace / "runs" / "sums" / "checkpoints" / "step_1").is_dir(), log


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*/ci.yaml")), ids=lambda path: path.parent.name)
def test_the_ci_configuration_of_an_example_runs_as_its_first_lines_say(example: Path, tmp_path: Path) -> None:
    [command] = re.findall(r"^# +rlcore (train .*)$", example.read_text(), re.MULTILINE)
    output = rlcore(f"{command} train.dir={tmp_path} train.name=run", ROOT)
    assert "held-out" in output
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "manifest.json").is_file()


def test_the_plan_of_the_arithmetic_example_takes_the_reward_from_the_plugin() -> None:
    plan = plan_run([ARITHMETIC / "config.yaml"], [], ["digit_sum"])
    [reward] = plan.rewards
    assert (reward.name, reward.target) == ("accuracy", "rlcore_example_arithmetic:last_number")
    assert "digit_sum" in reward.provided_by
    assert [plugin.distribution for plugin in plan.plugins] == ["rlcore-example-arithmetic"]
    assert plan.batch_sizes["samples"] == 64


def test_the_arithmetic_example_holds_out_a_quarter_of_the_additions_and_nothing_else() -> None:
    config = plan_run([ARITHMETIC / "config.yaml"], [], ["digit_sum"]).config
    train = load_prompts(config.data.sources, config.data)
    heldout = load_prompts(config.eval.sources, config.data)
    refuse_overlap(train, heldout)
    questions = {
        which: {str(prompt.messages[-1]["content"]) for value in prompts.values() for prompt in value}
        for which, prompts in (("train", train), ("heldout", heldout))
    }
    assert len(questions["train"]) + len(questions["heldout"]) == 100
    assert 20 <= len(questions["heldout"]) <= 35
    pattern = re.compile(r"State the final answer to the following arithmetic problem: \d \+ \d =")
    assert all(pattern.fullmatch(value) for value in questions["train"] | questions["heldout"])


def get_model(target: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ARITHMETIC / "get_model.py"), str(target)]
    return subprocess.run(command, text=True, capture_output=True, timeout=300, check=False)


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = get_model(tmp_path / "model")
    assert (done.returncode, list((tmp_path / "model").iterdir())) == (0, [])
    assert "is there already" in done.stdout


@pytest.mark.real
def test_the_model_of_the_demo_is_an_ordinary_model_directory(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = ROOT / ".models" / "smollm2-135m-instruct"
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert not hasattr(model.config, "quantization_config")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_arithmetic_example_trains_the_real_model_for_two_steps(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rlcore(
        f"train examples/arithmetic/config.yaml --plugin digit_sum train.dir={tmp_path} train.name=run "
        "train.max_steps=2 train.prompts_per_step=2 rollout.samples_per_prompt=4 eval.sources.heldout.limit=4",
        ROOT,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step_2" / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) > 130_000_000


GSM8K = ROOT / "examples" / "gsm8k"


def test_the_problems_of_the_gsm8k_example_are_as_on_the_hub_and_their_own_answers_score(tmp_path: Path) -> None:
    shutil.copy(GSM8K / "make_problems.py", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "make_problems.py")], check=True, timeout=60)
    plan = plan_run([GSM8K / "config.yaml"], [], [])
    assert [reward.target for reward in plan.rewards] == ["rlcore.reward.scorers:gsm8k"]
    for name, sources in (("problems", plan.config.data.sources), ("heldout", plan.config.eval.sources)):
        assert (tmp_path / f"{name}.jsonl").read_text() == (GSM8K / f"{name}.jsonl").read_text()
        for prompts in load_prompts(sources, plan.config.data).values():
            for prompt in prompts:
                assert gsm8k(make_trajectory(prompt, text=str(prompt.answer))).score == 1.0
                assert gsm8k(make_trajectory(prompt, text="The answer is 123456789.")).score == 0.0


@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_gsm8k_example_trains_the_real_model_for_two_steps(tmp_path: Path) -> None:
    rlcore(
        f"train examples/gsm8k/config.yaml train.dir={tmp_path} train.name=run train.max_steps=2 "
        "train.prompts_per_step=2 rollout.samples_per_prompt=2 rollout.max_tokens=24 eval.sources.heldout.limit=1 "
        "eval.every_steps=0",
        ROOT,
    )
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["reward/failed"] for step in steps if "reward/failed" in step] == [0.0, 0.0]
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()


@pytest.mark.parametrize(
    ("response", "grade"), [("5", 10), ("It is 5.", 7), ("It is -5", 0), ("It is 3.5", 0), ("2/5", 0), ("It is 15", 0)]
)
def test_the_rules_of_the_judge_read_whole_numbers(response: str, grade: int) -> None:
    question = f"The known answer: 5\n\n<response-0a>\n{response}\n</response-0a>"
    request = ScoreRequest("0", ({"role": "user", "content": question},))
    assert import_target(f"{ROOT / 'examples' / 'judge' / 'rules.py'}:grade")(request) == grade
