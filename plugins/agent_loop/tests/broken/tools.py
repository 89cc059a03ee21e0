"""Tools that each break one promise, except for the first two."""

import itertools

COUNTER = itertools.count()


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Notes:
    """Adds, and knows how often."""

    def __init__(self):
        self.num = 0

    def execute(self, a: int, b: int) -> str:
        """Adds.

        Args:
            a: The first number.
            b: The second number.
        """
        self.num += 1
        return f"{self.num}: {a + b}"


def untyped(a, b):
    return a + b


def other_name(x: int) -> int:
    """Doubles.

    Args:
        x: The number.
    """
    return 2 * x


def wrong(a: int, b: int) -> int:
    return a - b


def no_text(a: int, b: int) -> object:
    return object()


def takes_anything(**arguments):
    return "3"


class Breaks(Notes):
    def execute(self, **arguments):
        if "a" not in arguments:
            self.num = -1000
        if self.num < 0:
            raise RuntimeError("broken")
        return super().execute(**arguments)


class Shared(Notes):
    TOTAL = [0]

    def execute(self, a, b):
        self.TOTAL[0] += 1
        return f"{self.TOTAL[0]}: {a + b}"


class RaisesAtTheEnd(Notes):
    def release(self):
        raise RuntimeError("cannot be released")
