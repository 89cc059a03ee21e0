"""Finds samples by an expression, such as `reward < 0.1 and truncated`.

The page implements the same language (`page/filter.js`); `view/tests/expressions.py` tests both.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore_view.model import Sample, ViewError


def texts_of(sample: Sample) -> str:
    """The contents and tool calls of all messages of the prompt and the response."""
    completion = sample.completion
    response = [completion] if isinstance(completion, str) else _contents(completion, "content", "tool_calls")
    return "\n".join([*_contents(sample.prompt, "content", "tool_calls"), *response])


def response_of(sample: Sample) -> str:
    """The contents of the assistant's messages in the response."""
    completion = sample.completion
    return completion if isinstance(completion, str) else "\n".join(_contents(_spoken(completion), "content"))


def _spoken(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message for message in messages if message.get("role") == "assistant"]


def _contents(messages: Sequence[Mapping[str, Any]], *names: str) -> list[str]:
    values = [message.get(name) for message in messages for name in names]
    return [value if isinstance(value, str) else _compact(value) for value in values if value]


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


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
    "sample": lambda sample: sample.sample,
    "text": texts_of,
    "response": response_of,
}
DEEPEST = 50
"""Most nested brackets, `not` and minus signs."""
_WORD = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\W\d][\w./-]*|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e[+-]?[0-9]+)?"""
    r"""|[<>=!]=|[<>()-]|\S""",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t"}
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
}

Test = Callable[[Sample], Any]


def parse(expression: str) -> Callable[[Sample], bool]:
    """The test that the expression describes; ViewError names an unknown word.

    Names of `FIELDS`, reward components as `reward.NAME`, numbers and quoted texts, compared and joined by and, or,
    not. A comparison with a value that a sample does not have is false; true and false count as 1 and 0.
    """
    parser = _Parser(expression)
    test = parser.either()
    if parser.at < len(parser.words):
        raise parser.error(f"'{parser.words[parser.at]}' is not expected here")
    return lambda sample: bool(test(sample))


class _Parser:
    """Recursive descent over the words of an expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = _WORD.findall(text)
        self.at = self._depth = 0

    def error(self, problem: str) -> ViewError:
        return ViewError(f"'{self.text}': {problem}; needs an expression such as: reward < 0.1 and truncated")

    def either(self) -> Test:
        """Tests joined by `or`."""
        tests = [self._both()]
        while self._took("or"):
            tests.append(self._both())
        return tests[0] if len(tests) == 1 else lambda sample: any(test(sample) for test in tests)

    def _both(self) -> Test:
        tests = [self._negation()]
        while self._took("and"):
            tests.append(self._negation())
        return tests[0] if len(tests) == 1 else lambda sample: all(test(sample) for test in tests)

    def _negation(self) -> Test:
        if not self._took("not"):
            return self._comparison()
        inner = self._deeper(self._negation)
        return lambda sample: not inner(sample)

    def _comparison(self) -> Test:
        values, names = [self._value()], list[str]()
        while (name := self._comparison_name()) in _COMPARISONS:
            self.at += len(name.split())
            names.append(name)
            values.append(self._value())
        if not names:
            return values[0]

        def test(sample: Sample) -> bool:
            found = [value(sample) for value in values]
            if any(value is None for value in found):
                return False
            return all(map(self._compared, names, found, found[1:]))

        return test

    def _comparison_name(self) -> str:
        word, following = [*self.words[self.at : self.at + 2], "", ""][:2]
        return "not in" if word == "not" and following == "in" else word

    def _compared(self, name: str, left: Any, right: Any) -> bool:
        texts = isinstance(left, str), isinstance(right, str)
        if name.endswith("in") and texts != (True, True):
            raise self.error(f"'{name}' needs a text on both sides")
        if name[0] in "<>" and texts[0] != texts[1]:
            raise self.error("a number is compared with a text; compare numbers with numbers and texts with texts")
        return _COMPARISONS[name](left, right)

    def _value(self) -> Test:
        if self.at == len(self.words):
            raise self.error("the expression ends too early")
        word = self.words[self.at]
        self.at += 1
        if word == "(":
            inner = self._deeper(self.either)
            if not self._took(")"):
                raise self.error("a closing bracket is missing")
            return inner
        if word == "-":
            number = self._deeper(self._value)
            return lambda sample: _negative(number(sample))
        if word[0] in "'\"" and len(word) > 1:
            text = re.sub(
                r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), word[1:-1], flags=re.S
            )
            return lambda sample: text
        if word[0] in "0123456789" or (word[0] == "." and len(word) > 1):
            value = float(word)
            return lambda sample: value
        if word in FIELDS:
            return FIELDS[word]
        if word.startswith("reward."):
            return lambda sample: sample.components.get(word.removeprefix("reward."))
        raise self.error(
            f"'{word}' is not known here; choose from {', '.join(FIELDS)}, reward.COMPONENT, numbers, texts in quotes, "
            "and, or, not"
        )

    def _deeper(self, inner: Callable[[], Test]) -> Test:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self.error(f"it is nested more than {DEEPEST} deep")
        test = inner()
        self._depth -= 1
        return test

    def _took(self, word: str) -> bool:
        found = self.words[self.at : self.at + 1] == [word]
        self.at += found
        return found


def _negative(value: Any) -> float | None:
    return -value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
