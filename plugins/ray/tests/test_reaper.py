"""The reaper finds the processes of one driver's Ray and no others."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rlcore_ray import reaper

HOLDS = "import sys; file = open(sys.argv[1], sys.argv[2]); print('open', flush=True); sys.stdin.read()"
NOW = datetime.now()


def at(time: datetime) -> str:
    return time.strftime(reaper.SESSION_TIME)


@contextmanager
def holding(path: Path, mode: str) -> Iterator[int]:
    """A process without the mark that has the file open."""
    path.parent.mkdir(parents=True)
    path.touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, path, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("named", "driver", "mode", "belongs"),
    [
        (NOW, 4321, "a", True),
        (NOW, 4321, "r", False),  # a reader of its log
        (NOW, 54321, "a", False),  # another driver's
        (NOW - timedelta(days=1), 4321, "a", False),  # started by an earlier process with that id
    ],
)
def test_one_without_the_mark_belongs_if_it_writes_to_the_drivers_own_session(
    tmp_path: Path, named: datetime, driver: int, mode: str, belongs: bool
) -> None:
    with holding(tmp_path / f"session_{at(named)}_{driver}" / "logs" / "agent.log", mode) as process:
        began = at(NOW - timedelta(seconds=1))
        assert (process in set(reaper.belonging("unused mark", began, 4321))) is belongs


def test_ray_names_its_sessions_so() -> None:
    node = pytest.importorskip("ray._private.node")
    source = Path(node.__file__).read_text()
    assert f'"{reaper.SESSION_TIME}"' in source
    assert 'f"session_{date_str}_{os.getpid()}"' in source


def test_a_later_time_has_the_greater_text() -> None:
    assert at(NOW - timedelta(microseconds=1)) < at(NOW)
