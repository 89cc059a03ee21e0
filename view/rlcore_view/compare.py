"""Compares runs: finds those that differ only in their seed, and compares configurations and samples by prompt."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore_view.model import Run, Sample, ViewError

_SEED = re.compile(r"[-_]?seed[-_=]?\d+|[-_]s\d+$")
_LINE = re.compile(r"^( *)(- )?(.*)$")
_KEYED = re.compile(r"([^\s:'\"{\[][^:]*|'[^']*'|\"[^\"]*\"):(?: +(.*))?$")
_PLACE_KEYS = ("train.seed", "train.dir", "train.name")
MOST_WORDS = 3000
"""Words of a text that are compared; the rest counts as one word."""


def settings(config: str) -> dict[str, str]:
    """Values by dotted key, from a configuration in JSON or rlcore's YAML; empty for any other text."""
    try:
        return dict(_flat(json.loads(config)))
    except (ValueError, RecursionError):
        pass
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    last, depth = "", math.inf
    for line in config.splitlines():
        spaces, dash, rest = _LINE.findall(line)[0]
        if rest and len(spaces) > depth:  # of a long text, whose lines may look like anything
            found[last] += f" {line.strip()}"
            continue
        if not rest or rest.startswith("#"):
            continue
        indent, keyed = len(spaces + dash), _KEYED.match(rest)
        key, value = (keyed[1], keyed[2]) if keyed else (None, rest)
        while above and above[-1][0] >= indent:
            above.pop()
        parent = ".".join(name for _, name in above)
        if key is not None and value is None:
            above.append((indent, key))
            depth = math.inf
            continue
        last = parent if key is None else f"{parent}.{key}" if parent else key
        found[last] = f"{found[last]}, {value}" if last in found else str(value)  # in a list, keys occur again
        depth = len(spaces) if key is None else indent
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, value if isinstance(value, str) else json.dumps(value)


def families(runs: Sequence[Run]) -> list[int]:
    """A number per run, equal for runs that differ only in seed, name and place."""
    known: dict[tuple[str, object], int] = {}
    return [known.setdefault(_family(run, number), len(known)) for number, run in enumerate(runs)]


def _family(run: Run, number: int) -> tuple[str, object]:
    if not run.config:
        without = _SEED.sub("", run.name)
        return run.format, without if without != run.name else number
    kept = _without_place(run)
    return run.format, json.dumps(kept, sort_keys=True) if kept else number


def _without_place(run: Run) -> dict[str, str]:
    """The run's settings without seed and name, with paths made relative to its directory.

    Only an absolute directory is looked for: `.` or `runs` begins many values that are not paths of the run.
    """
    values = settings(run.config)
    place = values.get("train.dir", "").rstrip("/")
    return {
        key: value.removeprefix(f"{place}/") if place.startswith("/") else value
        for key, value in values.items()
        if key not in _PLACE_KEYS and key != "seed"
    }


def changes(runs: Sequence[Run]) -> list[tuple[str, list[str | None]]]:
    """Configuration keys with different values, and the value in each run; None where it is absent."""
    values = [_without_place(run) for run in runs if run.config]
    if len(values) < len(runs) or len(runs) < 2:
        return []
    keys = dict.fromkeys(key for mapping in values for key in mapping)
    rows = [(key, [mapping.get(key) for mapping in values]) for key in keys]
    return [(key, row) for key, row in rows if len(set(row)) > 1]


def questions(runs: Sequence[Run]) -> list[dict[str, int]]:
    """A number per prompt of each run, equal for prompts of the same name and messages.

    Names count the rows of a source, so one name can be another question in a run on another file. System messages may
    differ: they are a setting that runs are compared in.
    """
    known: dict[tuple[str, str], int] = {}
    return [
        {prompt: known.setdefault((prompt, text), len(known)) for prompt, text in _messages(run).items()}
        for run in runs
    ]


def _messages(run: Run) -> dict[str, str]:
    """The messages of each prompt as text, in the order of recording; of training, if it has the prompt."""
    found = dict.fromkeys((sample.prompt_id for sample in run.samples), "")
    sources: dict[str, Sample] = {}
    for sample in sorted(run.samples, key=lambda sample: (sample.lane != "train", sample.segment)):
        sources.setdefault(sample.prompt_id, sample)
    for prompt, sample in sources.items():
        kept = [message for message in sample.prompt if message.get("role") != "system"]
        found[prompt] = json.dumps(kept, sort_keys=True, default=str)
    return found


