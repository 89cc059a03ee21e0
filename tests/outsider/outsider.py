"""Uses rlcore like a user who never saw the repository: `make outsider`.

Builds source distributions of the core, the plugins and the example's plugin, and wheels from these, installs the
wheels with their requirements into an empty virtual environment outside the repository, and works there: lists and
checks the plugins, plans the example, trains two steps of it and of PPO without torch, and makes sure that planning
imported nothing heavy. Exits with 1 and the reason when anything is not as it should be.

    python tests/outsider/outsider.py
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CONSTRAINTS = ROOT / "requirements" / "cpu.txt"
SOURCES = {
    "rlcore": ROOT,
    "rlcore_reward_loop": ROOT / "plugins" / "reward_loop",
    "rlcore_agent_loop": ROOT / "plugins" / "agent_loop",
    "rlcore_critic_engine": ROOT / "plugins" / "critic_engine",
    "rlcore_vllm": ROOT / "plugins" / "vllm",
    "rlcore_ray": ROOT / "plugins" / "ray",
    "rlcore_view": ROOT / "view",
    "rlcore_example_arithmetic": ROOT / "examples" / "arithmetic" / "plugin",
}
PLUGINS = {"reward_loop", "agent_loop", "critic_engine", "vllm", "ray", "digit_sum", "null"}
HEAVY = ("torch", "transformers", "accelerate", "datasets", "vllm", "ray")
SHAPE = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
SHAPE |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
MODULES_AFTER = """
import sys
from rlcore.cli import main
try:
    code = main({arguments!r})
except SystemExit as ended:
    code = ended.code
heavy = [name for name in {heavy!r} if name in sys.modules]
if heavy or code:
    sys.exit(f"rlcore {arguments!r}: exit code {{code}}, imported {{heavy}}")
