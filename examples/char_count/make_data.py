r"""Write the prompts of the task: how many of one letter are there in a word of random letters?

    python examples/char_count/make_data.py runs/char_count/data
    python examples/char_count/make_data.py runs/char_count/small --longest 5 --shortest 3 --items 4000

A word has a length drawn uniformly from `shortest` to `longest`, of which 1 to all are the letter that is asked for;
the others are drawn from the rest of the alphabet. It is shuffled and shown with dashes, so that a tokenizer sees its
letters. No question comes twice; a tenth of them, in heldout.jsonl, are held out. Each row has the `response` that the
warm-up imitates: a line for each letter, then \boxed{the count}. The files are functions of the arguments.
"""

import argparse
import json
import random
from pathlib import Path
from string import ascii_lowercase

HELDOUT_FRAC = 0.1


def item(shortest: int, longest: int, draw: random.Random) -> dict[str, str]:
    """One question with its answer and the response to imitate."""
    length = draw.randint(shortest, longest)
    wanted_letter = draw.choice(ascii_lowercase)
    count = draw.randint(1, length)
    others = [draw.choice(ascii_lowercase.replace(wanted_letter, "")) for _ in range(length - count)]
    letters = [wanted_letter] * count + others
    draw.shuffle(letters)
    lines = [
        f"{letter} = {wanted_letter}" if letter == wanted_letter else f"{letter} != {wanted_letter}"
        for letter in letters
    ]
    return {
        "prompt": f"How many {wanted_letter} are there in word {'-'.join(letters)}?",
        "answer": str(count),
        "response": "\n".join([*lines, rf"\boxed{{{count}}}"]),
    }


def items(num: int, shortest: int, longest: int, seed: int) -> list[dict[str, str]]:
    """That many different questions."""
    draw = random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    for _ in range(100 * num):
        row = item(shortest, longest, draw)
        found.setdefault(row["prompt"], row)
        if len(found) == num:
            return list(found.values())
    raise SystemExit(f"make_data: found {len(found)} different questions; needs {num}; use longer words")


def main() -> None:
    """Write train.jsonl and heldout.jsonl."""
    parser = argparse.ArgumentParser(description="Write the prompts of the char_count task.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--shortest", type=int, default=5)
    parser.add_argument("--longest", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not (1 <= options.shortest <= options.longest and options.items >= 10):
        raise SystemExit("make_data: needs 1 <= shortest <= longest, and 10 items or more")
    rows = items(options.items, options.shortest, options.longest, options.seed)
    num_heldout = int(HELDOUT_FRAC * len(rows))
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[num_heldout:]), ("heldout", rows[:num_heldout])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (options.directory / f"{name}.jsonl").write_text(lines)
        print(f"make_data: {len(part)} rows in {options.directory / name}.jsonl")


if __name__ == "__main__":
    main()
