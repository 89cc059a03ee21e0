"""Algorithms are called on a small batch before anything is sampled, and refused by name if they break their offer."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algo.advantage import AdvantageInputs
from rlcore.algo.core_offers import OFFERS
from rlcore.algo.covariance import SelectionInputs
from rlcore.algo.kl import FixedKl
from rlcore.algo.probe import probe
from rlcore.algo.step import weigh, with_advantages
from rlcore.cli import main
from rlcore.config import AlgoConfig
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Need, Scope
from rlcore.errors import ConfigError, PluginError
from rlcore.testing import check_plugin
from rlcore.testing.packages import importable, write_package
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import random_batch

FUNCTIONS = """
import sys

import torch

from rlcore.algo.loss import PolicyLossInputs, PolicyLossOutput

def two(inputs, other): return inputs.rewards_B
def none(inputs): pass
async def late(inputs): return inputs.rewards_B
def a_list(inputs): return inputs.rewards_B.tolist()
def an_array(inputs): return inputs.rewards_B.numpy()
def integers(inputs): return inputs.rewards_B.long()
def scalar(inputs): return inputs.rewards_B.mean()
def by_token(inputs): return inputs.rewards_B[:, None] * inputs.loss_mask_BT
def unmasked(inputs): return inputs.rewards_B[:, None].expand(inputs.loss_mask_BT.shape)
def over_std(inputs):
    found = torch.zeros_like(inputs.rewards_B)
    for group in inputs.group_B.unique():
        rows = inputs.group_B == group
        found[rows] = (inputs.rewards_B[rows] - inputs.rewards_B[rows].mean()) / inputs.rewards_B[rows].std()
    return found
def with_epsilon(inputs):
    found = torch.zeros_like(inputs.rewards_B)
    for group in inputs.group_B.unique():
        rows = inputs.group_B == group
        found[rows] = (inputs.rewards_B[rows] - inputs.rewards_B[rows].mean()) / (inputs.rewards_B[rows].std() + 1e-6)
    return found
def by_row(inputs): return torch.arange(len(inputs.rewards_B)).float()
def learned(inputs): return inputs.rewards_B * torch.ones(1, requires_grad=True)
def raises(inputs): raise KeyError("which")
def leaves(inputs): sys.exit(0)
def without_numbers(inputs): return inputs.rewards_B.to("meta")
def fine(inputs): return inputs.rewards_B - 0.5
def fine_by_token(inputs): return by_token(inputs)
def with_values(inputs): return by_token(inputs) - inputs.values_BT
def with_baseline(inputs): return inputs.rewards_B - inputs.baseline_B

def parts(inputs):
    return torch.where(inputs.mask_BT, -inputs.logprobs_BT * inputs.advantages_BT, 0.0)
def a_loss(inputs): return PolicyLossOutput(parts(inputs), {"size": parts(inputs).detach()})
def a_tensor(inputs): return parts(inputs)
def summed(inputs): return PolicyLossOutput(parts(inputs).sum())
def everywhere(inputs): return PolicyLossOutput(-inputs.logprobs_BT * inputs.advantages_BT)
def detached(inputs): return PolicyLossOutput(parts(inputs).detach())
def nans(inputs): return PolicyLossOutput(parts(inputs) / 0.0)
def of_another(inputs):
    return PolicyLossOutput(torch.where(inputs.mask_BT, torch.ones(inputs.mask_BT.shape, requires_grad=True), 0.0))
def steep(inputs): return PolicyLossOutput((parts(inputs) * 0.0).sqrt())
def a_number(inputs): return PolicyLossOutput(parts(inputs), {"size": 1.0})
def by_number(inputs): return PolicyLossOutput(parts(inputs), {1: parts(inputs).detach()})
def short(inputs): return PolicyLossOutput(parts(inputs), {"size": parts(inputs).detach()[1:]})
def no_numbers(inputs): return PolicyLossOutput(parts(inputs).to("meta"))
def with_gradient(inputs): return PolicyLossOutput(parts(inputs), {"size": parts(inputs)})
def as_ours(inputs): return PolicyLossOutput(parts(inputs), {"entropy": parts(inputs).detach()})
def no_mapping(inputs): return PolicyLossOutput(parts(inputs), [parts(inputs)])
def selected(inputs):
    return PolicyLossOutput(torch.where(inputs.selected_BT, 0.0, parts(inputs)))

