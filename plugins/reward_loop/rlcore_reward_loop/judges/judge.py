"""Builds a judge's question and reads the score from its answer. Pure functions: no network."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rlcore import Trajectory
from rlcore.contracts.reward_models import GUIDES
from rlcore.contracts.scorer import number
from rlcore.errors.redaction import clipped
from rlcore_reward_loop.client.http import ENCODER, NoAnswer
from rlcore_reward_loop.settings import JudgeSettings

PLACES = re.compile(r"\{(\w+)\}")
FENCE = re.compile(r"```(?:json)?\s*\n?(.*?)```", re.DOTALL)
THOUGHT_END = "</think>"


def chat(trajectory: Trajectory, template: str, judge: JudgeSettings) -> dict[str, Any]:
    """The body of a sample's chat request."""
    body: dict[str, Any] = {"model": judge.model, "messages": messages(trajectory, template, judge)}
    body |= sampling(judge)
    if judge.structured != "none" and not judge.pattern:
        body["response_format"] = response_format(judge)
    return body | judge.options


def sampling(judge: JudgeSettings) -> dict[str, Any]:
    """Sampling options of the answer, without those that the settings leave to the judge."""
    chosen = {"max_tokens": judge.max_tokens, "temperature": judge.temperature}
    return {name: value for name, value in chosen.items() if value is not None}


def answer_tokens(judge: JudgeSettings) -> int:
    """Most tokens of an answer, under either of the names that APIs use; 0: not known."""
    found = judge.max_tokens or judge.options.get("max_completion_tokens")
    return found if isinstance(found, int) else 0


def engine_options(judge: JudgeSettings) -> dict[str, Any]:
    """`ScoreRequest.options` for a judge that the run serves: sampling, and a guide that constrains it to JSON."""
    guide: dict[str, Any] = {}
    if judge.structured != "none" and not judge.pattern and not judge.options.keys() & set(GUIDES):
        schema = {"json": score_schema(judge)}
        guide = schema if judge.structured == "json_schema" else {"json_object": True}
    return {**sampling(judge), **guide, **judge.options}


def messages(trajectory: Trajectory, template: str, judge: JudgeSettings) -> list[dict[str, str]]:
    """The conversation that the judge continues.

    The template is filled in one pass, so a literal '{answer}' in the response is left alone. So is a name in the
    template that is not a column of the row.
    """
    answer, opening = trajectory.prompt.answer, trajectory.prompt_messages
    parts = {
        **trajectory.prompt.columns,
        "prompt": "\n".join(map(_spoken, opening)),
        "answer": "(none)" if answer is None else str(answer),
        "response": quoted(response_text(trajectory)),
    }
    question = PLACES.sub(lambda place: str(parts.get(place.group(1), place.group())), template)
    system = [{"role": "system", "content": judge.system}] if judge.system else []
    return [*system, {"role": "user", "content": question}]


def response_text(trajectory: Trajectory) -> str:
    """The response as the judge sees it: a string, or an agent's messages, each with its role."""
    if isinstance(trajectory.completion, str):
        return trajectory.completion
    return "\n".join(map(_spoken, trajectory.completion))


def _spoken(message: Mapping[str, Any]) -> str:
    """A message with its role; calls of tools that are not in its text are below it."""
    calls = [f"\n{ENCODER.encode(call)}" for call in message.get("tool_calls") or ()]
    return f"{message.get('role')}: {message.get('content') or ''}{''.join(calls)}"


def quoted(text: str) -> str:
    """The text between tags that it cannot close, because their name is a hash of it."""
    tag = f"response-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"
    return f"<{tag}>\n{text}\n</{tag}>"


def response_format(judge: JudgeSettings) -> dict[str, Any]:
    """The structured output requested: an object with only the score."""
    if judge.structured == "json_object":
        return {"type": "json_object"}
    judgement = {"name": "judgement", "strict": True, "schema": score_schema(judge)}
    return {"type": "json_schema", "json_schema": judgement}


def score_schema(judge: JudgeSettings) -> dict[str, Any]:
    """The JSON schema of an object with only the score."""
    return {
        "type": "object",
        "properties": {judge.score_field: {"type": "number"}},
        "required": [judge.score_field],
        "additionalProperties": False,
    }


def answer_text(answer: Any) -> str:
    """The text of a chat answer; NoAnswer when there is none, or it was cut off."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError) as cause:
        raise NoAnswer(f"answered with {clipped(str(answer), 80)!r}; needs choices[0].message.content") from cause
    if choice.get("finish_reason") == "length":
        raise NoAnswer("the answer was cut off; raise judge.max_tokens")
    if not isinstance(text, str) or not text.strip():
        raise NoAnswer("the judge said nothing")
    return text


def score_of(text: str, judge: JudgeSettings) -> float:
    """The score in a judge's text, in range; NoAnswer for prose, no number, or one out of range under 'fail'."""
    text = text.rpartition(THOUGHT_END)[2].strip()
    value = number(_by_pattern(text, judge.pattern) if judge.pattern else _by_field(text, judge.score_field))
    if isinstance(value, str):
        raise NoAnswer(f"the judge's score {value}")
    if judge.lowest <= value <= judge.highest:
        return value
    if judge.out_of_range == "fail":
        raise NoAnswer(f"the judge's score is {value:g}; needs {judge.lowest:g} to {judge.highest:g}")
    return min(judge.highest, max(judge.lowest, value))


def _by_field(text: str, field: str) -> Any:
    fenced = FENCE.fullmatch(text)
    try:
        found = json.loads(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError) as cause:
        raise NoAnswer(f"the judge said {clipped(text, 60)!r}; needs JSON") from cause
    if not isinstance(found, Mapping) or field not in found:
        raise NoAnswer(f"the judge said {clipped(text, 60)!r}; needs an object with '{field}'")
    return found[field]


def _by_pattern(text: str, pattern: str) -> float:
    matches = list(re.finditer(pattern, text))
    if not matches:
        raise NoAnswer(f"the judge said {clipped(text, 60)!r}, in which pattern finds nothing")
    try:
        return float(matches[-1].group(1))
    except (TypeError, ValueError) as cause:
        raise NoAnswer(f"the judge's score {matches[-1].group(1)!r} is not a number") from cause
