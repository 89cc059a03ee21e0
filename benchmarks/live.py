"""A run as `rlcore train` launches it, with a pause after each step: production plan, workers, session and trainer."""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rlcore.plugins.planning import plan_run
from rlcore.report.terminal import Terminal
from rlcore.runtime.launch import launch
from rlcore.train.callbacks import Callbacks
from rlcore.train.run_prompts import fitting, load_data
from rlcore.train.session import Session
from rlcore.train.signals import StopRequest
from rlcore.train.trainer import Trainer


@asynccontextmanager
async def live(
    config: Mapping[str, Any], overrides: Sequence[str], plugins: Sequence[str], run_dir: Path
) -> AsyncIterator[Trainer]:
    """The trainer of a launched run, with every sink of a real one; the terminal's output is discarded."""
    plan = plan_run([config], overrides, plugins)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        async with launch(plan, run_dir) as run:
            prompts = await fitting(run, load_data(plan.config), Terminal())
            session = Session(plan, run_dir, run, prompts, StopRequest(finish_step=False), Callbacks())
            trainer = session._trainer  # `Session.train` takes all steps; a benchmark takes them one by one
            try:
                trainer.start()
                yield trainer
            finally:
                await trainer.close()
