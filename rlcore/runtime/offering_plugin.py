"""Adds the plugin that offered a worker's class to the worker's errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.errors import RlcoreError
from rlcore.plan import CORE, RunPlan


@contextmanager
def naming_offers(plan: RunPlan) -> Iterator[None]:
    """Context in which errors of worker calls, or caused by them, also name the class's plugin, unless it is the
    core."""
    try:
        yield
    except RlcoreError as error:
        call = _of_a_call(error)
        offers = {worker.request.role.name: worker for worker in plan.workers}
        worker = offers.get(call.role) if call else None
        if call is None or worker is None:
            raise
        error.role, error.method, error.offered_by = call.role, call.method, worker.offered_by
        if worker.provided_by.startswith(f"plugin '{CORE}' ") or worker.provided_by in str(error):
            raise
        named = type(error)(f"{error}; its class is {error.offered_by}")
        named.role, named.method, named.offered_by = error.role, error.method, error.offered_by
        raise named from error


def _of_a_call(error: BaseException | None) -> RlcoreError | None:
    """The error that a worker's call raised: this one, or the nearest of its causes."""
    while error is not None:
        if isinstance(error, RlcoreError) and error.role:
            return error
        error = error.__cause__
    return None
