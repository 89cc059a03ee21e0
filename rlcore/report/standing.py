"""Describes a run in a sentence: "step 12: 3 of 64 samples wait for reward judge, the oldest for 41 s; actor idle"."""

from collections.abc import Iterator

from rlcore.report.status import RoleStatus, Status


def sentence(status: Status, now: float) -> str:
    """The work in progress; `now` is in seconds since 1970."""
    return f"{_place(status)}: {'; '.join(_parts(status, now))}"


def duration(seconds: float) -> str:
    """Seconds for people: 41 s, 3 min 20 s, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def progress(status: Status) -> str:
    """Progress of the step's samples and updates; empty before there are any."""
    parts = []
    if status.samples:
        if status.sampled < status.samples:
            parts.append(f"sampled {status.sampled}/{status.samples}")
        parts.append(f"scored {status.scored}/{status.samples}")
    if status.updates > 1 and status.phase == "updating":
        parts.append(f"updated {status.updated}/{status.updates}")
    return "  ".join(parts)


def _place(status: Status) -> str:
    if not status.step:
        return "before the first step"
    return f"step {status.step}" + (f" of {status.steps}" if status.steps else "")


def _parts(status: Status, now: float) -> Iterator[str]:
    yield f"{status.phase or 'starting'} for {duration(now - status.phase_began)}"
    if unsampled := status.samples - status.sampled:
        yield f"{unsampled} of {status.samples} samples are being sampled"
    for waiting in status.waiting:
        wait = "waits" if waiting.samples == 1 else "wait"
        oldest = f", the oldest for {duration(now - waiting.oldest)}"
        yield f"{waiting.samples} of {status.samples} samples {wait} for {waiting.kind} {waiting.who}{oldest}"
    if status.updates > 1 and status.phase == "updating":
        yield f"{status.updated} of {status.updates} updates made"
    for role in status.roles:
        yield _role(role, now)


def _role(role: RoleStatus, now: float) -> str:
    if not role.busy:
        return f"{role.role} idle"
    share = f" on {role.busy} of {role.replicas} replicas" if role.replicas > 1 else ""
    return f"{role.role} {role.method}(){share} for {duration(now - role.since)}"
