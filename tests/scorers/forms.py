"""Reward functions in the forms of TRL and verl, good and bad, for test_reward_forms.py."""

import json
import time
from pathlib import Path


def overlong(max_len, cache):
    """A factory as TRL's get_soft_overlong_punishment."""
    return _Overlong(max_len, cache)


class _Overlong:
    def __init__(self, max_len, cache):
        self.max_len, self.cache = max_len, cache

    def __call__(self, completion_ids, **kwargs):
        return [0.0 if len(ids) <= self.max_len - self.cache else -1.0 for ids in completion_ids]


def closure(bonus=1.0):
    def score(completions, **kwargs):
        return [bonus for _ in completions]

    return score


def makes_async():
    async def score(trajectory):
        return 0.5

    return score


def makes_class():
    return Judge


class Judge:
    def score(self, trajectory):
        return 0.25


def makes_none(x=1):
    return None


def makes_number():
    return 1.0


def makes_wrong():
    return lambda a, b: 1.0


async def makes_later():
    return closure()


def breaks(secret="hunter2-hunter2"):
    raise ValueError("no such tokenizer")


def hangs():
    time.sleep(60)


def only_ids(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def only_completions(completions):
    return [float(len(text)) for text in completions]


def only_prompts(prompts):
    return [float(len(text)) for text in prompts]


def only_state(trainer_state, **kwargs):
    return [float(trainer_state.max_steps)] * len(kwargs["prompts"])


def usual(prompts, completions, ground_truth, **kwargs):
    return [float(truth in text) for text, truth in zip(completions, ground_truth, strict=True)]


def notes(completions, log_extra, log_metric):
    log_extra("length", [len(completion) for completion in completions])
    log_metric("share", 0.25)
    log_metric("share", 0.75)
    return [1.0 if "a" in completion else None for completion in completions]


def notes_too_few(completions, log_extra):
    log_extra("length", [1])
    return [1.0] * len(completions)


def notes_nan(completions, log_metric):
    log_metric("share", float("nan"))
    return [1.0] * len(completions)


def with_environments(completions, environments):
    return [1.0]


def without_environments(completions, environments=None):
    return [0.0 if environments else 1.0]


def tupled(data_source, solution_str, ground_truth, extra_info=None):
    return {"1": (1.0, solution_str, "because"), "2": (0.5, {"acc": True, "pred": "x"}), "0": (), "x": ("1", "b")}[
        ground_truth
    ]


def verl_dict(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": -1.0, "acc": False, "tokens": 7, "pred": "4", "note": "n", "bad": float("nan")}


def tuple_of_a_trajectory(trajectory):
    return (1.0, "not here")


class RewardAgent:
    """The form of verl's pull request 2854."""

    def __init__(self, path="", scale=1.0, wrong="", **_):
        self.path, self.scale, self.wrong = path, scale, wrong

    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        if "bad" in solution_str:
            raise ValueError("judge is down")
        return float(len(solution_str)) * self.scale, solution_str, "by length"

    def post_process_scores(self, scores):
        if self.wrong == "length":
            return scores[1:]
        if self.wrong == "raises":
            raise ValueError("cannot smooth")
        if self.wrong == "none":
            return None
        return [score - min(scores) for score in scores]

    def log(self, query, response, score, latency, details):
        if self.wrong == "log":
            raise OSError("disk full")
        if self.path:
            record = {"query": query, "response": response, "score": score, "latency": latency, "details": details}
            with Path(self.path).open("a") as file:
                file.write(json.dumps(record) + "\n")


class AsyncAgent(RewardAgent):
    async def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return super().compute_score(data_source, solution_str, ground_truth, extra_info)

    async def post_process_scores(self, scores, completions):
        return [score + len(completions) for score in scores]

    async def log(self, **everything):
        super().log(**{key: everything[key] for key in ("query", "response", "score", "latency", "details")})


class LogsOddly(Judge):
    """A class judged by `score` may have a `log` that means something else."""

    def log(self, level):
        raise NotImplementedError


class WantsMoreToLog(RewardAgent):
    def log(self, query, wandb):
        raise NotImplementedError


class HalfAsync(RewardAgent):
    async def log(self, query):
        raise NotImplementedError


class NoScores(RewardAgent):
    def post_process_scores(self):
        return []


def centred(completions, score):
    return [outcome - sum(score) / len(score) for outcome in score]


def too_few(completions, score):
    return score[1:]


def with_settings(trajectory, settings):
    return float(settings)


def maybe_settings(trajectory, settings=None):
    return 1.0 if settings is None else 2.0


class ClassWithSettings(Judge):
    def __init__(self, settings):
        self.settings = settings


def hungry(trajectory, gib=2.0):
    if "eat" in trajectory.text():
        held.append(bytearray(int(gib * 2**30)))
    return 1.0


held = []


async def async_plain(trajectory):
    return 1.0
