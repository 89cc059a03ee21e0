"""Hosts the workers of a process other than the controller: builds, calls and closes them by role.

Each process of a cluster has one `WorkerHost`, whether it is a child of the controller or on another node. Everything
runs on that process's loop: plain methods one at a time, async ones concurrently, as in a thread of the local cluster.
"""

import contextlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcore.cluster.out_of_memory import memory_problem
from rlcore.cluster.same_software import check_code, check_versions, versions_here
from rlcore.contracts.clusters import RunCode, Shipment, WorkerPlan
from rlcore.contracts.workers import Worker, WorkerContext
from rlcore.errors import PluginError, RlcoreError, WorkerError, boundary
from rlcore.errors.checks.results import as_stream
from rlcore.imports import collecting_rarely


def pack(
    name: str, plan: WorkerPlan, context: WorkerContext, plugin_files: Sequence[str], code: RunCode | None = None
) -> Shipment:
    """The shipment that builds this worker in another process; WorkerError when class or settings cannot be sent."""
    with boundary(f"{name}: its class or its settings cannot be sent to another process", WorkerError):
        payload = pickle.dumps((plan.cls, replace(context, host=None)), protocol=pickle.HIGHEST_PROTOCOL)
    inside = plan.request.embedded_in.name if plan.request.embedded_in else ""
    files = tuple(_modules_of(plugin_files))
    return Shipment(name, plan.request.role.name, inside, files, payload, versions_here(), code)


def _modules_of(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        if paths and getattr(module, "__file__", None) in paths:
            yield name, str(module.__file__)


@contextlib.contextmanager
def named(where: str, context: WorkerContext | None = None) -> Iterator[None]:
    """Turns a worker's exception into a WorkerError that names the call; an RlcoreError keeps its class.

    If memory was exhausted, the error adds the plan's estimate and the settings that lower it.
    """
    try:
        with boundary(where, WorkerError):
            yield
    except SystemExit as cause:
        raise WorkerError(f"{where}: it called sys.exit({cause.code!r})") from cause
    except RlcoreError as error:
        problem = memory_problem(error, context, where)
        if problem:
            raise WorkerError(f"{where}: {problem}") from error
        if str(error).startswith(f"{where}: "):
            raise
        raise type(error)(f"{where}: {error}") from error


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables that set the threads of numerical libraries, which read them on import."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


class WorkerHost:
    """Serves the workers of one process."""

    def __init__(self, address: str = "") -> None:
        """`address`: of this node, unless it is the controller's."""
        self._address = address
        self._workers: dict[str, tuple[str, Worker]] = {}

    def build(self, shipment: Shipment) -> None:
        """Create a worker and set it up; WorkerError on a node whose versions or code differ from the controller's."""
        where = f"{shipment.name}.setup()"
        with named(where):
            check_versions(shipment.versions)
            if shipment.code is not None:
                check_code(shipment.code)
        with collecting_rarely():
            self._set_up(shipment, where)

    def _set_up(self, shipment: Shipment, where: str) -> None:
        _import_files(shipment.files)
        with named(where):
            cls, context = pickle.loads(shipment.payload)
            host = self._workers[shipment.embedded_in][1] if shipment.embedded_in else None
            worker: Worker = cls(replace(context, host=host, address=self._address or context.address))
            self._workers[shipment.role] = (shipment.name, worker)
        with named(where, context):
            worker.setup()
        _use_threads(context.threads)

    async def call(self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The method's result."""
        name, worker = self._workers[role]
        with named(f"{name}.{method}()", worker.context):
            result = getattr(worker, method)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def stream(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """The items of an async-generator method, which is closed with this one."""
        name, worker = self._workers[role]
        where = f"{name}.{method}()"
        with named(where, worker.context):
            found = getattr(worker, method)(*args, **kwargs)
            async with contextlib.aclosing(as_stream(where, found, WorkerError)) as items:
                async for result in items:
                    yield result

    def close(self) -> list[str]:
        """Close every worker, last one first; returns error texts."""
        problems = []
        for name, worker in reversed(list(self._workers.values())):
            try:
                with named(f"{name}.close()"):
                    worker.close()
            except RlcoreError as error:
                problems.append(str(error))
        self._workers.clear()
        return problems


def _import_files(files: Sequence[tuple[str, str]]) -> None:
    """Import plugin files under the module names that pickles use."""
    for name, path in files:
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not Path(path).is_file():
            raise PluginError(f"plugin file {path}: it is not on this machine ({os.uname().nodename})")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with boundary(f"plugin file {path}: importing it", PluginError):
            spec.loader.exec_module(module)


def _use_threads(threads: int) -> None:
    """The environment sets this for later imports; an imported torch is set directly, without importing it."""
    torch = sys.modules.get("torch")
    if torch is not None and threads > 0:
        torch.set_num_threads(threads)
