r"""Ready-made reward functions, which the core offers by their names: `reward.functions.x.fn=boxed`.

The first five extract an answer from the response and compare it with the prompt's. The answer goes into
`info['answer']`, from which the evaluation takes majority votes. The others look at the response alone.
"""

import math
import re
import threading
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from rlcore.contracts.scorer import task_score
from rlcore.errors import RewardError
from rlcore.types import FrozenDict, Reward, Trajectory

THINK_ANSWER = r"<think>.*</think>\s*<answer>.*</answer>"
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
GSM8K_MARK = "####"
QUANTITY = re.compile(
    r"((?<![\w.)])[-\u2212])?(?:\$\s?([-\u2212])?)?(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
)
r"""A number as people write it: -3, $1,234.50, -$5, .5. A hyphen after a digit or word joins: 10-15 ends in 15."""
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3}(?!\d))")
r"""The marks between thousands that TeX writes: 1{,}234, 1\,234, 1,\!234."""
NO_ANSWER = FrozenDict[str, Any]({"answer": ""})
"""Nothing in the response could be read: a vote for nothing, and what a run counts before it says so."""


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete \boxed{...}, with balanced braces; None without one."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : end]
        start = text.rfind("\\boxed{", 0, start)
    return None


def extract(text: str) -> str:
    r"""The last \boxed{} of a response, else its last <answer> tag, else its last number, else all of it."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    tags = ANSWER_TAG.findall(text)
    if tags:
        return str(tags[-1]).strip()
    numbers = list(QUANTITY.finditer(THOUSANDS.sub(",", text)))
    return _as_written(numbers[-1]) if numbers else text.strip()


def same_answer(found: str, wanted: str) -> bool:
    """True if two answers are the same text, or the same number; commas between thousands, a plus, $ and trailing
    zeros do not count."""
    found, wanted = found.strip(), wanted.strip()
    if found == wanted:
        return True
    matches = [QUANTITY.fullmatch(THOUSANDS.sub(",", text).removeprefix("+")) for text in (found, wanted)]
    numbers = [_quantity(match) for match in matches if match is not None]
    return len(numbers) == len(matches) and numbers[0] == numbers[1]


def exact_match(trajectory: Trajectory) -> Reward:
    r"""1 when the extracted answer (see `extract`) is the prompt's, else 0."""
    return _judged(extract(trajectory.text()), trajectory)


def boxed(trajectory: Trajectory) -> Reward:
    r"""1 when the last \boxed{} holds the prompt's answer, else 0; a response without one scores 0."""
    found = last_boxed(trajectory.text())
    return Reward(0.0, info=NO_ANSWER) if found is None else _judged(found.strip(), trajectory)


def gsm8k(trajectory: Trajectory) -> Reward:
    r"""1 when the response ends in the number of an answer as GSM8K has it ('... #### 72'), else 0.

    The number of the response is the last in its last \boxed{}, else the first after its last '####', else the last in
    its last <answer> tag, else its last. Commas between thousands, $, % and dots at the end do not count. RewardError
    when the data's answer has no number.
    """
    wanted = _last_quantity(_wanted(trajectory).rpartition(GSM8K_MARK)[2])
    if wanted is None:
        raise RewardError(
            f"gsm8k reads the number after '{GSM8K_MARK}' of the data's answer; that of prompt "
            f"'{trajectory.prompt.id}' is {_wanted(trajectory)[-60:]!r}"
        )
    found = gsm8k_number(trajectory.text())
    if found is None:
        return Reward(0.0, info=NO_ANSWER)
    return Reward(float(found == wanted), info=FrozenDict({"answer": _plainly(found)}))


def gsm8k_number(text: str) -> Decimal | None:
    """The number that a response gives as its answer, as in `gsm8k`; None without a number."""
    if (found := _last_quantity(last_boxed(text) or "")) is not None:
        return found
    marked = text.rpartition(GSM8K_MARK)
    if marked[1] and (match := QUANTITY.search(marked[2])) is not None:
        return _quantity(match)
    tags = ANSWER_TAG.findall(text)
    if tags and (found := _last_quantity(tags[-1])) is not None:
        return found
    return _last_quantity(text)


