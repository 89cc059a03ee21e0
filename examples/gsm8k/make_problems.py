"""Writes this example's problems in the format of GSM8K: problems.jsonl to train on, heldout.jsonl to measure.

Each row has `question`, and `answer` with the working, its sums as <<2*3=6>>, and the result after '####'.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
NUM_TRAIN, NUM_HELDOUT = 192, 32
NAMES = ("Ada", "Ben", "Chloe", "Dev", "Elif", "Femi", "Greta", "Hugo")
THINGS = ("apples", "stamps", "marbles", "postcards", "buttons", "shells")


def shared(draw: random.Random, name: str, thing: str) -> tuple[str, str, int]:
    """Two steps: buy bags, give some away."""
    bags, size = draw.randrange(2, 7), draw.randrange(2, 9)
    gift = draw.randrange(1, bags * size)
    left = bags * size - gift
    return (
        f"{name} buys {bags} bags with {size} {thing} in each. {name} gives {gift} of them to a friend. How many "
        f"{thing} does {name} have left?",
        f"{name} buys {bags}*{size} = <<{bags}*{size}={bags * size}>>{bags * size} {thing}.\n"
        f"{bags * size}-{gift} = <<{bags * size}-{gift}={left}>>{left} are left.",
        left,
    )


def earned(draw: random.Random, name: str, thing: str) -> tuple[str, str, int]:
    """Two steps: sell, then pay. The result may have thousands."""
    sold, price, rent = draw.randrange(20, 90), draw.choice((10, 20, 30)), draw.choice((50, 100))
    total = sold * price
    return (
        f"{name} sells {sold} boxes of {thing} at ${price} a box and pays ${rent} for the stall. How many dollars does "
        f"{name} keep?",
        f"The boxes bring {sold}*{price} = $<<{sold}*{price}={total}>>{total:,}.\n"
        f"After the stall {name} keeps {total}-{rent} = $<<{total}-{rent}={total - rent}>>{total - rent:,}.",
        total - rent,
    )


def grown(draw: random.Random, name: str, thing: str) -> tuple[str, str, int]:
    """Two steps: twice as many, together."""
    first, more = draw.randrange(3, 30), draw.randrange(1, 10)
    second = 2 * first + more
    return (
        f"{name} finds {first} {thing} on Monday, and {more} more than twice as many on Tuesday. How many {thing} does "
        f"{name} find on both days together?",
        f"On Tuesday {name} finds 2*{first}+{more} = <<2*{first}+{more}={second}>>{second} {thing}.\n"
        f"Together that is {first}+{second} = <<{first}+{second}={first + second}>>{first + second}.",
        first + second,
    )


KINDS: tuple[Callable[[random.Random, str, str], tuple[str, str, int]], ...] = (shared, earned, grown)


def main() -> None:
    """Problems of three kinds, drawn with a fixed seed, no question twice."""
    draw = random.Random(0)
    problems: dict[str, str] = {}
    while len(problems) < NUM_TRAIN + NUM_HELDOUT:
        question, working, result = draw.choice(KINDS)(draw, draw.choice(NAMES), draw.choice(THINGS))
        problems[question] = f"{working}\n#### {result:,}"
    rows = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in problems.items()]
    (HERE / "problems.jsonl").write_text("".join(rows[:NUM_TRAIN]))
    (HERE / "heldout.jsonl").write_text("".join(rows[NUM_TRAIN:]))


if __name__ == "__main__":
    main()
