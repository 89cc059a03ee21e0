"""Checks of completions, trajectories, rewards, numbers per token and metrics; each runs once, on arrival.

Every check raises one line that begins with `who`: the worker and its method, or the slot, its component and the
method. Metrics may be NaN or infinite, which is information about a run; training data may not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from rlcore.errors import PluginError, RlcoreError, WorkerError, shown
from rlcore.errors.checks.results import kind
from rlcore.types import (
    Batch,
    Completion,
    FinishReason,
    Float32s,
    FrozenDict,
    GenerateRequest,
    Metrics,
    Prompt,
    Reward,
    RewardStatus,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

ROUNDING = 1e-4
"""Largest log-prob: engines divide by the kept probability mass in float32, and rounding may lift one above 0."""
POLICIES = ("drop_sample", "drop_group", "abort")
"""Failure policies of parts of a reward that have no settings in `reward.functions`."""
_INT = (int, np.integer)
_NUMBER = (float, int, np.floating, np.integer)
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
LARGEST = float(np.finfo(np.float32).max)
"""Largest absolute reward: a batch holds rewards as float32."""


def check_completion(who: str, completion: Any, vocabulary: int | None) -> None:
    """WorkerError unless `completion` is a completion that can be trained on.

    Needs (N,) ids inside the vocabulary (None: its size is unknown), (N,) finite log-probs of at most 0 except for
    rounding, a finish reason, and versions that begin with the first token. `check_answer` compares it to the request.
    """
    if not isinstance(completion, Completion):
        raise WorkerError(f"{who} yielded {kind(completion)}; needs Completion")
    if problem := _wrong_completion(completion, vocabulary):
        raise WorkerError(
            f"{who}: sample {shown(completion.sample)} of request {shown(completion.request_id)}: {problem}"
        )


def check_answer(who: str, completion: Completion, request: GenerateRequest, newest: int) -> None:
    """WorkerError unless a completion has 1 to `max_tokens` tokens, sampled with weights up to the `newest` version."""
    num, most = len(completion.token_ids), request.sampling.max_tokens
    versions, last = completion.versions, completion.version
    if versions:  # nearly always one, and this runs once per sample
        last = max(last, versions[0][1] if len(versions) == 1 else max([version for _, version in versions]))
    if not 1 <= num <= most:
        problem = f"{num} tokens; needs 1 to max_tokens={most}"
    elif last > newest:
        problem = f"version {last} of the weights; the newest is {newest}"
    else:
        return
    raise WorkerError(f"{who}: sample {completion.sample} of request '{request.id}': {problem}")


def _wrong_completion(completion: Completion, vocabulary: int | None) -> str:
    if not isinstance(completion.request_id, str) or not isinstance(completion.sample, int):
        return "request_id and sample are not those of the request; needs its id and an index below its n"
    if problem := _wrong_array("token_ids", completion.token_ids, "iu", "integers"):
        return problem
    if problem := _wrong_array("logprobs", completion.logprobs, "f", "floating-point numbers"):
        return problem
    num = len(completion.token_ids)
    if len(completion.logprobs) != num:
        return f"found {num} token_ids and {len(completion.logprobs)} logprobs; needs one log-prob per token"
    if num and (problem := _wrong_ids(completion.token_ids, vocabulary) or wrong_logprobs(completion.logprobs)):
        return problem
    if not isinstance(completion.finish, FinishReason):
        return f"finish is {shown(completion.finish)}; needs one of {', '.join(map(repr, FinishReason))}"
    if not isinstance(completion.version, int) or completion.version < 0:
        return f"version is {shown(completion.version)}; needs the number of the weights, 0 or more"
    return _wrong_versions(completion.versions, 0, num) if completion.versions else ""


def _wrong_array(name: str, array: Any, kinds: str, needed: str) -> str:
    if type(array) is np.ndarray and array.dtype.kind in kinds and array.ndim == 1:
        return ""
    if not isinstance(array, np.ndarray):
        return f"{name} is {kind(array)}; needs a numpy array"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        return f"{name} has shape {array.shape} and dtype {array.dtype}; needs one dimension of {needed}"
    return ""


def _is_mapping(value: Any) -> bool:
    return type(value) is FrozenDict or isinstance(value, Mapping)  # isinstance is slow for an abstract class


def _wrong_ids(ids_N: Any, vocabulary: int | None) -> str:
    """The problem with token ids of any integer type; empty: none. A batch holds ids as int32."""
    num_ids = vocabulary or 2**31
    # As an unsigned number, a negative id is larger than every id: one pass over the ids instead of two. `argmax` takes
    # a sixth of the time of a ufunc's reduction to the maximum.
    unsigned_N = ids_N.view(_UNSIGNED[ids_N.itemsize])
    if unsigned_N.item(unsigned_N.argmax()) < num_ids:
        return ""
    bad = next(number for number in ids_N.ravel().tolist() if not 0 <= number < num_ids)
    return f"token id {bad}; needs 0 to {num_ids - 1}" + (", the model's vocabulary" if vocabulary else "")


def wrong_logprobs(logprobs_N: Any) -> str:
    """The problem with log-probs of sampled tokens; empty: none."""
    # both argmax and argmin choose a NaN
    if logprobs_N.item(logprobs_N.argmax()) <= ROUNDING and logprobs_N.item(logprobs_N.argmin()) > -np.inf:
        return ""
    bad_N = logprobs_N[~(np.isfinite(logprobs_N) & (logprobs_N <= ROUNDING))]
    first = bad_N[0] if len(bad_N) else logprobs_N.min()
    return f"log-prob {first:g}; needs finite numbers of at most 0"


def _wrong_versions(versions: Any, begin: int | None, num: int) -> str:
    """The problem with (position, version) pairs; empty: none.

    They have to begin at `begin` (None: anywhere) and lie within `num` positions.
    """
    needed = "needs pairs (position, version) of integers, positions in ascending order"
    if not isinstance(versions, tuple):
        return f"versions is {kind(versions)}; {needed}"
    before: Any = -1
    for version in versions:
        if (
            type(version) is not tuple
            or len(version) != 2
            or not isinstance(version[0], _INT)
            or not isinstance(version[1], _INT)
        ):
            return f"versions holds {shown(version)}; {needed}"
        if not before < version[0] < (num or 1) or version[1] < 0:
            return f"versions holds {shown(version)} of {num} tokens; {needed}"
        if before < 0 and begin is not None and version[0] != begin:
            return f"versions begins at position {version[0]}; needs {begin}, the first token"
        before = version[0]
    return ""


def check_trajectory(who: str, row: Any) -> None:
    """PluginError unless `row` is a trajectory whose arrays have the declared types and lengths; not their numbers."""
    if not isinstance(row, Trajectory):
        raise PluginError(f"{who} yielded {kind(row)}; needs Trajectory")
    if not isinstance(row.id, TrajectoryId):
        raise PluginError(f"{who} yielded a Trajectory whose id is {kind(row.id)}; needs TrajectoryId")
    if problem := _wrong_id(row.id) or _wrong_trajectory(row):
        raise PluginError(f"{who}: trajectory {row.id}: {problem}")


def _wrong_id(row: TrajectoryId) -> str:
    if not isinstance(row.prompt, str):
        return f"its prompt is {kind(row.prompt)}; needs the prompt's id"
    if not type(row.epoch) is type(row.sample) is type(row.segment) is int:
        for name in ("epoch", "sample", "segment"):
            value = getattr(row, name)
            if isinstance(value, bool) or not isinstance(value, _INT):
                return f"its {name} is {shown(value)}; needs a whole number"
    return "" if row.segment >= 0 else f"its segment is {row.segment}; needs an index of at least 0"


def _wrong_trajectory(row: Trajectory) -> str:
    if not isinstance(row.prompt, Prompt) or row.prompt.id != row.id.prompt:
        found = f"that of '{row.prompt.id}'" if isinstance(row.prompt, Prompt) else kind(row.prompt)
        return f"prompt is {found}; needs the Prompt of its task"
    problem = (
        _wrong_array("token_ids", row.token_ids, "iu", "integers")
        or _wrong_array("loss_mask", row.loss_mask, "b", "booleans")
        or _wrong_array("logprobs", row.logprobs, "f", "floating-point numbers")
    )
    if problem:
        return problem
    num = len(row.token_ids)
    if len(row.loss_mask) != num or len(row.logprobs) != num:
        lengths = num, len(row.loss_mask), len(row.logprobs)
        return f"token_ids, loss_mask and logprobs have lengths {lengths}; needs one length"
    if not num:
        return "token_ids is empty; needs the prompt's tokens at least, also of a sample that failed"
    if row.token_ids.dtype.itemsize > 4 and (problem := _wrong_ids(row.token_ids, None)):
        return problem  # converted to int32, it may become another token
    if row.loss_mask[0]:
        return "loss_mask is True at position 0, whose token has no log-prob; needs False there"
    if not _is_mapping(row.info):
        return f"info is {kind(row.info)}; needs a mapping of str to plain values"
    if not isinstance(row.completion, (str, tuple)):
        return f"completion is {kind(row.completion)}; needs text, or a tuple of messages"
    if not isinstance(row.opening, (tuple, type(None))):
        return f"opening is {kind(row.opening)}; needs a tuple of messages, or None"
    if not isinstance(row.finish, FinishReason):
        return f"finish is {shown(row.finish)}; needs one of {', '.join(map(repr, FinishReason))}"
    if not isinstance(row.num_segments, int) or row.num_segments < 0:
        return f"num_segments is {shown(row.num_segments)}; needs the number of segments, or 0"
    if row.versions == () and row.loss_mask.any():
        return "versions is empty; needs those of its completions, for the tokens that were sampled"
    return _wrong_versions(row.versions, None, num)


def checked_scored(who: str, row: Any) -> ScoredTrajectory:
    """The row, with Python's floats for any others: metrics and checkpoints write a reward's numbers as JSON. The score
    of a reward that is not OK is 0.0.

    PluginError unless it is a trajectory with a reward, whose score is a finite float32 if its status is OK.
    """
    if not isinstance(row, ScoredTrajectory):
        raise PluginError(f"{who} yielded {kind(row)}; needs ScoredTrajectory")
    if not isinstance(row.trajectory, Trajectory) or not isinstance(row.reward, Reward):
        found = f"{kind(row.trajectory)} and {kind(row.reward)}"
        raise PluginError(f"{who} yielded ScoredTrajectory of {found}; needs a Trajectory and its Reward")
    status, score = row.reward.status, row.reward.score
    if not isinstance(status, RewardStatus):
        found = f"status is {shown(status)}; needs one of {', '.join(map(repr, RewardStatus))}"
        raise PluginError(f"{who}: reward of {row.trajectory.id}: {found}")
    if not isinstance(score, _NUMBER) or isinstance(score, bool):
        raise PluginError(f"{who}: reward of {row.trajectory.id}: score is {kind(score)}; needs a number")
    # float(), because a subclass may override comparisons
    if status is RewardStatus.OK and not -LARGEST <= float(score) <= LARGEST:
        raise PluginError(
            f"{who}: reward of {row.trajectory.id}: score is {score} with status OK; needs a finite number, or a "
            "status that says that there is none"
        )
    if problem := _wrong_reward(row.reward, len(row.trajectory.token_ids)):
        raise PluginError(f"{who}: reward of {row.trajectory.id}: {problem}")
    exact = type(score) is type(row.reward.latency_s) is float and (status is RewardStatus.OK or score == 0.0)
    return row if exact and {float}.issuperset(map(type, row.reward.components.values())) else _with_floats(row)


def _with_floats(row: ScoredTrajectory) -> ScoredTrajectory:
    reward, components = row.reward, row.reward.components
    score, latency_s = float(reward.score) if reward.status is RewardStatus.OK else 0.0, float(reward.latency_s)
    floats = FrozenDict({name: float(value) for name, value in components.items()})
    return replace(row, reward=replace(reward, score=score, components=floats, latency_s=latency_s))


def _wrong_reward(reward: Reward, num_tokens: int) -> str:
    """The problem with a reward's components, info, latency or token scores; empty: none."""
    if not _is_mapping(reward.components) or not _is_mapping(reward.info):
        return f"components is {kind(reward.components)} and info {kind(reward.info)}; needs mappings"
    for name, value in reward.components.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, _NUMBER):
            return f"components has {shown(name)}: {shown(value)}; needs a mapping of str to float"
    if reward.status is RewardStatus.FAILED and (problem := _wrong_policies(reward.info)):
        return problem
    if not isinstance(reward.latency_s, _NUMBER):
        return f"latency_s is {kind(reward.latency_s)}; needs seconds"
    scores_T = reward.token_scores
    if scores_T is None:
        return ""
    if problem := _wrong_array("token_scores", scores_T, "f", "floating-point numbers"):
        return problem
    if len(scores_T) != num_tokens or not np.isfinite(scores_T).all():
        return f"token_scores are {len(scores_T)} numbers for {num_tokens} tokens; needs a finite one per token"
    return ""