def _last_quantity(text: str) -> Decimal | None:
    matches = list(QUANTITY.finditer(THOUSANDS.sub(",", text)))
    return _quantity(matches[-1]) if matches else None


def _quantity(match: "re.Match[str]") -> Decimal:
    return Decimal(_as_written(match).replace(",", ""))


def _as_written(match: "re.Match[str]") -> str:
    """The number with its commas and its sign, without a $."""
    return f"{'-' if match[1] or match[2] else ''}{match[3]}"


def _plainly(number: Decimal) -> str:
    """Without zeros at the end, so that 72 and 72.00 are one answer in a vote."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def math_verify(trajectory: Trajectory) -> Reward:
    """1 if math-verify (extra `tasks`) finds the response mathematically equal to the prompt's answer, else 0."""
    from math_verify import parse, verify

    # its own limits are alarms, which only the main thread has; a call's deadline holds in any
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    parse = partial(parse, parsing_timeout=limit)
    wanted = parse(f"${_wanted(trajectory)}$")
    if not wanted:
        raise RewardError(f"math-verify cannot read the answer {_wanted(trajectory)!r} of the data")
    found = parse(trajectory.text())
    answer = FrozenDict[str, Any]({"answer": str(found[0])}) if found else NO_ANSWER
    return Reward(float(verify(wanted, found, timeout_seconds=limit)), info=answer)


def reasoning_gym(trajectory: Trajectory) -> Reward:
    """The score in 0..1 that the task of reasoning-gym (extra `tasks`) itself gives the extracted answer.

    It is 0 for an answer on which the task's code raises, unless it raises on the right answer, too. The task's name is
    the column `metadata`'s source_dataset, as reasoning-gym makes it.
    """
    from reasoning_gym import get_score_answer_fn

    metadata = trajectory.prompt.columns.get("metadata")
    name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not name:
        raise RewardError("reasoning_gym needs the column metadata with source_dataset; the data has none")
    found = extract(trajectory.text())
    question = str(trajectory.prompt.messages[-1].get("content", ""))
    entry = {"question": question, "answer": trajectory.prompt.answer, "metadata": metadata}
    return Reward(task_score(get_score_answer_fn(name), found, entry), info=FrozenDict({"answer": found}))


def format_match(trajectory: Trajectory, pattern: str = THINK_ANSWER) -> float:
    """1 when the whole response, spaces around it aside, matches the regular expression, in which '.' is any character;
    else 0."""
    return float(re.fullmatch(pattern, trajectory.text().strip(), re.DOTALL) is not None)


def length_penalty(trajectory: Trajectory, free: int = 256, limit: int = 512) -> float:
    """0 up to `free` sampled tokens, -1 from `limit` on, linear in between (DAPO, arXiv 2503.14476, equation 13)."""
    if limit <= free:
        raise RewardError(f"length_penalty: limit={limit} is not above free={free}")
    return -min(1.0, max(0, trajectory.num_sampled - free) / (limit - free))


def answer_text(answer: Any) -> str:
    """The answer of the data as a response writes it: a float without an exponent, 0.00002 where Python has 2e-05."""
    if isinstance(answer, float) and math.isfinite(answer):
        return f"{Decimal(str(answer)):f}"
    return str(answer)


def _wanted(trajectory: Trajectory) -> str:
    if trajectory.prompt.answer is None:
        raise RewardError(f"prompt '{trajectory.prompt.id}' has no answer to compare with")
    return answer_text(trajectory.prompt.answer)


def _judged(found: str, trajectory: Trajectory) -> Reward:
    return Reward(float(same_answer(found, _wanted(trajectory))), info=FrozenDict({"answer": found}))
