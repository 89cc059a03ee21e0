"""Writes runs as one HTML file that opens from a file manager: no network, no server, no external markup.

The page's script writes every text with `textContent`. A content security policy allows only that script. Small columns
of every sample are in the page's head; texts and tokens are packed separately and unpacked on view.
"""

import array
import base64
import gzip
import hashlib
import html
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlcore_view.compare import changes, families, questions, settings
from rlcore_view.model import Event, Run, Sample
from rlcore_view.redaction import clipped, redact
from rlcore_view.token_files import WITHHELD
from rlcore_view.watch import diagnose

SCRIPTS = (
    "data.js",
    "elements.js",
    "charts.js",
    "filter.js",
    "words.js",
    "tokens.js",
    "overview.js",
    "steps.js",
    "groups.js",
    "prompts.js",
    "samples.js",
    "search.js",
    "timeline.js",
    "compare.js",
    "main.js",
)
FOLLOW = "follow.js"
"""The script that polls the server for changes; only in pages of `--serve`."""
MEGABYTE = 1_000_000
NAN = float("nan")
MAX_NAMES = 2000
"""Most metrics, and most reward components, of a run that its page shows."""
CHUNK = 256
"""Most samples whose texts are packed together."""


def write_page(runs: Run | Sequence[Run], path: Path, max_mb: float = 100.0) -> None:
    """Write the page of one run, or of several to compare.

    Above `max_mb`, texts of samples that are neither best nor worst are left out, and the page says so. The file is
    replaced atomically: if the disk is full, an older one stays.
    """
    text = page(runs, max_mb)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def page(runs: Run | Sequence[Run], max_mb: float = 100.0) -> str:
    """The page as text."""
    listed = [runs] if isinstance(runs, Run) else [*runs]
    return page_of(listed, parts(listed, max_mb))


def page_of(runs: Sequence[Run], data: Mapping[str, str], edition: str = "") -> str:
    """The page of runs whose `parts` are `data`; with an `edition`, it polls its server for a newer one."""
    script = "\n".join(_asset(name) for name in (*((FOLLOW,) if edition else ()), *SCRIPTS))
    style = _asset("page.css")
    named = ", ".join(f"{run.name}: {run.format}" for run in runs)
    title = html.escape(redact(named)).encode("ascii", "xmlcharrefreplace").decode()
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script, bool(edition))}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{style}</style></head>",
            f'<body data-edition="{html.escape(edition)}">' if edition else "<body>",
            '<noscript>This page shows its data with a script; allow it to run.</noscript><div id="app"></div>',
            *(_data(name, packed) for name, packed in data.items()),
            f"<script>{script}</script></body></html>",
        ]
    )


def _version(run: Run, event: Event, index: int | None) -> int | None:
    """The version of the weights that sampled: the event's, or the first of its sample's."""
    if event.version is not None or index is None or event.kind != "sampled":
        return event.version
    versions = run.samples[index].versions
    return int(versions[0][1]) if versions else None


def _policy(script: str, live: bool) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    asks = "connect-src 'self'; " if live else ""
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; {asks}base-uri 'none'"


class PackedChunks:
    """Packs samples in chunks, and keeps those of the last edition: most do not change during a run."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[Sequence[Sample], str]] = {}
        """Chunks by the identities of their samples, which are kept alive here."""
        self._used: dict[tuple[int, ...], tuple[Sequence[Sample], str]] = {}

    def begin(self) -> None:
        """Begin an edition: drop what the previous one did not use."""
        self._kept, self._used = self._used, {}

    def packed(self, samples: Sequence[Sample]) -> str:
        """The chunk of these samples."""
        key = tuple(map(id, samples))
        found = self._kept.get(key) or (samples, _packed([_body(sample) for sample in samples]))
        self._used[key] = found
        return found[1]


def parts(runs: Sequence[Run], max_mb: float, packer: PackedChunks | None = None) -> dict[str, str]:
    """The page's data by name, packed: `about`, and for run r `head-r`, `events-r` and `chunk-r-0` onwards."""
    packer = packer or PackedChunks()
    packer.begin()
    about = {"count": len(runs), "families": families(runs), "changes": changes(runs)}
    found = {"about": _packed(about)}
    for number, (run, numbers) in enumerate(zip(runs, questions(runs), strict=True)):
        chunks, where, left_out = _chunks(run.samples, int(max_mb * MEGABYTE / max(1, len(runs))), packer)
        notes = [*run.notes, *left_out_names(run)]
        if left_out:
            notes.append(
                f"texts of {left_out} of {len(run.samples)} samples are left out, to stay below {max_mb:g} MB; the "
                "best and the worst of each step are here"
            )
        found[f"head-{number}"] = _packed(_head(run, where, notes) | {"questions": [*numbers.values()]})
        found[f"events-{number}"] = _packed(_events(run))
        found |= {f"chunk-{number}-{place}": chunk for place, chunk in enumerate(chunks)}
    return found


