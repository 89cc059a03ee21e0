"""Writes runs as one HTML file that opens from a file manager: no network, no server, no foreign markup.

The page's script makes every text with `textContent`. A content security policy allows that script and nothing else.
Small columns of every sample stand in the page's head; texts and tokens are packed apart and unpacked when looked at.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlcore_view.model import Run, Sample
from rlcore_view.redaction import redact
from rlcore_view.watch import diagnose

SCRIPTS = ("data.js", "elements.js", "charts.js", "tokens.js", "pages.js", "main.js")
MEGABYTE = 1_000_000
CHUNK = 256
"""Samples whose texts are packed together, at most."""


def write_page(run: Run, path: Path, max_mb: float = 100.0) -> None:
    """Write the page; texts of samples that are neither best nor worst are left out above `max_mb`, and it says so."""
    path.write_text(page(run, max_mb), encoding="utf-8", newline="\n")


def page(run: Run, max_mb: float = 100.0) -> str:
    """The page as text."""
    script = "\n".join(_asset(name) for name in SCRIPTS)
    style = _asset("page.css")
    chunks, where, left_out = _chunks(run.samples, int(max_mb * MEGABYTE))
    notes = [*run.notes]
    if left_out:
        notes.append(
            f"texts of {left_out} of {len(run.samples)} samples are left out, to stay below {max_mb:g} MB; the best "
            "and the worst of each step are here"
        )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    title = html.escape(redact(f"{run.name}: {run.format}")).encode("ascii", "xmlcharrefreplace").decode()
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{style}</style></head><body>",
            '<noscript>This page shows its data with a script; allow it to run.</noscript><div id="app"></div>',
            _data("head", _packed(_head(run, where, notes))),
            *(_data(f"chunk-{number}", chunk) for number, chunk in enumerate(chunks)),
            f"<script>{script}</script></body></html>",
        ]
    )


def _head(run: Run, where: Sequence[Sequence[int]], notes: Sequence[str]) -> dict[str, Any]:
    """The data of every page of the viewer: a column per field, one entry per sample."""
    samples = run.samples
    prompts = {name: number for number, name in enumerate(dict.fromkeys(sample.prompt_id for sample in samples))}
    sources = {name: number for number, name in enumerate(dict.fromkeys(sample.source for sample in samples))}
    components = sorted({name for sample in samples for name in sample.components})
    names = sorted({name for record in run.metrics for name in record} - {"step", "time/unix_s"})
    return {
        "name": run.name,
        "format": run.format,
        "notes": [*notes],
        "findings": [[finding.name, finding.evidence, finding.advice] for finding in diagnose(run)],
        "config": run.config,
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


def _chunks(samples: Sequence[Sample], limit: int) -> tuple[list[str], list[tuple[int, int]], int]:
    """Packed texts; (chunk, place in it) of each sample, (-1, 0) where left out; how many were left out."""
    where = [(-1, 0)] * len(samples)
    chunks, size, left_out = list[str](), 0, 0
    for extremes in (True, False):
        wanted = list(_by_step(samples, extremes))
        for begin in range(0, len(wanted), CHUNK):
            part = wanted[begin : begin + CHUNK]
            packed = _packed([_body(samples[index]) for index in part])
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
    """The page's view of one sample: messages, response, what was recorded of it, tokens."""
    body: dict[str, Any] = {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "answer": sample.answer,
        "versions": sample.versions,
        "info": sample.info,
    }
    if sample.tokens is not None:
        body["tokens"] = {
            "pieces": sample.tokens.pieces,
            "arrays": sample.tokens.arrays,
            "sampled": [int(value) for value in sample.tokens.sampled],
            "turn": sample.tokens.turn,
        }
    return body


def _packed(value: Any) -> str:
    """JSON, without secrets, compressed, as base64."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")


def _plain(value: Any) -> Any:
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