def _wrong_policies(info: Mapping[str, Any]) -> str:
    """The problem with the failures of a reward's parts and their policies; empty: none."""
    for name in ("failed", "on_failure"):
        if not _is_mapping(info.get(name, {})):
            return f"info['{name}'] is {kind(info[name])}; needs a mapping by the part's name"
    for name, policy in info.get("on_failure", {}).items():
        if policy not in POLICIES:
            return f"info['on_failure'] has {shown(name)}: {shown(policy)}; choose from: {', '.join(POLICIES)}"
    return ""


def check_tokens(who: str, batch: Batch, rows: Sequence[TrajectoryId], vocabulary: int | None) -> None:
    """PluginError unless all ids of a batch are inside the vocabulary, and sampled tokens have valid log-probs.

    `rows` are the trajectories of the batch, which `who` made. `vocabulary` is None if its size is unknown.
    """
    tokens = batch.tokens
    mask_BT = tokens.loss_mask_BT
    sampled_N, ids_N = tokens.rollout_logprobs_BT[mask_BT], tokens.token_ids_BT[tokens.valid_BT]
    if len(ids_N) and (problem := _wrong_ids(ids_N, vocabulary)):
        raise PluginError(f"{who}: a trajectory of {rows[0]} to {rows[-1]} has {problem}")
    if len(sampled_N) and (problem := wrong_logprobs(sampled_N)):
        bad_BT = mask_BT & ~(np.isfinite(tokens.rollout_logprobs_BT) & (tokens.rollout_logprobs_BT <= ROUNDING))
        raise PluginError(f"{who}: trajectory {rows[int(bad_BT.any(axis=1).argmax())]}: {problem}")