def _shared(runs: Sequence[Run]) -> tuple[set[str], int]:
    """The prompts that all runs have, and the number of further ones whose name they all have."""
    numbers = questions(runs)
    names = set.intersection(*(set(of) for of in numbers))
    same = {name for name in names if len({of[name] for of in numbers}) == 1}
    return same, len(names) - len(same)


def prompts_of_both(first: Run, second: Run) -> list[dict[str, Any]]:
    """Prompts that both runs trained on, with each run's mean score, largest difference first."""
    means = [_means(run) for run in (first, second)]
    same, _ = _shared([first, second])
    rows = [
        {
            "prompt": prompt,
            "a": means[0][prompt],
            "b": means[1][prompt],
            "difference": means[1][prompt] - means[0][prompt],
        }
        for prompt in means[0]
        if prompt in means[1] and prompt in same
    ]
    return sorted(rows, key=lambda row: -abs(row["difference"]))


def _num_other_questions(first: Run, second: Run) -> int:
    """Names of prompts that both runs trained on, as different questions."""
    same, _ = _shared([first, second])
    return len((_means(first).keys() & _means(second).keys()) - same)


def _means(run: Run) -> dict[str, float]:
    scores: dict[str, dict[tuple[object, int], float]] = {}  # by sample: its segments have the same score
    for sample in run.samples:
        if sample.lane == "train" and sample.score is not None:
            scores.setdefault(sample.prompt_id, {})[sample.group, sample.sample] = sample.score
    return {prompt: sum(values.values()) / len(values) for prompt, values in scores.items()}


def prompt_named(runs: Sequence[Run], name: str) -> str:
    """The prompt with this name in all runs, or the only one whose name ends with it or contains it."""
    shared, num_other = _shared(runs)
    for fits in (str.__eq__, lambda prompt, end: prompt.endswith(f"/{end}"), str.__contains__):
        found = sorted(prompt for prompt in shared if fits(prompt, name))
        if len(found) == 1:
            return found[0]
        if found:
            raise ViewError(
                f"'{name}': {len(found)} prompts have this name, such as '{found[0][:80]}'; write one whole"
            )
    raise ViewError(
        f"'{name}': the runs do not share a prompt of this name; they share {len(shared)}"
        + (f", such as '{min(shared)[:80]}'" if shared else "")
        + (f"; {num_other} more are other questions in each run" if num_other else "")
    )


def last_group(run: Run, prompt: str, step: int | None = None) -> list[Sample]:
    """The prompt's samples at the step, or at the last step that has it; best first."""
    samples = [sample for sample in run.samples if sample.prompt_id == prompt and step in (None, sample.step)]
    last = max((sample.step for sample in samples), default=0)
    found = [sample for sample in samples if sample.step == last]
    return sorted(found, key=lambda sample: float("-inf") if sample.score is None else sample.score, reverse=True)


def marked(old: str, new: str) -> str:
    """The new text, with added words as `{+words+}` and removed ones as `[-words-]`."""
    before, after = _words(old), _words(new)
    shown = list[str]()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, old_begin, old_end, new_begin, new_end in matcher.get_opcodes():
        gone, come = "".join(before[old_begin:old_end]), "".join(after[new_begin:new_end])
        if kind == "equal":
            shown.append(come)
        else:
            shown.append((f"[-{gone}-]" if gone else "") + (f"{{+{come}+}}" if come else ""))
    return "".join(shown)


def _words(text: str) -> list[str]:
    parts = re.findall(r"\s+|\w+|[^\w\s]", text)
    return [*parts[:MOST_WORDS], *(["".join(parts[MOST_WORDS:])] if len(parts) > MOST_WORDS else [])]


def summary(first: Run, second: Run) -> Mapping[str, Any]:
    """Differences between two runs: configuration, last values of metrics, and prompts."""
    shared = {name for record in first.metrics for name in record} & {
        name for record in second.metrics for name in record
    }
    ends = {name: (first.curve(name), second.curve(name)) for name in sorted(shared - {"step"}) if "time/" not in name}
    return {
        "runs": [first.name, second.name],
        "config": [{"key": key, "a": values[0], "b": values[1]} for key, values in changes([first, second])],
        "metrics": {name: {"a": a[-1][1], "b": b[-1][1]} for name, (a, b) in ends.items() if a and b},
        "prompts": prompts_of_both(first, second),
        "other_questions": _num_other_questions(first, second),
    }
