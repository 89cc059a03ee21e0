"""Functions that are called before something happens."""

from collections.abc import Callable


class Listeners(list[Callable[[], None]]):
    """Calls each of them in order."""

    def __call__(self) -> None:
        for listener in self:
            listener()
