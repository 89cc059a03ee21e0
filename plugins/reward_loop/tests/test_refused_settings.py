"""Settings of this plugin that cannot work are refused before anything starts."""

from collections.abc import Callable
from typing import Any

import pytest

from rlcore.errors import ConfigError, PlanError
from rlcore.plugins.planning import plan_run

BAD_SETTINGS = {
    "no rewards": ({}, "rewards: empty; needs at least one"),
    "no address": ({"services": {"s": {}}, "rewards": {"a": {"served_by": "s"}}}, r"services\.s\.urls: empty"),
    "a bad address": (
        {"services": {"s": {"urls": ["127.0.0.1:80"]}}, "rewards": {"a": {"served_by": "s"}}},
        "needs an",
    ),
    "a password in an address": ({"services": {"s": {"urls": ["http://me:pw@x/"]}}}, "an address holds a password"),
    "a token in the file": (
        {"services": {"s": {"urls": ["http://x/"], "token": "sk-1"}}},
        r"token: found a secret written out",
    ),
    "no service": ({"rewards": {"a": {"served_by": "x"}}}, r"served_by: found 'x'; kind=service needs an entry"),
    "a name of two": ({"services": {"s": {}}, "models": {"s": {"path": "p"}}}, "both in services and in models"),
    "unused service": (
        {
            "services": {"s": {"urls": ["http://x/"]}, "t": {"urls": ["http://x/"]}},
            "rewards": {"a": {"served_by": "s"}},
        },
        r"services\.t: no reward is served_by it",
    ),
    "a token that ends its line": (
        {"services": {"s": {"urls": ["http://x/"], "token": "${oc.env:REWARD_LOOP_TEST_TOKEN}"}}},
        r"services\.s\.token: holds white space or a control character",
    ),
    "a batch of vLLM's": (
        {"models": {"m": {"path": "p", "backend": "vllm", "batch_tokens": 7}}},
        r"models\.m\.batch_tokens: set to .*, which has no effect: it is used only when .*backend == 'hf'",
    ),
    "a wait of vLLM's": (
        {"models": {"m": {"path": "p", "backend": "vllm", "batch_wait_s": 1.0}}},
        r"models\.m\.batch_wait_s: set to .*, which has no effect",
    ),
    "options of no engine": (
        {"models": {"m": {"path": "p", "options": {"enforce_eager": True}}}},
        r"models\.m\.options.*: set to .*, which has no effect: it is used only when .*backend != 'hf'",
    ),
    "weight": ({"rewards": {"a": {"weight": float("nan")}}}, r"rewards\.a\.weight: found .*; needs a finite number"),
    "no response": ({"judge": {"template": "Grade this."}}, r"judge\.template: has no \{response\} in it"),
    "no file": ({"judge": {"template": "nowhere.txt"}}, r"judge\.template: found no file 'nowhere\.txt'"),
    "no range": ({"judge": {"lowest": 5.0, "highest": 5.0}}, "lowest=5 is not below highest=5"),
    "no group": ({"judge": {"pattern": "[0-9]+"}}, "needs a group around the score"),
    "no pattern": ({"judge": {"pattern": "("}}, "is not a regular expression"),
    "no function": ({"post_process": "mine"}, "needs module:name or file.py:name"),
    "a judge's key": ({"kind": "service", "judge": {"lowest": 1.0}}, "which has no effect: it is used only when"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    config_of: Callable[..., dict[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_LOOP_TEST_TOKEN", "sk-read-from-a-file\n")
    plugin, message = BAD_SETTINGS[name]
    if "rewards" not in plugin and name not in ("no rewards",):
        reward = {"kind": "judge", "served_by": "s"} | {
            k: v for k, v in plugin.items() if k not in ("services", "models")
        }
        services = plugin.get("services", {"s": {"urls": ["http://x/"]}})
        plugin = {"rewards": {"a": reward}, "services": services, "models": plugin.get("models", {})}
    if "rewards" in plugin and name == "weight":
        plugin = {
            "rewards": {"a": {"served_by": "s", **plugin["rewards"]["a"]}},
            "services": {"s": {"urls": ["http://x/"]}},
        }
    with pytest.raises((ConfigError, PlanError), match=message):
        plan_run([config_of(**plugin)], [])
