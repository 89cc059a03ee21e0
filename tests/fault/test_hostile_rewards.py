"""One run with reward functions that do what none should: each fails or is scored, and every step is taken."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.testing import write_prompts

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

FILE = Path(__file__).parent.parent / "broken" / "hostile_rewards.py"
NAMES = [node.name for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.FunctionDef)]
SCORED = {
    *("half", "usr1_parent", "pipe_parent", "winch_parent", "chdir", "stdout_none", "setlocale", "rlim", "rlimfd"),
    *("ignore", "thread", "numpy_", "numpy_obj", "decimal_", "forkreturn", "boolean", "nums_tiny"),
}
"""Rewards that harm nothing that scores need."""
OTHERS = {"setattr_mod", "excepthook", "nones"}
"""Rewards that break their own child after a first score, and rewards that skip."""
PARTS = 3
"""Runs among which the functions are divided: each has a child per function."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_with_hostile_reward_functions_takes_every_step(part: int, tmp_path: Path) -> None:
    names = NAMES[part::PARTS]
    config = {
        "model": {"path": "none", "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 2, "max_tokens": 8},
        "actor": {"backend": "null"},
        "reward": {
            "error_budget_frac": 1.0,
            "functions": {name: {"fn": f"{FILE}:{name}", "children": 1, "deadline_s": 2.0} for name in names},
        },
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
        "plugins": {"null": {}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [str(Path(sys.executable).parent / "rlcore"), "train", str(tmp_path / "config.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    files = sorted((tmp_path / "run" / "trajectories").glob("*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(rows) == 8
    for name in names:
        failed = [name in row["info"].get("failed", {}) for row in rows]
        if name in SCORED:
            assert not any(failed), name
        elif name not in OTHERS:
            assert all(failed), name
