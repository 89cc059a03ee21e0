"""`rlcore init NAME`: writes a project that trains: data, held-out data, a reward with its test, a configuration."""

import contextlib
import io
import json
import keyword
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer
from rlcore.cluster.interpreter import run_in_new_interpreter
from rlcore.errors import ConfigError, RlcoreError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WORDS = (
    "apple", "bird", "cloud", "door", "earth", "fish", "grass", "house", "iron", "jar", "kite", "lamp",
    "moon", "nest", "ocean", "paper", "queen", "river", "stone", "tree", "umbrella", "valley", "wind", "yard",
    "zebra", "bread", "chair", "dream", "eagle", "flame", "garden", "hill", "island", "jewel", "king", "leaf",
)  # fmt: skip
NUM_HELDOUT = 8
CHECK_S = 60
RUN_WITH_ASSERTS = """
with open({path!r}, "rb") as file:
    code = compile(file.read(), {path!r}, "exec", optimize=0)
exec(code, {{"__name__": "__main__", "__file__": {path!r}}})
"""
"""Runs a script with its assert statements, even if PYTHONOPTIMIZE is set."""

ONE_STEP = """
import sys
from rlcore.cli import main
sys.exit(main({arguments!r}))
"""
STAND_IN = (
    "--plugin=null", "model.path=none", "model.tokenizer=bytes", "actor.backend=null", "rollout.backend=null",
    "train.max_steps=1", "reward.functions.correct.children=1",
)  # fmt: skip
"""Arguments for one step of a run without its model, but with its data, canary, reward and evaluation."""


@dataclass(frozen=True)
class _Fit:
    """Sizes of a step that suit the machine."""

    machine: str
    prompts: int
    samples: int
    tokens: int
    steps: int


def run(arguments: Sequence[str]) -> int:
    """Write the directory, run its commands, and print them."""
    parser = Parser("init", "Write a project that trains: data, a reward with its test, a configuration.")
    parser.add_argument("name", metavar="NAME", type=Path, help="directory to make; a Python identifier")
    parser.add_argument("--model", default=MODEL, help=f"model directory or name on the Hub; default: {MODEL}")
    parsed = parser.parse(arguments)
    directory: Path = parsed.name
    _check_name(directory)
    _write(directory, parsed.model, _fit())
    commands = [
        f"{_python()} {_word(directory / 'test_reward.py')}",
        f"rlcore plan {_word(directory / 'config.yaml')}",
        f"rlcore train {_word(directory / 'config.yaml')}",
    ]
    _try(directory)
    answer(f"wrote {directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")
    answer("next (all were run just now, the third for one step with a stand-in for the model):")
    for command in commands:
        answer(f"  {command}")
    return 0


def _python() -> str:
    return "python" if sys.prefix != sys.base_prefix else _word(Path(sys.executable))


def _word(path: Path) -> str:
    """The path as one word of a shell."""
    return shlex.quote(str(path))


def _check_name(directory: Path) -> None:
    """ConfigError for a name that exists, or that would hide another module."""
    name = directory.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"init: '{name}' is not a Python identifier; needs letters, digits and '_' only, not beginning with a digit"
        )
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"init: '{directory}' exists; choose another name, or remove it")
    if name in sys.stdlib_module_names or name == "rlcore":
        owner = "rlcore" if name == "rlcore" else "the standard library"
        raise ConfigError(
            f"init: '{name}' is a module of {owner}, which a directory of that name would hide; choose another name, "
            f"such as {name}_task"
        )
    if not directory.absolute().parent.is_dir():
        raise ConfigError(f"init: found no directory '{directory.parent}' to write '{name}' into; make it first")


def _fit() -> _Fit:
    from rlcore.runtime.machine import machine_facts

    facts = machine_facts()
    if facts.gpus and not facts.gpu_problem:
        return _Fit(f"{facts.gpus} GPUs", prompts=32, samples=8, tokens=64, steps=100)
    return _Fit(f"{facts.cpus} CPU cores, no GPU", prompts=4, samples=4, tokens=16, steps=20)


def _write(directory: Path, model: str, fit: _Fit) -> None:
    template = files("rlcore.cli").joinpath("project")
    directory.mkdir()
    question = "Spell the word '{}' backwards. Answer with the word only."
    rows = [{"prompt": question.format(word), "answer": word[::-1]} for word in WORDS]
    for name, part in (("train.jsonl", rows[:-NUM_HELDOUT]), ("held.jsonl", rows[-NUM_HELDOUT:])):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")
    values = {
        "directory": _word(directory), "name": directory.name, "model": json.dumps(model), "machine": fit.machine,
        "prompts": fit.prompts, "samples": fit.samples, "tokens": fit.tokens, "steps": fit.steps,
    }  # fmt: skip
    for name in ("reward.py", "test_reward.py", "config.yaml"):
        text = template.joinpath(f"{name}.txt").read_text("utf-8")
        for key, value in values.items():
            text = text.replace(f"@{key}@", str(value))
        (directory / name).write_text(text, "utf-8")


def _try(directory: Path) -> None:
    """Run the test, plan the run, take a step; ConfigError if one of them fails."""
    test = run_in_new_interpreter(RUN_WITH_ASSERTS.format(path=str(directory / "test_reward.py")), CHECK_S)
    if test is None or test.code:
        last = (test.errors.strip().splitlines() if test else []) or [f"it was not done after {CHECK_S} s"]
        raise ConfigError(f"init: the test of '{directory / 'reward.py'}' failed: {last[-1]}")
    from rlcore.cli.plan import show_with_data
    from rlcore.plugins.planning import plan_run

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            show_with_data(plan_run([directory / "config.yaml"], []), origins=False)
    except RlcoreError as error:
        raise ConfigError(f"init: wrote '{directory}', whose plan is refused: {error}") from error
    with tempfile.TemporaryDirectory(prefix="rlcore-init-") as runs:
        arguments = [
            "train",
            str(directory / "config.yaml"),
            *STAND_IN,
            f"train.dir={json.dumps(runs, ensure_ascii=False)}",
        ]
        step = run_in_new_interpreter(ONE_STEP.format(arguments=arguments), CHECK_S)
    if step is None or step.code:
        last = (step.errors.strip().splitlines() if step else []) or [f"it was not done after {CHECK_S} s"]
        raise ConfigError(f"init: wrote '{directory}', whose first step fails without its model, too: {last[-1]}")
