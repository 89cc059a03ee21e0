"""Makes a beginner's mistakes with the real commands, and prints the answer to each as JSON lines.

`docs/results/first_contact.md` grades the messages. `plan`, `config`, `init`, `sweep`, `plugins` or `rlcore.train` find
MISTAKES before the first process of a run. A run on the null policy finds those of `first_contact_runs`.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from first_contact_runs import RUN_MISTAKES, made

from rlcore.cli import main as rlcore
from rlcore.errors import RlcoreError

ROWS = "".join(
    json.dumps({"prompt": f"Reverse {word}", "answer": word[::-1]}) + "\n" for word in ["cat", "dog", "cow", "pig"]
)
TRL = "def ok(completions, answer, **kwargs):\n    return [float(a in c) for a, c in zip(answer, completions)]\n"
ANSWERED = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "b"}\n'
FILES = {"train.jsonl": ROWS, "rew.py": TRL}
RUN = (
    "model.path=none", "model.tokenizer=bytes", "actor.backend=null", "rollout.backend=null",
    "data.sources.train.path=train.jsonl", "reward.functions.ok.fn=rew.py:ok", "train.prompts_per_step=2",
    "train.max_steps=2",
)  # fmt: skip
NULL = ("--plugin", "null")
LLAMA = json.dumps(
    {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A mistake, and words that the answer must contain."""

    name: str
    words: str
    arguments: tuple[str, ...] = ()
    """Arguments of the command line."""
    call: Callable[[], Any] | None = None
    """A call in Python, instead of a command."""
    files: Mapping[str, str] = field(default_factory=dict)
    is_note: bool = False
    """The answer is a note of the plan, and the run continues."""


def plan(name: str, words: str, *overrides: str, is_note: bool = False, **files: str) -> Mistake:
    """A mistake in a run; `files` maps names to contents, with __ for the dot."""
    named = {name.replace("__", "."): text for name, text in files.items()}
    return Mistake(name, words, ("plan", *RUN, *overrides, *NULL), files=named, is_note=is_note)


def of_python(**changed: Any) -> Callable[[], Any]:
    """A call of `rlcore.train` with a reward and changed arguments."""

    def call() -> Any:
        from rlcore import train

        arguments: dict[str, Any] = {"model": "none", "rewards": ["rew.py:ok"], "data": "train.jsonl", **changed}
        return train(**arguments, plugins=["null"], **dict(word.split("=") for word in RUN[:4]))

    return call


def closure() -> Callable[..., list[float]]:
    """A reward with an object that cannot be sent to another process."""
    model = io.BytesIO()

    def judged(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(model.tell()) for _ in completions]

    return judged


def typed() -> Callable[..., Any]:
    """A reward whose source cannot be found."""
    names: dict[str, Any] = {}
    exec("def made(completions, **kwargs):\n    return [1.0 for _ in completions]\n", names)
    made: Callable[..., Any] = names["made"]
    return made


