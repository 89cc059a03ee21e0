"""Each kind of disk write of a run is refused once: the run ends in one line or continues, and can be resumed."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("refusing_disk.py")
ENDED_WITH_ERROR = 2


def outcomes(directory: Path, error: int, stays: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), str(directory), str(error), stays]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("error", "stays"), [(errno.EIO, "once"), (errno.ENOSPC, "stays")], ids=["refused", "full"])
def test_a_refused_change_is_one_line_or_a_warning_and_leaves_the_run_undisturbed(
    tmp_path: Path, error: int, stays: str
) -> None:
    found = outcomes(tmp_path, error, stays)
    assert len(found) >= 60
    for outcome in found:
        text = outcome["output"] + outcome["log"]
        assert outcome["code"] in (0, ENDED_WITH_ERROR), outcome
        assert "Traceback" not in text, outcome
        if outcome["code"]:
            last = outcome["output"].rstrip().rsplit("\n", 1)[-1]
            assert last.startswith("rlcore: "), outcome
            assert "[Errno" in last, outcome
        assert outcome["resumed_code"] == 0, outcome
        assert outcome["differences"] == [], outcome
        assert outcome["change"], outcome
    assert ENDED_WITH_ERROR in {outcome["code"] for outcome in found}
