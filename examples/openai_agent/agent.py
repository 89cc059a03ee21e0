"""An agent as its author wrote it, for any server that speaks the OpenAI protocol. It does not use rlcore.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/openai_agent/agent.py "What is 3 + 4?"
"""

import re
import sys

from openai import OpenAI

NUMBER = "The number only."
SHOWN: list = [
    {"role": "user", "content": "State the final answer to the following arithmetic problem: 11 + 12 ="},
    {"role": "assistant", "content": "11 + 12 = 23"},
    {"role": "user", "content": NUMBER},
    {"role": "assistant", "content": "23"},
]


def solve(question: str, base_url: str | None = None, api_key: str | None = None, model: str = "policy") -> str:
    """The answer to a question: worked out first, and then given as a number."""
    messages: list = [*SHOWN, {"role": "user", "content": question}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for instruction in (NUMBER, ""):
            response = client.chat.completions.create(model=model, messages=messages, max_tokens=12)
            messages.append(response.choices[0].message)
            if instruction:
                messages.append({"role": "user", "content": instruction})
    found = re.findall(r"-?\d+", messages[-1].content or "")
    return found[-1] if found else ""


if __name__ == "__main__":
    print(solve(sys.argv[1]))
