"""Stop strings are found at the token that completes them, however characters and tokens lie to each other."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.contracts.stop_scan import StopScan
from rlcore.data.tokenizer import ByteTokens

TEXTS = st.text(alphabet="ab\n é€😀", min_size=1, max_size=12)


def ended_at(token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
    scan = StopScan(stop, ByteTokens().decode)
    return next((i for i in range(1, len(token_ids) + 1) if scan.found(token_ids[:i])), None)


def ended_by_decoding_everything(token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
    decode = ByteTokens().decode
    return next((i for i in range(1, len(token_ids) + 1) if any(text in decode(token_ids[:i]) for text in stop)), None)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, stop=st.lists(st.text(alphabet="ab\n é€😀", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_ends_a_row_at_the_token_that_completes_it(text: str, stop: list[str]) -> None:
    token_ids = list(text.encode())
    assert ended_at(token_ids, stop) == ended_by_decoding_everything(token_ids, stop)


@settings(max_examples=40, deadline=None)
@given(
    noise=st.lists(st.sampled_from([0xE2, 0x82, 0xFF, 0xC3, 97, 98, 256]), max_size=8),
    text=st.text(alphabet="ab€", min_size=1, max_size=6),
)
def test_bytes_that_are_no_characters_hide_no_stop_string_for_longer_than_they_last(
    noise: list[int], text: str
) -> None:
    """Broken bytes are settled by the next whole character, so a stop string of two characters after one is found."""
    token_ids = [*noise, *b"|", *text.encode(), *b"ab"]
    found = ended_at(token_ids, ["ab"])
    assert found is not None
    assert found >= (ended_by_decoding_everything(token_ids, ["ab"]) or 0)
    assert "ab" in ByteTokens().decode(token_ids[:found])


def test_each_token_is_decoded_a_few_times_only() -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return ByteTokens().decode(ids)

    scan = StopScan(("never",), decode)
    token_ids = list(b"abcdefghij" * 40)
    assert not any(scan.found(token_ids[:i]) for i in range(1, len(token_ids) + 1))
    assert decoded <= 4 * len(token_ids)


def test_without_stop_strings_nothing_is_decoded() -> None:
    def decode(ids: Sequence[int]) -> str:
        raise ValueError("decoded")

    assert not StopScan((), decode).found([1, 2, 3])
    assert not StopScan(("",), decode).found([1, 2, 3])


def test_the_text_before_a_token_decides_how_it_is_decoded() -> None:
    """Some tokenizers drop the space before the first word of what they decode."""
    words = [" stop", " here", " now"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).lstrip(" ")

    scan = StopScan(("stop here now",), decode)
    assert [scan.found(ids) for ids in ([0], [0, 1], [0, 1, 2])] == [False, False, True]
