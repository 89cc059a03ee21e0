"""Checkpoints: written whole or not at all, checked before they are used.

`<run>/checkpoints/step_N/` appears by one rename, after everything in it is on the disk, so whatever happens during a
save, the newest complete checkpoint is the previous or the new one. `manifest.json` has the size and SHA-256 of every
file; a checkpoint with a missing, changed, added, linked or pickled file is rejected.

    directory = staging(run_dir, step)              # engines write into it
    publish(directory, run_dir, step, state, keep)
    loaded = load(latest(run_dir))                  # loaded.path, loaded.step, loaded.state

`<run>/checkpoints/latest` names the newest one for people and shell scripts; `latest()` trusts only what verifies.
`<run>/checkpoints/best` names the one with the best evaluation, by the metric of `checkpoint.best`. All functions
block. One process at a time may write the checkpoints of a run.
"""

import hashlib
import json
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlcore.contracts.model_files import readable_as
from rlcore.errors import CheckpointError, RlcoreError, describe
from rlcore.report.files import FILES, FileOperations, write_atomically

FORMAT = 1
"""Version of the layout of a checkpoint directory."""


MANIFEST, STATE, POINTER, BEST = "manifest.json", "state.json", "latest", "best"


MAX_JSON_BYTES = 1 << 28
"""Limit in bytes of the manifest and of the state; a larger file is not read."""


PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill"})


_NAME = re.compile(r"step_(\d+)")


_ASIDE = re.compile(r"step_(\d+)\.passed_over")


_LEFTOVER = re.compile(r"\.step_(\d+)\.(staging|replaced|pruned)")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Survey:
    """The checkpoints of a run, down to the newest usable one."""

    newest: Path | None
    """The newest one that verifies."""
    passed_over: tuple[str, ...]
    """Reason why each newer one cannot be used, the newest first."""


def staging(run_dir: Path, step: int, files: FileOperations = FILES) -> Path:
    """A fresh directory to write the checkpoint of `step` into; `publish` makes it one. Cleans up first."""
    directory = run_dir / "checkpoints"
    with reported(f"checkpoint of step {step}: no directory to write it into"):
        _make_directories(directory, files)
        clean(run_dir, files)
        path = directory / f".step_{step}.staging"
        files.make_directory(path)
    return path


def clean(run_dir: Path, files: FileOperations = FILES) -> None:
    """Remove what an interrupted save left behind."""
    for path, step, kind in list(_leftovers(run_dir)):
        original = run_dir / "checkpoints" / f"step_{step}"
        if kind == "replaced" and not original.exists():
            files.rename(path, original)
        else:
            _remove_tree(path, files)


def publish(
    staging: Path,
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    keep: int,
    files: FileOperations = FILES,
    best: int | None = None,
) -> Path:
    """Make the staged directory the run's checkpoint of `step`, and prune to the newest `keep` (0: all) and `best`.

    `state` is JSON and comes back from `load` unchanged. An earlier checkpoint of the same step is replaced; one of a
    later step is left alone. CheckpointError if it cannot be saved; earlier checkpoints stay valid.
    """
    directory = run_dir / "checkpoints"
    target, aside = directory / f"step_{step}", directory / f".step_{step}.replaced"
    with reported(f"checkpoint of step {step} was not saved, what was published before stands", staging, files):
        files.write(staging / STATE, _encode_state(state, step))
        readable_as(staging / STATE, staging)
        files.write(staging / MANIFEST, _make_manifest(staging, step))
        _sync_tree(staging, files)
        if target.exists():
            files.rename(target, aside)
        files.rename(staging, target)
        files.sync(directory)
    return settle(run_dir, step, keep, files, best)


def settle(run_dir: Path, step: int, keep: int, files: FileOperations = FILES, best: int | None = None) -> Path:
    """Have the pointers name the published checkpoint of `step` and `best`, and prune as `publish` does.

    A save ends with this, and a resume begins with it, because a crash may have cut a save short before it.
    """
    directory = run_dir / "checkpoints"
    with reported(f"checkpoint of step {step} was saved, tidying up after it failed"):
        clean(run_dir, files)
        write_atomically(directory / POINTER, f"step_{step}\n".encode(), files)
        if best is not None and (directory / f"step_{best}").is_dir():
            write_atomically(directory / BEST, f"step_{best}\n".encode(), files)
        _prune(run_dir, step, keep, files, best)
    return directory / f"step_{step}"


