"""vLLM executors that end with the process that started the engine.

vLLM runs its engine in a separate process, which outlives a parent that was killed. An executor is created in that
process, so it can ask the kernel to kill it with its parent; the executor's own workers end with it.
"""

import ctypes
import os
import signal

from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # type: ignore[import-not-found]
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # type: ignore[import-not-found]

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, or now if it has ended."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class BoundMultiprocExecutor(MultiprocExecutor):  # type: ignore[misc]
    """The engine's workers in separate processes."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class BoundUniProcExecutor(UniProcExecutor):  # type: ignore[misc]
    """The engine's only worker, in the engine's process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()
