"""`rlcore plan`: decides and prints the parts of a run before anything starts."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rlcore.cli.arguments import Parser, settings_of
from rlcore.cli.console import answer
from rlcore.cli.plan_on import add_machine, estimates_here, lengths_of, run_on, show_estimates, to_json

if TYPE_CHECKING:
    from rich.table import Table

    from rlcore.config.choices import Choice
    from rlcore.contracts.requests import WorkerRequest
    from rlcore.plan import PoolPlan, RunPlan, WorkerPlan
    from rlcore.plan.machine_plan import MachinePlan
    from rlcore.plan.step_time import StepTime
    from rlcore.runtime.data_preview import DataPreview

SHARING = {
    "tree": "once, packed with its samples (tree)",
    "cache": "once, as the cache of its samples (cache)",
    "none": "once for each sample",
}


def run(arguments: Sequence[str]) -> int:
    """Make the plan and print it."""
    parser = Parser("plan", "Show the plan of a run: roles, pools, batches, rewards, algorithms. Starts nothing.")
    parser.add_settings()
    parser.add_argument("--json", action="store_true", help="print JSON, as plan.json is saved with a run")
    parser.add_argument(
        "--origins", action="store_true", help="also print the origin of every value that is not a default"
    )
    add_machine(parser)
    parsed = parser.parse(arguments)
    settings = settings_of(parsed)
    if parsed.on:
        return run_on(parsed, settings, show)

    from rlcore.plan import plan_to_json
    from rlcore.plugins.planning import plan_run

    lengths = lengths_of(parsed)
    plan = plan_run(settings.files, settings.overrides, settings.plugins, lengths=lengths)
    found = estimates_here(plan, settings, lengths)
    if parsed.json:
        from rlcore.runtime.data_preview import preview_data

        preview_data(plan)
        origins = {"origins": {key: by for key, _, by in _origins(plan)}} if parsed.origins else {}
        answer(json.dumps((plan_to_json(plan) if found is None else to_json(plan, found)) | origins, indent=1))
    else:
        show_with_data(plan, parsed.origins, found)
    return 0


def show(plan: "RunPlan", origins: bool) -> None:
    """Print the plan as tables."""
    _print(_tables(plan, origins), plan.notes)


def show_with_data(plan: "RunPlan", origins: bool, found: "MachinePlan | None" = None) -> None:
    """Print the plan and a summary of its data as tables, and the estimates for its machine. ConfigError for data that
    training would refuse."""
    from rlcore.plan.step_time import expected_step_time, slow_step_note
    from rlcore.report.tracker_packages import missing_trackers
    from rlcore.runtime.data_preview import preview_data

    data = preview_data(plan)
    time = expected_step_time(plan, data.longest_tokens)
    tables = (*_tables(plan, origins), _data(data), _expected(plan, data, time, found))
    _print(tables, (*plan.notes, *data.notes, missing_trackers(plan), slow_step_note(plan, time)))
    if found is not None:
        show_estimates(plan, found)


def _print(tables: "Iterable[Table]", notes: Sequence[str]) -> None:
    from rlcore.cli.console import say, stdout

    console = stdout()
    for table in tables:
        if table.row_count:
            console.print(table)
            console.print()
    for note in notes:
        if note:
            say(console, f"note: {note}")


def _tables(plan: "RunPlan", origins: bool) -> "Iterator[Table]":
    from rlcore.cli.console import table

    yield table(
        "components",
        ("slot", "component", "from"),
        (
            *((slot, component.component.name, component.provided_by) for slot, component in plan.components.items()),
            ("cluster", plan.cluster.offer.name, plan.cluster.provided_by),
            ("prompt order", plan.prompt_order.offer.name, plan.prompt_order.provided_by),
            *(("tracker", tracker.offer.name, tracker.provided_by) for tracker in plan.trackers),
        ),
    )
    yield table(
        "roles",
        ("role", "class", "from", "asked by", "pool", "replicas x ranks", "memory of a rank"),
        (_role(plan, worker) for worker in plan.workers),
    )
    yield table(
        "pools", ("pool", "devices", "memory of a device", "roles", "from"), (_pool(plan, pool) for pool in plan.pools)
    )
    yield table("a step", ("what", "how many"), ((name.replace("_", " "), n) for name, n in plan.batch_sizes.items()))
    yield table("schedule", ("what", "how"), _schedule(plan))
    yield table(
        "rewards",
        ("reward", "weight", "sees", "deadline", "scored by", "from"),
        _rewards(plan),
    )
    yield table(
        "algorithms",
        ("purpose", "name", "sees", "needs", "from"),
        (
            (
                purpose.replace("_", " "),
                algorithm.algorithm.name,
                algorithm.algorithm.scope,
                ", ".join(sorted(algorithm.algorithm.needs)) or "-",
                algorithm.provided_by,
            )
            for purpose, algorithm in plan.algorithms.items()
        ),
    )
    yield table(
        "chosen for this machine",
        ("key", "value", "why"),
        ((choice.key, _text(choice.value), _why(choice)) for choice in plan.choices),
    )
    if origins:
        yield table("origins", ("key", "value", "set by"), _origins(plan))


def _data(data: "DataPreview") -> "Table":
    from rlcore.cli.console import table

    rows = [
        (
            source.key,
            source.rows,
            source.answered,
            "unknown" if source.longest_tokens is None else f"{source.longest_tokens} tokens",
            ", ".join(source.columns) or "-",
        )
        for source in data.sources
    ]
    unread = [(key, "read when training starts", "-", "-", "-") for key in data.unread]
    return table("data", ("source", "prompts", "answers", "longest prompt", "further columns"), [*rows, *unread])


def _expected(plan: "RunPlan", data: "DataPreview", time: "StepTime | None", found: "MachinePlan | None") -> "Table":
    from rlcore.cli.console import table
    from rlcore.plan.step_time import in_words

    train, rows = plan.config.train, []
    steps = train.max_steps
    if data.steps_per_epoch is not None:
        rows.append(("steps per epoch", str(data.steps_per_epoch)))
        steps = steps or train.epochs * data.steps_per_epoch
    if steps:
        rows.append(("steps", str(steps)))
    step_s, parts = _time_of_step(time, found)
    if step_s:
        rows.append(("time of a step", f"about {in_words(step_s)}: {parts}"))
        if steps:
            rows.append(("time of the run", f"about {in_words(steps * step_s)}, without evaluations"))
    if time is not None and found is None:
        rows.append(("assumed", time.assumed))
    return table("expected", ("what", "how much"), rows)


def _time_of_step(time: "StepTime | None", found: "MachinePlan | None") -> tuple[float, str]:
    """The seconds of a step and their parts, by the figures of the machine's cards if they are known; else 0."""
    from rlcore.plan.step_time import in_words

    if found is not None:
        return found.times.total, "the phases are below"
    if time is None:
        return 0.0, ""
    return time.step_s, f"{in_words(time.sampling_s)} sampling, {in_words(time.updates_s)} updates"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _why(choice: "Choice") -> str:
    return f"set by {choice.set_by}" if choice.set_by else choice.reason