def _metrics(run: Run) -> list[str]:
    """The names of a run's metrics, in the order in which they appear."""
    names: dict[str, Any] = {}
    for record in run.metrics:
        names |= record
    return [name for name in names if name not in ("step", "time/unix_s")]


def _components(run: Run) -> list[str]:
    """The names of a run's reward components, in the order in which they appear."""
    return [*dict.fromkeys(name for sample in run.samples for name in sample.components)]


def left_out_names(run: Run) -> list[str]:
    """A line for each kind of names of which the page shows only the first MAX_NAMES."""
    return [
        f"{len(names) - MAX_NAMES} of {len(names)} {kind} are left out, from '{clipped(names[MAX_NAMES], 80)}' on; a "
        f"page shows {MAX_NAMES}"
        for kind, names in (("metrics", _metrics(run)), ("reward components", _components(run)))
        if len(names) > MAX_NAMES
    ]


def _events(run: Run) -> dict[str, Any]:
    """The timeline: rows by name, and events as [row, name, kind, start, length, step, version, sample]."""
    rows = {name: number for number, name in enumerate(dict.fromkeys(event.row for event in run.events))}
    samples = {
        (sample.step, sample.prompt_id, sample.epoch, sample.sample, sample.segment): index
        for index, sample in enumerate(run.samples)
    }
    begin = min((event.start_s for event in run.events), default=0.0)
    return {
        "rows": [*rows],
        "events": [
            [
                rows[event.row],
                event.name,
                event.kind,
                round(event.start_s - begin, 6),
                round(event.length_s, 6),
                event.step,
                _version(run, event, index),
                index,
            ]
            for event in run.events
            for index in [samples.get((event.step, *event.sample)) if event.sample and event.step is not None else None]
        ],
    }


def _head(run: Run, where: Sequence[Sequence[int]], notes: Sequence[str]) -> dict[str, Any]:
    """The data of every page of the viewer: a column per field, one entry per sample."""
    samples = run.samples
    prompts = {name: number for number, name in enumerate(dict.fromkeys(sample.prompt_id for sample in samples))}
    sources = {name: number for number, name in enumerate(dict.fromkeys(sample.source for sample in samples))}
    components = sorted(_components(run)[:MAX_NAMES])
    names = sorted(_metrics(run)[:MAX_NAMES])
    return {
        "name": run.name,
        "format": run.format,
        "notes": [*notes],
        "findings": [[finding.name, finding.evidence, finding.advice] for finding in diagnose(run)],
        "config": run.config,
        "settings": list(settings(run.config).items()),
        "alerts": run.alerts,
        "has_events": bool(run.events),
        "plan": run.plan,
        "prompts": [*prompts],
        "sources": [*sources],
        "metrics": {name: run.curve(name) for name in names},
        "columns": {
            "step": [sample.step for sample in samples],
            "lane": [int(sample.lane == "eval") for sample in samples],
            "prompt": [prompts[sample.prompt_id] for sample in samples],
            "source": [sources[sample.source] for sample in samples],
            "epoch": [sample.epoch for sample in samples],
            "sample": [sample.sample for sample in samples],
            "segment": [sample.segment for sample in samples],
            "score": [_rounded(sample.score) for sample in samples],
            "advantage": [_rounded(sample.advantage) for sample in samples],
            "length": [sample.num_sampled for sample in samples],
            "truncated": [
                sample.truncated if sample.truncated is None else int(sample.truncated) for sample in samples
            ],
            "status": [sample.status for sample in samples],
            "chunk": [place[0] for place in where],
            "place": [place[1] for place in where],
            **{f"reward.{name}": [_rounded(sample.components.get(name)) for sample in samples] for name in components},
        },
    }