MISTAKES = (
    Mistake("no model, no data, no reward", "needs", ("plan",)),
    plan("data file typo", "did you mean 'train.jsonl'", "data.sources.train.path=trian.jsonl"),
    plan("train.json that is not there", "did you mean 'train.jsonl'", "data.sources.train.path=train.json"),
    plan(
        "data of an unknown kind",
        "is not a kind of file that is read",
        "data.sources.train.path=train.xml",
        train__xml="<a/>",
    ),
    plan("model path typo", "found no directory './nomodel'", "model.path=./nomodel", "model.tokenizer="),
    plan("wrong columns", "prompt_column", train__jsonl='{"text": "a", "label": "b"}\n'),
    plan(
        "nested answer typo",
        "did you mean",
        "data.sources.train.answer_column=reward_model.groundtruth",
        train__jsonl='{"prompt": "a", "reward_model": {"ground_truth": "b"}}\n' * 2,
    ),
    plan("no answer, reward takes answer", "needs an answer", train__jsonl='{"prompt": "a"}\n{"prompt": "b"}\n'),
    plan(
        "no answer, exact_match",
        "needs an answer",
        "reward.functions.ok.fn=exact_match",
        train__jsonl='{"prompt": "a"}\n{"prompt": "b"}\n',
    ),
    plan("reward wants a column", "needs target", rew__py="def ok(completions, target):\n    return []\n"),
    plan("class without score", "has no method score", rew__py="class ok:\n    pass\n"),
    plan("wrong signature", "takes nothing of a sample", rew__py="def ok(foo, bar):\n    return 1.0\n"),
    plan("a lambda in a file", "is a lambda", rew__py="ok = lambda completions: [1.0]\n"),
    plan("reward file typo", "found no file 'rew9.py'", "reward.functions.ok.fn=rew9.py:ok"),
    plan("reward name typo", "did you mean 'ok'", "reward.functions.ok.fn=rew.py:okay"),
    plan("reward imports what is missing", "imports 'nomodule'", is_note=True, rew__py="import nomodule\n" + TRL),
    plan("a reward's file with a syntax error", "is not a Python file", rew__py="def ok(completions:\n"),
    plan(
        "wrong canary",
        "scored 0",
        "reward.canary=It is so: {answer}",
        rew__py="def ok(completions, answer):\n    return [float(a == c) for a, c in zip(answer, completions)]\n",
    ),
    plan(
        "canary whose reward raises",
        "rew.py:2: ZeroDivisionError",
        "reward.canary={answer}",
        rew__py="def ok(completions, answer):\n    return [1 / 0]\n",
    ),
    plan(
        "canary whose reward returns text",
        "did not get a score",
        "reward.canary={answer}",
        rew__py="def ok(completions, answer):\n    return ['1.0' for _ in completions]\n",
    ),
    plan("canary without a place for the answer", "needs {answer}", "reward.canary=It is"),
    plan("all prompts too long", "raise it or choose another source", "data.max_prompt_tokens=2"),
    plan("more prompts per step than rows", "twice", "train.prompts_per_step=100", is_note=True),
    plan(
        "messages that end with the answer",
        "message of the assistant",
        is_note=True,
        train__jsonl=ANSWERED * 2,
    ),
    plan(
        "batch too large",
        "lower actor.micro_batch_tokens",
        "model.path=.",
        "actor.backend=hf",
        "rollout.backend=hf",
        "actor.micro_batch_tokens=100000000",
        "rollout.max_tokens=4000",
        config__json=LLAMA,
    ),
    plan("device gpu", "'gpu' is 'cuda' here", "cluster.device=gpu"),
    plan("cuda without a GPU", "cluster.device=cpu", "cluster.device=cuda"),
    plan("verl's rollout.n", "rollout.samples_per_prompt", "rollout.n=4"),
    plan("TRL's num_generations", "rollout.samples_per_prompt", "rollout.num_generations=4"),
    plan("learning_rate", "actor.lr", "actor.learning_rate=1e-5"),
    plan("batch_size", "prompts_per_step", "train.batch_size=8"),
    plan("beta", "algo.kl.coef", "algo.beta=0.1"),
    plan("clip_ratio", "clip_low", "algo.clip_ratio=0.1"),
    plan("a key without effect", "algo.kl.placement", "algo.kl.coef=0.1"),
    plan("top_p in training", "top_p", "rollout.top_p=0.9"),
    plan("vLLM is missing", "'vllm' comes with `pip install './plugins/vllm[engine]'`", "rollout.backend=vllm"),
    plan("PPO without a critic", "'critic_engine' is installed; enable it with", "algo.advantage=gae"),
    Mistake("tab in YAML", "found a tab", ("plan", "c.yaml"), files={"c.yaml": "model:\n\tpath: none\n"}),
    Mistake(
        "wrong indent in YAML",
        "begin in the same column",
        ("plan", "c.yaml"),
        files={"c.yaml": "model:\n  path: none\n   tokenizer: bytes\n"},
    ),
    Mistake(
        "duplicate key in YAML",
        "each of its keys once",
        ("plan", "c.yaml"),
        files={"c.yaml": "model:\n  path: a\n  path: b\n"},
    ),
    Mistake("section at the wrong level", "reward.functions", ("plan", "c.yaml"), files={"c.yaml": "functions: {}\n"}),
    Mistake("key typo in `config`", "did you mean", ("config", "actor.lrr")),
    Mistake("no such command", "did you mean", ("trian",)),
    Mistake("init with a name that exists", "exists", ("init", "taken"), files={"taken": ""}),
    Mistake("init json", "standard library", ("init", "json")),
    Mistake("init my-task", "not a Python identifier", ("init", "my-task")),
    Mistake("plugins new json", "standard library", ("plugins", "new", "json")),
    Mistake(
        "plugins new with an unknown offer", "did you mean 'reward'", ("plugins", "new", "mine", "--offers", "rewards")
    ),
    Mistake(
        "plugins new with a name that exists", "exists", ("plugins", "new", "taken", "--file"), files={"taken.py": ""}
    ),
    Mistake("sweep --jobs 0", "1 or more", ("sweep", *RUN, *NULL, "--jobs", "0", "train.seed=1,2")),
    Mistake("resume without a run", "gone", ("resume", "runs/gone")),
    Mistake("a lambda as a reward", "write it with def", call=of_python(rewards=[lambda completions, **kwargs: [1.0]])),
    Mistake("a closure over a model", "put it into a file", call=of_python(rewards=[closure()])),
    Mistake("a function without a source", "put it into a file", call=of_python(rewards=[typed()])),
    Mistake("rows that are not dicts", "dict", call=of_python(data=["a", "b"])),
    Mistake("a dict of columns as data", "from_dict", call=of_python(data={"prompt": ["a"], "answer": ["b"]})),
    Mistake("plugin typo", "did you mean 'null'", ("plan", *RUN, "--plugin", "nul")),
)


