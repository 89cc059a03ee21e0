"""`rlcore export`: writes a checkpoint as a model for others."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer


def run(arguments: Sequence[str]) -> int:
    """Verify the checkpoint and write its model."""
    parser = Parser("export", "Write the model of a checkpoint into a new directory, after verifying its checksums.")
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run, or one of its checkpoints")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write")
    parser.add_argument(
        "--form",
        choices=("adapter", "merged", "hf"),
        default="hf",
        help="hf (default): a directory for from_pretrained, adapters merged; merged: the same, for LoRA runs only; "
        "adapter: peft's adapter, unmerged",
    )
    parser.add_argument(
        "--push", metavar="NAME", help="also upload it to this name on the Hub, private if new; needs a token there"
    )
    parsed = parser.parse(arguments)

    from rlcore.train.exported import export_checkpoint

    made = export_checkpoint(parsed.source, parsed.out, parsed.form, parsed.push)
    answer(f"wrote the model of step {made.step} to {made.path}")
    if made.url:
        answer(f"uploaded it to {made.url}")
    return 0
