"""`rlcore chat`: talk to the weights of a run."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer, complain


def run(arguments: Sequence[str]) -> int:
    """Answer each line of standard input; prompts go to standard error, so that a pipe gets only the answers."""
    parser = Parser("chat", "Talk to a run's newest checkpoint, a line at a time; /reset begins again, /exit ends.")
    parser.add_argument("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run, or one of its checkpoints")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that win over the run's configuration"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default: rollout.temperature")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of an answer; default: rollout.max_tokens")
    parsed = parser.parse(arguments)
    if parsed.temperature is not None and not 0 <= parsed.temperature < math.inf:
        parser.error(f"--temperature: found {parsed.temperature:g}; needs a finite number, 0 or more")
    if parsed.max_tokens is not None and parsed.max_tokens < 1:
        parser.error(f"--max-tokens: found {parsed.max_tokens}; needs 1 or more")

    from rlcore.plugins.saved_run import open_run

    saved = open_run(parsed.run)

    from rlcore.train import find_checkpoint, run_anywhere
    from rlcore.train.conversing import converse
    from rlcore.train.tasks import training_sampling

    weights = find_checkpoint(parsed.run)
    plan = saved.plan(parsed.overrides, only_sampling=True)
    chosen = {"temperature": parsed.temperature, "max_tokens": parsed.max_tokens}
    sampling = dataclasses.replace(
        training_sampling(plan.config.rollout), **{name: value for name, value in chosen.items() if value is not None}
    )
    if sys.stdin.isatty():
        complain(f"{weights}: /reset begins again, /exit ends")
    run_anywhere(converse(plan, weights, sampling, parsed.system, _read, answer))
    return 0


def _read() -> str:
    """The next line of standard input; empty at its end."""
    if sys.stdin.isatty():
        complain("> ", end="")
    return sys.stdin.readline()