def per_token(who: str, value: Any, batch: Batch, error: type[RlcoreError], named: str) -> Float32s:
    """The (B, T) numbers that `who` computed for a batch, `named` in errors: 'log-probs'.

    They have to be finite where the loss mask is True; numbers outside the mask are not checked. Raises `error` for
    anything else.
    """
    mask_BT = batch.tokens.loss_mask_BT
    needed = f"needs a numpy array of {mask_BT.shape} floating-point numbers, one per token"
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise error(f"{who} returned {kind(value)}; {needed}")
    if value.shape != mask_BT.shape or value.dtype.kind != "f":
        raise error(f"{who} returned shape {value.shape} and dtype {value.dtype}; {needed}")
    with np.errstate(over="ignore"):
        values_BT = np.array(value, dtype=np.float32)  # a copy, because the sender may still write to its array
    if not np.isfinite(values_BT).all() and (bad_BT := ~np.isfinite(values_BT) & mask_BT).any():
        found = f"{int(bad_BT.sum())} of {int(mask_BT.sum())} {named} are not finite, the first {values_BT[bad_BT][0]}"
        raise error(f"{who}: {found}; needs a number for every token that was sampled; nothing was updated on them")
    return values_BT


def checked_metrics(who: str, value: Any, error: type[RlcoreError]) -> Metrics:
    """Metrics by name, as floats; NaN and infinities are legal. Raises `error` unless `value` is a dict of numbers."""
    needed = "needs a dict of str to float"
    if not isinstance(value, Mapping):
        raise error(f"{who} returned {kind(value)}; {needed}")
    for name, part in value.items():
        if not isinstance(name, str) or isinstance(part, bool) or not isinstance(part, (float, Real)):
            raise error(f"{who} returned {shown(name)}: {shown(part)}; {needed}")
    return {name: float(part) for name, part in value.items()}
