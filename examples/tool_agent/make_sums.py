"""Writes the sums of this example: sums.jsonl to train on, heldout.jsonl to measure with, no sum in both.

Each row is a conversation in which one small sum has been worked out with the tool, so that the policy has seen what a
call looks like.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
NUM_TRAIN, NUM_HELDOUT = 512, 64
SHOWN = (
    {"role": "user", "content": "What is 12 + 7?"},
    {"role": "assistant", "content": "add(12, 7)"},
    {"role": "tool", "content": "19"},
    {"role": "assistant", "content": "19"},
)


def main() -> None:
    """Three-digit sums, drawn with a fixed seed."""
    numbers = random.Random(0)
    sums: dict[tuple[int, int], None] = {}
    while len(sums) < NUM_TRAIN + NUM_HELDOUT:
        sums[numbers.randrange(100, 1000), numbers.randrange(100, 1000)] = None
    rows = [
        {"prompt": [*SHOWN, {"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in sums
    ]
    for name, part in (("sums", rows[:NUM_TRAIN]), ("heldout", rows[NUM_TRAIN:])):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