def _rewards(plan: "RunPlan") -> "Iterator[tuple[str, ...]]":
    for reward in plan.rewards:
        scored_by = (
            f"result of {reward.target}({', '.join(sorted(reward.kwargs))})" if reward.is_factory else reward.target
        )
        if reward.post_process:
            scored_by += f", then by group {reward.post_process}"
        yield reward.name, f"{reward.weight:g}", reward.scope, f"{reward.deadline_s:g} s", scored_by, reward.provided_by
    manager = plan.components["reward"].provided_by
    for part in plan.reward_components:
        scored_by = f"{part.kind}: {plan.served_where(part)}"
        yield part.name, f"{part.weight:g}", part.scope, f"{part.deadline_s:g} s", scored_by, manager


def _schedule(plan: "RunPlan") -> "Iterator[tuple[str, str]]":
    schedule = plan.schedule
    yield "name", schedule.name
    yield "samples are trained on", f"at most {schedule.max_staleness} versions after they were sampled"
    if schedule.max_staleness:
        yield "samples that are older", "are discarded" if schedule.drop else "are waited for"
    yield "log-probs of pi_old", schedule.old_logprobs.value
    ways = {
        worker.request.role.name: worker.shared_prefix
        for worker in plan.workers
        if worker.request.shared_prefix != "none"
    }
    if ways:
        yield "the prompt of a group is computed", ", ".join(f"{role}: {SHARING[way]}" for role, way in ways.items())
    rows = f"are computed: {schedule.all_rows}" if schedule.all_rows else "are left out: they change no gradient"
    yield "in updates, rows whose advantages are all 0", rows
    yield "forward passes while rewards are pending", ", ".join(schedule.passes) or "none"
    if plan.layout.name:
        yield "devices of roles that serve", f"{_layout(plan)} ({plan.layout.reason})"
    if plan.colocated_roles:
        yield "sleep while the actor trains", ", ".join(plan.colocated_roles)


