"""Errors of workers name who offered their class, whatever raised them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.errors import RlcoreError
from rlcore.plan import CORE, RunPlan

_CALL = re.compile(r"(?:^|: )(\w[\w.-]*)\[\d+(?:\.\d+)?\]")
"""A replica or a rank, as errors begin with: 'actor[0].update()', 'rollout[1.0]'."""


@contextmanager
def naming_offers(plan: RunPlan) -> Iterator[None]:
    """An error that begins with a worker of the plan also says whose class that is, unless it is the core's own."""
    try:
        yield
    except RlcoreError as error:
        found = _CALL.search(str(error))
        offers = {worker.request.role.name: worker for worker in plan.workers}
        worker = offers.get(found[1]) if found else None
        if worker is None or worker.provided_by.startswith(f"plugin '{CORE}' ") or worker.provided_by in str(error):
            raise
        named = f"{error}; its class is {worker.cls.__qualname__} of {worker.provided_by}"
        raise type(error)(named) from error
