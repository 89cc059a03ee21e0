"""Checks data against rewards before anything starts: required columns, answers, endings of prompts.

Signatures are read from the functions' source without importing it. Functions that cannot be read this way, such as
decorated ones, are checked when their child has started.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.contracts.components import ResolvedReward
from rlcore.data.conversation import text_of
from rlcore.data.read_prompts import ANSWER_COLUMNS
from rlcore.errors import ConfigError, counted, misspelt, shown
from rlcore.plan import RunPlan
from rlcore.plan.sources import definition
from rlcore.reward.call_arguments import NO_COLUMNS
from rlcore.reward.signature import ACCEPTED, METHODS, SETTINGS, TRL_NAMES
from rlcore.types import SAMPLE_NAMES, Prompt

Prompts = Mapping[str, Sequence[Prompt]]

ROLES = ("system", "user", "assistant", "tool", "developer")
"""The roles that chat templates know."""
SCORERS = "rlcore.reward.scorers:"
COMPARING = ("exact_match", "boxed", "gsm8k", "math_verify")
"""Scorers of the core that compare the response with the prompt's answer."""


@dataclass(frozen=True)
class _Needs:
    """Columns that a function takes, all of which must exist."""

    columns: frozenset[str]
    answer: bool
    """True if it compares with the answer, whatever its column."""


def check_data(plan: RunPlan, prompts: Prompts, heldout: Prompts) -> list[str]:
    """Notes on data that works but is rarely intended; ConfigError for data that every reward call fails on.

    `prompts` and `heldout` are those of `data.sources` and `eval.sources`.
    """
    notes = [*_repeated(plan, prompts)]
    for section, sources in (("data.sources", prompts), ("eval.sources", heldout)):
        for name, rows in sources.items():
            notes += _endings(f"{section}.{name}", rows)
            notes += _odd_roles(f"{section}.{name}", rows)
            notes += _taken_names(f"{section}.{name}", rows) if plan.rewards else []
    for reward in plan.rewards:
        needs = _needs_of(reward)
        if needs is not None:
            notes += _missing(reward, needs, prompts, heldout)
            notes += _partly_answered(reward, needs, "data.sources", prompts)
            notes += _partly_answered(reward, needs, "eval.sources", heldout)
    return notes


def _repeated(plan: RunPlan, prompts: Prompts) -> list[str]:
    num_prompts, num_rows = plan.config.train.prompts_per_step, sum(map(len, prompts.values()))
    if num_prompts <= num_rows:
        return []
    return [
        f"train.prompts_per_step={num_prompts}: the sources hold {counted(num_rows, 'prompt')}, so a step has some of "
        "them twice; lower it or add rows"
    ]


def _endings(who: str, rows: Sequence[Prompt]) -> list[str]:
    ends = sum(1 for row in rows if row.messages and row.messages[-1].get("role") == "assistant")
    if not ends:
        return []
    return [
        f"{who}: {ends} of {len(rows)} prompts end with a message of the assistant, which the policy reads as part of "
        "the prompt; if that is the answer, put it into a separate column, such as answer"
    ]


def _odd_roles(who: str, rows: Sequence[Prompt]) -> list[str]:
    odd = [(row, role) for row in rows for message in row.messages if (role := message.get("role")) not in ROLES]
    if not odd:
        return []
    row, role = odd[0]
    return [
        f"{who}: messages with a role other than {', '.join(ROLES)}: {len(odd)}, such as {shown(role)} in {row.id} "
        f"({question_start(row)}), which a chat template may drop or misread; correct the role"
    ]


def _taken_names(who: str, rows: Sequence[Prompt]) -> list[str]:
    taken = sorted({name for row in rows for name in row.columns if name in NO_COLUMNS})
    if not taken:
        return []
    return [
        f"{who}: list-style reward functions do not get the columns {', '.join(taken)}, because these names mean "
        "something else in a call; rename them"
    ]


def _missing(reward: ResolvedReward, needs: _Needs, prompts: Prompts, heldout: Prompts) -> list[str]:
    """Notes on sources that lack columns of the function; ConfigError if every training source does."""
    lacking = {name: lack for name, rows in prompts.items() if (lack := _lack(needs, rows))}
    if lacking and len(lacking) == len(prompts):
        name, lack = next(iter(lacking.items()))
        raise ConfigError(f"reward.functions.{reward.name}.fn: {reward.target} {_worded(name, lack, prompts[name])}")
    lacking |= {f"eval {name}": lack for name, rows in heldout.items() if (lack := _lack(needs, rows))}
    return [
        f"reward.functions.{reward.name}: needs {', '.join(lack)}, which source {name} does not have: its samples fail"
        for name, lack in lacking.items()
    ]


