"""The data of a training step: frozen, picklable, and matched by id, never by position in a list.

THE index convention, for every per-token array in rlcore: position t belongs to token t. The log-probability at t is
that of token t given the tokens before it; position 0 has none (it holds 0 and no mask selects it).

THE shape letters: B rows of a batch (one row is one Trajectory), T token positions, V vocabulary. A batch is padded on
the right. A *sample* is one draw for a prompt and may end as several rows (segments); a *group* is all samples of a
prompt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from numpy import ndarray

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Metrics = dict[str, float]
"""Numbers by name."""
Message = Mapping[str, Any]
"""One message of a conversation, in the form for chat templates: `role`, `content`, and any other keys they use."""

SAMPLE_NAMES = frozenset(
    (
        *("trajectory", "trajectories"),
        *("data_source", "solution_str", "ground_truth", "extra_info"),
        *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"),
    )
)
"""Parameter names by which reward functions get samples: rlcore's, verl's and TRL's. A function that takes none of them
is called once, and returns the reward function."""

ROLLOUT_ERROR = "rollout_error"
"""Key of `Trajectory.info` by which an agent loop fails a sample, in each of its segments: the reason, such as
`Completion.error` of a turn that could not be sampled, or the error of an agent or environment. The reward is FAILED
with this text and counts in `reward.error_budget_frac`; no reward manager gets the sample."""

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A read-only, hashable dict; for a changed copy use `FrozenDict({**old, ...})`."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a FrozenDict cannot be written to; make another one: FrozenDict({**old, ...})")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type["FrozenDict[K, V]"], tuple[dict[K, V]]]:
        return FrozenDict, (dict(self),)

    def __repr__(self) -> str:
        return f"FrozenDict({dict.__repr__(self)})"


def plain(value: Any, leaf: Callable[[Any], Any] | None = None, key: Callable[[Any], Any] | None = None) -> Any:
    """Mappings as dicts and sequences as lists, recursively, for code that tests for those types or writes JSON.

    `leaf` converts each other value, and `key` each key; by default they stay. A scalar of numpy becomes Python's
    number, which JSON has.
    """
    if isinstance(value, Mapping):
        return {key(name) if key else name: plain(inner, leaf, key) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, leaf, key) for inner in value]
    if isinstance(value, (np.number, np.bool_)):
        value = value.item()
    return leaf(value) if leaf else value


class ReadOnlyArrays:
    """Mixin of frozen dataclasses that hold numpy arrays: the arrays are read-only, even after unpickling."""

    def __post_init__(self) -> None:
        for value in self.__dict__.values():
            if isinstance(value, ndarray):  # called for every field of every sample, so the fast path
                value.setflags(write=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        ReadOnlyArrays.__post_init__(self)


class Lane(StrEnum):
    """The queue of a request: training, or evaluation, which has priority."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """The reason why generation of a trajectory ended."""

    STOP = "stop"
    """The model ended its turn (EOS or a stop string)."""
    LENGTH = "length"
    """A token budget ended it: the response is truncated."""


class RewardStatus(StrEnum):
    """The result of a reward call."""

    OK = "ok"
    SKIPPED = "skipped"
    """The function returned None: it does not judge this sample."""
    FAILED = "failed"
    """No usable score; the failure policy decides."""


class SharedPrefix(StrEnum):
    """Methods of computing the common prefix of a group's rows once, forward and backward, for all of them."""

    NONE = "none"
    """Not at all: once for each sample."""
    TREE = "tree"
    """Prefixes at any number of levels: one packed sequence, without padding, and a tree attention."""
    CACHE = "cache"
    """Only prompts: they run first; their keys and values, with their graph, are the cache of the samples."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row of a data source."""

    id: str
    """Unique and stable within the run: '<source>/<index>'."""
    messages: tuple[Message, ...]
    """The conversation so far, in chat form; the chat template has not been applied."""
    answer: Any
    """The known answer, or None."""
    source: str
    """Name of the entry of `data.sources` or `eval.sources`."""
    columns: FrozenDict[str, Any] = field(default_factory=FrozenDict)
    """Every other column of the row, read-only; rewards get them by name."""
    conversational: bool = False
    """The row's prompt was a list of messages, not a string: TRL-style rewards then get messages too."""


@dataclass(frozen=True, order=True)
class TrajectoryId:
    """Identifies one row of a batch for the whole run."""

    prompt: str
    epoch: int
    """Number of times that this prompt had been issued before."""
    sample: int
    """Index within the group, from 0."""
    segment: int = 0
    """Index within the sample, from 0: an agent's sample may end as several segments, which are ONE unit for reward,
    group baseline and advantage."""

    def unit(self) -> "TrajectoryId":
        """The id of the sample, the same for all its segments."""
        return self if self.segment == 0 else TrajectoryId(self.prompt, self.epoch, self.sample)


