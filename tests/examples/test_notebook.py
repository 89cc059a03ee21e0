"""The notebook and the Python of docs/python.md, run as they stand.

A cell is compiled as IPython, which is not installed, does it: its source is in `linecache`, its names are those of
`__main__`, and an event loop runs in the thread.
"""

import asyncio
import json
import linecache
import re
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


@pytest.mark.real
def test_the_notebook_trains_evaluates_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "notebook" / "first_steps.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    names = run_cells(cells, monkeypatch)
    assert len(names["curve"]) == 6
    assert names["curve"][-1] > names["curve"][0]
    assert (names["longer"].steps, names["longer"].run_dir) == (8, names["result"].run_dir)
    assert names["longer"].best is not None


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
