"""Values that cross between the controller and an actor, pickled by us instead of by Ray."""

import pickle
from typing import Any

from ray import cloudpickle


class Sealed:
    """A pickled value.

    Ray unpickles arguments before the method begins, and pickles results after it has returned. A value that cannot be
    pickled would be an error of Ray's there, of a call that never had its turn. Arrays stay buffers, which Ray writes
    to its store and maps from there without another copy.
    """

    def __init__(self, value: Any) -> None:
        self._buffers: list[Any] = []
        self._pickle: Any = cloudpickle.dumps(value, protocol=5, buffer_callback=self._buffers.append)

    def __reduce__(self) -> Any:
        return _sealed, (pickle.PickleBuffer(self._pickle), self._buffers)

    def opened(self) -> Any:
        """The value; its arrays are read-only if it has crossed."""
        return pickle.loads(self._pickle, buffers=self._buffers)


def _sealed(payload: Any, buffers: list[Any]) -> Sealed:
    found = Sealed.__new__(Sealed)
    found._pickle, found._buffers = payload, buffers
    return found