def set_aside(run_dir: Path, step: int, files: FileOperations = FILES) -> None:
    """Rename checkpoints later than `step`, which a resume passed over, to `step_N.passed_over`.

    They count for nothing then, not even for `checkpoint.keep`, and go when the run has saved a step as late as theirs.
    """
    with reported("checkpoints that were passed over cannot be set aside"):
        for path, later in list(_published(run_dir)):
            if later > step:
                aside = path.with_name(f"{path.name}.passed_over")
                _remove_tree(aside, files)
                files.rename(path, aside)


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint of the run that verifies, or None."""
    return survey(run_dir).newest


def survey(run_dir: Path) -> Survey:
    """The newest checkpoint that verifies, and why each newer one does not. Reads every file of these checkpoints."""
    # a replaced one counts while its successor is missing: a crash fell between two renames
    found = [(step, "~", path) for path, step in _published(run_dir)]
    found += [(step, "", path) for path, step, kind in _leftovers(run_dir) if kind == "replaced"]
    passed_over: list[str] = []
    for _, _, path in sorted(found, reverse=True):
        try:
            return Survey(load(path).path, tuple(passed_over))
        except CheckpointError as error:
            passed_over.append(str(error))
    return Survey(None, tuple(passed_over))


def complete_steps(run_dir: Path) -> list[int]:
    """The steps whose checkpoints have a manifest, the newest first. Reads none of their files."""
    return sorted((step for path, step in _published(run_dir) if (path / MANIFEST).is_file()), reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; CheckpointError if there is none."""
    match = _NAME.fullmatch(path.name) or _LEFTOVER.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"'{path}': a checkpoint's directory is named step_N")
    return int(match.group(1))


def load(path: Path) -> LoadedCheckpoint:
    """Verify every file of the checkpoint and read its state.

    CheckpointError, naming the file, when anything is missing, changed, added, a link, outside the directory or a
    pickle.
    """
    with reported(f"checkpoint '{path}' cannot be read"):
        step, listed = _read_manifest(path)
        if _NAME.fullmatch(path.name) and step_of(path) != step:
            raise CheckpointError(f"checkpoint '{path}': its manifest is that of step {step}; rename it to step_{step}")
        present = dict(_regular_files(path))
        present.pop(MANIFEST, None)
        for name in sorted(listed.keys() | present.keys()):
            if name not in present:
                raise CheckpointError(f"checkpoint '{path}': '{name}' is missing; choose another checkpoint")
            if name not in listed:
                raise CheckpointError(f"checkpoint '{path}': '{name}' is not in its manifest; remove it")
            _refuse_pickle(present[name], path)
            # the size first: reading a file that pretends to be a terabyte would take hours
            if listed[name][0] != present[name].stat().st_size or listed[name] != _fingerprint(present[name]):
                raise CheckpointError(f"checkpoint '{path}': '{name}' is damaged; choose another checkpoint")
        return LoadedCheckpoint(path, step, _read_object(path / STATE, path))


@contextmanager
def reported(what: str, staging: Path | None = None, files: FileOperations = FILES) -> Iterator[None]:
    """Turns OSError into a CheckpointError that begins with `what`; a failed save releases the space of `staging`."""
    try:
        yield
    except (OSError, RlcoreError) as error:
        if staging is not None:
            with suppress(OSError):
                _remove_tree(staging, files)
        if isinstance(error, RlcoreError):
            raise
        raise CheckpointError(f"{what}: {describe(error)}") from error


def _published(run_dir: Path, pattern: re.Pattern[str] = _NAME) -> Iterator[tuple[Path, int]]:
    """(path, step) of everything with a checkpoint's name, complete or not."""
    for path in _entries(run_dir):
        match = pattern.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            yield path, int(match.group(1))


def _leftovers(run_dir: Path) -> Iterator[tuple[Path, int, str]]:
    """(path, step, kind) of what an interrupted save left behind."""
    for path in _entries(run_dir):
        match = _LEFTOVER.fullmatch(path.name)
        if match is not None:
            yield path, int(match.group(1)), match.group(2)


def _entries(run_dir: Path) -> list[Path]:
    directory = run_dir / "checkpoints"
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _make_directories(path: Path, files: FileOperations) -> None:
    if not path.is_dir():
        _make_directories(path.parent, files)
        files.make_directory(path)
        files.sync(path.parent)


def _remove_tree(path: Path, files: FileOperations) -> None:
    """Remove the directory and all below it; links are removed, never followed."""
    if path.is_symlink() or not path.is_dir():
        if path.is_symlink() or path.exists():
            files.remove(path)
        return
    for child in sorted(path.iterdir()):
        _remove_tree(child, files)
    files.remove_directory(path)


def _prune(run_dir: Path, step: int, keep: int, files: FileOperations, best: int | None) -> None:
    """Remove all but `best` and the newest `keep` checkpoints up to `step`, which is complete and always stays.

    Those set aside go, too.
    """
    for path, passed_over in list(_published(run_dir, _ASIDE)):
        if passed_over <= step:
            _remove_tree(path, files)
    older = sorted((published, path) for path, published in _published(run_dir) if published < step)
    for version, path in older[: max(0, len(older) - keep + 1)] if keep > 0 else []:
        if version == best:
            continue
        # renamed first, so a partial checkpoint never has a checkpoint's name
        doomed = path.with_name(f".step_{version}.pruned")
        files.rename(path, doomed)
        _remove_tree(doomed, files)


