"""Fixtures of the tests that need a device."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _device_is_open() -> None:
    """A process opens a device once, and keeps its descriptors and threads: no test leaves them behind."""
    if torch.cuda.is_available():
        weight = torch.ones(2, 2, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()
        torch.cuda.synchronize()
