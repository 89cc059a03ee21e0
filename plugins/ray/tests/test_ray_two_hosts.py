"""A run on two hosts: each is a network namespace with a separate loopback interface, and a link joins them.

The host's name is one of 127.0.0.1 in both, as on many machines. Needs root and iproute2.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.report import metrics
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_classifier, write_tiny_model

BIN = Path(sys.executable).parent
PORT = 6399


def _can_make_hosts() -> bool:
    """True if a network namespace and a link in it can be made."""
    if which("ip") is None:
        return False
    name = f"rlcore-probe-{os.getpid()}"
    link = ["ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other"]
    made = [
        subprocess.run(command, capture_output=True, check=False).returncode == 0
        for command in (["ip", "netns", "add", name], link, ["ip", "netns", "delete", name])
    ]
    return all(made)


pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("machine"),
    NEEDS_RAY,
    pytest.mark.skipif(not _can_make_hosts(), reason="needs root and iproute2 for network namespaces"),
]


class Host:
    """A network namespace with one address that the other host reaches."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def command(self, *command: object) -> list[str]:
        """The command, run on this host."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def do(self, *command: object) -> None:
        """Run it to its end; an error has its output."""
        done = subprocess.run(self.command(*command), text=True, capture_output=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")


@contextmanager
def two_hosts() -> Iterator[Sequence[Host]]:
    mark = secrets.token_hex(3)
    hosts = [Host(f"rlcore-{mark}-{number}", f"10.77.0.{number}") for number in (1, 2)]
    try:
        for host in hosts:
            subprocess.run(["ip", "netns", "add", host.name], check=True)
        ends = [("name", f"r{mark}{number}", "netns", host.name) for number, host in enumerate(hosts)]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for host, end in zip(hosts, ends, strict=True):
            host.do("ip", "address", "add", f"{host.address}/24", "dev", end[1])
            host.do("ip", "link", "set", "lo", "up")
            host.do("ip", "link", "set", end[1], "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], check=False)


@contextmanager
def ray_on(hosts: Sequence[Host]) -> Iterator[None]:
    """A Ray cluster with a node of two CPUs on each host; the first is the head."""
    first = hosts[0].address
    common = ("--num-cpus=2", "--object-store-memory=104857600", "--disable-usage-stats")
    try:
        for host in hosts:
            place = ("--head", f"--port={PORT}", "--include-dashboard=false")
            place = place if host is hosts[0] else (f"--address={first}:{PORT}",)
            host.do(BIN / "ray", "start", *place, f"--node-ip-address={host.address}", *common)
        yield
    finally:
        for host in hosts:  # a namespace does not hide processes: `ray stop` would end other clusters, too
            pids = subprocess.run(
                ["ip", "netns", "pids", host.name], text=True, capture_output=True, check=False
            ).stdout.split()
            subprocess.run(["kill", "-9", *pids], check=False) if pids else None


def settings_of(directory: Path) -> dict[str, Any]:
    """An actor and a reward model with a rank on each host."""
    classifier = {"path": str(write_tiny_classifier(directory / "classifier")), "tokenizer": "bytes", "cpus": 0.3}
    plugin = {
        "rewards": {"liked": {"kind": "model", "served_by": "judge"}},
        "models": {"judge": {**classifier, "data_parallel": 2, "sharding": "fsdp2"}},
    }
    values = run_settings(
        directory,
        16,
        **{
            "model.path": write_tiny_model(directory / "tiny"),
            "actor.backend": "hf",
            "actor.data_parallel": 2,
            "actor.sharding": "fsdp2",
            "rollout.backend": "hf",
            "rollout.samples_per_prompt": 4,
            "cluster.threads": 1,
            "cluster.pools.main.nodes": 2,
            "cluster.pools.reward.nodes": 2,
            "plugins.ray.address": f"10.77.0.1:{PORT}",
            "plugins.reward_loop": json.dumps(plugin),
            "train.max_steps": 2,
            "train.name": "run",
        },
    )
    return {key: value for key, value in values.items() if not key.startswith("reward.functions")}


def test_ranks_on_two_hosts_train_and_score_although_both_have_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with two_hosts() as hosts, ray_on(hosts):
        overrides = [f"{key}={value}" for key, value in settings_of(tmp_path).items()]
        command = hosts[0].command(sys.executable, "-m", "rlcore", "train", *overrides)
        done = subprocess.run(command, text=True, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [row for row in metrics.read(tmp_path / "runs" / "run") if "reward/mean" in row]
    assert len(steps) == 2
    assert all(step["reward/failed"] == 0.0 for step in steps)
