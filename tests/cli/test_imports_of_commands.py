"""Imports of the command line: help imports little."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.imports import STARTING_THRESHOLDS
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS

ROOT = Path(__file__).parent.parent.parent


def test_help_imports_only_the_standard_library_and_the_errors() -> None:
    code = (
        "import sys; from rlcore.cli import main; main(['--help']);"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1]
    light = "'rlcore.cli.console', 'rlcore.cli.endings', 'rlcore.cli.inherited_signals', 'rlcore.errors'"
    light += ", 'rlcore.errors.redaction', 'rlcore.errors.user_lines'"
    assert loaded == f"['__main__', 'rlcore', 'rlcore.cli', {light}]"


@pytest.mark.slow
def test_a_run_that_is_not_there_is_found_missing_before_torch_is_imported(tmp_path: Path) -> None:
    code = "import sys; from rlcore.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    for command in ("resume", "chat"):
        done = subprocess.run(
            [sys.executable, "-c", code, command, str(tmp_path / "gone")], capture_output=True, text=True, timeout=100
        )
        assert "is not a run: found no such directory" in done.stderr
        assert done.stdout == "False\n"


COLLECTED = """
import gc, sys

class Looking:
    def find_spec(self, name, path, target=None):
        if name in ("rlcore.plan.planner", "torch"):
            found.append((name, gc.get_threshold()))

found = []
gc.set_threshold(700, 10, 10)
sys.meta_path.insert(0, Looking())
from rlcore.cli import main
main(sys.argv[1:])
print([*found, gc.get_threshold()])
"""


@pytest.mark.slow
def test_garbage_is_collected_rarely_while_planner_and_torch_are_imported(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 16)
    settings = [*SETTINGS, f"data.sources.all.path={prompts}", "train.max_steps=1"]
    command = [sys.executable, "-c", COLLECTED, "train", "--plugin", "null", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rarely = [(name, STARTING_THRESHOLDS) for name in ("rlcore.plan.planner", "torch")]
    assert done.stdout.splitlines()[-1] == repr([*rarely, (700, 10, 10)])
