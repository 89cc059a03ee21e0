"""How long the controller waits for workers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlines:
    """Seconds that the controller waits for a worker before it gives up, by what it waits for."""

    setup_s: float = 1800.0
    call_s: float = 21600.0
    close_s: float = 10.0
