"""The keyword arguments `model`, `rewards`, `data` and `eval` as settings, and as files in the run directory."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from rlcore.config import RunConfig
from rlcore.config.names import check_name
from rlcore.errors import ConfigError
from rlcore.plugins.saved_run import INPUTS
from rlcore.train.python.row_files import check_form, check_no_columns, is_rows, rows_as_lines
from rlcore.train.python.shared_functions import describe_type, share_function

OTHER_NAMES = {
    "train_dataset": "data",
    "dataset": "data",
    "rows": "data",
    "eval_dataset": "eval",
    "reward": "rewards",
    "reward_funcs": "rewards",
    "reward_fn": "rewards",
}
"""Names under which other trainers take an argument. `reward` is also a section of the configuration."""


@dataclass(frozen=True)
class InputFile:
    """A file below `INPUTS`, as the value of a key; `attribute` is a name in it."""

    name: str
    attribute: str = ""

    def below(self, directory: Path) -> str:
        """The value of the key when the files are in `directory`."""
        path = str(directory / self.name)
        return f"{path}:{self.attribute}" if self.attribute else path


@dataclass(frozen=True)
class Inputs:
    """Settings by dotted key, and the files that some of them name."""

    settings: Mapping[str, Any]
    files: Mapping[str, bytes]
    notes: tuple[str, ...] = ()
    """Notes for the user: the functions that the run has as source, with the reason."""
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names below each section that an argument replaces as a whole, such as `data.sources`."""

    def below(self, directory: Path) -> dict[str, Any]:
        """The settings when the files are in `directory`."""
        return {
            key: value.below(directory) if isinstance(value, InputFile) else value
            for key, value in self.settings.items()
        }

    def check(self, config: RunConfig) -> None:
        """ConfigError when the configuration names sources or functions in addition to those of an argument."""
        found: dict[str, Mapping[str, Any]] = {
            "data.sources": config.data.sources,
            "eval.sources": config.eval.sources,
            "reward.functions": config.reward.functions,
        }
        for key, names in self.named.items():
            if others := sorted(set(found[key]) - names):
                argument = {"reward.functions": "rewards"}.get(key, key.partition(".")[0])
                raise ConfigError(
                    f"{argument}: the configuration has {key}.{others[0]}, too; needs one place for all of them: name "
                    f"yours {argument}={{'{others[0]}': ...}} to replace it, or set them in the configuration"
                )

    def write(self, directory: Path, resume: bool) -> None:
        """Write the files; ConfigError if a resumed run was started with other contents."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            path = directory / name
            if resume and path.exists() and path.read_bytes() != content:
                raise ConfigError(
                    f"resume: '{path}' differs from what was passed; continue with the run's own by "
                    f"rlcore.resume('{directory.parent}'), or begin another run"
                )
            path.write_bytes(content)


class _Gathered:
    """Collects settings, files and names from the arguments."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.notes: list[str] = []
        self.named: dict[str, frozenset[str]] = {}

    def add_sources(self, argument: str, data: Any, default_name: str) -> None:
        """`data` or `eval`: one source, or several by name."""
        whole = isinstance(data, (str, os.PathLike)) or is_rows(data)
        if not whole and (not isinstance(data, Mapping) or type(data).__module__.startswith("datasets")):
            check_form(data, argument)
        sources = {default_name: data} if whole else data
        if not sources:
            raise ConfigError(f"{argument}: it is empty; needs rows, or sources by name")
        if not whole:
            check_no_columns(sources, argument)
        for name, source in sources.items():
            check_name(argument, name, "a source")
            self._add_source(argument, f"{argument}.sources.{name}", f"{argument}_{name}.jsonl", source)
        self.named[f"{argument}.sources"] = frozenset(sources)

    def _add_source(self, argument: str, key: str, file: str, source: Any) -> None:
        if isinstance(source, (str, os.PathLike)):
            path = Path(source).expanduser()
            self.settings[f"{key}.path"] = str(path.absolute()) if path.exists() else str(source)
        elif isinstance(source, Mapping) and not type(source).__module__.startswith("datasets"):
            self.settings[key] = dict(source)
        elif is_rows(source):
            self.files[file] = rows_as_lines(source, argument)
            self.settings[f"{key}.path"] = InputFile(file)
        else:
            check_form(source, f"{argument}['{key.rpartition('.')[2]}']")

    def add_rewards(self, rewards: Any) -> None:
        """`rewards`: a function or text, a list of these, or a mapping of names to functions, texts or settings."""
        if isinstance(rewards, Mapping):
            named = [(name, reward) for name, reward in rewards.items()]
        else:
            listed = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
            named = [(_name_of(reward), reward) for reward in listed]
        names = [name for name, _ in named]
        if not names:
            raise ConfigError("rewards: it is empty; needs at least one function")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"rewards: two are named {', '.join(twice)}; give them names: rewards={{'one': f, 'other': g}}"
            )
        for name, reward in named:
            check_name("rewards", name, "a reward function")
            self._add_reward(name, reward)
        self.named["reward.functions"] = frozenset(names)

    def _add_reward(self, name: str, reward: Any) -> None:
        key, who = f"reward.functions.{name}", f"reward '{name}'"
        if isinstance(reward, Mapping):
            self.settings |= {f"{key}.{setting}": value for setting, value in reward.items() if setting != "fn"}
            reward = reward.get("fn", "")
        if isinstance(reward, str):
            self.settings[f"{key}.fn"] = reward
            return
        shared = share_function(reward, who)
        if shared.module:
            self.settings[f"{key}.fn"] = f"{shared.module}:{shared.name}"
            return
        file = f"reward_{name}.py"
        self.files[file] = shared.source.encode()
        self.settings[f"{key}.fn"] = InputFile(file, shared.name)
        self.notes.append(f"{who} is passed as source, in {INPUTS}/{file}: {shared.reason}")


def gather_inputs(model: Any, rewards: Any, data: Any, eval: Any, settings: Mapping[str, Any]) -> Inputs:
    """The arguments as settings and files; ConfigError for an argument that cannot become either."""
    for name, value in settings.items():
        if name in OTHER_NAMES and not (name == "reward" and isinstance(value, Mapping)):
            raise ConfigError(f"{name}: found {describe_type(value)}; pass it as {OTHER_NAMES[name]}=")
    gathered = _Gathered()
    if model is not None:
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(
                f"model: found {describe_type(model)}; needs a model directory or a name on the Hub: the workers load "
                "it in separate processes (save it with save_pretrained)"
            )
        gathered.settings["model.path"] = str(model)
    if data is not None:
        gathered.add_sources("data", data, "train")
    if eval is not None:
        gathered.add_sources("eval", eval, "heldout")
    if rewards is not None:
        gathered.add_rewards(rewards)
    return Inputs({**gathered.settings, **settings}, gathered.files, tuple(gathered.notes), gathered.named)


def _name_of(reward: Any) -> str:
    if isinstance(reward, str):
        return reward.rpartition(":")[2] or reward
    if isinstance(reward, Mapping):
        raise ConfigError("rewards: settings need a name: rewards={'name': {'fn': ..., 'weight': 0.5}}")
    if isinstance(reward, FunctionType) and reward.__name__ != "<lambda>":
        return reward.__name__
    return share_function(reward, "rewards").name
