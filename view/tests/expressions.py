"""Expressions over samples: the cases that the command and the page must answer alike."""

from made_runs import run_of, sample
from rlcore_view import Run

CALLS = [{"function": {"name": "search", "arguments": '{"q": "été"}'}}]
TALK = [
    {"role": "assistant", "content": "let me look", "tool_calls": CALLS},
    {"role": "tool", "content": 'found: ünïcode\n"it\'s"'},
    {"role": "assistant", "content": [{"type": "text", "text": "so 42"}]},
    {"role": "assistant", "content": None},
]
PARTS = {"right": 1.0, "format-ok": 0.5, "größe": 2.0}


def samples_to_find() -> Run:
    """Five samples: plain, truncated, without a score, failed, and a conversation of an evaluation."""
    return run_of(
        [
            sample(1, 0, 0, 0.0, completion="The answer is 4.", components=PARTS, source="sums", advantage=-1.0),
            sample(1, 1, 1, 1.0, completion="so long", truncated=True, num_sampled=16, components={"right": 0.0}),
            sample(2, 2, 0, None, truncated=None, num_sampled=None, advantage=None, completion=""),
            sample(2, 3, 1, None, status="failed", advantage=0.0, completion="a\tb"),
            sample(3, 4, 0, 0.5, completion=TALK, lane="eval", source="größe"),
        ]
    )


FOUND: dict[str, list[int]] = {
    # numbers, and values that a sample does not have
    "reward < 0.6": [0, 4],
    "score >= 1": [1],
    "reward == reward": [0, 1, 4],
    "-1 <= advantage < 0.5": [0, 1, 3],
    "-reward < 0": [1, 4],
    "- - reward > 0": [1, 4],
    "advantage == -.5e0 or length > 1.5e1": [1],
    "not reward < 0.6": [1, 2, 3],
    "not not failed": [3],
    "reward": [1, 4],
    "1": [0, 1, 2, 3, 4],
    "0 or ''": [],
    "reward != 0 and step > 1": [4],
    # truth values count as 1 and 0
    "truncated": [1],
    "not truncated": [0, 2, 3, 4],
    "truncated == 0": [0, 3, 4],
    "truncated >= 1": [1],
    "failed == 1": [3],
    "failed > 0": [3],
    "-failed < 1": [],
    # components
    "reward.right == 1": [0],
    "reward.format-ok < 1": [0],
    "reward.größe == 2": [0],
    "reward.unknown < 1 or reward.unknown >= 1": [],
    "reward.toString == 1": [],
    # names
    "lane == 'eval'": [4],
    'source != "" and lane in "training"': [0],
    "prompt == 'all/3' or sample == 1 and step == 1": [1, 3],
    "(prompt == 'all/3' or sample == 1) and step == 1": [1],
    "'all' in prompt": [0, 1, 2, 3, 4],
    "'2' not in prompt and reward < 9": [0, 1, 4],
    "not '2' in prompt and reward < 9": [0, 1, 4],
    "source < 'm'": [2, 1, 3, 4],
    "step == '1'": [],
    "step != '1'": [0, 1, 2, 3, 4],
    # texts of prompts and responses
    "'question 3' in text": [3],
    "'question' in response": [],
    "'so' in response": [1, 4],
    "'so' in text and reward < 1": [4],
    "'ünïcode' in text": [4],
    "'ünïcode' in response": [],
    "'search' in text and not 'search' in response": [4],
    '\'"type":"text"\' in response': [4],
    r"'a\tb' in response": [3],
    r"'\n\"it\'s' in text": [4],
    r"'\\' in text": [4],
    "response == ''": [2],
    "text": [0, 1, 2, 3, 4],
    "response": [0, 1, 3, 4],
    "response == 'so long' or 'So' in text": [1],
    "(" * 49 + "reward > 0" + ")" * 49: [1, 4],
}
REFUSED: dict[str, str] = {
    "": "the expression ends too early",
    "reward <": "the expression ends too early",
    "(reward < 1": "a closing bracket is missing",
    "reward < 1)": "')' is not expected here",
    "reward is 1": "'is' is not expected here",
    "reward = 1": "'=' is not expected here",
    "rewards < 1": "'rewards' is not known here; choose from reward, score",
    "constructor": "'constructor' is not known here",
    "text.__class__ == 1": "'text.__class__' is not known here",
    "__import__('os').system('true')": "'__import__' is not known here",
    "[step for step in text]": "'[' is not known here",
    "reward < 'a'": "compare numbers with numbers and texts with texts",
    "response > 3": "compare numbers with numbers and texts with texts",
    "1 in text": "'in' needs a text on both sides",
    "'a' not in reward": "'not in' needs a text on both sides",
    "'open": "''' is not known here",
    "1.": "'.' is not expected here",
    "(" * 300 + "1" + ")" * 300: "it is nested more than 50 deep",
    "not " * 300 + "1": "it is nested more than 50 deep",
    "1 < " + "-" * 300 + "1": "it is nested more than 50 deep",
}
