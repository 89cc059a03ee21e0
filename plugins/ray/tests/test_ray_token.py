"""The token of a Ray that a run starts is readable by its user alone."""

import os
import stat
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.errors import WorkerError

pytestmark = NEEDS_RAY


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without a token, and no other way to one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def modes(home: Path) -> tuple[int, int]:
    """The access that the directory and the file give."""
    directory = home / ".ray"
    return stat.S_IMODE(directory.stat().st_mode), stat.S_IMODE((directory / "auth_token").stat().st_mode)


def test_the_token_is_made_for_its_user_alone_and_kept(home: Path) -> None:
    from rlcore_ray.session import make_private_token

    make_private_token()
    token = (home / ".ray" / "auth_token").read_text()
    assert len(token) == 64
    assert modes(home) == (0o700, 0o600)
    make_private_token()
    assert (home / ".ray" / "auth_token").read_text() == token


def test_a_token_that_others_may_read_is_closed_to_them(home: Path) -> None:
    from rlcore_ray.session import make_private_token

    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("as Ray left it")
    (home / ".ray" / "auth_token").chmod(0o644)
    make_private_token()
    assert modes(home)[1] == 0o600
    assert (home / ".ray" / "auth_token").read_text() == "as Ray left it"


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_TOKEN", "mine"), ("RAY_AUTH_TOKEN_PATH", "/mine"), ("RAY_AUTH_MODE", "disabled")]
)
def test_no_token_is_made_where_ray_needs_none_of_ours(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    from rlcore_ray.session import make_private_token

    monkeypatch.setenv(name, value)
    make_private_token()
    assert not (home / ".ray").exists()


IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "an empty file": Path.touch,
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_what_holds_no_token_is_named(home: Path, kind: str) -> None:
    from rlcore_ray.session import make_private_token

    (home / ".ray").mkdir()
    IN_ITS_PLACE[kind](home / ".ray" / "auth_token")
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"cluster: .*auth_token"):
        make_private_token()
    assert time.monotonic() - began < 10.0
    assert not (home / ".ray" / "nothing").exists()


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_closed_to_them(home: Path, mode: int) -> None:
    from rlcore_ray.session import make_private_token

    (home / ".ray").mkdir()
    (home / ".ray").chmod(mode)
    make_private_token()
    assert modes(home)[0] & 0o022 == 0


def test_of_several_starts_at_once_all_find_one_whole_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore_ray import session
    from rlcore_ray.session import make_private_token

    def generate() -> str:
        time.sleep(0.05)
        return uuid.uuid4().hex * 2

    monkeypatch.setattr(session, "generate_new_authentication_token", generate)
    found: set[str] = set()

    def make(_: int) -> None:
        make_private_token()
        found.add((home / ".ray" / "auth_token").read_text())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(make, range(64)))
    assert [len(token) for token in found] == [64]
    assert [path.name for path in (home / ".ray").iterdir()] == ["auth_token"]
