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
SESSION_TIME = "%Y-%m-%d_%H-%M-%S_%f"


def at(time: datetime) -> str:
    return time.strftime(SESSION_TIME)


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
        (NOW - timedelta(hours=1), 4321, "a", True),  # the clock was set back
    ],
)
def test_one_without_the_mark_belongs_if_it_writes_to_the_drivers_own_session(
    tmp_path: Path, named: datetime, driver: int, mode: str, belongs: bool
) -> None:
    with holding(tmp_path / f"session_{at(named)}_{driver}" / "logs" / "agent.log", mode) as process:
        began = reaper.started(Path("/proc/self"))
        assert (process in set(reaper.belonging("unused mark", began, 4321))) is belongs


def test_one_that_was_started_before_the_driver_does_not_belong(tmp_path: Path) -> None:
    with holding(tmp_path / f"session_{at(NOW)}_4321" / "logs" / "agent.log", "a") as process:
        began = reaper.started(Path(f"/proc/{process}"))
        assert process in set(reaper.belonging("unused mark", began, 4321))
        assert process not in set(reaper.belonging("unused mark", began + 1, 4321))


def test_ray_names_its_sessions_so() -> None:
    node = pytest.importorskip("ray._private.node")
    source = Path(node.__file__).read_text()
    assert f'"{SESSION_TIME}"' in source
    assert 'f"session_{date_str}_{os.getpid()}"' in source
    assert reaper.SESSION.search(f"/session_{at(NOW)}_4321/")
