"""Checkpoints: what is published comes back, and what was tampered with is refused."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from rlcore.errors import CheckpointError
from rlcore.report.files import write_atomically
from rlcore.train import checkpoint, find_checkpoint
from rlcore.train.checkpoint import clean, latest, load, publish, staging, step_of


def save(run_dir: Path, step: int, keep: int = 0, weights: bytes = b"weights") -> Path:
    directory = staging(run_dir, step)
    (directory / "model").mkdir()
    (directory / "model" / "model.safetensors").write_bytes(weights)
    return publish(directory, run_dir, step, {"step": step, "order": {"a": [1, 2]}}, keep)


def steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def rewrite_manifest(path: Path, change: str, to: str) -> None:
    manifest = path / "manifest.json"
    text = manifest.read_text()
    assert change in text
    manifest.write_text(text.replace(change, to))


def test_what_is_published_is_loaded_again(tmp_path: Path) -> None:
    path = save(tmp_path, 7, weights=b"\x00" * 100_000)
    loaded = load(path)
    assert path == tmp_path / "checkpoints" / "step_7" == loaded.path
    assert (loaded.step, loaded.state) == (7, {"step": 7, "order": {"a": [1, 2]}})
    assert (path / "model" / "model.safetensors").read_bytes() == b"\x00" * 100_000
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_7\n"
    assert steps(tmp_path) == ["latest", "step_7"]


def test_weights_may_be_read_by_all_that_the_umask_lets_read(tmp_path: Path) -> None:
    directory = staging(tmp_path, 1)
    (directory / "model").mkdir()
    weights = directory / "model" / "model.safetensors"
    weights.write_bytes(b"weights")
    weights.chmod(0o600)  # as safetensors leaves it
    (path := tmp_path / "like").touch()
    published = publish(directory, tmp_path, 1, {}, keep=0)
    assert (published / "model" / "model.safetensors").stat().st_mode == path.stat().st_mode


def test_the_manifest_has_size_and_sha256_of_every_file(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, 1, weights=b"abc") / "manifest.json").read_text())
    assert manifest["files"].keys() == {"state.json", "model/model.safetensors"}
    assert manifest["files"]["model/model.safetensors"] == {
        "size": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }


def test_latest_is_the_newest_by_number(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (9, 10, 2):
        save(tmp_path, step)
    newest = latest(tmp_path)
    assert newest is not None
    assert step_of(newest) == 10


def test_only_the_newest_n_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == ["latest", "step_10", "step_3"]
    save(tmp_path, 11, keep=1)
    assert steps(tmp_path) == ["latest", "step_11"]
    for step in (12, 13):
        save(tmp_path, step, keep=0)
    assert steps(tmp_path) == ["latest", "step_11", "step_12", "step_13"]


def test_pruning_leaves_later_checkpoints_and_the_one_just_saved(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    save(tmp_path, 15, keep=1)
    assert steps(tmp_path) == ["latest", "step_15", "step_20"]


def test_latest_passes_over_damaged_checkpoints_and_load_names_what_is_wrong(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    (bad / "model" / "model.safetensors").write_bytes(b"weightz")
    assert latest(tmp_path) == good
    with pytest.raises(CheckpointError, match=r"'model/model\.safetensors' is damaged"):
        load(bad)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5, weights=b"old")
    path = save(tmp_path, 5, weights=b"new")
    assert (path / "model" / "model.safetensors").read_bytes() == b"new"
    assert steps(tmp_path) == ["latest", "step_5"]
    assert load(path).step == 5


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    half = staging(tmp_path, 2)
    (half / "half.safetensors").write_bytes(b"")
    clean(tmp_path)
    assert steps(tmp_path) == ["latest", "step_1"]
    (staging(tmp_path, 2) / "half.safetensors").write_bytes(b"")
    assert list(staging(tmp_path, 3).iterdir()) == []
    assert steps(tmp_path) == [".step_3.staging", "latest", "step_1"]


def test_cleaning_removes_links_and_never_what_they_point_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    (staging(tmp_path, 1) / "link").symlink_to(precious)
    clean(tmp_path)
    assert (precious / "file").read_text() == "keep me"
    assert steps(tmp_path) == []


def test_a_replaced_checkpoint_counts_until_its_successor_is_complete(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    aside = path.rename(path.with_name(".step_5.replaced"))
    assert latest(tmp_path) == aside
    assert step_of(aside) == 5
    clean(tmp_path)
    assert latest(tmp_path) == path


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("/etc/passwd", "outside"),
        ("../other/state.json", "outside"),
        ("model/../../x", "outside"),
        ("./state2.json", "outside"),
        ("a//b", "outside"),
        ("..", "outside"),
        ("", "outside"),
        ("model\\\\x", "outside"),
        ("elsewhere", "'elsewhere' is missing"),
    ],
)
def test_paths_in_a_manifest_stay_inside_the_checkpoint(tmp_path: Path, listed: str, message: str) -> None:
    path = save(tmp_path, 1)
    rewrite_manifest(path, '"model/model.safetensors"', f'"{listed}"')
    with pytest.raises(CheckpointError, match=message):
        load(path)
    assert latest(tmp_path) is None


def test_links_in_a_checkpoint_are_refused_when_loading_and_when_saving(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"weights")
    path = save(tmp_path, 1)
    (path / "model" / "model.safetensors").unlink()
    (path / "model" / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        load(path)
    directory = staging(tmp_path, 2)
    (directory / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="'link' is a symbolic link"):
        publish(directory, tmp_path, 2, {}, 0)
    os.mkfifo(staging(tmp_path, 3) / "pipe")
    with pytest.raises(CheckpointError, match="'pipe' is a special file"):
        publish(tmp_path / "checkpoints" / ".step_3.staging", tmp_path, 3, {}, 0)
    assert steps(tmp_path) == ["latest", "step_1"]


def test_a_linked_directory_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "model").rename(tmp_path / "model")
    (path / "model").symlink_to(tmp_path / "model")
    with pytest.raises(CheckpointError, match="'model' is a symbolic link"):
        load(path)


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "model" / "extra.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"'model/extra\.json' is not in its manifest"):
        load(path)


def torch_style_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))


@pytest.mark.parametrize("name", ["a.pkl", "optimizer.pt", "model/pytorch_model.BIN", "innocent.json"])
def test_pickles_are_refused_when_saving(tmp_path: Path, name: str) -> None:
    directory = staging(tmp_path, 1)
    (directory / "model").mkdir()
    (directory / name).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="is a pickle"):
        publish(directory, tmp_path, 1, {}, 0)
    assert latest(tmp_path) is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_smuggled_into_a_checkpoint_is_refused_also_with_a_right_checksum(
    tmp_path: Path, protocol: int
) -> None:
    path = save(tmp_path, 1)
    content = pickle.dumps(os.getcwd, protocol)
    (path / "model" / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is a pickle"):
        load(path)
    (path / "model" / "model.safetensors").write_bytes(b"weights")
    load(path)
    torch_style_zip(path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a pickle"):
        load(path)


def test_safetensors_whose_header_length_looks_like_a_pickle_are_accepted(tmp_path: Path) -> None:
    header = b'{"__metadata__":{}}'.ljust(0x0280)
    path = save(tmp_path, 1, weights=len(header).to_bytes(8, "little") + header)
    assert (path / "model" / "model.safetensors").read_bytes()[:2] == b"\x80\x02"
    assert load(path).step == 1


def test_a_pickled_state_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "state.json").write_bytes(pickle.dumps({"step": 1}))
    with pytest.raises(CheckpointError, match=r"'state\.json' is a pickle"):
        load(path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": float("nan")}, "finite"),
        ({"a": object()}, "not JSON serializable"),
        ({"a": [{3: 1}]}, r"state\.a\[0\] has the key 3"),
    ],
)
def test_a_state_that_json_would_not_give_back_is_refused(
    tmp_path: Path, state: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        publish(staging(tmp_path, 1), tmp_path, 1, state, 0)
    assert steps(tmp_path) == []


def test_a_state_that_would_be_too_large_to_read_is_refused_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_JSON_BYTES", 1 << 20)
    first = save(tmp_path, 1)
    words = r"step 2 was not saved: its state has 2 MiB, most of them in 'order'; needs at most 1 MiB; train on fewer"
    with pytest.raises(CheckpointError, match=words):
        publish(staging(tmp_path, 2), tmp_path, 2, {"step": 2, "order": "x" * (2 << 20)}, 0)
    assert latest(tmp_path) == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "is a list; needs an object"),
        ('{"format": 2, "step": 1, "files": {}}', "its format is 2, this rlcore reads 1"),
        ('{"format": 1, "step": 1, "files": []}', "damaged"),
        ('{"format": 1, "step": 1, "files": {"state.json": {"size": 1}}}', "damaged"),
        ('{"format": 1, "step": 1, "files": {}}', r"does not list state\.json"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_damaged_manifest_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_missing_unfinished_and_misnamed_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        load(tmp_path / "checkpoints" / "step_3")
    with pytest.raises(CheckpointError, match="never finished"):
        load(staging(tmp_path, 3))
    renamed = save(tmp_path, 4).rename(tmp_path / "checkpoints" / "step_9")
    with pytest.raises(CheckpointError, match="rename it to step_4"):
        load(renamed)
    kept = renamed.rename(tmp_path / "best")
    assert load(kept).step == 4
    with pytest.raises(CheckpointError, match="named step_N"):
        step_of(kept)


def test_an_atomic_write_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    for content in (b"one", b"two"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("keep", [1, 4, 8])
def test_the_newest_checkpoints_are_kept_also_while_there_are_fewer(tmp_path: Path, keep: int) -> None:
    for step in range(1, 11):
        save(tmp_path, step, keep=keep)
        assert len(list((tmp_path / "checkpoints").glob("step_*"))) == min(step, keep)


def test_an_error_of_a_missing_checkpoint_names_its_siblings(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    for step in (2, 10, 12):
        save(tmp_path, step)
    shutil.rmtree(directory / "step_12")  # by hand, to free the disk: the pointer still names it
    (save(tmp_path, 11) / "manifest.json").unlink()
    (directory / "latest").write_text("step_12\n")
    for gone in ("step_12", "latest", "step_11"):
        with pytest.raises(CheckpointError, match=r"choose from: step_10, step_2$"):
            find_checkpoint(directory / gone)
    with pytest.raises(CheckpointError, match=r"step_N$"):
        find_checkpoint(tmp_path / "other")