def _encode_state(state: Mapping[str, Any], step: int) -> bytes:
    refuse_odd_keys(state, "state")
    try:
        text = (json.dumps(state, indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as cause:
        raise CheckpointError(
            f"checkpoint of step {step} was not saved: the state must be JSON with finite numbers: {describe(cause)}"
        ) from cause
    if len(text) > MAX_JSON_BYTES:
        name = max(state, key=lambda key: len(json.dumps(state[key])))
        raise CheckpointError(
            f"checkpoint of step {step} was not saved: its state has {len(text) >> 20} MiB, most of them in '{name}'; "
            f"needs at most {MAX_JSON_BYTES >> 20} MiB; train on fewer prompts, or keep less in the state of components"
        )
    return text


def refuse_odd_keys(value: Any, where: str) -> None:
    """CheckpointError for keys that are not strings, which JSON would silently convert."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"checkpoint: {where} has the key {key!r}; keys of the state must be strings")
            refuse_odd_keys(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            refuse_odd_keys(inner, f"{where}[{index}]")


def _make_manifest(staging: Path, step: int) -> bytes:
    listed = {}
    for name, path in _regular_files(staging):
        _refuse_pickle(path, staging)
        size, digest = _fingerprint(path)
        listed[name] = {"size": size, "sha256": digest}
    listed.pop(MANIFEST, None)
    return (json.dumps({"format": FORMAT, "step": step, "files": listed}, indent=1) + "\n").encode()


def _regular_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(name relative to `root`, path) of every file, sorted; CheckpointError at a link or a special file."""
    for path in sorted(root.rglob("*")):
        name, mode = path.relative_to(root).as_posix(), path.lstat().st_mode
        if stat.S_ISREG(mode):
            yield name, path
        elif not stat.S_ISDIR(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
            raise CheckpointError(f"checkpoint '{root}': '{name}' is {kind}; only plain files are allowed in it")


def _sync_tree(root: Path, files: FileOperations) -> None:
    """Everything below `root`, then `root` itself."""
    for child in sorted(root.iterdir()):
        if child.is_dir():
            _sync_tree(child, files)
        else:
            files.sync(child)
    files.sync(root)


def _fingerprint(path: Path) -> tuple[int, str]:
    """(size in bytes, SHA-256)."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _read_manifest(root: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """(step, (size, SHA-256) by name)."""
    if not root.is_dir():
        raise CheckpointError(f"checkpoint '{root}': there is no such directory")
    path = root / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"checkpoint '{root}': it has no {MANIFEST}, so it was never finished; choose another")
    manifest = _read_object(path, root)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint '{root}': its format is {manifest.get('format')!r}, this rlcore reads {FORMAT}"
        )
    try:
        step = int(manifest["step"])
        listed = {str(n): (int(file["size"]), str(file["sha256"])) for n, file in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise CheckpointError(f"checkpoint '{root}': {MANIFEST} is damaged: {describe(cause)}") from cause
    for name in listed:
        plain = PurePosixPath(name)
        if plain.is_absolute() or ".." in plain.parts or "\\" in name or plain.as_posix() != name or name == ".":
            raise CheckpointError(f"checkpoint '{root}': {MANIFEST} lists '{name}', a path outside the checkpoint")
    if STATE not in listed:
        raise CheckpointError(f"checkpoint '{root}': {MANIFEST} does not list {STATE}")
    return step, listed


def _read_object(path: Path, root: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"checkpoint '{root}': '{path.name}' is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"checkpoint '{root}': {path.name} is not JSON: {describe(cause)}") from cause
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint '{root}': {path.name} is a {type(value).__name__}; needs an object")
    return value


def _refuse_pickle(path: Path, root: Path) -> None:
    """CheckpointError if the file's name or content is that of a pickle, because reading one can run code."""
    if path.suffix.lower() in PICKLE_SUFFIXES or _looks_pickled(path):
        name = path.relative_to(root).as_posix()
        raise CheckpointError(
            f"checkpoint '{root}': '{name}' is a pickle, which can run any code when it is read; needs "
            "safetensors, JSON or plain arrays"
        )


def _looks_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] == b"PK\x03\x04":  # what torch.save writes is a zip with a pickle in it
        try:
            with zipfile.ZipFile(path) as archive:
                return any(PurePosixPath(name).suffix in PICKLE_SUFFIXES for name in archive.namelist())
        except zipfile.BadZipFile:
            return True
    # the length of a safetensors header can begin like a pickle, but six zeros after it are not a pickle's
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and head[2:] != bytes(6)
