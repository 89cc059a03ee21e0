"""Attention of a packed sequence: the same as row by row, and nothing made that grows with the square of a length."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.engines.hf.train import tree_attention
from rlcore.engines.hf.train.tree import PackedBatch, pack
from rlcore.engines.hf.train.tree import tree_attention as tree_attention_of_layer
from rlcore.engines.hf.train.tree_attention import (
    HALF_FROM,
    FlashKernel,
    LoopedFlash,
    Runs,
    Spans,
    Tree,
    VariableLengthFlash,
    attend,
)
from rlcore.types import Batch, TokenArrays

torch.set_num_threads(1)

Group = tuple[int, list[int]]
"""Length of a prefix, and of each suffix after it."""
HEADS = [(4, 4), (8, 2), (3, 1)]
SUFFIX_ID = 100_000


def batch_of(groups: list[Group]) -> Batch:
    """Rows whose token ids all differ, a group's prefix aside; the token after the last suffix has a loss."""
    lengths = [(group, prefix, suffix) for group, (prefix, suffixes) in enumerate(groups) for suffix in suffixes]
    columns = np.arange(max(prefix + suffix for _, prefix, suffix in lengths) + 1)
    group_B, prefix_B, suffix_B = (np.array(numbers, dtype=np.int64) for numbers in zip(*lengths, strict=True))
    valid_BT = columns <= (prefix_B + suffix_B)[:, None]
    own_BT = SUFFIX_ID + 1000 * np.arange(len(lengths))[:, None] + columns
    token_ids_BT = np.where(columns < prefix_B[:, None], 1000 * group_B[:, None] + columns, own_BT).astype(np.int32)
    prompt_B = np.maximum(prefix_B, 1)
    loss_mask_BT = valid_BT & (columns >= prompt_B[:, None])
    return Batch(
        tokens=TokenArrays(token_ids_BT, valid_BT, loss_mask_BT, np.zeros(valid_BT.shape, dtype=np.float32)),
        sample_B=np.arange(len(lengths)),
        group_B=group_B,
        lengths_B=prefix_B + suffix_B + 1,
        num_sampled_B=np.count_nonzero(loss_mask_BT, axis=1),
        prompt_lengths_B=prompt_B,
        rewards_B=np.zeros(len(lengths), dtype=np.float32),
    )


def packed(groups: list[Group], device: str = "cpu") -> PackedBatch:
    return pack(batch_of(groups), torch.device(device))


def inputs_of(packed: PackedBatch, heads: int, key_heads: int, size: int = 8, **settings: Any) -> list[Tensor]:
    tokens = sum(packed.tree.own.queries.lengths)
    generator = None if "device" in settings else torch.Generator().manual_seed(tokens)
    return [
        torch.randn(1, num, tokens, size, generator=generator, **settings).requires_grad_()
        for num in (heads, key_heads, key_heads)
    ]


def row_by_row(inputs: list[Tensor], groups: list[Group], token_ids_N: Tensor) -> Tensor:
    """(1, heads, N, size): every row with its prefix by itself, by a plain softmax."""
    query, key, value = inputs
    places = {token_id: place for place, token_id in enumerate(token_ids_N.tolist())}
    repeats, outputs, row = query.shape[1] // key.shape[1], {}, 0
    for group, (prefix, suffixes) in enumerate(groups):
        for suffix in suffixes:
            shared = [1000 * group + position for position in range(prefix)]
            own = [SUFFIX_ID + 1000 * row + position for position in range(prefix, prefix + suffix)]
            tokens = [places[token_id] for token_id in shared + own if token_id in places]
            row += 1
            keys, values = (tensor[0, :, tokens].repeat_interleave(repeats, 0) for tensor in (key, value))
            scores = query[0, :, tokens] @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
            seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            output = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
            outputs |= {place: output[:, index] for index, place in enumerate(tokens)}
    return torch.stack([outputs[place] for place in range(len(places))], dim=1)[None]


