"""Packs tensors into a bucket of fixed size, which is sent whenever it is full."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlcore.contracts.weight_stream import Piece
from rlcore.engines.weight_server import type_of


def packed(tensors: Iterable[tuple[str, Tensor]], bucket_N: Tensor) -> Iterator[tuple[list[Piece], Tensor]]:
    """Yields the pieces in the bucket and its filled part, for all tensors in order and without gaps.

    The next tensors go into the same bucket when the iteration continues. Of `tensors`, each is read before the next
    one is made.
    """
    pieces: list[Piece] = []
    used = 0
    for name, tensor in tensors:
        bytes_M = tensor.detach().reshape(-1).view(torch.uint8)
        begin, more = 0, True
        while more:  # once for an empty tensor
            if used == len(bucket_N):
                yield pieces, bucket_N
                pieces, used = [], 0
            num = min(len(bucket_N) - used, len(bytes_M) - begin)
            bucket_N[used : used + num].copy_(bytes_M[begin : begin + num])
            pieces.append(Piece(name, type_of(tensor), list(tensor.shape), used, begin, num))
            used, begin = used + num, begin + num
            more = begin < len(bytes_M)
    if pieces:
        yield pieces, bucket_N[:used]