def all_of_it(inputs): return inputs.mask_BT.clone()
def too_much(inputs): return torch.ones_like(inputs.mask_BT)
def numbers(inputs): return inputs.mask_BT.float()
def none_of_it(inputs): return None
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test, one with functions in it."""
    with importable(tmp_path / "site") as place:
        (place / "probe_functions.py").write_text(FUNCTIONS)
        (place / "probe_breaks.py").write_text("import nothing_like_it\n\ndef f(inputs): return inputs.rewards_B\n")
        yield place


def estimator(name: str, **more: object) -> Algorithm:
    return Algorithm(name, AlgorithmKind.ADVANTAGE, f"probe_functions:{name}", Scope.SAMPLE, **more)  # type: ignore[arg-type]


def loss(name: str, selection: str = "") -> Algorithm:
    needs = frozenset({Need.MINIBATCH_STATISTICS}) if selection else frozenset[Need]()
    picks = f"probe_functions:{selection}" if selection else ""
    return Algorithm(
        name, AlgorithmKind.POLICY_LOSS, f"probe_functions:{name}", Scope.SAMPLE, needs=needs, selection=picks
    )


def test_a_loss_that_does_not_ignore_zero_advantages_as_its_offer_says_is_refused() -> None:
    offers = {offer.name: offer for offer in OFFERS if offer.kind is AlgorithmKind.POLICY_LOSS}
    assert [name for name, offer in offers.items() if not offer.ignores_zero_advantages] == ["kl_cov"]
    message = r"kl_cov .*returned a loss of \S+ for row \d, token \d, whose advantages are all 0; needs 0 there"
    with pytest.raises(PluginError, match=message):
        probe(replace(offers["kl_cov"], ignores_zero_advantages=True), "the core")


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.kind}-{offer.name}")
def test_every_algorithm_of_the_core_passes(offer: Algorithm) -> None:
    assert callable(probe(offer, "the core").function)


def test_a_probe_takes_a_few_milliseconds() -> None:
    for offer in OFFERS:
        probe(offer, "the core")
    began = time.process_time()
    for offer in OFFERS:
        probe(offer, "the core")
    assert (time.process_time() - began) / len(OFFERS) < 0.05


PER_TOKEN = {"per_token": True}
ESTIMATORS = {
    "two": ({}, r"takes \(inputs, other\): .*needs one parameter, AdvantageInputs"),
    "none": ({}, r"returned None; needs a floating-point tensor of shape \(7,\), one per row"),
    "late": ({}, r"returned coroutine \(it is an `async def`; needs a plain `def`\)"),
    "a_list": ({}, "returned list; needs a floating-point tensor"),
    "an_array": ({}, "returned ndarray; needs a floating-point tensor"),
    "without_numbers": ({}, "it: (RuntimeError|NotImplementedError): "),
    "integers": ({}, r"returned a tensor of int64 of shape \(7,\); needs a floating-point tensor"),
    "scalar": ({}, r"returned a tensor of float32 of shape \(\); needs .* shape \(7,\)"),
    "by_token": ({}, r"shape \(7, 8\); needs .* shape \(7,\), one per row \(per_token=False\)"),
    "fine": (PER_TOKEN, r"shape \(7,\); needs .* shape \(7, 8\), one per token, as its offer says"),
    "unmasked": (PER_TOKEN, "returned 1 for row 1, token 0, outside the loss mask; needs 0 there"),
    "over_std": ({}, r"returned nan for row 4, in a group of equal rewards; needs .*finite ones"),
    "with_epsilon": ({}, "returned nan for row 6, the only sample left in its group; needs .*finite ones"),
    "by_row": ({}, "gave two rows of one sample different advantages; needs one number per sample"),
    "learned": ({}, "requires a gradient; needs advantages, which are constants"),
    "raises": ({}, r"it failed: KeyError: 'which'"),
    "leaves": ({}, r"it failed: it called sys\.exit\(0\)"),
    "missing": ({}, "'probe_functions' has no 'missing'; choose from"),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_that_does_not_do_what_its_offer_says_is_refused(site: Path, name: str) -> None:
    more, message = ESTIMATORS[name]
    with pytest.raises(PluginError, match=rf"^algo\.advantage={name} of plugin 'mine': .*{message}") as caught:
        probe(estimator(name, **more), "plugin 'mine'")
    assert "\n" not in str(caught.value)


def test_estimators_that_do_what_they_say_pass(site: Path) -> None:
    right = (
        estimator("fine"),
        estimator("fine_by_token", per_token=True),
        estimator("with_values", per_token=True, needs=frozenset({Need.VALUES})),
        estimator("with_baseline", needs=frozenset({Need.GREEDY_BASELINE})),
    )
    assert [probe(offer, "mine").function.__name__ for offer in right] == [offer.name for offer in right]


@pytest.mark.parametrize("name", ["with_values", "with_baseline"])
def test_what_an_estimator_does_not_say_it_needs_it_does_not_get(site: Path, name: str) -> None:
    with pytest.raises(PluginError, match=f"algo.advantage={name}.*it failed: TypeError.*NoneType"):
        probe(estimator(name, per_token=name == "with_values"), "mine")


STATE = {
    "set_grad_enabled(False)": "grad mode; needs grad mode left as it is: use `with torch.no_grad",
    "set_default_dtype(torch.float64)": "the default dtype; needs the default dtype left as it is: give each tensor",
    "set_default_device('meta')": "the default device; needs .* give each tensor its device",
    "manual_seed(90210)": "the random state; needs .* draw from a new torch.Generator",
    "rand(1)": "the random state; needs .* draw from a new torch.Generator",
    "set_num_threads(torch.get_num_threads() + 1)": "the number of threads; needs .* leave it to the run",
    "use_deterministic_algorithms(True)": "deterministic algorithms; needs .* leave it to the run",
    "set_float32_matmul_precision('medium')": "float32 matmul precision; needs .* leave it to the run",
    "autograd.set_detect_anomaly(True)": "anomaly detection; needs .* leave it to the run",
}
CHANGES = "import torch\n{at_import}\ndef f(inputs):\n    {in_call}\n    return inputs.rewards_B * 1.0\n"


def torch_state() -> tuple[object, ...]:
    """Global state of torch that an algorithm may not change."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
    )


