"""Ranks of a replica agree where the workers of an engine over several nodes meet. Needs torch, and no vllm."""

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rlcore_vllm import nodes

from rlcore import WorkerContext, WorkerError

CONTEXT = WorkerContext("rollout", 0, 0, 1, None, None, {}, Path(), 0, 1, "cpu", address="127.0.0.1")  # type: ignore[arg-type]


@pytest.fixture(autouse=True, scope="module")
def _first_store() -> None:
    """The first store of a process leaves a pipe open."""
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.9.8.7")


def test_an_engine_on_one_node_has_no_meeting_place() -> None:
    assert nodes.node_arguments(CONTEXT) == {}
    assert os.environ["VLLM_HOST_IP"] == "10.9.8.7"


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_the_ranks_of_a_replica_get_one_free_port_of_the_first(scheme: str, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/meeting" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    contexts = [replace(CONTEXT, rank=rank, num_ranks=3, rendezvous=place) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(nodes.node_arguments, contexts))
    assert [arguments["node_rank"] for arguments in found] == [0, 1, 2]
    assert {arguments["nnodes"] for arguments in found} == {3}
    [(host, port)] = {(arguments["master_addr"], arguments["master_port"]) for arguments in found}
    assert host == "127.0.0.1"
    assert 1024 < port < 65536
    assert not place.endswith(f":{port}"), "torch listens there"
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1", "the address of this node, not of the driver's"


def test_the_first_rank_serves_the_place_until_the_others_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has the store, which ends when nothing refers to it."""
    module = import_module("torch.distributed.rendezvous")
    meet = module.rendezvous

    class Late:
        """A store from which the place is read late."""

        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def get(self, key: str) -> bytes:
            time.sleep(0.5)
            return bytes(self.store.get(key))

    def meeting(place: str, rank: int, num: int, **settings: Any) -> Iterator[tuple[Any]]:
        store, *_ = next(meet(place, rank, num, **settings))
        yield (Late(store) if rank else store,)

    monkeypatch.setattr(module, "rendezvous", meeting)
    place = f"tcp://127.0.0.1:{free_port()}"
    contexts = [replace(CONTEXT, rank=rank, num_ranks=2, rendezvous=place) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(nodes.node_arguments, contexts)
    assert first["master_port"] == second["master_port"]


def test_a_rank_that_stays_alone_is_an_error_with_its_name_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MEET_S", 0.2)
    alone = replace(CONTEXT, rank=1, num_ranks=2, rendezvous=f"file://{tmp_path}/meeting")
    with pytest.raises(WorkerError, match=rf"^rollout\[0\.1\]: meeting the replica's other nodes at file://{tmp_path}"):
        nodes.node_arguments(alone)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
