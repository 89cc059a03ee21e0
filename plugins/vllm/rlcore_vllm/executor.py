"""vLLM executors that end with the process that started the engine.

vLLM runs its engine in a separate process, which outlives a parent that was killed. An executor is created in that
process, so it can ask the kernel to kill it with its parent. `rlcore_vllm.extension` does the same for its workers.
"""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # type: ignore[import-not-found]
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # type: ignore[import-not-found]

from rlcore_vllm.orphans import end_with_parent


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