def _lack(needs: _Needs, rows: Sequence[Prompt]) -> list[str]:
    """Required columns that no row has; 'an answer' stands for the answer's column."""
    columns = {name for row in rows for name in row.columns} | {"source"}
    answered = any(_is_answered(row) for row in rows)
    lack = sorted(name for name in needs.columns - columns if name not in ANSWER_COLUMNS)
    return [*lack, *(["an answer"] if _asks_for_answer(needs, rows) and not answered else [])]


def _partly_answered(reward: ResolvedReward, needs: _Needs, section: str, sources: Prompts) -> list[str]:
    """Notes on sources where only some rows have the answer that the function takes."""
    notes = []
    for name, rows in sources.items():
        without = [row for row in rows if not _is_answered(row)]
        if without and len(without) < len(rows) and _asks_for_answer(needs, rows):
            notes.append(
                f"{section}.{name}: prompts without an answer: {len(without)} of {len(rows)}, such as {without[0].id} "
                f"({question_start(without[0])}), and reward.functions.{reward.name} takes one; fill it in, or leave "
                "them out"
            )
    return notes


def question_start(row: Prompt) -> str:
    """The first words of the prompt's last message, quoted."""
    return repr(" ".join(text_of(row.messages[-1]).split())[:40])


def _asks_for_answer(needs: _Needs, rows: Sequence[Prompt]) -> bool:
    columns = {name for row in rows for name in row.columns}
    return needs.answer or bool(needs.columns & (set(ANSWER_COLUMNS) - columns))


def _is_answered(row: Prompt) -> bool:
    judged = row.columns.get("reward_model")
    return row.answer is not None or (isinstance(judged, Mapping) and judged.get("ground_truth") is not None)


def _worded(name: str, lack: Sequence[str], rows: Sequence[Prompt]) -> str:
    present = sorted({name for row in rows for name in row.columns})
    columns = ", ".join(present) or "none besides prompt and answer"
    answers = ANSWER_COLUMNS if any(map(_is_answered, rows)) else ()
    needed = ", ".join(lack) + misspelt(lack, {*present, *answers, *SAMPLE_NAMES})
    if lack == ["an answer"]:
        way_out = f"name its column in data.sources.{name}.answer_column, or {', '.join(ANSWER_COLUMNS)} in the data"
    else:
        way_out = "add them to the data, or give the parameters defaults"
    return f"needs {needed}, which source {name} does not have; it has the columns: {columns}; {way_out}"


def _needs_of(reward: ResolvedReward) -> _Needs | None:
    """Needs according to the function's source; None if unknown. ConfigError for a class that cannot score."""
    if reward.target.startswith(SCORERS):
        return _Needs(frozenset(), reward.target.removeprefix(SCORERS) in COMPARING)
    node, is_method = definition(reward.target), False
    if isinstance(node, ast.ClassDef):
        node, is_method = _method(reward, node), True
    if node is None or reward.is_factory:
        return None
    return _read(node, frozenset(reward.kwargs) if not is_method else frozenset())


def _method(reward: ResolvedReward, node: ast.ClassDef) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The method that scores; None if a base class may define it."""
    for name in METHODS:
        for member in node.body:
            if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)) and member.name == name:
                return member
    if not node.bases and not node.keywords and not any(isinstance(member, ast.Assign) for member in node.body):
        raise ConfigError(
            f"reward.functions.{reward.name}.fn: the class {node.name} of {reward.target} has no method score and no "
            f"compute_score; {ACCEPTED}, as its method score"
        )
    return None


def _read(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: frozenset[str]) -> _Needs | None:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = {argument.arg for argument in positional[: len(positional) - len(arguments.defaults)]}
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required |= {argument.arg for argument, default in keywords if default is None}
    names = {argument.arg for argument in (*positional, *arguments.kwonlyargs)}
    if names & set(TRL_NAMES):
        return _Needs(frozenset(required - set(TRL_NAMES) - bound - {SETTINGS, "self", "cls", "environments"}), False)
    if {"solution_str", "ground_truth"} <= names:
        used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return _Needs(frozenset(), "ground_truth" in used)
    return None
