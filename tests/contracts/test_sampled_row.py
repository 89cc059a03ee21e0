"""A row of any engine ends at the same token, and says which weights sampled what."""

import pytest

from rlcore.contracts.sampled_row import SampledRow
from rlcore.errors import WorkerError
from rlcore.testing.null import ByteTokens
from rlcore.types import FinishReason, GenerateRequest, Sampling

END = ByteTokens.EOS


def row_of(max_tokens: int = 8, stop: tuple[str, ...] = ()) -> SampledRow:
    sampling = Sampling(max_tokens=max_tokens, stop=stop)
    return SampledRow(GenerateRequest("p/0", (1, 2), sampling, n=1, seed=0), 0, ByteTokens())


def appended(row: SampledRow, *token_ids: int) -> SampledRow:
    for token in token_ids:
        assert row.finish is None
        row.append(token, -0.5, 3)
    return row


@pytest.mark.parametrize(
    ("row", "token_ids", "finish"),
    [
        (row_of(), [*b"abc", END], FinishReason.STOP),
        (row_of(stop=("bc",)), list(b"abc"), FinishReason.STOP),
        (row_of(max_tokens=3), list(b"abc"), FinishReason.LENGTH),
        (row_of(max_tokens=3), [*b"ab", END], FinishReason.STOP),
    ],
)
def test_a_row_ends_at_the_end_of_a_turn_a_stop_string_or_its_last_token(
    row: SampledRow, token_ids: list[int], finish: FinishReason
) -> None:
    completion = appended(row, *token_ids).completion(1.5)
    assert (completion.token_ids.tolist(), completion.finish) == (token_ids, finish)
    assert completion.logprobs.tolist() == [-0.5] * len(token_ids)
    assert (completion.request_id, completion.sample, completion.generate_s) == ("p/0", 0, 1.5)


def test_runs_of_tokens_have_the_version_that_sampled_them() -> None:
    """A change of weights without a new version begins a run as well."""
    row = row_of(max_tokens=5)
    for version, num_changes in ((3, 0), (3, 0), (3, 1), (4, 2), (4, 2)):
        row.append(1, -1.0, version, num_changes)
    completion = row.completion(0.0)
    assert (completion.version, completion.versions) == (3, ((0, 3), (2, 3), (3, 4)))


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf")])
def test_a_log_prob_that_is_not_finite_ends_the_run(logprob: float) -> None:
    row = appended(row_of(), 1)
    with pytest.raises(WorkerError, match=r"^rollout: request 'p/0', sample 0: the logits after 3 tokens are"):
        row.append(1, logprob, 3)


def test_a_row_that_has_not_ended_is_not_a_completion() -> None:
    with pytest.raises(ValueError, match="p/0/0 has not ended"):
        appended(row_of(), 1).completion(0.0)