"""


class Failed(Exception):
    """Something is not as it should be."""


def need(condition: bool, what: str) -> None:
    """Raise Failed unless the condition holds; not an assert, which -O would remove."""
    if not condition:
        raise Failed(what)


def run(command: Sequence[str | Path], directory: Path, expected: int = 0) -> str:
    """The command's output. Nothing of the repository reaches it through the environment."""
    print("$", " ".join(map(str, command)).strip().partition("\n")[0][:200], flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for installer in ("PIP", "UV"):
        environment |= {f"{installer}_CONSTRAINT": str(CONSTRAINTS), f"{installer}_BUILD_CONSTRAINT": str(CONSTRAINTS)}
    environment["COLUMNS"] = "200"
    done = subprocess.run(
        list(map(str, command)), cwd=directory, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode != expected:
        raise Failed(f"exit code {done.returncode}, expected {expected}\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def build_wheels(wheels: Path) -> None:
    """Every distribution as a wheel that is built from its source distribution; what is in them is what should be."""
    sdists = wheels.parent / "sdists"
    for source in SOURCES.values():
        run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", sdists], source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels]
    run([*pip, *sorted(sdists.glob("*.tar.gz"))], wheels.parent)
    for package in SOURCES:
        [wheel] = wheels.glob(f"{package}-*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        tops = {name.split("/")[0] for name in names}
        need(tops == {package, f"{wheel.name.split('-py3')[0]}.dist-info"}, f"{wheel.name} holds {sorted(tops)}")
        need(f"{package}/py.typed" in names, f"{wheel.name} has no py.typed")
        if package == "rlcore":
            need("rlcore/plan/catalog.toml" in names, f"{wheel.name} has no catalog.toml")
        if package != "rlcore_example_arithmetic":
            need(any(name.endswith("licenses/LICENSE") for name in names), f"{wheel.name} has no LICENSE")


def install(place: Path, wheels: Path) -> Path:
    """An environment with the wheels and their requirements; its bin directory."""
    venv.create(place / "venv", with_pip=True)
    bin_directory = place / "venv" / "bin"
    pip = [bin_directory / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):  # as the Makefile does
        pip = [uv, "pip", "install", "--quiet", "--python", bin_directory / "python"]
    index = subprocess.run(
        [sys.executable, ROOT / "requirements" / "torch_index.py"], text=True, capture_output=True, check=True
    )
    run([*pip, "torch", *index.stdout.split()], place)
    # reasoning-gym for the example's task: that is what `rlcore[tasks]` adds
    run([*pip, *sorted(wheels.glob("*.whl")), "reasoning-gym"], place)
    run([bin_directory / "python", "-m", "pip", "check"], place)
    return bin_directory


def check_installed(bin_directory: Path, place: Path) -> None:
    """The package that is imported is the installed one, and its plugins are found and sound."""
    where = run([bin_directory / "python", "-c", "import rlcore; print(rlcore.__file__)"], place).strip()
    need(Path(where).is_relative_to(place), f"rlcore was imported from {where}")
    listed = json.loads(run([bin_directory / "rlcore", "plugins", "--json"], place))
    found = {name["name"] for name in listed}
    need(found == PLUGINS, f"plugins: {sorted(found)}")
    print(run([bin_directory / "rlcore", "plugins", "--check"], place))


def check_example(bin_directory: Path, place: Path) -> None:
    """The example can be planned without anything heavy, and trained on the null policy."""
    shutil.copytree(ROOT / "examples" / "arithmetic", place / "example", ignore=shutil.ignore_patterns("plugin"))
    config, ci = "example/config.yaml", "example/ci.yaml"
    model = place / ".models" / "smollm2-135m-instruct"  # a plan looks at its shape; no weights are there
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPE))
    plan = json.loads(run([bin_directory / "rlcore", "plan", config, "--plugin", "digit_sum", "--json"], place))
    need("rlcore-example-arithmetic" in json.dumps(plan["plugins"]), "the plan does not name the example's plugin")
    for arguments in (["--help"], ["plugins"], ["plan", config, "--plugin", "digit_sum"]):
        program = MODULES_AFTER.format(arguments=arguments, heavy=HEAVY)
        run([bin_directory / "python", "-c", program], place)
    output = run(
        [bin_directory / "rlcore", "train", config, ci, "--plugin", "digit_sum", "--plugin", "null", "train.name=run"],
        place,
    )
    need((place / "runs" / "run" / "checkpoints" / "step_2").is_dir(), f"no checkpoint\n{output}")
    run([bin_directory / "rlcore", "view", "runs/run"], place)
    need("DecompressionStream" in (place / "run.html").read_text("utf-8"), "the page of the run lacks its script")


def check_critic(bin_directory: Path, place: Path) -> None:
    """With the wheels of core, viewer and critic left: PPO is planned without anything heavy, and trained without."""
    kept = ("rlcore", "rlcore_view", "rlcore_critic_engine")
    others = [source.replace("_", "-") for source in SOURCES if source not in kept]
    run([bin_directory / "python", "-m", "pip", "uninstall", "--quiet", "--yes", *others], place)
    listed = json.loads(run([bin_directory / "rlcore", "plugins", "--json"], place))
    need({name["name"] for name in listed} == {"critic_engine", "null"}, f"plugins of three wheels: {listed}")
    shutil.copytree(ROOT / "examples" / "ppo_critic", place / "ppo")
    plan = ["plan", "ppo/config.yaml", "--plugin", "critic_engine", "algo.preset=ppo"]
    run([bin_directory / "python", "-c", MODULES_AFTER.format(arguments=plan, heavy=HEAVY)], place)
    train = ["train", "ppo/config.yaml", "ppo/ci.yaml", "--plugin", "critic_engine", "--plugin", "null"]
    output = run([bin_directory / "rlcore", *train, "algo.preset=ppo", "train.name=ppo"], place)
    need((place / "runs" / "ppo" / "checkpoints" / "step_2" / "critic").is_dir(), f"no critic was saved\n{output}")
    [line] = run([bin_directory / "rlcore", *plan[:2], "algo.preset=ppo"], place, expected=2).strip().splitlines()
    need("--plugin critic_engine" in line, f"PPO without a critic gave {line}")


def check_error(bin_directory: Path, place: Path) -> None:
    """A mistake is one line and exit code 2."""
    command = [bin_directory / "rlcore", "plan", "example/config.yaml", "--plugin", "digit_sums"]
    lines = run(command, place, expected=2).strip().splitlines()
    need(len(lines) == 1 and "digit_sum" in lines[0], f"a misspelt plugin gave {lines}")


def main() -> None:
    """Everything, in a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="rlcore-outsider-") as name:
        place = Path(name)
        wheels = place / "wheels"
        wheels.mkdir()
        build_wheels(wheels)
        bin_directory = install(place, wheels)
        check_installed(bin_directory, place)
        check_example(bin_directory, place)
        check_error(bin_directory, place)
        check_critic(bin_directory, place)
    print("outsider: all is well")


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"outsider: {failure}")
