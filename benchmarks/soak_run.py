"""The run of the soak: its files, its controller process, and the services that it calls."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from soak_parts import share

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.service import ServiceAnswer, ServiceCall, chat_answer
from rlcore.testing.tiny import write_tiny_classifier, write_tiny_model

PARTS = Path(__file__).with_name("soak_parts.py")
PROMPTS, PROMPTS_PER_STEP, SAMPLES = 50, 4, 4
CHECKPOINT_STEPS = 5
REPLICAS = 2
"""Replicas of the rollout, unless the actor samples itself, and of the reward model."""
MODEL_TOKENS = 1024
CONTROLLER = '''
"""`rlcore` with a clock that jumps: `time.time` of the controller adds what the file says.

Workers are marked by role in `pids`, and again when they are set up.
"""
import os, pathlib, sys, time

real, path = time.time, os.path.join(os.path.dirname(os.path.abspath(__file__)), "clock")

def jumping():
    try:
        with open(path) as file:
            return real() + float(file.read() or 0)
    except (OSError, ValueError):
        return real()

time.time = jumping
from rlcore.cli import main
from rlcore.cluster.child import ChildProcess

set_up, pids = ChildProcess.setup, pathlib.Path(__file__).parent / "pids"

async def marked(self, *arguments):
    role, bracket, _ = self.name.partition("[")
    kind = {"actor": "actor", "rollout": "rollout", "liker": "model"}.get(role)
    if kind and bracket:
        (pids / f"{kind}.{self.pid}").touch()
    await set_up(self, *arguments)
    if kind and bracket:
        (pids / f"ready.{self.pid}").touch()

ChildProcess.setup = marked
sys.exit(main())
'''
RESPONSE = re.compile(r"<response-\w+>(.*)</response-\w+>", re.DOTALL)


class Weather:
    """Misbehaviour of the services, such as delays and refusals; faults switch it on."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.refusals = 0
        """Number of next requests that are answered 429 or 503."""
        self.drops = 0
        """Number of next requests that are cut off before an answer."""
        self.nonsense: list[ServiceAnswer] = []
        """Answers to the next requests, one answer per request."""
        self.served = 0

    def score(self, call: ServiceCall) -> ServiceAnswer:
        """The script of the reward service."""
        return self._but(lambda: ServiceAnswer({"score": share(json.dumps(call.json()["completion"]))}))

    def judge(self, call: ServiceCall) -> ServiceAnswer:
        """The script of the judge."""

        def judged() -> ServiceAnswer:
            found = RESPONSE.search(call.json()["messages"][-1]["content"])
            return chat_answer(json.dumps({"score": round(10 * share(found.group(1) if found else ""), 3)}))

        return self._but(judged)

    def _but(self, answer: Any) -> ServiceAnswer:
        self.served += 1
        if self.refusals:
            self.refusals -= 1
            busy = self.refusals % 2
            return ServiceAnswer({}, 429 if busy else 503, {"Retry-After": "0.2"} if busy else {})
        if self.drops:
            self.drops -= 1
            return ServiceAnswer({}, cut_at=-1)
        if self.nonsense:
            return self.nonsense.pop()
        result: ServiceAnswer = answer()
        return ServiceAnswer(result.body, after_s=self.stall_s) if self.stall_s else result


def config(
    work: Path, scene: str, urls: dict[str, list[str]], seed: int, update_s: float, engine: str = "null"
) -> dict[str, Any]:
    """The run's configuration; `scene` names the agent, and `engine` the engine that samples and trains."""
    parts = work / "parts.py"
    agents: dict[str, Any] = {"max_turns": 3, "turn_tokens": 12, "children": 2}
    if scene == "tools":
        agents |= {
            "tools": {"echo": {"fn": f"{parts}:echo", "deadline_s": 300.0}},
            "parser": f"{parts}:always",
            "describe_tools": "never",
        }
    elif scene == "program":
        agents = {"max_turns": 4, "agent": {"fn": f"{parts}:agent", "children": 2, "threads": 4}, "time_s": 3600.0}
    rollout, actor, engines = _engines(engine, update_s)
    return {
        "model": {"path": "" if engine == "null" else str(work / "model"), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(work / "prompts.jsonl")}}},
        "rollout": {"samples_per_prompt": SAMPLES, "max_tokens": 48, **rollout},
        "actor": actor,
        "reward": {
            "error_budget_frac": 1.0,
            "functions": {
                "low": {"fn": f"{parts}:low", "children": 2, "on_failure": "retry", "tries": 20, "deadline_s": 300.0}
            },
        },
        "cluster": {"max_restarts": 100000, "threads": 1},
        "train": {
            "seed": seed,
            "dir": str(work / "runs"),
            "max_steps": 1_000_000,
            "prompts_per_step": PROMPTS_PER_STEP,
            "log_completions_every": 0,
        },
        "checkpoint": {"every_steps": CHECKPOINT_STEPS, "keep": 4},
        "plugins": {
            **({} if scene == "single" else {"agent_loop": agents}),
            "reward_loop": _reward_loop(urls, None if engine == "null" else work / "classifier"),
            **engines,
        },
    }


