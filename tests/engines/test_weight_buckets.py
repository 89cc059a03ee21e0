"""Tensors packed into buckets of a fixed size."""

from typing import Any

import pytest

from rlcore.contracts.weight_stream import PiecesOfTensors

torch = pytest.importorskip("torch")
weight_buckets = pytest.importorskip("rlcore.engines.weight_buckets")


def some_tensors() -> dict[str, Any]:
    return {
        "matrix": torch.randn(3, 7).bfloat16(),
        "byte": torch.arange(3).byte(),
        "long": torch.arange(9),
        "none": torch.empty(0, 4),
        "turned": torch.randn(5, 2).T,
        "trained": torch.nn.Parameter(torch.randn(4)),
        "number": torch.tensor(2.5),
    }


@pytest.mark.parametrize("size", [1, 7, 64, 2**20])
def test_buckets_hold_every_byte_once_and_in_order(size: int) -> None:
    tensors, bucket = some_tensors(), torch.empty(size, dtype=torch.uint8)
    found, sizes, put_together = {}, [], PiecesOfTensors()
    for pieces, filled in weight_buckets.packed(tensors.items(), bucket):
        sizes.append(len(filled))
        offset = 0
        for piece in pieces:
            assert piece.offset == offset, "no gaps"
            put_together.place(piece).copy_(filled[offset : offset + piece.num_bytes])
            offset += piece.num_bytes
            if (tensor := put_together.finished(piece)) is not None:
                found[piece.name] = tensor
        assert offset == len(filled)
        bucket.fill_(255)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert sizes == [min(size, total - begin) for begin in range(0, total, size)]
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_nothing_is_packed_without_tensors() -> None:
    assert list(weight_buckets.packed([], torch.empty(4, dtype=torch.uint8))) == []


def test_each_tensor_is_read_before_the_next_one_is_made() -> None:
    memory = torch.empty(4)

    def reused() -> Any:
        for number in range(3):
            yield str(number), memory.fill_(number)

    bucket = torch.empty(64, dtype=torch.uint8)
    [(_, filled)] = weight_buckets.packed(reused(), bucket)
    assert filled.view(torch.float32).tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
