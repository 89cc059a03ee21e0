"""Weights that go from the actor's process to a replica's: what is sent, to whom, and what is refused."""

import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import WorkerError
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")
link = pytest.importorskip("rlcore.engines.weight_server")
weights = pytest.importorskip("rlcore.contracts.weights")


def some_tensors() -> dict[str, Any]:
    """Of several types and sizes, some not in one piece, some without a number."""
    return {
        "matrix": torch.randn(30, 7),
        "long": torch.arange(7),
        "number": torch.tensor(2.5),
        "half": torch.randn(11, 3).bfloat16(),
        "none": torch.empty(0, 4),
        "turned": torch.randn(6, 4).T,
        "parameter": torch.nn.Parameter(torch.randn(300)),
    }


def equal(found: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    """The same names in the same order, types and numbers."""
    return list(found) == list(tensors) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items()
    )


@pytest.fixture
def server() -> Iterator[Any]:
    opened = link.tcp_server("127.0.0.1")
    yield opened
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]


def test_a_client_with_the_address_gets_every_tensor_as_it_was_offered_at_any_time(server: Any) -> None:
    tensors = some_tensors()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    address = server.offer(tensors.items())
    assert address.startswith("127.0.0.1:")
    for tensor in tensors.values():
        tensor.detach().zero_()  # as an update does
    with ThreadPoolExecutor() as threads:
        taken = [threads.submit(lambda: dict(weights.received(address))) for _ in range(3)]
        assert all(equal(task.result(), before) for task in taken)
    later = server.offer(tensors.items())
    assert equal(dict(weights.received(later)), tensors)


@pytest.mark.parametrize("kind", ["tcp", "shm", "nccl", "ipc"])
def test_a_wrong_secret_is_logged_once_on_the_side_of_the_weights(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    from rlcore.engines.group_server import group_server
    from rlcore.engines.ipc_server import IpcServer
    from rlcore.engines.memory_server import memory_server

    openers: dict[str, Any] = {
        "tcp": lambda: link.tcp_server("127.0.0.1"),
        "shm": memory_server,
        "nccl": lambda: group_server("127.0.0.1", 1, "gloo", "cpu"),
        "ipc": lambda: IpcServer("cpu", 1),
    }
    server = openers[kind]()
    address = server.offer() if kind == "ipc" else server.offer([("one", torch.ones(1))])
    place, _, secret = address.rpartition("/")
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"the sender has gone, has other weights by now, or another secret$"):
            dict(weights.weights_of(WeightsHandle(1, kind, f"{place}/{'0' * len(secret)}")))
    server.close()
    logged = [record.getMessage() for record in caplog.records if "wrong secret" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].startswith(
        f"weights: a process {'of this machine' if kind in ('shm', 'ipc') else 'at 127.0.0.1'} asked for "
    )
    assert secret not in logged[0]


def test_an_address_is_good_for_one_version_and_for_those_who_know_the_secret(server: Any) -> None:
    first = server.offer(some_tensors().items())
    place, _, secret = first.rpartition("/")
    refused = f"weights: receiving them from {place}: EOFError: 8 of 8 bytes are missing"
    with pytest.raises(WorkerError, match=refused):
        next(weights.received(f"{place}/{'0' * len(secret)}"))
    second = server.offer(some_tensors().items())
    assert second != first
    with pytest.raises(WorkerError, match=refused) as caught:
        next(weights.received(first))
    assert secret not in str(caught.value)
    assert len(dict(weights.received(second))) == len(some_tensors())


@pytest.mark.slow
def test_a_client_that_leaves_halfway_and_a_silent_one_harm_no_other(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "EXCHANGE_S", 0.5)
    monkeypatch.setattr(weights, "EXCHANGE_S", 0.5)
    large = {"large": torch.randn(3000, 1000), "other": torch.randn(3000, 1000)}
    address = server.offer(large.items())
    silent = socket.create_connection(("127.0.0.1", int(address.rpartition("/")[0].rpartition(":")[2])))
    gone = weights.received(address)
    assert next(gone)[0] == "large"
    gone.close()
    assert equal(dict(weights.received(address)), large)
    silent.settimeout(5)
    assert silent.recv(1) == b"", "it was let go"
    silent.close()


def test_a_moment_without_free_file_descriptors_refuses_no_later_client(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.offer([("number", torch.tensor(1.0))])
    port = int(address.rpartition("/")[0].rpartition(":")[2])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno(), limits[1]))  # so that accept() gets none
        try:
            client.connect(("127.0.0.1", port))
            until = time.monotonic() + 10.0
            while not caplog.messages and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert equal(dict(weights.received(address)), {"number": torch.tensor(1.0)})
    (line,) = caplog.messages
    assert line.startswith("weights: a replica could not be accepted: OSError: [Errno 24] Too many open files; ")


def test_a_sender_that_is_gone_is_an_error_that_names_it() -> None:
    server = link.tcp_server("127.0.0.1")
    address = server.offer([("large", torch.randn(3000, 3000)), ("other", torch.randn(3000, 3000))])
    place = address.rpartition("/")[0]
    taking = weights.received(address)
    next(taking)
    server.close()
    with pytest.raises(WorkerError, match=f"weights: receiving them from {place}: "):
        next(taking)
    with pytest.raises(WorkerError, match=f"weights: receiving them from {place}: ConnectionRefusedError"):
        next(weights.received(address))
    with pytest.raises(WorkerError, match=r"weights: listening on 192\.0\.2\.1: OSError"):
        link.tcp_server("192.0.2.1")


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        (
            "Qwen2Moe",
            {
                "num_experts": 4,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "num_key_value_heads": 4,
            },
        ),
    ],
)
@pytest.mark.parametrize("adapted", [False, True])
def test_what_is_sent_is_what_would_be_written(
    architecture: str, settings: Mapping[str, Any], adapted: bool, tmp_path: Path
) -> None:
    """Also of models whose weights transformers holds under other names than its files, and in other tensors."""
    if adapted:
        pytest.importorskip("peft")
    from safetensors.torch import load_file

    from rlcore.config import LoraConfig, ModelConfig
    from rlcore.engines.hf.train.model import ModelKind, load_model
    from rlcore.engines.hf.train.state import save_whole, whole_tensors

    lora = LoraConfig(enabled=adapted, rank=4)
    base = write_tiny_model(tmp_path / "tiny", architecture, **settings)
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(base)), dtype="float32", device="cpu", lora=lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    save_whole(model, tmp_path / "whole")
    written, sent = load_file(tmp_path / "whole" / "model.safetensors"), whole_tensors(model)
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.items())
