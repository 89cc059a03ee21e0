"""`rlcore export`: from a checkpoint to a model for others."""

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
        help="hf (default): a directory for from_pretrained, adapters merged; merged: the same, of LoRA runs only; "
        "adapter: peft's adapter as it is",
    )
    parsed = parser.parse(arguments)

    from rlcore.engines.hf.train.model_export import export_model
    from rlcore.train import checkpoint, find_checkpoint

    loaded = checkpoint.load(find_checkpoint(parsed.source))
    written = export_model(loaded.path, parsed.out, parsed.form)
    answer(f"wrote the model of step {loaded.step} to {written}")
    return 0
