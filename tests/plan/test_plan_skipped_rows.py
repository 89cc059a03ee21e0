"""The plan says whether updates leave out rows whose advantages are all 0, and why they do not."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rlcore.cli import console
from rlcore.cli.plan import show
from rlcore.cluster.worker_context import cluster_context, context_of
from rlcore.contracts.clusters import Deadlines
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

LOSS = """
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import Algorithm, AlgorithmKind, Scope

    @hookimpl
    def rlcore_algorithms():
        return [Algorithm("mine", AlgorithmKind.POLICY_LOSS, "rlcore.algo.loss:clip", Scope.SAMPLE)]
"""
PLANS = {
    "grpo": ([], ""),
    "kl in the reward": (["algo.kl.placement=reward", "reference.backend=null"], ""),
    "clip_cov": (["algo.policy_loss=clip_cov"], ""),
    "kl in the loss": (
        ["algo.kl.placement=loss", "reference.backend=null"],
        "algo.kl.placement=loss gives each token a gradient",
    ),
    "entropy": (["algo.entropy_coef=0.01"], "algo.entropy_coef=0.01 gives each token a gradient"),
    "kl_cov": (["algo.policy_loss=kl_cov"], "algo.policy_loss=kl_cov of plugin 'core'"),
    "of a plugin": (["algo.policy_loss=mine"], "algo.policy_loss=mine of plugin 'own_loss'"),
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path / "site") as directory:
        write_package(directory, "own_loss", LOSS)
        yield directory


def planned(overrides: list[str]) -> RunPlan:
    plugins = ["null", *(["own_loss"] if "algo.policy_loss=mine" in overrides else [])]
    hooks, loaded = configure([], [*SETTINGS, *overrides], plugins)
    return make_plan(loaded, hooks, Facts(cpus=2))


@pytest.mark.parametrize(("overrides", "why"), PLANS.values(), ids=PLANS)
def test_rows_are_skipped_where_that_is_exact_and_else_the_plan_says_why_not(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], why: str
) -> None:
    plan = planned(overrides)
    assert plan.schedule.all_rows.startswith(why)
    assert bool(plan.schedule.all_rows) is bool(why)
    assert plan_to_json(plan)["schedule"]["all_rows"] == plan.schedule.all_rows
    cluster = cluster_context(plan, tmp_path, Deadlines())
    for worker in plan.workers:
        skips = worker.request.role.name == "actor" and not why
        assert context_of(cluster, worker, 0, device="cpu").skips_rows is worker.skips_rows is skips
        assert plan_to_json(plan)["workers"][worker.request.role.name]["skips_rows"] is skips
    shown = io.StringIO()
    monkeypatch.setattr(console, "stdout", lambda: Console(file=shown, width=200))
    show(plan, origins=False)
    message = f"are computed: {why}" if why else "are left out: they change no gradient"
    assert "in updates, rows whose advantages are all 0" in shown.getvalue()
    assert message in shown.getvalue()
