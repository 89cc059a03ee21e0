"""The base of the suites of algorithms, which test an offer or a function with the attributes of an offer."""

import inspect
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlcore.algo.probe import finite_tensor, probe
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Need, Scope
from rlcore.imports import import_function
from rlcore.testing.suites.harness import Suite, extra

TOLERANCE = 1e-5


class AlgorithmSuite(Suite):
    """An algorithm; `target` is its offer, an `Algorithm`, or a function or its import string."""

    kind: ClassVar[AlgorithmKind]
    scope: str = "sample"
    """The value of `Algorithm.scope` if the target is not an offer."""
    needs: Collection[Need] = ()
    per_token: bool = False
    """For an estimator: it returns (B, T) advantages."""
    selection: Any = ""
    """For a policy loss: the function that selects tokens, or its import string."""
    seed: int = 0
    """Seed of the batches."""
    has_reference: bool = False
    """The target is an offer or an import string, so a run would import and probe it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.has_reference = isinstance(inspect.getattr_static(cls, "target"), (Algorithm, str))
        super().__init_subclass__(**kwargs)

    @extra("has_reference")
    def test_it_passes_the_probe_of_a_run(self) -> None:
        """The probe is the one that `rlcore train` runs before it samples."""
        probe(self.offer(), "the test")

    def offer(self) -> Algorithm:
        """The target's offer, or the one that the attributes describe."""
        target = inspect.getattr_static(type(self), "target")
        if isinstance(target, Algorithm):
            return target
        reference = target if isinstance(target, str) and target else "here:tested"
        selection = self.selection if isinstance(self.selection, str) else "here:selection"
        scope, needs = Scope(self.scope), frozenset(self.needs)
        return Algorithm("tested", self.kind, reference, scope, needs, self.per_token, selection)

    @property
    def who(self) -> str:
        """The offer's name."""
        target = inspect.getattr_static(type(self), "target")
        return f"{target.kind.value} '{target.name}'" if isinstance(target, Algorithm) else super().who

    def function(self) -> Any:
        """The function under test; PluginError when it cannot be imported."""
        target = inspect.getattr_static(type(self), "target")
        if isinstance(target, Algorithm):
            return import_function(target.target)
        return import_function(target) if isinstance(target, str) else self.load()

    def need_tensor(self, what: str, found: Any, shape: tuple[int, ...]) -> None:
        """PluginError unless `found` is a finite floating-point tensor of this shape."""
        finite_tensor(f"{self.who}: {what} is", found, torch.Size(shape), "as its offer says")

    def need_equal(self, what: str, one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> None:
        """`Breach` unless both tensors are equal except for rounding."""
        off = float((one - other).abs().max()) if one.numel() else 0.0
        scale = max(1.0, float(one.abs().max()) if one.numel() else 0.0)
        self.need(off <= tolerance * scale, f"{what}: differs by {off:g}")