def check_equal(groups: list[Group], heads: int, key_heads: int) -> None:
    sequence = packed(groups)
    inputs = inputs_of(sequence, heads, key_heads, dtype=torch.float64)
    ours, plain = attend(*inputs, sequence.tree), row_by_row(inputs, groups, sequence.token_ids_N)
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = [ours, *torch.autograd.grad(ours, inputs, grad)]
    expected = [plain, *torch.autograd.grad(plain, inputs, grad)]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_groups_equal_rows_computed_one_by_one_in_output_and_all_gradients(
    seed: int, heads: int, key_heads: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = [
        (int(rng.integers(0, 9)), rng.integers(0, 7, rng.integers(1, 6)).tolist()) for _ in range(rng.integers(1, 6))
    ]
    check_equal([*groups, (3, [2, 0, 4])], heads, key_heads)


@pytest.mark.parametrize("kept", [5, 8, 12])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_values_may_be_smaller_or_larger_than_keys(kept: int, scaling: float | None) -> None:
    groups: list[Group] = [(3, [2, 1, 4]), (1, [3])]
    sequence = packed(groups)
    query, key, _ = inputs_of(sequence, 4, 2, dtype=torch.float64)
    value = inputs_of(sequence, 4, 2, kept, dtype=torch.float64)[2]
    output_1NHD, _ = tree_attention_of_layer(None, query, key, value, None, tree=sequence.tree, scaling=scaling)
    scaled = query if scaling is None else query * scaling * query.shape[-1] ** 0.5
    plain = row_by_row([scaled, key, value], groups, sequence.token_ids_N)
    results = [output_1NHD.transpose(1, 2), *torch.autograd.grad(output_1NHD.square().sum(), [query, key, value])]
    expected = [plain, *torch.autograd.grad(plain.square().sum(), [query, key, value])]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize(
    "groups",
    [
        [(3, [4]), (5, [1]), (2, [6])],
        [(5, [0, 0]), (3, [2, 2])],
        [(0, [3, 4]), (3, [4, 1])],
        [(0, [1, 2]), (5, [0, 0]), (2, [0, 3]), (4, [0, 0]), (3, [2, 4]), (0, [5, 5])],
        [(4, [3, 3, 3]), (4, [3, 3, 3])],
        [(1, [1, 1])],
        [(0, [2])],
        [(700, [300, 40])],
    ],
    ids=[
        "one row per group", "no suffix", "no prefix", "all kinds", "equal lengths", "single tokens", "one row",
        "longer than a block of the kernel",
    ],
)  # fmt: skip
def test_groups_at_the_edges_equal_rows_computed_one_by_one(groups: list[Group], heads: int, key_heads: int) -> None:
    check_equal(groups, heads, key_heads)


def test_gradients_and_inputs_whose_numbers_are_no_neighbours_in_memory_are_read_right() -> None:
    groups: list[Group] = [(3, [4, 2]), (2, [1, 1])]
    sequence = packed(groups)
    inputs = [
        tensor.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
        for tensor in inputs_of(sequence, 4, 2, dtype=torch.float64)
    ]
    ours, plain = attend(*inputs, sequence.tree), row_by_row(inputs, groups, sequence.token_ids_N)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(plain.sum(), inputs)  # the gradient of a sum is one number, seen everywhere
    for result, expected in zip(torch.autograd.grad(ours.sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_a_group_of_one_row_is_one_causal_run() -> None:
    tree = packed([(3, [4]), (2, [1, 2])]).tree
    assert sorted(tree.own.queries.lengths) == [1, 2, 2, 7]
    (level,) = tree.levels
    assert (level.queries.lengths, level.keys.lengths) == ((3,), (2,))


def test_neighbouring_runs_of_equal_lengths_are_one_call() -> None:
    tree = packed([(4, [3, 3, 3]), (4, [3, 3, 3])]).tree
    assert tree.own.alike == ((2, 4, 4), (6, 3, 3))
    assert tree.levels[0].alike == ((2, 9, 4),)


def test_a_batch_that_predicts_nothing_keeps_one_token_because_a_model_needs_one() -> None:
    assert packed([(0, [0, 0])]).token_ids_N.tolist() == [SUFFIX_ID]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_other_number_formats_differ_by_their_rounding(dtype: torch.dtype, tolerance: float) -> None:
    groups: list[Group] = [(9, [5, 5, 8]), (3, [20, 4])]
    sequence = packed(groups)
    exact = inputs_of(sequence, 8, 2, dtype=torch.float64)
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    grad = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain, ours = row_by_row(exact, groups, sequence.token_ids_N), attend(*rounded, sequence.tree)
    assert ours.dtype == dtype
    wanted = [plain, *torch.autograd.grad(plain, exact, grad.double())]
    for result, expected in zip([ours, *torch.autograd.grad(ours, rounded, grad)], wanted, strict=True):
        assert float((result - expected).detach().abs().max()) < tolerance * max(
            1.0, float(expected.detach().abs().max())
        )


def test_the_log_sums_of_the_flash_operation_have_no_gradient_so_a_join_outside_of_it_would_lose_one() -> None:
    query = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)
    exact = torch.logsumexp(query @ query.transpose(-1, -2) * 8**-0.5, -1)
    torch.testing.assert_close(log_sums, exact)
    assert torch.autograd.grad(exact.sum(), query, retain_graph=True)[0].abs().max() > 0.1
    assert not log_sums.requires_grad
    assert output.requires_grad


class Made(TorchDispatchMode):
    """The sizes of all tensors that operations inside make; views and what is written in place are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(returned.alias_info is None for returned in func._schema.returns):
            self.sizes += [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


META = torch.device("meta")


def long_tree(levels: int) -> Tree:
    """32k tokens: a prompt of 4k and 4 rows after it; with two levels every two of them share a turn of 3k, and what
    the levels speak of has gaps."""
    if levels == 1:
        own = Runs.neighbours(0, (4096, 9000, 7000, 7000, 5672), META)
        return Tree(
            Spans(own, own, causal=True), (Spans(Runs((4096,), (28672,), META), Runs((0,), (4096,), META), False),)
        )
    own = Runs.neighbours(0, (4096, 3000, 6000, 6000, 3000, 6000, 4672), META)
    turns = Spans(Runs((7096, 22096), (12000, 10672), META), Runs((4096, 19096), (3000, 3000), META), causal=False)
    return Tree(Spans(own, own, causal=True), (*long_tree(1).levels, turns))


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(("kernel", "num_made"), [(LoopedFlash(), 12), (VariableLengthFlash(), 8)])
def test_no_tensor_is_larger_than_the_queries_and_only_inputs_output_and_log_sums_are_kept(
    kernel: FlashKernel, num_made: int, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tree_attention.KERNELS, "meta", kernel)
    heads, key_heads, size, tokens = 28, 4, 128, 32768  # of Qwen2.5-7B
    inputs = [
        torch.empty(1, num, tokens, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for num in (heads, key_heads, key_heads)
    ]
    saved: list[int] = []
    with Made() as made:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x
        ):  # type: ignore[func-returns-value]
            output = attend(*inputs, long_tree(levels))
        gradients = torch.autograd.grad(output, inputs, torch.empty_like(output))
    assert output.shape == (1, heads, tokens, size)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in inputs]
    assert max(made.sizes) == tokens * heads * size
    allowed = num_made + (levels - 1) * 10  # of a level with gaps the queries are copied, too
    assert sum(made.sizes) < allowed * tokens * heads * size, "keys repeated for each head of queries are 4 more"
    assert sum(saved) == tokens * (2 * heads * size + 2 * key_heads * size + heads)


def test_values_of_another_size_and_devices_without_a_kernel_are_refused() -> None:
    tree = packed([(2, [1, 2])]).tree
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"its values have the shape \(1, 2, 5, 4\) and its keys \(1, 2, 5, 8\)"):
        attend(query, key, key[..., :4], tree)
    with pytest.raises(ValueError, match="found the device 'meta'; flash attention needs one of: cpu, cuda"):
        attend(query.to("meta"), key.to("meta"), key.to("meta"), tree)


class BackwardFormats(TorchDispatchMode):
    """The number formats of the queries of the CPU's backward operation, by their length."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.seen[args[1].shape[-2]] = args[1].dtype
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "long"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
def test_gradients_of_half_precision_are_computed_in_the_faster_format(dtype: torch.dtype, long: torch.dtype) -> None:
    groups: list[Group] = [(0, [HALF_FROM]), (5, [3, 3])]
    sequence = packed(groups)
    inputs = inputs_of(sequence, 4, 2, dtype=dtype)
    with BackwardFormats() as formats:
        results = torch.autograd.grad(attend(*inputs, sequence.tree).float().sum(), inputs)
    assert formats.seen == {HALF_FROM: long, 5: torch.float32, 3: torch.float32, 6: torch.float32}
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(row_by_row(exact, groups, sequence.token_ids_N).sum(), exact)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert float((result.double() - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