@dataclass(frozen=True, eq=False)
class Trajectory(ReadOnlyArrays):
    """One generation from a prompt: token ids in, token ids out, never tokenised again."""

    id: TrajectoryId
    prompt: Prompt
    token_ids: Int32s
    """(T,) prompt and response."""
    loss_mask: Bools
    """(T,) True where the policy sampled the token; never at position 0."""
    logprobs: Float32s
    """(T,) log-probability under the sampling policy softmax(logits / temperature) where loss_mask, else 0."""
    completion: str | tuple[Message, ...]
    """The decoded response: a string, or messages for agents."""
    finish: FinishReason
    versions: tuple[tuple[int, int], ...]
    """(start position, weights version) of each run of tokens sampled with one version."""
    turns: int = 1
    timing: FrozenDict[str, float] = field(default_factory=FrozenDict)
    """Seconds by phase, such as generate_s."""
    num_segments: int = 1
    """Number of segments of the sample; it is scored when all are in. 0: the end of the stream decides."""
    info: FrozenDict[str, Any] = field(default_factory=FrozenDict)
    """Details from the agent loop, for rewards and the trajectories on disk; plain values that pickle."""
    opening: tuple[Message, ...] | None = None
    """The messages before the response if an environment or an agent program chose others than the prompt's."""

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages that the response continues."""
        return self.prompt.messages if self.opening is None else self.opening

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one (all of them if none was sampled)."""
        first = int(self.loss_mask.argmax()) if len(self.loss_mask) else 0
        return first if self.loss_mask[first : first + 1].any() else len(self.token_ids)

    def text(self) -> str:
        """The completion as one string; for messages, the content of the assistant's."""
        if isinstance(self.completion, str):
            return self.completion
        return "\n".join(str(m.get("content") or "") for m in self.completion if m.get("role") == "assistant")


@dataclass(frozen=True, eq=False)
class Reward(ReadOnlyArrays):
    """The judgement of one sample."""

    score: float
    """Weighted sum over the functions that had an opinion; 0.0 unless status is OK."""
    components: FrozenDict[str, float] = field(default_factory=FrozenDict)
    """The unweighted score of each function that returned one."""
    status: RewardStatus = RewardStatus.OK
    token_scores: Float32s | None = None
    """(T,) extra per-token rewards, or None."""
    latency_s: float = 0.0
    info: FrozenDict[str, Any] = field(default_factory=FrozenDict)
    """Values that functions log; 'answer' is the extracted answer for maj@k, 'error' the reason of a failure."""


@dataclass(frozen=True, eq=False)
class ScoredTrajectory:
    """A trajectory with its reward."""

    trajectory: Trajectory
    reward: Reward
    baseline: float | None = None
    """The reward (score and token scores) of a greedy sample of the same prompt, for estimators that request one."""

    @property
    def token_score(self) -> float:
        """The sum of the token scores."""
        scores_T = self.reward.token_scores
        return 0.0 if scores_T is None else float(scores_T.sum(dtype=np.float64))


def total_rewards(rows: Iterable[ScoredTrajectory]) -> dict[TrajectoryId, float]:
    """By `TrajectoryId.unit` of each sample that did not fail: its score plus the token scores of all its segments."""
    totals: dict[TrajectoryId, float] = {}
    for row in rows:
        reward, unit = row.reward, row.trajectory.id
        if reward.status is RewardStatus.OK:
            if unit.segment:  # seldom, and this runs once per sample
                unit = unit.unit()
            extra = 0.0 if reward.token_scores is None else row.token_score
            totals[unit] = totals.get(unit, reward.score) + extra
    return totals


@dataclass(frozen=True, eq=False)
class TokenArrays(ReadOnlyArrays):
    """The token arrays of a batch, padded on the right."""

    token_ids_BT: Int32s
    valid_BT: Bools
    """True where there is a token, False where there is padding."""
    loss_mask_BT: Bools
    rollout_logprobs_BT: Float32s


@dataclass(frozen=True, eq=False)
class TokenScores(ReadOnlyArrays):
    """The result of a forward pass over a batch; only the values at loss tokens count."""

    logprobs_BT: Float32s
    """(B, T) log-probs of the tokens."""
    entropy_BT: Float32s | None = None
    """(B, T) entropy in nats of the distribution before each token was sampled; None: not computed."""