def _layout(plan: "RunPlan") -> str:
    roles = ", ".join(plan.layout.roles)
    return f"{plan.layout.name}: {roles} on the actor's" if roles else plan.layout.name


def _role(plan: "RunPlan", worker: "WorkerPlan") -> tuple[str, ...]:
    request = worker.request
    inside = f"inside {request.embedded_in.name}" if request.embedded_in else request.pool
    return (
        request.role.name,
        worker.cls.__qualname__,
        worker.provided_by,
        worker.asked_by,
        inside,
        f"{request.replicas} x {request.ranks}"
        + (f" x {request.gpus:g} GPUs" if request.gpus > 1 else "")
        + _mesh(request),
        "-" if request.embedded_in else _memory(plan, worker),
    )


def _mesh(request: "WorkerRequest") -> str:
    """The division of a role's ranks, if it is more than data parallel."""
    if request.engine is None or request.embedded_in:
        return ""
    copies, slices = request.engine.dp_replicate, request.engine.context_parallel
    parts = [f"{copies} copies x {request.ranks // copies}"] if copies > 1 else []
    parts += [f"{request.ranks // slices} shares x {slices} slices"] if slices > 1 else []
    return f" ({'; '.join(parts)})" if parts else ""


def _memory(plan: "RunPlan", worker: "WorkerPlan") -> str:
    if worker.request.device_frac:
        return f"{worker.request.device_frac:.0%} of a device"
    memory = plan.memory_bytes.get(worker.request.role.name)
    return "unknown" if memory is None else f"about {memory / 2**30:.1f} GiB"


def _pool(plan: "RunPlan", pool: "PoolPlan") -> tuple[str, ...]:
    gpus = pool.gpus_per_node * pool.nodes
    devices = f"{pool.nodes} x {pool.gpus_per_node} GPUs" if gpus else f"{plan.facts.cpus} CPUs"
    union = f" (union of {', '.join(pool.colocates)})" if pool.colocates else ""
    where = [pool.placement] if pool.placement != "pack" else []
    where += [f"{key}: {value}" for key, value in pool.labels.items()]
    where += [f"{amount:g} {name} per bundle" for name, amount in pool.resources.items()]
    devices += f" ({', '.join(where)})" if where else ""
    phases = plan.device_bytes.get(pool.name, {})
    memory = ", ".join(f"{phase}: about {size / 2**30:.1f} GiB" for phase, size in phases.items())
    return (pool.name + union, devices, memory or "-", ", ".join(pool.roles), pool.provided_by)


def _origins(plan: "RunPlan") -> "Iterator[tuple[str, str, str]]":
    for key, origin in plan.loaded.origins.items():
        if origin != "default":
            yield key, json.dumps(plan.loaded.values[key]), origin
