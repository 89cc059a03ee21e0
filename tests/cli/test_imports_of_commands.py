"""Imports of the command line: help imports little, and Ctrl-C is answered while they run."""

import subprocess
import sys
import tomllib
from pathlib import Path

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
    light += ", 'rlcore.errors.redaction'"
    assert loaded == f"['__main__', 'rlcore', 'rlcore.cli', {light}]"


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    script = (
        "import sys\n"
        "class Interrupting:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'rlcore.cli.console':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "from rlcore.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rlcore: interrupted\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"]["rlcore"] == "rlcore.__main__:main"
