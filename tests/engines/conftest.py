"""Makes the modules shared by tests of engines importable, which are in this directory; fixtures of several files."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest

from rlcore.plan.cpu_products import MAX_ISA, bfloat16_instructions


@pytest.fixture
def native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's products of bfloat16, which other tests do without; skips where it has none."""
    monkeypatch.setenv(MAX_ISA, "DEFAULT")
    if not bfloat16_instructions():
        pytest.skip("this CPU has no products of bfloat16")


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[None]:
    """`outputs_of_ranks` works: see forked_ranks.py."""
    from forked_ranks import ranks_to_be_forked

    with ranks_to_be_forked():
        yield


@pytest.fixture(scope="module")
def opened_once() -> None:
    """libuv opens a pipe with the first store of a process, and keeps it."""
    import torch.distributed

    distributed: Any = torch.distributed  # its stub does not export the stores
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
