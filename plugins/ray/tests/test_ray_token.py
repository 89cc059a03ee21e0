"""The token of a Ray that a run starts is readable by its user alone."""

import stat
from pathlib import Path

import pytest
from rlcore_ray.testing import NEEDS_RAY

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
