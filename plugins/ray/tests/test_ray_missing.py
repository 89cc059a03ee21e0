"""Ray that is not installed is named before anything starts."""

import asyncio
import sys
from pathlib import Path

import pytest

from rlcore.errors import PlanError
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing.null import SETTINGS


def test_ray_that_is_not_installed_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rlcore_ray.session", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # what Python makes of a package that is not there

    async def story() -> None:
        async with launch(plan_run([], [*SETTINGS, "plugins.ray={}"], ["null"]), tmp_path):
            pytest.fail("it started without Ray")

    with pytest.raises(PlanError, match=r"^cluster\.backend=ray: Ray is not installed; `pip install ray`"):
        asyncio.run(story())
