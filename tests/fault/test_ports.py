"""No setting fixes a port; where the ranks' meeting place was taken meanwhile, the error says which it was."""

import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.fault

MEETING = """
import sys
import torch
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.errors import WorkerError
try:
    Ranks(0, 2, sys.argv[1], torch.device("cpu"))
except WorkerError as error:
    print(error)
"""


def test_ranks_whose_meeting_place_is_taken_say_where_it_was_in_one_line() -> None:
    """Between the moment Ray's actor found the port free and the ranks' meeting, another process took it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", MEETING, place], capture_output=True, text=True, timeout=60, check=True
        )
    [line] = done.stdout.splitlines()
    assert line.startswith(f"rank 0 of 2: meeting the others at {place}: ")
    assert "address already in use" in line