@dataclass(frozen=True, eq=False)
class Batch(ReadOnlyArrays):
    """Rows that are trained together: statistics per row and per token, read-only.

    The same class serves a whole step and a mini-batch of it (`rlcore.data.batch.select`). A field that a phase has not
    filled yet is None.
    """

    tokens: TokenArrays
    sample_B: Int64s
    """Sample that the row belongs to: 0 .. number of samples - 1."""
    group_B: Int64s
    """Group that the row belongs to: 0 .. number of groups - 1."""
    lengths_B: Int64s
    """Number of tokens of each row."""
    num_sampled_B: Int64s
    """Number of loss tokens of each row."""
    prompt_lengths_B: Int64s
    """Number of tokens before the first sampled one; rows of a group share the prefix of the shortest of them."""
    rewards_B: Float32s
    """The reward of the row's sample (repeated for each of its segments)."""
    truncated_B: Bools | None = None
    """True where a token budget ended the row (`FinishReason.LENGTH`)."""
    token_scores_BT: Float32s | None = None
    """(B, T) extra per-token rewards."""
    weights_B: Float32s | None = None
    """Weight of one token's loss of the row in the loss of the mini-batch: see `rlcore.algo.aggregation`."""
    advantages_B: Float32s | None = None
    """One advantage per row; None when the estimator gives one per token."""
    advantages_BT: Float32s | None = None
    """(B, T) one advantage per token."""
    returns_BT: Float32s | None = None
    """(B, T) targets of the critic."""
    values_BT: Float32s | None = None
    """(B, T) the step-start critic's values."""
    old_logprobs_BT: Float32s | None = None
    """(B, T) log-probs of pi_old, the weights at the start of the step; None when pi_old is the detached pi."""
    reference_logprobs_BT: Float32s | None = None
    """(B, T) log-probs of the reference policy; None without a KL term."""
    entropy_BT: Float32s | None = None
    """(B, T) entropy of pi_old in nats; None unless its pass computed it, for recording or for
    `algo.top_entropy_quantile`. Updates do not get it."""
    baselines_B: Float32s | None = None
    """The reward of a greedy sample of the row's prompt; None unless the estimator requests one."""
    selected_BT: Bools | None = None
    """(B, T) tokens of the whole mini-batch that the policy loss's `Algorithm.selection` chose."""
    same_weights_BT: Bools | None = None
    """(B, T) loss tokens that were sampled with the weights of pi_old; None: all were."""
    updates_left: int | None = None
    """Updates from the one on this mini-batch to the last of the run, both included, if steps make as many as the
    settings say; None outside a run. Learning-rate schedules follow it."""

    def __len__(self) -> int:
        return len(self.sample_B)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Strings that end the response; the tokens that complete one are kept."""


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """A prompt to continue `n` times."""

    id: str
    """Names the request in results and errors; the canonical order of admission is by id."""
    token_ids: tuple[int, ...]
    sampling: Sampling
    n: int
    seed: int
    """Sample i draws from its own random stream, seeded by (seed, i)."""
    conversation: str = ""
    """Requests of one conversation go to the same replica, whose cache may hold its earlier turns; empty: to any."""
    rank: int = 0
    """The rank of its replica that samples it, modulo their number; set by the rollout service."""


@dataclass(frozen=True, eq=False)
class Completion(ReadOnlyArrays):
    """One finished continuation of a request."""

    request_id: str
    sample: int
    token_ids: Int32s
    """(N,) the sampled tokens, the end-of-turn token included."""
    logprobs: Float32s
    """(N,) log-probs under softmax(logits / temperature), divided by the mass kept where top_p, top_k or min_p cut."""
    finish: FinishReason
    version: int
    """Version of the weights that sampled the first token."""
    generate_s: float = 0.0
    versions: tuple[tuple[int, int], ...] = ()
    """(offset in token_ids, version) of each run of tokens sampled with the same weights; empty: `version` sampled all.

    A version that occurs twice sampled before and after an update that was not published.
    """
    error: str = ""
    """Reason why the request cannot be served: it kills its replica. There are no tokens; the sample has failed."""


COPIED_KINDS: tuple[Literal["tcp", "shm", "nccl"], ...] = ("tcp", "shm", "nccl")
"""Kinds of weights of which the actor's process keeps a copy, which it sends."""
SENT_KINDS: tuple[Literal["tcp", "shm", "nccl", "ipc"], ...] = (*COPIED_KINDS, "ipc")
"""Kinds of weights that the actor's process sends."""


@dataclass(frozen=True)
class WeightsHandle:
    """The location of the actor's weights of one version, for replicas that hold a copy."""

    version: int
    kind: Literal["directory", "adapter", "tcp", "shm", "nccl", "ipc"]
    """directory: a model directory that from_pretrained opens, with safetensors files; adapter: one of peft's, for the
    model that the replicas started with; tcp, shm and nccl: the actor's process sends them to any process that knows
    the address, shm through memory shared on its machine, nccl to all replicas together; ipc: each rank of the actor
    sends them to the processes on its device, while `ActorWorker.send_weights` runs.
    `rlcore.contracts.weights.weights_of` reads each of them."""
    path: str
    """Path of the directory; for tcp and nccl HOST:PORT/SECRET, for shm SOCKET/SECRET of each rank that has a share,
    separated by commas; for ipc DEVICE@SOCKET/SECRET of each rank."""
    members: int = 0
    """For nccl: the number of replicas that take this version together, as
    `rlcore.contracts.weight_groups.GroupReceiver` does; 0: one replica takes it alone. For ipc: the number of replicas
    to which the actor sends it."""

    @property
    def is_sent(self) -> bool:
        """True if the actor's process sends the weights, and nothing is written."""
        return self.kind in SENT_KINDS

    @property
    def place(self) -> str:
        """The name of it in errors, without secrets."""
        return ",".join(part.rpartition("/")[0] for part in self.path.split(",")) if self.is_sent else self.path


def frozen_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages as a read-only tuple."""
    return tuple(FrozenDict(message) for message in messages)