@pytest.mark.parametrize("where", ["at_import", "in_call"])
@pytest.mark.parametrize("call", STATE)
def test_the_algorithm_that_changes_torch_is_refused_and_no_other(tmp_path: Path, call: str, where: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CHANGES.format(**{"at_import": "", "in_call": "pass", where: f"torch.{call}"}))
    mine = Algorithm("mine", AlgorithmKind.ADVANTAGE, f"{path}:f", Scope.BATCH)
    before = torch_state()
    with pytest.raises(
        PluginError, match=rf"^algo\.advantage=mine of me: .* changed torch's global state: {STATE[call]}"
    ):
        probe(mine, "me")
    assert torch_state() == before


def test_an_algorithm_that_changes_torch_in_a_later_call_is_refused(tmp_path: Path) -> None:
    batch = random_batch()
    with pytest.raises(PluginError, match=r"^algo\.advantage=rloo changed torch's global state: grad mode; "):
        with_advantages(batch, lambda inputs: (torch.set_grad_enabled(False) and 0) or inputs.rewards_B * 1.0, False,
                        replace(AlgoConfig(), advantage="rloo"), 8, FixedKl(0.0))  # fmt: skip
    assert torch.is_grad_enabled()


def test_the_random_numbers_of_another_worker_are_not_blamed_on_an_algorithm() -> None:
    def during_an_update(inputs: AdvantageInputs) -> Tensor:
        worker = Thread(target=torch.rand, args=(1,))
        worker.start()
        worker.join()
        return inputs.rewards_B * 1.0

    before = torch.get_rng_state()
    with_advantages(random_batch(), during_an_update, False, replace(AlgoConfig(), advantage="rloo"), 8, FixedKl(0.0))
    assert not torch.equal(torch.get_rng_state(), before), "what the worker drew stays drawn"


@pytest.mark.parametrize("picked", [None, "too_much", "short"])
def test_a_selection_that_goes_wrong_in_a_later_call_is_named(picked: str | None) -> None:
    def select(inputs: SelectionInputs) -> object:
        whole_BT = torch.ones_like(inputs.mask_BT)
        return {"too_much": whole_BT, "short": whole_BT[1:]}.get(picked or "")

    batch = replace(random_batch(), advantages_B=np.ones(8, np.float32), old_logprobs_BT=None)
    with pytest.raises(PluginError, match=r"^algo\.policy_loss=clip: its selection (returned|picked)"):
        weigh(batch, AlgoConfig(), select)  # type: ignore[arg-type]


