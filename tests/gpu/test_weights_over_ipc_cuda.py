"""CUDA IPC itself: another process on the device maps the bucket and copies every weight."""

import json
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from rlcore.types import WeightsHandle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
RECEIVER = """
import json, sys
import torch
from rlcore.contracts.weight_ipc import weights_over_ipc
from rlcore.types import WeightsHandle
for number in range(2):
    weights = weights_over_ipc(WeightsHandle(1, "ipc", sys.argv[1], 1), "cuda:0")
    sums = {name: [str(t.device), t.reshape(-1).view(torch.uint8).long().sum().item()] for name, t in weights}
    print(json.dumps(sums))
"""


@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments:True"])
def test_another_process_on_the_device_gets_every_weight(settings: str) -> None:
    from rlcore.engines.ipc_server import IpcServer

    torch._C._accelerator_setAllocatorSettings(settings)
    tensors = {
        "large": torch.randn(3000, 1000, device="cuda:0").bfloat16(),
        "turned": torch.randn(600, 400, device="cuda:0").T,
        "none": torch.empty(0, 4, device="cuda:0"),
        "on the host": torch.randn(7),
    }
    with closing(IpcServer("cuda:0", 1)) as server:
        handle = WeightsHandle(1, "ipc", server.offer(), members=1)
        child = subprocess.Popen([sys.executable, "-c", RECEIVER, handle.path], stdout=subprocess.PIPE, text=True)
        for _ in range(2):
            server.send(1, tensors.items())
        lines = child.communicate(timeout=120)[0].splitlines()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    expected = {
        name: ["cuda:0", tensor.reshape(-1).view(torch.uint8).long().sum().item()] for name, tensor in tensors.items()
    }
    assert [json.loads(line) for line in lines] == [expected] * 2
