"""The notebook in a real kernel, and the Python of docs/python.md, run as they stand.

A block of the page is compiled as IPython does it with a cell: its source is in `linecache`, its names are those of
`__main__`, and an event loop runs in the thread.
"""

import ast
import asyncio
import json
import linecache
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlcore.testing.tiny import write_tiny_model

ROOT = Path(__file__).parent.parent.parent


def run_cells(cells: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the cells one after another under a running loop; the names they leave."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    async def run() -> None:
        for number, cell in enumerate(cells, 1):
            file = f"<ipython-input-{number}>"
            linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
            exec(compile(cell, file, "exec"), vars(main))

    asyncio.run(run())
    return vars(main)


EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""
LAST_CELL = """
import json
json.dumps({
    "curve": curve, "steps": longer.steps, "same": longer.run_dir == result.run_dir, "best": longer.best is not None
})
"""


@pytest.mark.real
def test_the_notebook_trains_evaluates_and_resumes(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "notebook" / "first_steps.ipynb").read_text("utf-8"))
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    last = {
        "cell_type": "code",
        "id": "last",
        "metadata": {},
        "source": LAST_CELL,
        "execution_count": None,
        "outputs": [],
    }
    path = tmp_path / "notebook.ipynb"
    path.write_text(json.dumps(notebook | {"cells": [*notebook["cells"], last]}))
    # in another process: the client keeps an event loop
    command = [sys.executable, "-c", EXECUTE, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    [output] = json.loads(path.read_text("utf-8"))["cells"][-1]["outputs"]
    found = json.loads(ast.literal_eval("".join(output["data"]["text/plain"])))
    assert len(found["curve"]) == 6
    assert found["curve"][-1] > found["curve"][0]
    assert (found["steps"], found["same"], found["best"]) == (8, True, True)


@pytest.mark.slow
def test_the_python_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    small = '"model.tokenizer": "bytes", "cluster.device": "cpu", "rollout.max_tokens": 4, "train.max_steps"'
    tiny = str(write_tiny_model(tmp_path / "model"))
    training = blocks[0].replace("HuggingFaceTB/SmolLM2-135M-Instruct", tiny).replace('"train.max_steps"', small)
    names = run_cells([training, blocks[1]], monkeypatch)
    assert names["result"].steps == 3
    assert capsys.readouterr().out.rstrip().endswith(str(names["plan"].config.rollout.samples_per_prompt))
