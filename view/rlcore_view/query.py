"""Finds samples by an expression, such as `reward < 0.1 and truncated`."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rlcore_view.model import Sample, ViewError

FIELDS: Mapping[str, Callable[[Sample], Any]] = {
    "reward": lambda sample: sample.score,
    "score": lambda sample: sample.score,
    "advantage": lambda sample: sample.advantage,
    "length": lambda sample: sample.num_sampled,
    "truncated": lambda sample: sample.truncated,
    "failed": lambda sample: sample.status == "failed",
    "step": lambda sample: sample.step,
    "lane": lambda sample: sample.lane,
    "source": lambda sample: sample.source,
    "prompt": lambda sample: sample.prompt_id,
    "text": lambda sample: sample.text(),
    "sample": lambda sample: sample.sample,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}

Test = Callable[[Sample], Any]


def parse(expression: str) -> Callable[[Sample], bool]:
    """The test that the expression describes; ViewError names what it does not know.

    Names of `FIELDS`, components of the reward as `reward.NAME`, numbers and strings, compared and joined by and, or,
    not. A comparison with a value that a sample does not have is false.
    """
    try:
        test = _test(ast.parse(expression, mode="eval").body, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ViewError(
            f"'{expression}': this is not an expression; for example: reward < 0.1 and truncated"
        ) from error
    return lambda sample: bool(test(sample))


def _test(node: ast.expr, text: str) -> Test:
    if isinstance(node, ast.BoolOp):
        tests, join = [_test(value, text) for value in node.values], all if isinstance(node.op, ast.And) else any
        return lambda sample: join(test(sample) for test in tests)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _test(node.operand, text)
        return lambda sample: not inner(sample)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _test(node.operand, text)
        return lambda sample: -number(sample)
    if isinstance(node, ast.Compare):
        return _comparison(node, text)
    if isinstance(node, ast.Constant):
        return lambda sample: node.value
    if isinstance(node, ast.Name) and node.id in FIELDS:
        return FIELDS[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "reward":
        return lambda sample: sample.components.get(node.attr)
    raise ViewError(
        f"'{text}': '{ast.unparse(node)}' is not known here; choose from {', '.join(FIELDS)}, reward.COMPONENT, "
        "numbers, strings, comparisons, and, or, not"
    )


def _comparison(node: ast.Compare, text: str) -> Test:
    operands = [_test(operand, text) for operand in (node.left, *node.comparators)]
    unknown = [type(op).__name__ for op in node.ops if type(op) not in _COMPARISONS]
    if unknown:
        raise ViewError(f"'{text}': the comparison {unknown[0]} is not known here; choose from < <= > >= == != in")
    compare = [_COMPARISONS[type(op)] for op in node.ops]

    def test(sample: Sample) -> bool:
        values = [operand(sample) for operand in operands]
        if any(value is None for value in values):
            return False
        try:
            return all(op(left, right) for op, left, right in zip(compare, values, values[1:], strict=False))
        except TypeError as error:
            raise ViewError(f"'{text}': {error}; compare numbers with numbers and texts with texts") from error

    return test
