"""Seeds of turns: numpy's SeedSequence, for all samples of a rollout at once.

What a SeedSequence does is a few dozen operations on 32-bit numbers, by an algorithm that numpy promises to keep
(numpy.random.SeedSequence, after O'Neill's seed_seq); making the object takes far longer than the operations.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlcore.agents import RolloutTask

Words = npt.NDArray[np.uint32]

AT_ONCE = 4
"""Turns whose seeds are made together."""
WORTH_IT = 16
"""Seeds for which one call of arrays takes less time than a SeedSequence each."""
_POOL = 4
_MASK = 0xFFFFFFFF


def turn_seed(entropy: Sequence[int]) -> int:
    """The first 32-bit word of SeedSequence(entropy)."""
    return int(np.random.SeedSequence(list(entropy)).generate_state(1, np.uint32)[0])


def turn_seeds(entropy: Sequence[Words]) -> Words:
    """(N,) `turn_seed` of each row; `entropy` are at most four arrays (N,), one a 32-bit word of SeedSequence's own."""
    constants = _constants(0x43B0D7E5, 0x931E8875, _POOL * _POOL + 1)
    place = 0

    def hashed(words_N: Words) -> Words:
        nonlocal place
        mixed_N = (words_N ^ constants[place]) * constants[place + 1]
        place += 1
        return mixed_N ^ (mixed_N >> np.uint32(16))

    zeros_N = np.zeros_like(entropy[0])
    pool = [hashed(entropy[index] if index < len(entropy) else zeros_N) for index in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed_N = np.uint32(0xCA01F9DD) * pool[target] - np.uint32(0x4973F715) * hashed(pool[source])
                pool[target] = mixed_N ^ (mixed_N >> np.uint32(16))
    first, second = _constants(0x8B51F9DD, 0x58F38DED, 2)
    state_N = (pool[0] ^ first) * second
    return state_N ^ (state_N >> np.uint32(16))


class TurnSeeds:
    """The seeds of the later turns of a rollout's samples."""

    def __init__(self, tasks: Sequence[RolloutTask]) -> None:
        self._tasks = tasks
        self._found: dict[tuple[int, int, int], int] = {}
        self._made: set[int] = set()
        """Blocks of turns whose seeds were made."""

    def of(self, seed: int, sample: int, turn: int) -> int:
        """`turn_seed` of the three: each turn draws from a stream of its own, or all would begin with the same numbers.

        A seed is asked for once.
        """
        block = turn // AT_ONCE
        if block not in self._made:
            self._made.add(block)
            self._make(range(block * AT_ONCE, (block + 1) * AT_ONCE))
        found = self._found.pop((seed, sample, turn), None)
        return turn_seed((seed, sample, turn)) if found is None else found

    def _make(self, turns: range) -> None:
        for many in (False, True):  # a seed of more than 32 bits is two words
            keys = [
                (task.seed, sample, turn)
                for task in self._tasks
                if 0 <= task.seed < 2**64 and (task.seed > _MASK) is many
                for sample in range(task.n)
                for turn in turns
            ]
            if len(keys) < WORTH_IT:
                continue
            seeds_N, samples_N, turns_N = np.array(keys, dtype=np.uint64).T
            words = [seeds_N & _MASK, seeds_N >> np.uint64(32)] if many else [seeds_N]
            found_N = turn_seeds([each.astype(np.uint32) for each in (*words, samples_N, turns_N)])
            self._found.update(zip(keys, found_N.tolist(), strict=True))


def _constants(first: int, factor: int, num: int) -> list[np.uint32]:
    """A constant of the hash and its successors."""
    found = [first]
    for _ in range(num - 1):
        found.append(found[-1] * factor & _MASK)
    return [np.uint32(each) for each in found]
