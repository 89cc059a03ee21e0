"""Settings with which a model that exceeds its devices fits, found by planning with them: what an error advises is
accepted. Of those that fit, an error advises the ones with the fewest seconds per step."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, PlanError
from rlcore.plan.batch_sizes import batch_sizes
from rlcore.plan.fitting_candidates import Candidate, scoring_candidates, training_candidates
from rlcore.plan.machine_cards import machine_like
from rlcore.plan.machine_facts import Facts
from rlcore.plan.machine_plan import Lengths, size_of, step_layout, step_size
from rlcore.plan.machine_times import StepLayout, estimate_step
from rlcore.plan.memory_limits import ACTOR_SETTINGS, DeviceMemoryError
from rlcore.plan.pools import PoolSizeError
from rlcore.plan.run_plan import RunPlan
from rlcore.plan.weight_sync import expected_sync

Replan = Callable[[Sequence[str]], RunPlan]
"""Makes the plan of a run with further overrides."""
ALIKE = 0.03
"""Share of a step by which estimates are not told apart: then the fewest settings are advised."""
MAX_PLANS = 24
"""Number of ways that are planned for one error: one takes 20 to 70 ms on a slow core, most of them for reading the
configuration."""


def with_settings_that_fit(
    error: DeviceMemoryError, replan: Replan, config: RunConfig, is_set: Set[str], facts: Facts, lengths: Lengths
) -> PlanError:
    """The error of a refused plan, with settings that shard the model so that the plan is accepted, if there are any.
    `is_set`: the keys that are set by anything other than a default.

    These are the fastest by `rlcore.plan.machine_times`; the error says the seconds if the card is known.
    """
    search = _Search(replan, config, is_set, facts, lengths)
    if error.settings == ACTOR_SETTINGS or error.trains:
        search.plan(training_candidates(error.settings, config, is_set, facts))
    else:
        search.plan(scoring_candidates(error.settings, facts), max(MAX_PLANS, facts.gpus))
    best = search.best()
    return error.advising(" ".join(best), search.seconds(best)) if best else error


def with_layout_that_fits(error: PoolSizeError, replan: Replan) -> PlanError:
    """The error of pools with too many devices, with `cluster.layout=colocated` if the plan is then accepted.

    `cluster.layout=planned` moves no roles if their machines cannot be seen from here, nor does `split`.
    """
    accepted = _accepted(replan, ("cluster.layout=colocated",))
    return error.advising(" ".join(accepted[0])) if accepted else error


def _accepted(replan: Replan, settings: tuple[str, ...]) -> tuple[tuple[str, ...], RunPlan] | None:
    """The settings and their plan if it is accepted, with the same shards of a second model if that needs them."""
    try:
        return settings, replan(settings)
    except DeviceMemoryError as error:
        sharded = tuple(setting.replace(ACTOR_SETTINGS, error.settings, 1) for setting in settings[:2])
        return None if set(sharded) <= set(settings) else _accepted(replan, (*settings, *sharded))
    except (ConfigError, PlanError):
        return None


class _Search:
    """Plans the ways to shard a model, first those that promise the shortest step, and knows the cost of each that is
    accepted.

    The cost is the seconds of a step. If the card is unknown, the times of a similar card decide: they are wrong, but
    the order of layouts is much the same, and it accounts for batches, links and turns, which the number of devices
    does not. Where the architecture is unknown, there is only that number.
    """

    def __init__(self, replan: Replan, config: RunConfig, is_set: Set[str], facts: Facts, lengths: Lengths) -> None:
        self._replan, self._facts, self._lengths, self._machine = replan, facts, lengths, machine_like(facts)
        self._costs: dict[tuple[str, ...], float] = {}
        self._copies = config.actor.dp_replicate
        self._estimates = facts.shape is not None and config.cluster.device == "cuda"
        self._size = size_of(config, facts, lengths) if self._estimates else None
        # What a layout of devices leaves open; with room for all rows, so that no plan is faster than expected.
        self._open = StepLayout(
            max_rows=config.rollout.max_rows if "rollout.max_rows" in is_set else StepLayout.max_rows,
            checkpointing=config.actor.gradient_checkpointing,
            sharded=True,
            updates=batch_sizes(config)["minibatches"],
            epochs=config.actor.epochs,
            weight_sync=expected_sync(config),
            overlaps=config.schedule.max_staleness > 0,
        )

    def plan(self, candidates: Iterable[Candidate], left: int = MAX_PLANS) -> None:
        """Plan at most `left` ways, none of a layout that is slower than one that fits."""
        for candidate in sorted(candidates, key=self._expected):
            if self._costs and self._expected(candidate) > (1 + ALIKE) * min(self._costs.values()):
                continue
            for way in candidate.ways[:left]:
                left -= 1
                accepted = _accepted(self._replan, way)
                if accepted:
                    self._costs[accepted[0]] = self._cost(accepted[1])
                    break

    def best(self) -> tuple[str, ...]:
        """The accepted settings with the least cost; the fewest of those with about that cost. Empty if there are
        none."""
        least = min(self._costs.values(), default=0.0)
        alike = {settings: cost for settings, cost in self._costs.items() if cost <= (1 + ALIKE) * least}
        return min(alike, key=lambda settings: (len(settings), alike[settings]), default=())

    def seconds(self, settings: tuple[str, ...]) -> float:
        """The seconds of a step with accepted settings; 0 if they are unknown."""
        return self._costs[settings] if self._estimates and self._facts.card else 0.0

    def _expected(self, candidate: Candidate) -> float:
        """The least cost that a layout can have: with a copy of the weights on each node, where that is faster."""
        if self._size is None:
            return 0.0
        layouts = [
            replace(
                self._open,
                trainers=layout.trainers,
                engines=layout.engines,
                tensor_parallel=layout.tensor_parallel,
                embedded=layout.embedded,
                copies=copies,
            )
            for layout in candidate.layouts
            for copies in {1, self._machine.nodes, self._copies}
            if copies == 1 or (layout.trainers % copies == 0 and layout.trainers > copies)
        ]
        return min((estimate_step(self._size, layout, self._machine).total for layout in layouts), default=0.0)

    def _cost(self, plan: RunPlan) -> float:
        if self._size is None:
            return 1 / max(1, len({gpu for pool in plan.pools for gpu in pool.gpus}))
        self._size, layout = step_size(plan, self._lengths), step_layout(plan, self._lengths)
        # A critic's ranks may differ with the policy's, so the least cost has a critic only where it has none of them.
        critic = layout.critic and layout.critic_model is None
        passes = layout.scoring_passes
        self._open = replace(self._open, scoring_passes=passes, reference=layout.reference, critic=critic)
        return estimate_step(self._size, layout, self._machine).total
