"""The planner: what is decided, and every refusal with the parties it names."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.offers import Scope
from rlcore.contracts.rollout import RolloutWorker
from rlcore.errors import ConfigError, PlanError, PluginError, RlcoreError
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS, NullActor, NullReference, NullRollout
from rlcore.testing.packages import importable, write_package


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def plan(*overrides: str, plugins: tuple[str, ...] = ()) -> RunPlan:
    """The production plan of the null run with some overrides."""
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null", *plugins])
    return make_plan(loaded, hooks, Facts(cpus=2))


def refused(kind: type[RlcoreError], *overrides: str) -> str:
    """The one line with which the plan is refused."""
    with pytest.raises(kind) as caught:
        plan(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_null_run_is_planned_with_what_was_named() -> None:
    made = plan()
    assert {slot: component.component.name for slot, component in made.components.items()} == {
        "agent": "single_turn",
        "reward": "functions",
        "critic": "none",
    }
    assert [(worker.request.role.name, worker.cls, worker.asked_by) for worker in made.workers] == [
        ("actor", NullActor, "core"),
        ("rollout", NullRollout, "core"),
    ]
    assert [(pool.name, pool.roles, pool.gpus) for pool in made.pools] == [("main", ("actor", "rollout"), ())]
    assert made.algorithms["advantage"].algorithm.name == "grpo"
    assert made.workers[0].request.targets == {
        "advantage": "rlcore.algo.advantage:grpo",
        "policy_loss": "rlcore.algo.loss:clip",
    }


def test_an_embedded_rollout_is_served_inside_the_actor_because_its_class_says_so() -> None:
    made = plan()
    rollout = next(worker for worker in made.workers if worker.request.role.name == "rollout")
    assert rollout.request.embedded_in is not None
    assert rollout.request.embedded_in.name == "actor"


def test_a_kl_term_asks_for_a_reference() -> None:
    made = plan("algo.kl.placement=loss", "reference.backend=null")
    assert [worker.cls for worker in made.workers] == [NullActor, NullReference, NullRollout]


def test_the_arithmetic_of_a_step() -> None:
    made = plan(
        "train.prompts_per_step=12", "rollout.samples_per_prompt=4", "actor.minibatch_prompts=3", "actor.epochs=2"
    )
    assert made.batch_sizes == {
        "prompts": 12,
        "samples_per_prompt": 4,
        "samples": 48,
        "minibatch_prompts": 3,
        "minibatch_samples": 12,
        "minibatches": 4,
        "epochs": 2,
        "updates": 8,
    }


@pytest.mark.parametrize(
    ("kind", "override", "message"),
    [
        (PlanError, "actor.minibatch_prompts=3", "choose from: 1, 2, 4, 8"),
        (PlanError, "actor.minibatch_prompts=9", "needs 1 to 8"),
        (ConfigError, "train.prompts_per_step=0", "train.prompts_per_step=0"),
        (ConfigError, "actor.epochs=0", "actor.epochs=0"),
        (PlanError, "rollout.samples_per_prompt=1", "algo.advantage=grpo"),
        (ConfigError, "algo.advantage=grop", "did you mean 'grpo'"),
        (ConfigError, "algo.policy_loss=clap", "did you mean 'clip'"),
        (ConfigError, "rollout.agent=singel_turn", "did you mean 'single_turn'"),
        (ConfigError, "reward.manager=reward_loop", "--plugin reward_loop reward.manager=reward_loop"),
        (ConfigError, "rollout.agent=agent_loop", "--plugin agent_loop"),
        (ConfigError, "critic.engine=critic_engine", "--plugin critic_engine critic.engine=critic_engine"),
        (ConfigError, "algo.advantage=gae", "--plugin critic_engine critic.engine=critic_engine"),
        (PlanError, "rollout.backend=nul", "did you mean 'null'"),
        (
            PlanError,
            "rollout.backend=sglang",
            "backend 'sglang': none is offered; choose from: hf, null, null_replica",
        ),
        (PlanError, "actor.backend=hf", "make the two equal"),
        (PlanError, "cluster.pools.spare.gpus_per_node=0", "pool 'spare' of config (cluster.pools) is unused"),
        (PlanError, "cluster.pools.main.nodes=2", "2 nodes"),
        (PlanError, "cluster.device=cuda", "the pools need 1 GPUs ('main' 1), the machine has 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kind: type[RlcoreError], override: str, message: str) -> None:
    assert message in refused(kind, override)


def test_a_reward_in_a_file_is_found_next_to_its_config_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("def score(trajectory):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path / "sub")
    made = plan("reward.functions.letters.fn=mine.py:score")
    assert made.rewards[0].target == f"{tmp_path / 'sub' / 'mine.py'}:score"
    config = tmp_path / "sub" / "run.yaml"
    config.write_text("reward: {functions: {mine: {fn: 'mine.py:score', weight: 0.5}}}\n")
    monkeypatch.chdir(tmp_path)
    hooks, loaded = configure([config], [setting for setting in SETTINGS if "reward" not in setting], ["null"])
    found = make_plan(loaded, hooks, Facts()).rewards[0]
    assert (found.target, found.weight) == (f"{tmp_path / 'sub' / 'mine.py'}:score", 0.5)
    assert refused(ConfigError, "reward.functions.letters.fn=mine.py:score").startswith(
        "reward.functions.letters.fn: found no file 'mine.py', which counts from the working directory "
        f"({tmp_path}/mine.py)"
    )
    gone = f"reward.functions.letters.fn: found no file '{tmp_path}/gone.py'"
    assert refused(ConfigError, f"reward.functions.letters.fn={tmp_path}/gone.py:score") == gone
    config.write_text("reward: {functions: {mine: {fn: 'mein.py:score'}}}\n")
    for here, places in (
        (tmp_path, f"{config.parent}/mein.py, {tmp_path}/mein.py"),
        (config.parent, f"{config.parent}/mein.py"),
    ):
        monkeypatch.chdir(here)
        hooks, loaded = configure([config], [setting for setting in SETTINGS if "reward" not in setting], ["null"])
        with pytest.raises(ConfigError, match=r"counts from the directory of run.yaml, then from the working") as error:
            make_plan(loaded, hooks, Facts())
        assert str(error.value).endswith(f"directory ({places}); did you mean 'mine.py'? choose from: mine.py")


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("mine.py:scor", "did you mean 'score'"),
        ("mine.py", "file.py:name"),
        ("broken.py:score", "not a Python file"),
        ("count_leter", "did you mean 'count_letter'"),
        ("module:a.b", "'a.b' is not a name"),
        ("not a module:score", "neither a .py file nor a module"),
    ],
)
def test_a_reward_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text("def score(trajectory):\n    return 1.0\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    monkeypatch.chdir(tmp_path)
    assert message in refused(ConfigError, f"reward.functions.letters.fn={fn}")


def test_scope_and_deadline_come_from_the_offer_unless_the_config_says_them(site: Path) -> None:
    source = """
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import RewardFunction, Scope

    @hookimpl
    def rlcore_reward_functions():
        return [RewardFunction("grouped", "math:sqrt", Scope.GROUP, 5.0)]
    """
    write_package(site, "plan_scope", source)
    named = "reward.functions.letters.fn=grouped"
    offered = plan(named, plugins=("plan_scope",)).rewards[0]
    assert (offered.scope, offered.deadline_s) == (Scope.GROUP, 5.0)
    settings = ("reward.functions.letters.scope=sample", "reward.functions.letters.deadline_s=7")
    message = plan(named, *settings, plugins=("plan_scope",)).rewards[0]
    assert (message.scope, message.deadline_s) == (Scope.SAMPLE, 7.0)


RAISES = "raise RuntimeError\ndef score(trajectory): ..."


def test_an_entry_point_reward_is_named_without_being_imported_and_takes_no_name_from_a_plugin(site: Path) -> None:
    write_package(site, "plan_ten", RAISES, entry_points={"rlcore.rewards": {"tenth": "plan_ten:score"}})
    made = plan("reward.functions.letters.fn=tenth", "algo.kl.placement=loss", "reference.backend=null")
    assert (made.rewards[0].target, made.rewards[0].provided_by) == (
        "plan_ten:score",
        "entry point 'tenth' (plan-ten 1.0)",
    )
    assert "plan_ten" not in sys.modules
    write_package(site, "plan_eleven", RAISES, entry_points={"rlcore.rewards": {"count_letter": "plan_eleven:score"}})
    assert plan().rewards[0].provided_by == "plugin 'null' (rlcore 0.1.0)"
    write_package(site, "plan_twelve", RAISES, entry_points={"rlcore.rewards": {"tenth": "plan_twelve:score"}})
    assert (
        "reward.functions.letters.fn=tenth: offered by entry point 'tenth' (plan-ten 1.0) as plan_ten:score and entry "
        "point 'tenth' (plan-twelve 1.0) as plan_twelve:score; one name needs one offer, so set "
        "reward.functions.letters.fn=MODULE:NAME instead"
    ) in refused(PluginError, "reward.functions.letters.fn=tenth")


def test_the_plan_as_json_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "swordfish-123")
    made = plan("reward.functions.letters.kwargs.key=${oc.env:JUDGE_KEY}")
    assert made.rewards[0].kwargs == {"key": "swordfish-123"}
    text = json.dumps(plan_to_json(made))
    assert "swordfish" not in text
    assert "${oc.env:JUDGE_KEY}" in text


def test_the_interfaces_are_matched_by_identity() -> None:
    made = plan()
    assert [worker.request.role.interface for worker in made.workers] == [ActorWorker, RolloutWorker]
