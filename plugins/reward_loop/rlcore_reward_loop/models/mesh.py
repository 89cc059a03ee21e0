"""A replica of several ranks: the first one decides what all of them compute, in which order.

Calls of a replica reach its ranks at different times, and batches depend on time. So the first rank forms the batches
and sends them to the others, whose thread waits for such instructions. A rank that fails ends its process: the others
wait for it in a collective operation, and the replica is restarted as a whole.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlcore import ConfigError, RlcoreError, WorkerContext, WorkerError
from rlcore.config import ModelConfig
from rlcore.contracts.reward_models import Conversations, RewardModel, until_padding
from rlcore.engines.hf import ClassifierEngine, pin_exactly, ranks_of
from rlcore.errors import boundary
from rlcore.types import Float32s
from rlcore_reward_loop.settings import ModelSettings

T = TypeVar("T")

SCORE, OFFLOAD, RELOAD, CLOSE = "score", "offload", "reload", "close"
RELEASE_S = 5.0
"""Timeout for the first rank to release the others when the replica is closed."""
FIRST_WAITS_S = 2.0
"""Seconds that the first rank waits before it ends, so that the controller first notices the rank that failed."""


class MeshClassifier:
    """A sequence classifier whose rows and weights are divided among the ranks of a replica.

    The first rank has the interface of `Classifier`; the others follow it until `close`.
    """

    def __init__(self, model: RewardModel, context: WorkerContext, settings: ModelSettings, key: str) -> None:
        """Load this rank's part; all ranks must come here. ConfigError or WorkerError naming the model."""
        if context.device != "cpu":
            pin_exactly()
        import torch

        if context.threads > 0:
            torch.set_num_threads(context.threads)
        self.conversations = Conversations(model)
        if self.conversations.pad_id is None:
            raise ConfigError(f"reward model '{model.path}': neither it nor its tokenizer names a padding token")
        ranks = ranks_of(context, settings.context_parallel)
        if ranks is None:
            raise WorkerError(f"{context}: found one rank; needs {key}.data_parallel above 1")
        self._ranks, self._name = ranks, str(context)
        self._engine = ClassifierEngine(
            ModelConfig(path=model.path),
            settings.engine(offload=True),
            name=context.role,
            device=context.device,
            section=key,
            path_key=f"{key}.path",
            shared_prefix=context.shared_prefix,
            ranks=ranks,
        )
        self._engine.begin_updates()
        self._loop = asyncio.get_running_loop()
        self._done = {OFFLOAD: asyncio.Semaphore(0), RELOAD: asyncio.Semaphore(0)}
        self._closing = False
        self._following = threading.Thread(target=self._follow, name="reward model", daemon=True)
        if not self.leads:
            self._following.start()

    @property
    def leads(self) -> bool:
        """True for the first rank."""
        return self._ranks.rank == 0

    @property
    def num_shares(self) -> int:
        """Shares of a batch that are computed at the same time."""
        return self._ranks.num // (1 if self._ranks.context is None else self._ranks.context.num)

    def scores(self, rows: list[Sequence[int]]) -> list[float]:
        """The configured output of each row; for the first rank."""
        pad_id = self.conversations.pad_id
        outputs_BL = self._lead({"do": SCORE, "rows": [until_padding(row, pad_id) for row in rows]})
        return [self.conversations.score(outputs_L) for outputs_L in outputs_BL.tolist()]

    def offload(self) -> None:
        """Move the weights of all ranks to host memory; for the first rank."""
        self._lead({"do": OFFLOAD})

    def reload(self) -> None:
        """Move the weights back; for the first rank."""
        self._lead({"do": RELOAD})

    async def offloaded(self) -> None:
        """Wait until this rank, which follows the first one, has moved its weights to host memory once more."""
        await self._done[OFFLOAD].acquire()

    async def reloaded(self) -> None:
        """The same for moving them back."""
        await self._done[RELOAD].acquire()

    def close(self) -> None:
        """Leave the other ranks. The first one releases them."""
        self._closing = True
        if self.leads:
            self._ranks.instructed({"do": CLOSE})
        else:
            self._following.join(RELEASE_S)
        if not self._following.is_alive():
            self._ranks.close()

    def _lead(self, instruction: Mapping[str, Any]) -> Float32s:
        return self._or_end(lambda: self._compute(self._ranks.instructed(instruction)))

    def _follow(self) -> None:
        """Follow the first rank's instructions; a separate thread, because waiting for them blocks it."""
        instruction: Mapping[str, Any] = {}
        while instruction.get("do") != CLOSE:
            instruction = self._or_end(self._next)
            if instruction["do"] in self._done:
                self._loop.call_soon_threadsafe(self._done[instruction["do"]].release)

    def _next(self) -> Mapping[str, Any]:
        """The next instruction, followed."""
        instruction = self._ranks.instructed()
        self._compute(instruction)
        return instruction

    def _compute(self, instruction: Mapping[str, Any]) -> Float32s:
        """(B, L) outputs of the rows of a SCORE, else empty."""
        do = instruction["do"]
        if do == SCORE:
            return self._engine.outputs(instruction["rows"])
        if do == OFFLOAD:
            self._engine.end_updates()
        if do == RELOAD:
            self._engine.begin_updates()
        return np.zeros((0, 0), dtype=np.float32)

    def _or_end(self, work: Callable[[], T]) -> T:
        """The result. If it fails, the process ends with the error as its last words."""
        try:
            with boundary(self._name, WorkerError):
                return work()
        except RlcoreError as error:
            if self._closing:
                sys.exit()  # ends the thread: the first rank left without a word
            if self.leads:
                time.sleep(FIRST_WAITS_S)
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)
