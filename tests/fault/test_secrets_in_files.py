"""Canaries in one whole run: none is in a byte of the run directory or of the output, however it is written."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest

from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS
from rlcore.testing.service import ServiceAnswer, ServiceCall, chat_answer, serving

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

CANARIES = {
    "SERVICE_TOKEN": "tok-canary/A+1=9%zQ",
    "QUERY_KEY": "query-canary-C3",
    "FUNCTION_API_KEY": "function-canary/D4+",
    "UNNAMED_PASSWORD": "password-canary-E5é",
    "JUDGE_KEY": "judge-canary-F6",
}
REWARDS = """
import base64, logging, os, sys
from urllib.parse import quote


def loud(completions, **columns):
    key = os.environ["FUNCTION_API_KEY"]
    for text in (key, "x" * 3990 + key, quote(key, safe=""), key.encode().hex()):
        print(text)
    print(base64.b64encode(("user:" + key).encode()).decode(), file=sys.stderr)
    print(key[:10], end="")
    sys.stdout.flush()
    print(key[10:])
    info = {"key": key, "base64": base64.b64encode(key.encode()).decode(), "list": [key] * 3, key: 1}
    return [{"score": 0.5, "info": info}] * len(completions)


def failing(completions, **columns):
    raise ValueError("x" * 490 + os.environ["FUNCTION_API_KEY"])


async def inside(completions, **columns):
    key = os.environ["UNNAMED_PASSWORD"]
    print(key)
    print("x" * 65530 + key, end="")
    sys.stdout.flush()
    logging.getLogger("rlcore.mine").warning("the key is %s", key)
    return [{"score": 0.5, "info": {"key": key}}] * len(completions)


async def failing_inside(completions, **columns):
    raise ValueError(os.environ["UNNAMED_PASSWORD"])
"""


def echoed(number: int, call: ServiceCall) -> ServiceAnswer:
    """An answer that holds what was sent, in one of the places that an answer has."""
    token = CANARIES["SERVICE_TOKEN"]
    sent = json.dumps(dict(call.headers)) + str(vars(call))[:3000]
    cut = "x" * (number * 7 % 220) + sent
    encoded = base64.b64encode(f"user:{token}".encode()).decode()
    return (
        ServiceAnswer({"score": 1, "info": {"headers": dict(call.headers), "call": str(vars(call))}}),
        ServiceAnswer(sent.encode(), 500),
        ServiceAnswer({"error": sent}, 404),
        ServiceAnswer(cut.encode(), content_type="text/html"),
        ServiceAnswer({"score": cut}),
        ServiceAnswer({sent: 1}),
        ServiceAnswer({}, 401, {"WWW-Authenticate": f'Basic realm="{token}"', "Location": f"file:///etc?{token}"}),
        ServiceAnswer({"score": 1, "info": {"base64": encoded, "quoted": quote(token, safe="")}}),
        ServiceAnswer({}, 302, {"Location": f"http://127.0.0.1:1/?{token}"}),
    )[number % 9]


def judged(call: ServiceCall) -> ServiceAnswer:
    """A judge that says what it was sent."""
    return chat_answer(json.dumps({"score": 5, "reason": str(vars(call))}))


def config(scorer: str, judge: str) -> dict[str, object]:
    functions = {
        name: {"fn": f"rewards.py:{name}", "weight": 0.5, **more}
        for name, more in {
            "loud": {"env": ["FUNCTION_API_KEY"], "children": 1},
            "failing": {"env": ["FUNCTION_API_KEY"], "children": 1},
            "inside": {},
            "failing_inside": {},
        }.items()
    }
    services = {
        "scorer": {"urls": [f"{scorer}/b?key=${{oc.env:QUERY_KEY}}"], "token": "${oc.env:SERVICE_TOKEN}", "tries": 2},
        "api": {"urls": [f"{judge}/v1"], "token": "${oc.env:JUDGE_KEY}", "tries": 1},
    }
    rewards = {
        "remote": {"served_by": "scorer"},
        "judge": {"kind": "judge", "served_by": "api", "judge": {"model": "m"}},
    }
    loop = {"audit": "all", "expose": True, "rewards": rewards, "services": services}
    return {"reward": {"error_budget_frac": 1.0, "functions": functions}, "plugins": {"reward_loop": loop}}


def written(value: str) -> Iterator[bytes]:
    """Texts that a search for the value would look for: it, halves of it, and how others write it."""
    raw = value.encode()
    yield from (raw, raw[: len(raw) * 2 // 3], raw[len(raw) // 3 :], raw.hex().encode(), quote(value, safe="").encode())
    for before in range(3):
        encoded = base64.b64encode(b"x" * before + raw)
        yield encoded[-(-8 * before // 6) : -4]


def test_no_byte_of_a_run_or_of_its_output_holds_a_secret(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 64)
    (tmp_path / "rewards.py").write_text(REWARDS)
    numbers = count()
    with serving(lambda call: echoed(next(numbers), call)) as scorer, serving(judged) as judge:
        (tmp_path / "run.json").write_text(json.dumps(config(scorer.url, judge.url)))
        settings = [*SETTINGS[:-2], f"data.sources.all.path={prompts}", "train.name=run", "train.max_steps=3"]
        settings += ["train.prompts_per_step=8", "rollout.samples_per_prompt=2", "train.log_completions_every=1"]
        command = [sys.executable, "-m", "rlcore", "train", "run.json", *settings]
        command += ["--plugin", "null", "--plugin", "reward_loop"]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **CANARIES}, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert len(scorer.calls) > 45
        assert len(judge.calls) >= 45
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"log.txt", "plan.json", "reward_calls.jsonl", "step_000001.jsonl"} <= {path.name for path in files}
    found = {str(path): path.read_bytes() for path in files} | {"stdout": done.stdout, "stderr": done.stderr}
    leaks = [
        (where, name, form)
        for where, text in found.items()
        for name, value in CANARIES.items()
        for form in written(value)
        if form in text
    ]
    assert leaks == []
    assert b"${oc.env:FUNCTION_API_KEY}" in found[str(tmp_path / "runs" / "run" / "log.txt")]
