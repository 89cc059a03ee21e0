"""The role that trains the policy."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from rlcore.contracts.requests import Role
from rlcore.contracts.workers import Worker
from rlcore.errors import WorkerError
from rlcore.types import Batch, Float32s, Metrics, TokenScores, WeightsHandle


class ActorWorker(Worker):
    """Owns the policy's weights and optimizer."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> Float32s:
        """(B, T) log-probs of the batch's tokens under the current weights and the rollout's temperature."""

    def token_scores(self, batch: Batch) -> TokenScores:
        """Log-probs as `logprobs` returns them, with the entropy of each token if the same pass can compute it.

        A run that records tokens calls this instead of `logprobs`. The entropy is recorded, and never trained on.
        """
        return TokenScores(self.logprobs(batch))

    def expect(self, num_updates: int) -> None:
        """Told once before the first update how many optimizer steps the whole run makes; schedules of lr end there."""

    def begin_updates(self) -> None:
        """Called before the first update of a step: the time to bring what an update needs to the device."""

    def end_updates(self) -> None:
        """Called after the last update of a step, and after an error: the time to free what only an update needs.

        Comes before `publish`, so servers that wake up for the new weights find the device free.
        """

    @abstractmethod
    def update(self, minibatch: Batch) -> Metrics:
        """Exactly one optimizer step; skipped, and counted in 'actor/skipped', when the gradient is not finite."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Give the current weights their version, which every token sampled from now on carries."""

    def weights(self, version: int, directory: Path) -> WeightsHandle:
        """Write the current weights, named `version`, into the new `directory`, in the form that
        `WorkerContext.weights_kind` names: an adapter is merged unless it is 'adapter'.

        Rollout replicas that hold a copy of the weights read them. One rank writes. With 'tcp' the weights are copied
        in memory instead, and this process sends them to each replica that asks, until the next call. Replicas that
        share the actor's devices sleep meanwhile, so what this call needs there, such as gathered weights, is freed
        when it returns.
        """
        raise WorkerError(
            f"{self.context}: {type(self).__name__} cannot hand its weights to another process; choose a rollout that "
            "is embedded in it"
        )

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the model directory (`model/`, opened by from_pretrained) and the training state below `directory`."""

    def snapshot(self) -> bool:
        """Copy into host memory what `save` would write now, and return True: `write_snapshot` follows once.

        False, as here: this worker cannot, and training waits for its `save` instead.
        """
        return False

    async def write_snapshot(self, directory: Path) -> None:
        """Write the copy that the last `snapshot` made as `save` would have written it then, and free its memory.

        Other calls, updates among them, come meanwhile, so it must not keep the worker's loop; with several ranks it
        makes no exchange with them.
        """
        raise WorkerError(f"{self.context}: {type(self).__name__} takes no snapshots, so there is none to write")

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load what `save` wrote, bit for bit."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts of the loaded model: num_parameters, context_length, vocabulary (token ids are below it)."""


ACTOR = Role("actor", ActorWorker)
"""The role that is trained."""
