"""The tensors that a `WeightsHandle` names, from files or over TCP, with one call."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.weights import check_readable, weights_of
from rlcore.errors import WorkerError
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")


@pytest.fixture
def tensors() -> dict[str, Any]:
    return {"a.weight": torch.randn(3, 4), "b.weight": torch.arange(5.0).bfloat16(), "c.bias": torch.zeros(2)}


@pytest.fixture
def server() -> Iterator[Any]:
    from rlcore.engines.weight_server import tcp_server

    with closing(tcp_server("127.0.0.1")) as opened:
        yield opened


def written(directory: Path, tensors: dict[str, Any]) -> WeightsHandle:
    """A model directory with its weights in two files."""
    from safetensors.torch import save_file

    directory.mkdir()
    names = list(tensors)
    save_file({names[0]: tensors[names[0]]}, directory / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[1:]}, directory / "model-2.safetensors")
    return WeightsHandle(3, "directory", str(directory))


def equal(found: dict[str, Any], tensors: dict[str, Any]) -> bool:
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_all_files_of_a_directory_and_a_server_give_the_same_tensors(
    tmp_path: Path, server: Any, tensors: dict[str, Any]
) -> None:
    handles = [written(tmp_path / "model", tensors), WeightsHandle(3, "tcp", server.offer(tensors.items()))]
    for handle in handles:
        check_readable(handle)
        assert equal(dict(weights_of(handle)), tensors), handle.kind


def test_a_reader_that_stops_early_leaves_nothing_open(tmp_path: Path, server: Any, tensors: dict[str, Any]) -> None:
    for handle in (written(tmp_path / "model", tensors), WeightsHandle(3, "tcp", server.offer(tensors.items()))):
        with closing(weights_of(handle)) as weights:
            assert next(weights)[0] == "a.weight"
        with pytest.raises(StopIteration):
            next(weights)
        assert equal(dict(weights_of(handle)), tensors)


def test_a_directory_without_weights_is_named_with_its_version_before_anything_is_read(tmp_path: Path) -> None:
    handle = WeightsHandle(7, "directory", str(tmp_path))
    message = f"version 7 of the weights: no safetensors file in '{tmp_path}'; rollout.weights_dir must be"
    for read in (check_readable, lambda handle: next(weights_of(handle))):
        with pytest.raises(WorkerError, match=message):
            read(handle)


def test_a_file_that_is_torn_and_a_server_that_has_gone_are_errors_that_name_them(
    tmp_path: Path, server: Any, tensors: dict[str, Any]
) -> None:
    handle = written(tmp_path / "model", tensors)
    (tmp_path / "model" / "model-2.safetensors").write_bytes(b"torn")
    with pytest.raises(WorkerError, match=f"weights: reading them in '{tmp_path / 'model'}'"):
        dict(weights_of(handle))
    address = server.offer(tensors.items())
    server.close()
    with pytest.raises(WorkerError, match=r"weights: receiving them from 127\.0\.0\.1:\d+: "):
        dict(weights_of(WeightsHandle(3, "tcp", address)))
