"""Imports of the command line: help imports little."""

import subprocess
import sys
from pathlib import Path

import pytest

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