LOSSES = {
    "two": r"needs one parameter, PolicyLossInputs",
    "none": "returned None; needs rlcore.algo.loss.PolicyLossOutput",
    "late": "returned coroutine",
    "a_tensor": "returned a tensor of float32 .*; needs rlcore.algo.loss.PolicyLossOutput",
    "summed": r"returned loss_BT: a tensor of float32 of shape \(\); needs .* shape \(4, 8\), one per token",
    "everywhere": "returned loss_BT: .* outside the loss mask; needs 0 there",
    "detached": "does not depend on logprobs_BT; needs a gradient",
    "of_another": "no gradient with respect to logprobs_BT",
    "nans": "returned loss_BT: (nan|-?inf) for row 0, token 0; needs .*finite ones",
    "steep": "a gradient that is not finite with respect to logprobs_BT",
    "a_number": "returned the metric 'size', which is float; needs",
    "by_number": "returned the metric 1, which is a tensor of float32 .*; needs",
    "short": r"returned the metric 'size', which is a tensor of float32 of shape \(3, 8\); needs",
    "no_numbers": "it: (RuntimeError|NotImplementedError): ",
    "with_gradient": "returned the metric 'size' with a gradient; needs it detached",
    "as_ours": "returned the metric 'entropy', which rlcore logs itself; choose another name",
    "no_mapping": "metrics that are list; needs a mapping",
    "raises": "it failed: KeyError: 'which'",
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss_that_does_not_do_what_its_offer_says_is_refused(site: Path, name: str) -> None:
    with pytest.raises(PluginError, match=rf"^algo\.policy_loss={name} of plugin 'mine': .*{LOSSES[name]}") as caught:
        probe(loss(name), "plugin 'mine'")
    assert "\n" not in str(caught.value)


SELECTIONS = {
    "too_much": "picked tokens outside mask_BT",
    "numbers": r"returned a tensor of float32 of shape \(4, 8\); needs a tensor of booleans of shape \(4, 8\)",
    "none_of_it": "returned None; needs a tensor of booleans",
    "two": "needs one parameter, SelectionInputs",
    "missing": "'probe_functions' has no 'missing'",
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_that_does_not_pick_tokens_is_refused(site: Path, name: str) -> None:
    with pytest.raises(PluginError, match=rf"^algo\.policy_loss=selected of mine: .*selection.*{SELECTIONS[name]}"):
        probe(loss("selected", name), "mine")


def test_a_loss_and_its_selection_that_do_what_they_say_pass(site: Path) -> None:
    assert probe(loss("a_loss"), "mine").selection is None
    assert callable(probe(loss("selected", "all_of_it"), "mine").selection)


def test_the_settings_of_the_run_hold_in_the_probe() -> None:
    [clip] = [offer for offer in OFFERS if (offer.kind, offer.name) == (AlgorithmKind.POLICY_LOSS, "clip")]
    with pytest.raises(ConfigError, match=r"algo\.dual_clip=0\.5"):
        probe(clip, "the core", replace(AlgoConfig(), dual_clip=0.5))


PLUGIN = """
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import Algorithm, AlgorithmKind, Scope

    @hookimpl
    def rlcore_algorithms():
        return [Algorithm("mine", AlgorithmKind.{kind}, "{reference}", Scope.SAMPLE)]
"""


@pytest.mark.parametrize(
    ("kind", "reference", "message"),
    [
        ("ADVANTAGE", "probe_functions:scalar", r"algo\.advantage=mine of plugin 'probed' .*returned a tensor"),
        ("ADVANTAGE", "probe_nowhere:f", r"plugin 'probed' .*algo\.advantage=mine: .*no module 'probe_nowhere'"),
        ("ADVANTAGE", "probe_breaks:f", r"algo\.advantage=mine of plugin 'probed' .*importing 'probe_breaks' failed"),
        ("POLICY_LOSS", "probe_functions:detached", r"algo\.policy_loss=mine of plugin 'probed' .*does not depend"),
    ],
)
def test_train_ends_with_2_and_one_line_before_any_worker_starts(
    site: Path,
    tmp_path: Path,
    kind: str,
    reference: str,
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_package(site, "probed", PLUGIN.format(kind=kind, reference=reference))

    def started(*args: object) -> None:
        pytest.fail("a worker was started")

    monkeypatch.setattr("rlcore.runtime.launch.start_sampler", started)
    settings = run_settings(tmp_path, 4) | {f"algo.{kind.lower()}": "mine"}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    assert main(["train", *overrides, "--plugin", "null", "--plugin", "probed"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert re.search(message, lines[0])
    assert not list((tmp_path / "runs").glob("*/trajectories/*"))


def test_plugins_check_probes_algorithms(site: Path) -> None:
    write_package(site, "probed_by_check", PLUGIN.format(kind="ADVANTAGE", reference="probe_functions:over_std"))
    [problem] = check_plugin("probed_by_check").problems
    assert problem.startswith("algo.advantage=mine of plugin 'probed_by_check'")
    assert "returned nan for row 4, in a group of equal rewards" in problem
