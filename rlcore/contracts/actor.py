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

        A run that records tokens calls this instead of `logprobs`. The entropy is recorded but not used in training.
        """
        return TokenScores(self.logprobs(batch))

    def expect(self, num_updates: int) -> None:
        """Called once before the first update, with the number of optimizer steps of the whole run; schedules of lr end
        there."""

    def begin_updates(self) -> None:
        """Called before the first update of a step, to move the state of updates to the device."""

    def end_updates(self) -> None:
        """Called after the last update of a step, and after an error, to free memory that only updates need.

        `publish` comes later, so servers that wake up for the new weights find the device free.
        """

    @abstractmethod
    def update(self, minibatch: Batch) -> Metrics:
        """Exactly one optimizer step; skipped, and counted in 'actor/skipped', when the gradient is not finite."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Set the version of the current weights; every token sampled from now on carries it."""

    def weights(self, version: int, directory: Path) -> WeightsHandle:
        """Write the current weights, named `version`, into the new `directory`, in the form that
        `WorkerContext.weights_kind` names: an adapter is merged unless it is 'adapter'.

        Rollout replicas that hold a copy of the weights read them. One rank writes. With 'tcp', 'shm' and 'nccl' the
        weights are copied in memory instead, and this process sends them to each replica that asks, until the next
        call. Replicas that share the actor's devices sleep meanwhile. Memory that this call takes there, such as
        gathered weights, must be freed when it returns.
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
        """Load the files of `save`, bit for bit."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts of the loaded model: num_parameters, context_length, vocabulary (token ids are below it)."""


ACTOR = Role("actor", ActorWorker)
"""The role that is trained."""
