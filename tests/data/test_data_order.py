"""The order of prompts: epochs, mixtures of sources, positions that are taken up again."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data import IssuedPrompts
from rlcore.errors import CheckpointError, ConfigError
from rlcore.testing.prompts import seeded_prompts
from rlcore.types import Message, Prompt, frozen_messages


def user(text: str) -> tuple[Message, ...]:
    return frozen_messages([{"role": "user", "content": text}])


def prompts_of(source: str, n: int) -> list[Prompt]:
    return [Prompt(f"{source}/{i}", user(f"{source} question {i}"), str(i), source) for i in range(n)]


def ids(taken: list[tuple[Prompt, int]]) -> list[tuple[str, int]]:
    return [(prompt.id, epoch) for prompt, epoch in taken]


def test_each_epoch_has_every_prompt_once_in_a_different_order() -> None:
    order = seeded_prompts({"a": prompts_of("a", 20)}, {}, seed=3, shuffle=True)
    assert order.num_prompts == 20
    epochs = [ids(order.next_prompts(20)) for _ in range(3)]
    for epoch, taken in enumerate(epochs):
        assert sorted(taken) == sorted((f"a/{i}", epoch) for i in range(20))
    orders = [[name for name, _ in taken] for taken in epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    other = seeded_prompts({"a": prompts_of("a", 20)}, {}, seed=4, shuffle=True)
    assert [name for name, _ in ids(other.next_prompts(20))] != orders[0]


def test_the_order_is_the_documented_one() -> None:
    expected = sorted(range(7), key=lambda i: hashlib.sha256(f"11\0a\0{1}\0{i}".encode()).digest())
    order = seeded_prompts({"a": prompts_of("a", 7)}, {}, seed=11, shuffle=True)
    order.next_prompts(7)
    assert ids(order.next_prompts(7)) == [(f"a/{i}", 1) for i in expected]


def test_without_shuffle_the_order_is_that_of_the_file() -> None:
    order = seeded_prompts({"a": prompts_of("a", 3)}, {}, seed=3, shuffle=False)
    assert ids(order.next_prompts(5)) == [("a/0", 0), ("a/1", 0), ("a/2", 0), ("a/0", 1), ("a/1", 1)]


def test_sources_are_mixed_by_weight_at_every_moment() -> None:
    prompts = {"b": prompts_of("b", 5), "a": prompts_of("a", 50)}
    taken = seeded_prompts(prompts, {"a": 3.0, "b": 1.0}, seed=0, shuffle=True).next_prompts(400)
    assert [prompt.source for prompt, _ in taken[:8]] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert Counter(prompt.source for prompt, _ in taken) == {"a": 300, "b": 100}
    assert Counter(prompt.id for prompt, _ in taken if prompt.source == "b") == {f"b/{i}": 20 for i in range(5)}
    assert max(epoch for prompt, epoch in taken if prompt.source == "a") == 5


weights_and_sizes = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.integers(1, 9), st.sampled_from([0.1, 1.0, 2.5, 7.0])), min_size=1
)


def order_of(mixture: Mapping[str, tuple[int, float]], seed: int, shuffle: bool) -> IssuedPrompts:
    prompts = {name: prompts_of(name, size) for name, (size, _) in mixture.items()}
    return seeded_prompts(prompts, {name: weight for name, (_, weight) in mixture.items()}, seed, shuffle)


@pytest.mark.slow
@settings(deadline=None)
@given(weights_and_sizes, st.integers(0, 5), st.booleans(), st.integers(0, 60), st.integers(0, 60), st.integers(1, 7))
def test_restoring_at_any_point_continues_identically(
    mixture: Mapping[str, tuple[int, float]], seed: int, shuffle: bool, before: int, after: int, chunk: int
) -> None:
    order = order_of(mixture, seed, shuffle)
    for _ in range(before):
        order.next_prompts(1)
    state = json.loads(json.dumps(order.state()))
    resumed = order_of(mixture, seed, shuffle)
    resumed.next_prompts(chunk)
    resumed.restore(state)
    in_chunks = [id_ for _ in range(0, after, chunk) for id_ in ids(resumed.next_prompts(chunk))][:after]
    assert in_chunks == ids(order.next_prompts(after))


@pytest.mark.slow
@settings(deadline=None)
@given(weights_and_sizes, st.integers(1, 200))
def test_shares_stay_close_to_the_weights_and_epochs_are_whole(
    mixture: Mapping[str, tuple[int, float]], n: int
) -> None:
    taken = order_of(mixture, 0, True).next_prompts(n)
    total = sum(weight for _, weight in mixture.values())
    for name, (size, weight) in mixture.items():
        mine = [(prompt.id, epoch) for prompt, epoch in taken if prompt.source == name]
        assert abs(len(mine) - n * weight / total) < 2
        assert len(set(mine)) == len(mine)
        assert [epoch for _, epoch in mine] == [i // size for i in range(len(mine))]


def test_a_position_in_other_data_is_refused() -> None:
    order = seeded_prompts({"a": prompts_of("a", 3)}, {}, 0, True)
    order.next_prompts(2)
    state = order.state()
    for prompts, seed, shuffle, message in (
        (
            {"a": prompts_of("a", 4)},
            0,
            True,
            "the prompts of source 'a' that data.max_prompt_tokens admits, schemas of tools included, are not those",
        ),
        ({"b": prompts_of("b", 3)}, 0, True, "source 'a' is missing"),
        ({"a": prompts_of("a", 3), "b": prompts_of("b", 3)}, 0, True, "source 'b' is new"),
        ({"a": prompts_of("a", 3)}, 1, True, r"train\.seed was 0, now it is 1"),
        ({"a": prompts_of("a", 3)}, 0, False, r"data\.shuffle was True, now it is False"),
    ):
        with pytest.raises(CheckpointError, match=message):
            seeded_prompts(prompts, {}, seed, shuffle).restore(state)


@pytest.mark.parametrize(
    ("prompts", "weights", "message"),
    [
        ({}, {}, "at least one source"),
        ({"a": []}, {}, r"data\.sources\.a: no prompt is left"),
        ({"a": prompts_of("a", 1)}, {"a": 0.0}, r"data\.sources\.a\.weight: it is 0\.0"),
        ({"a": prompts_of("a", 1)}, {"a": float("nan")}, "weight: it is nan"),
    ],
)
def test_a_mixture_of_nothing_is_refused(
    prompts: Mapping[str, list[Prompt]], weights: Mapping[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        seeded_prompts(prompts, weights, 0, True)