def _chunks(
    samples: Sequence[Sample], limit: int, packer: PackedChunks
) -> tuple[list[str], list[tuple[int, int]], int]:
    """Packed texts; (chunk, index in it) per sample, (-1, 0) if left out; the number left out."""
    where = [(-1, 0)] * len(samples)
    chunks, size, left_out = list[str](), 0, 0
    for extremes in (True, False):
        wanted = list(_by_step(samples, extremes))
        for begin in range(0, len(wanted), CHUNK):
            part = wanted[begin : begin + CHUNK]
            packed = packer.packed([samples[index] for index in part])
            if size + len(packed) > limit:
                left_out += len(part)
                continue
            for place, index in enumerate(part):
                where[index] = (len(chunks), place)
            size += len(packed)
            chunks.append(packed)
    return chunks, where, left_out


def _by_step(samples: Sequence[Sample], extremes: bool) -> Iterable[int]:
    """Indices of the best and the worst sample of each step and lane, or of all others, in order."""
    best: dict[tuple[int, str, bool], int] = {}
    for index, sample in enumerate(samples):
        for highest in (True, False):
            key = (sample.step, sample.lane, highest)
            score = sample.score if sample.score is not None else float("-inf")
            other = samples[best[key]].score if key in best else None
            if key not in best or (other is None) or (score > other if highest else score < other):
                best[key] = index
    chosen = set(best.values())
    return (index for index in range(len(samples)) if (index in chosen) is extremes)


def _body(sample: Sample) -> dict[str, Any]:
    """The page's view of one sample: messages, response, other recorded fields, tokens."""
    body: dict[str, Any] = {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "answer": sample.answer,
        "versions": sample.versions,
        "info": sample.info,
    }
    if sample.tokens is not None:
        body["tokens"] = {
            "pieces": _Plain(_spelled(sample.tokens.pieces)),
            "arrays": {name: _Plain([_planes(values)]) for name, values in sample.tokens.arrays.items()},
            "sampled": _Plain([*map(int, sample.tokens.sampled)]),
            "turn": _Plain(sample.tokens.turn),
        }
    return body


def _packed(value: Any) -> str:
    """JSON, without secrets, compressed, as base64."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("ascii"), 3, mtime=0)).decode("ascii")


class _Plain(list[Any]):
    """A list known to contain no secrets and no non-finite numbers, so it is not checked again."""


def _spelled(pieces: Sequence[str]) -> Sequence[str]:
    """The texts of tokens, with blocks in place of tokens that together spell a secret."""
    text = "".join(pieces)
    return pieces if redact(text) == text else [WITHHELD] * len(pieces)


def _planes(values: Sequence[float | None]) -> str:
    """Numbers as base64 of float32's three upper bytes: all highest bytes, then all second bytes, then all third bytes.

    This keeps four decimal digits and compresses well, because neighbours share an exponent. NaN stands for None.
    """
    if not (isinstance(values, array.array) and values.typecode == "f"):
        values = array.array("f", [NAN if value is None else value for value in values])
    data = values.tobytes()
    planes = (data[3::4], data[2::4], data[1::4]) if sys.byteorder == "little" else (data[::4], data[1::4], data[2::4])
    return base64.b64encode(b"".join(planes)).decode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, _Plain):
        return value
    if isinstance(value, Mapping):
        return {redact(str(name)): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value if value is None or isinstance(value, (bool, int)) else redact(str(value))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _data(name: str, packed: str) -> str:
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>'


def _asset(name: str) -> str:
    return files("rlcore_view").joinpath("page", name).read_text(encoding="utf-8")
