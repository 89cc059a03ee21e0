"""Files of a checkpoint: written as an engine produces them, or copied into host memory and written later.

Tensors are safetensors, everything else is JSON or text, nothing is pickled.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore.engines.hf.train.sharded_tensors import HOST
from rlcore.errors import CheckpointError, boundary

OF_TORCH = {"format": "pt"}
"""Metadata of files that transformers and peft open."""
STEP = re.compile(r"step_(\d+)")
"""Name of a checkpoint's directory."""


@dataclass(frozen=True, eq=False)
class StateFile:
    """One file, with its path relative to a directory that is not yet known."""

    path: str
    content: bytes | Mapping[str, Tensor]
    """Tensors may be on any device, and may change after the file has been written or copied."""
    metadata: Mapping[str, str] | None = None
    """Of tensors."""
    weights: Collection[str] = ()
    """Names of the tensors that must be finite in a checkpoint; a restore would refuse them."""

    def below(self, directory: str) -> "StateFile":
        """The file in a subdirectory."""
        return replace(self, path=f"{directory}/{self.path}")

    def copied(self) -> "StateFile":
        """The file with private copies of its tensors in host memory."""
        if isinstance(self.content, bytes):
            return self
        return replace(self, content=private_copies(self.content))

    def check(self) -> None:
        """CheckpointError if a weight is not finite."""
        if not isinstance(self.content, bytes):
            found = {name: self.content[name] for name in self.weights}
            check_finite(self.path, found, "training has diverged, and this step is not saved; lower the learning rate")

    def write(self, directory: Path) -> None:
        """Write it below `directory`; CheckpointError if that fails."""
        from safetensors.torch import save_file

        target = directory / self.path
        with boundary(f"checkpoint '{directory}': writing {self.path}", CheckpointError):
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(self.content, bytes):
                target.write_bytes(self.content)
                return
            tensors = {name: tensor.detach().to(HOST).contiguous() for name, tensor in self.content.items()}
            save_file(tensors, target, None if self.metadata is None else dict(self.metadata))


class StateCopy:
    """Copies of files in host memory, unaffected by training."""

    def __init__(self, files: Iterable[StateFile]) -> None:
        self._files = [file.copied() for file in files]

    def write(self, directory: Path) -> None:
        """Write each file and free its memory; any thread may do it, once.

        CheckpointError if that fails, or if a weight is not finite.
        """
        while self._files:
            file = self._files.pop(0)
            file.check()
            file.write(directory)


def write_files(files: Iterable[StateFile], directory: Path, *, checked: bool = False) -> None:
    """Write each file before the next one is made; CheckpointError if that fails, or if a weight of a `checked` file is
    not finite."""
    for file in files:
        if checked:
            file.check()
        file.write(directory)


def check_restored(source: Path, weights: Mapping[str, Tensor]) -> None:
    """CheckpointError if a weight read from `source`, a part of a checkpoint, has numbers that are not finite.

    It names the newest earlier checkpoint of the run. `--resume` would take this one again.
    """
    needed = "use another checkpoint"
    for path in (path for path in source.parents if STEP.fullmatch(path.name)):
        others = [other for other in path.parent.iterdir() if -1 < _step(other) < _step(path)]
        if earlier := max(others, key=_step, default=None):
            needed = f"start a new run with --resume-from {earlier}, or remove '{path}' and continue with --resume"
    check_finite(f"checkpoint '{source}'", weights, needed)


def _step(path: Path) -> int:
    """The step in a checkpoint's name; -1 for another name."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def check_finite(where: str, weights: Mapping[str, Tensor], needed: str) -> None:
    """CheckpointError if a weight has numbers that are not finite; of a sharded one, this rank's rows are checked."""
    for name, weight in weights.items():
        shard = weight.to_local() if isinstance(weight, DTensor) else weight
        # smallest and largest, either of which is NaN if a number is: no copy of the weight is made, as isfinite would
        if shard.numel() and not all(bool(bound.isfinite()) for bound in shard.detach().aminmax()):
            raise CheckpointError(f"{where}: weight '{name}' has numbers that are not finite; {needed}")


def settings_files(save: Callable[[str], None]) -> Iterator[StateFile]:
    """The files that `save` writes into a directory, except for tensor files."""
    with TemporaryDirectory(prefix="rlcore-settings-") as directory:
        save(directory)
        paths = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
        texts = {
            path.relative_to(directory).as_posix(): path.read_bytes() for path in paths if path.suffix != ".safetensors"
        }
    yield from (StateFile(name, text) for name, text in texts.items())


@torch.no_grad()
def private_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Private copies on the host; tensors that share their memory share the copy."""
    made: dict[tuple[object, ...], Tensor] = {}
    keys = {name: (tensor.untyped_storage()._cdata, tensor.storage_offset()) for name, tensor in tensors.items()}
    for name, key in keys.items():
        if key not in made:
            made[key] = tensors[name].detach().to(HOST, copy=True).contiguous()
    return {name: made[key] for name, key in keys.items()}