def answers(chosen: str = "") -> Iterator[dict[str, Any]]:
    """Makes each mistake in an empty directory with FILES; yields the answers."""
    for mistake in MISTAKES:
        if chosen in mistake.name:
            with tempfile.TemporaryDirectory(prefix="first-contact-") as directory, contextlib.chdir(directory):
                for name, text in {**FILES, **mistake.files}.items():
                    Path(name).write_text(text, "utf-8")
                yield answered(mistake)
    for in_run in RUN_MISTAKES:
        if chosen in in_run.name:
            with tempfile.TemporaryDirectory(prefix="first-contact-") as directory, contextlib.chdir(directory):
                for name, text in FILES.items():
                    Path(name).write_text(text, "utf-8")
                yield made(in_run, (*RUN, *NULL))


def answered(mistake: Mistake) -> dict[str, Any]:
    """The exit code, the lines and the seconds of one mistake."""
    out, errors = io.StringIO(), io.StringIO()
    began, code = time.monotonic(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        if mistake.call is None:
            code = rlcore(mistake.arguments)
        else:
            try:
                mistake.call()
            except RlcoreError as error:
                code = 2
                errors.write(f"{error}\n")
    notes = [line for line in out.getvalue().splitlines() if mistake.words in line]
    lines = notes if mistake.is_note else errors.getvalue().splitlines()
    return {
        "mistake": mistake.name,
        "code": code,
        "seconds": round(time.monotonic() - began, 2),
        "answer": lines,
        "as_expected": code == (0 if mistake.is_note else 2) and len(lines) == 1 and mistake.words in lines[0],
        "left": sorted(set(os.listdir()) - {*FILES, *mistake.files}),
    }


def main() -> int:
    """Print the answers; returns 1 if one is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="mistakes whose name has this text")
    parsed = parser.parse_args()
    wrong = 0
    for answer in answers(parsed.only):
        print(json.dumps(answer), flush=True)
        wrong += not answer["as_expected"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
