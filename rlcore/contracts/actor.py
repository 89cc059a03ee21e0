"""The role that trains the policy."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from rlcore.contracts.requests import Role
from rlcore.contracts.workers import Worker, concurrent
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
        """Called once before the first update, with the number of optimizer steps of the whole run.

        Learning-rate schedules end at that number; `Batch.updates_left` of a mini-batch says how far from it they are.
        """

    def begin_updates(self) -> None:
        """Called before the first update of a step, to move the state that updates need to the device."""

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
        """Write the current weights, as version `version`, into the new `directory`.

        `WorkerContext.weights_kind` names the form; with any but 'adapter', an adapter is merged into the weights. One
        rank writes, and rollout replicas with a copy of the weights read the files. With 'tcp', 'shm' and 'nccl', this
        call copies the weights in memory instead. This process then sends them to each replica that asks, until the
        next call. Replicas that share the actor's devices sleep during the call. It must free all memory that it takes
        there, such as gathered weights, before it returns.

        With 'ipc', it only makes the addresses, and `send_weights` sends the weights while the replicas load them.
        """
        raise WorkerError(
            f"{self.context}: {type(self).__name__} cannot hand its weights to another process; choose a rollout that "
            "is embedded in it"
        )

    def send_weights(self, handle: WeightsHandle) -> None:
        """Send the version of the handle, of kind 'ipc', to `handle.members` replicas, which load it meanwhile.

        Called after `weights`, once for all replicas, and again for each one that is restarted later; the weights have
        not changed since. A replica that goes meanwhile is left behind. It must free all memory that it takes on the
        device before it returns.
        """
        raise WorkerError(
            f"{self.context}: {type(self).__name__} cannot send its weights over IPC; choose another "
            "rollout.weight_sync"
        )

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the model directory (`model/`, for from_pretrained) and the training state below `directory`."""

    def snapshot(self) -> bool:
        """Copy the state that `save` would write into host memory, and return True; one `write_snapshot` follows.

        By default False: the worker cannot, so training waits for its `save`.
        """
        return False

    @concurrent
    async def write_snapshot(self, directory: Path) -> None:
        """Write the copy of the last `snapshot` as `save` would have written it at that time, and free its memory.

        The cluster calls it on a separate thread, and other calls, including updates, come meanwhile. A rank must not
        exchange data with other ranks in it.
        """
        raise WorkerError(f"{self.context}: {type(self).__name__} takes no snapshots, so there is none to write")

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load the files of `save`, bit for bit."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts of the loaded model: num_parameters, context_length, vocabulary (token ids are below it)."""


ACTOR = Role("actor", ActorWorker)
"""The role that trains the policy."""