def _engines(engine: str, update_s: float) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of the rollout, of the actor and of their plugins."""
    if engine == "null":
        rollout = {"backend": "null_replica", "replicas": REPLICAS}
        return rollout, {"backend": "null", "lr": 0.02}, {"null": {"update_s": update_s}}
    actor = {"lr": 1e-3, "data_parallel": 2 if engine == "hf" else 1}
    if engine == "hf":
        return {"backend": "hf"}, actor, {}
    vllm = {"max_model_len": MODEL_TOKENS, "kv_cache_gib": 0.125, "enforce_eager": True}
    return {"backend": "vllm", "replicas": REPLICAS}, actor, {"vllm": vllm}


def _reward_loop(urls: dict[str, list[str]], classifier: Path | None) -> dict[str, Any]:
    """A service, a judge and a reward model: a classifier, or a function of the text.

    The classifier computes one conversation at a time, so its scores do not depend on other requests.
    """
    model: dict[str, Any] = {"path": "none", "backend": "soak_model"}
    if classifier is not None:
        model = {"path": str(classifier), "tokenizer": "bytes", "batch_tokens": 1}
    service = {"tries": 50, "eject_s": 0.2, "deadline_s": 300.0}
    return {
        "rewards": {
            "helpful": {"served_by": "scorer", "weight": 0.1},
            "polite": {"kind": "judge", "served_by": "api", "weight": 0.01, "judge": {"model": "judge"}},
            "liked": {"kind": "model", "served_by": "liker", "weight": 0.1},
        },
        "services": {"scorer": {"urls": urls["score"], **service}, "api": {"urls": urls["judge"], **service}},
        "models": {
            "liker": {
                **model,
                "replicas": REPLICAS,
                "health_s": 0.2,
                "deadline_s": 300.0,
                "threads": 1,
            }
        },
        "expose": True,
        "audit": "failures",
    }


def write(work: Path, engine: str = "null") -> None:
    """The files that every run of the soak reads, with tiny models for real engines."""
    (work / "pids").mkdir(parents=True)
    shutil.copy(PARTS, work / "parts.py")
    (work / "controller.py").write_text(CONTROLLER)
    write_prompts(work / "prompts.jsonl", PROMPTS)
    if engine != "null":
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": MODEL_TOKENS}
        write_tiny_model(work / "model", **heads)
        write_tiny_classifier(work / "classifier", num_heads=1)


class Controller:
    """One life of the run: its process and its output."""

    def __init__(self, work: Path, name: str, number: int, *more: str, config: str = "config.json") -> None:
        settings = json.loads((work / config).read_text())
        sampler = settings["rollout"]["backend"]
        self.samples_itself = sampler == "hf"
        self.run = work / "runs" / name
        self.output_path = work / f"{name}-{number}.out"
        command = [
            sys.executable,
            str(work / "controller.py"),
            "train",
            str(work / config),
            f"train.name={name}",
            *more,
        ]
        command += ["--plugin", str(work / "parts.py")] if sampler == "null_replica" else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.began = time.monotonic()
        with self.output_path.open("w") as file:
            self._popen = subprocess.Popen(command, stdout=file, stderr=file, cwd=work, env=environment)
        self.process = psutil.Process(self._popen.pid)

    def ended(self) -> int | None:
        """The exit status; None while it runs."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send the signal, if the process still exists."""
        if self.ended() is None:
            self._popen.send_signal(number)

    def wait(self, limit_s: float) -> int:
        """The exit status. If the process hangs, it is killed and subprocess.TimeoutExpired is raised."""
        try:
            return self._popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the controller and all processes that it started, and wait for their end."""
        everyone = [self.process, *self.children()]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everyone, timeout=30.0)
        self._popen.wait()

    def text(self) -> str:
        """Everything that the controller printed."""
        return self.output_path.read_text(errors="replace")

    def children(self, kind: str = "") -> list[psutil.Process]:
        """Its living descendants, all or those of one kind."""
        try:
            found = self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        if not kind:
            return found
        marks = self.run.parent.parent / "pids"
        if kind == "engine":
            found = [child for child in found if _is_engine(child)]
        else:
            found = [child for child in found if (marks / f"{kind}.{child.pid}").exists()]
        return sorted(found, key=lambda child: child.pid)

    def is_whole(self) -> bool:
        """True if every replica of the rollout and the reward model is set up."""
        marks = self.run.parent.parent / "pids"
        ready = {
            kind: sum((marks / f"ready.{process.pid}").exists() for process in self.children(kind))
            for kind in ("rollout", "model")
        }
        return ready["model"] == REPLICAS and ready["rollout"] == (0 if self.samples_itself else REPLICAS)


def _is_engine(process: psutil.Process) -> bool:
    """True for the engine process below a replica of vLLM."""
    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def last_step(run: Path) -> int:
    """The last step in the metrics; 0 if there is none."""
    path = run / metrics.METRICS
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 32768))
        lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b'{"step":')]
    return int(json.loads(lines[-1])["step"]) if lines else 0
