"""Issues the training prompts in the order of the run, and keeps the results of past rows for the order."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from rlcore.config import DataConfig
from rlcore.contracts.prompt_orders import OrderContext, PromptOrder, RowResults
from rlcore.data.conversation import question_of
from rlcore.data.order import other_run
from rlcore.errors import CALLED, ConfigError, PluginError, boundary, shown
from rlcore.errors.checks.interfaces import defines
from rlcore.plan.run_plan import PromptOrderPlan
from rlcore.plan.time_limit import limited
from rlcore.types import Prompt, RewardStatus, ScoredTrajectory

T = TypeVar("T")


class IssuedPrompts:
    """Issues prompts without end, in the order that `data.order` names, and checks all that the order returns."""

    def __init__(
        self, prompts: Mapping[str, Sequence[Prompt]], plan: PromptOrderPlan, data: DataConfig, seed: int
    ) -> None:
        """ConfigError if there are no prompts or a source is empty; PluginError if the order cannot be made."""
        if not prompts:
            raise ConfigError("data.sources: there is none; needs at least one source of prompts")
        for name in sorted(prompts):
            if not prompts[name]:
                raise ConfigError(f"data.sources.{name}: no prompt is left; see data.max_prompt_tokens")
        self._offer, self._seed, self._solved_at = plan.offer, seed, data.solved_at
        self._who = f"{plan.provided_by}: prompt order '{plan.offer.name}'"
        self._digests = {name: _digest(prompts[name]) for name in sorted(prompts)}
        self._rows = {name: _digest_of_rows(prompts[name]) for name in sorted(prompts)}
        self.changed: Sequence[str] = ()
        """Sources with the questions of the restored state, and other answers, columns or system messages."""
        self._prompts = {prompt.id: prompt for name in sorted(prompts) for prompt in prompts[name]}
        self._issued: Counter[str] = Counter()
        """The number of times that each row was issued."""
        self._results: Mapping[str, RowResults] = {}
        self._saved: Mapping[str, list[Any]] = {}
        """The results as JSON. Neither mapping is changed in place, because a published state or the order may hold it.
        """
        self._counts = not defines(plan.offer.cls, PromptOrder, "times_issued")
        mixed = {name: source for name, source in data.sources.items() if name in prompts}  # without those of weight 0
        context = OrderContext(plan.offer.name, prompts, replace(data, sources=mixed), seed, plan.section)
        self._order = self._called("making it", lambda: plan.offer.cls(context))

    @property
    def num_prompts(self) -> int:
        """Number of rows of all sources."""
        return len(self._prompts)

    def next_prompts(self, n: int) -> list[tuple[Prompt, int]]:
        """The next `n` prompts, each with its epoch: the number of times that it was issued before.

        PluginError if the order returns anything but `n` known rows, each once unless the order may repeat rows.
        """
        if n == 0:
            return []
        call = f"next({n})"
        rows = self._called(call, lambda: self._order.next(n, MappingProxyType(self._results)))
        if not isinstance(rows, (list, tuple)):
            raise PluginError(f"{self._who}: {call} returned {shown(rows)}; needs a list of {n} prompt ids")
        if len(rows) != n:
            raise PluginError(f"{self._who}: {call} returned {len(rows)} rows; needs {n}")
        for row in rows:
            if not isinstance(row, str) or row not in self._prompts:
                raise PluginError(
                    f"{self._who}: {call} returned the row {shown(row)}; needs the id of a prompt of "
                    f"{', '.join(f'data.sources.{name}' for name in self._digests)}, such as "
                    f"'{next(iter(self._prompts))}'"
                )
        if not self._offer.repeats and n <= len(self._prompts) and len(set(rows)) < n:
            twice = next(row for row, times in Counter(rows).items() if times > 1)
            raise PluginError(
                f"{self._who}: {call} returned the row '{twice}' twice; needs different rows, or an offer with "
                "repeats=True"
            )
        return [self._issue(row) for row in rows]

    def _issue(self, row: str) -> tuple[Prompt, int]:
        epoch = self._issued[row]
        self._issued[row] += 1
        return self._prompts[row], epoch

    def prompt(self, name: str) -> Prompt:
        """The prompt of that id; CheckpointError if no source has it."""
        if name not in self._prompts:
            raise other_run(f"found no prompt '{name}'")
        return self._prompts[name]

    def record(self, groups: Iterable[tuple[Sequence[ScoredTrajectory], int]]) -> None:
        """Add the results of a published step: each (group, version that sampled it), in the order of issue."""
        if not self._offer.uses_results:
            return
        found, saved = dict(self._results), dict(self._saved)
        for group, version in groups:
            rewards = _rewards(group)
            if rewards:
                row = group[0].trajectory.id.prompt
                found[row] = _added(found.get(row), list(rewards.values()), self._solved_at, version)
                saved[row] = list(vars(found[row]).values())
        self._results, self._saved = found, saved

    def state(self) -> dict[str, Any]:
        """The exact position, as JSON; PluginError if the order's own state is not JSON."""
        state: dict[str, Any] = {
            "order": self._offer.name,
            "seed": self._seed,
            "digests": self._digests,
            "rows": self._rows,
            "position": self._position(),
        }
        if self._counts:
            state["issued"] = dict(self._issued)
        if self._offer.uses_results:
            state["results"] = self._saved
        return state

    def _position(self) -> Any:
        position = self._called("state()", self._order.state)
        try:
            return json.loads(json.dumps(position, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as cause:
            raise PluginError(f"{self._who}: state() returned {shown(position)}; needs JSON: {cause}") from cause

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        CheckpointError if order, prompts or seed differ, because the position would mean nothing. PluginError if the
        order does not return the state that it was restored to.
        """
        check_same_order(state, self._digests, self._offer.name, self._seed)
        for name, digest in self._digests.items():
            if state["digests"][name] != digest:
                fit = f"the prompts of source '{name}' that data.max_prompt_tokens admits, schemas of tools included,"
                raise other_run(f"{fit} are not those that it was saved with")
        self.changed = [name for name, digest in self._rows.items() if state["rows"][name] != digest]
        self._called("restore()", lambda: self._order.restore(state["position"]))
        again = self._position()
        if again != state["position"]:
            raise PluginError(
                f"{self._who}: state() after restore() is {shown(again)}; needs {shown(state['position'])}, which it "
                "was given"
            )
        known = None if self._counts else self._called("times_issued()", self._order.times_issued)
        self._issued = Counter(state["issued"] if known is None else known)
        self._saved = state.get("results", {})
        self._results = {row: RowResults(*numbers) for row, numbers in self._saved.items()}

    def _called(self, call: str, work: Callable[[], T]) -> T:
        """The result of the order's own code; errors and the time limit name the order and the call."""
        who = f"{self._who}: {call}"
        with boundary(who, PluginError, CALLED), limited(who):
            return work()


def check_same_order(state: Mapping[str, Any], sources: Iterable[str], order: str, seed: int) -> None:
    """CheckpointError if the state is that of other sources, another order or another seed."""
    names = set(sources)
    for name in sorted(state["digests"].keys() ^ names):
        raise other_run(f"source '{name}' is {'new' if name in names else 'missing'}")
    for key, was, now_is in (("data.order", state["order"], order), ("train.seed", state["seed"], seed)):
        if was != now_is:
            raise other_run(f"{key} was {was}, now it is {now_is}")


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}\0{question_of(prompt.messages)}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _digest_of_rows(prompts: Sequence[Prompt]) -> str:
    """The digest of messages, answers and columns; values that JSON lacks count as their types."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.messages, prompt.answer, prompt.columns]
        with suppress(ValueError, RecursionError):  # a number of thousands of digits, a value of hundreds of levels
            digest.update(json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True).encode())
    return digest.hexdigest()


def _rewards(group: Sequence[ScoredTrajectory]) -> dict[int, float]:
    """The finite scores of a group by sample, without those of failed samples."""
    return {
        row.trajectory.id.sample: row.reward.score
        for row in group
        if row.reward.status is RewardStatus.OK and math.isfinite(row.reward.score)
    }


def _added(results: RowResults | None, rewards: Sequence[float], solved_at: float, version: int) -> RowResults:
    """The results, with one more group added."""
    was = results or RowResults(0, 0, 0.0, 0, 0, 0.0, 0.0, 0)
    total, num_solved = math.fsum(rewards), sum(reward >= solved_at for reward in rewards)
    return RowResults(
        groups=was.groups + 1,
        samples=was.samples + len(rewards),
        reward_sum=was.reward_sum + total,
        num_solved=was.num_solved + num_solved,
        equal_groups=was.equal_groups + (len(set(rewards)) == 1),
        last_mean=total / len(rewards),
        last_solved_frac=num_solved / len(rewards),
        version=version,
    )
