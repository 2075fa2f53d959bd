"""Chunked log-probs compared with full logits: values, gradients and memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_core.algorithms import chunked_logprobs, full_logprobs
from rl_core.algorithms.logprobs import KeptIds
from rl_core.errors import ShapeError


def inputs(num_tokens=13, vocabulary=11, hidden=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden_TH": (num_tokens, hidden), "weight_VH": (vocabulary, hidden), "bias_V": (vocabulary,)}
    tensors = {
        n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for n, s in shapes.items()
    }
    return tensors, torch.randint(0, vocabulary, (num_tokens,), generator=generator)


def value_and_gradients(function, tensors, targets_T, use, **settings):
    results = function(**tensors, targets_T=targets_T, temperature=0.7, **settings)
    weights = torch.linspace(-1, 1, targets_T.numel(), dtype=results[0].dtype)
    parts = {
        "logprobs": results[0] * weights,
        "entropies": None if results[1] is None else results[1] * weights.flip(0),
    }
    total = sum(parts[name].sum() for name in use)
    return results, torch.autograd.grad(total, list(tensors.values()))


@pytest.mark.parametrize("use", [("logprobs",), ("entropies",), ("logprobs", "entropies")])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_equal_those_of_full_logits(use, chunk_tokens, has_bias):
    tensors, targets_T = inputs()
    if not has_bias:
        del tensors["bias_V"]
    expected, expected_grads = value_and_gradients(full_logprobs, tensors, targets_T, use)
    actual, actual_grads = value_and_gradients(chunked_logprobs, tensors, targets_T, use, chunk_tokens=chunk_tokens)
    for left, right in zip([*actual, *actual_grads], [*expected, *expected_grads], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_results_own_their_memory():
    # FSDP2 warns if a wrapped module returns a view: an in-place change of the view would drop FSDP2's hook on it.
    tensors, targets_T = inputs()
    logprobs_T, entropies_T = chunked_logprobs(**tensors, targets_T=targets_T, temperature=1.0, chunk_tokens=4)
    assert logprobs_T._base is None
    assert entropies_T._base is None


@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradients_pass_gradcheck(with_entropy):
    tensors, targets_T = inputs(num_tokens=5)

    def outputs(hidden_TH, weight_VH, bias_V):
        results = chunked_logprobs(
            hidden_TH, weight_VH, targets_T, temperature=1.3, chunk_tokens=2, bias_V=bias_V, with_entropy=with_entropy
        )
        return tuple(result for result in results if result is not None)

    assert torch.autograd.gradcheck(outputs, tuple(tensors.values()))


@pytest.mark.parametrize("frozen", ["hidden_TH", "weight_VH", "bias_V"])
def test_inputs_that_need_no_gradient_get_none(frozen):
    tensors, targets_T = inputs()
    expected = dict(
        zip(tensors, value_and_gradients(full_logprobs, tensors, targets_T, ("logprobs", "entropies"))[1], strict=True)
    )
    tensors[frozen] = tensors[frozen].detach()
    logprobs_T, entropies_T = chunked_logprobs(**tensors, targets_T=targets_T, temperature=0.7, chunk_tokens=4)
    weights = torch.linspace(-1, 1, 13, dtype=torch.float64)
    (logprobs_T * weights + entropies_T * weights.flip(0)).sum().backward()
    for name, tensor in tensors.items():
        if name == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_give_float32_results_and_gradients_of_their_own_dtype(dtype):
    tensors, targets_T = inputs(num_tokens=40, vocabulary=50, hidden=16, dtype=dtype)
    expected, expected_grads = value_and_gradients(full_logprobs, tensors, targets_T, ("logprobs", "entropies"))
    actual, actual_grads = value_and_gradients(
        chunked_logprobs, tensors, targets_T, ("logprobs", "entropies"), chunk_tokens=7
    )
    assert {result.dtype for result in actual} == {torch.float32}
    assert {gradient.dtype for gradient in actual_grads} == {dtype}
    # bfloat16 has 8 significant bits; the weight's gradient sums 40 products of that precision.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    for left, right in zip([*actual, *actual_grads], [*expected, *expected_grads], strict=True):
        torch.testing.assert_close(left, right, **tolerance)


def test_a_float32_weight_under_bfloat16_hidden_states_gets_a_float32_gradient():
    tensors, targets_T = inputs(dtype=torch.float32)
    tensors["hidden_TH"] = tensors["hidden_TH"].detach().bfloat16().requires_grad_()
    _, (hidden, weight, bias) = value_and_gradients(chunked_logprobs, tensors, targets_T, ("logprobs",), chunk_tokens=4)
    assert (hidden.dtype, weight.dtype, bias.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_extreme_logits_stay_finite():
    hidden_TH = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight_VH = torch.tensor([[1.0], [-1.0], [0.5]])
    logprobs_T, entropies_T = chunked_logprobs(
        hidden_TH, weight_VH, torch.tensor([0, 0, 2]), temperature=1.0, chunk_tokens=2
    )
    assert logprobs_T.tolist() == pytest.approx([0.0, -2e4, -1.0986123])
    assert entropies_T.tolist() == pytest.approx([0.0, 0.0, 1.0986123])
    (logprobs_T + entropies_T).sum().backward()
    assert hidden_TH.grad.isfinite().all()


def kept_sets(targets_T, vocabulary=11):
    """For every token, none or a random set of ids that includes the target; some sets have only the target, some all
    ids."""
    generator = torch.Generator().manual_seed(5)
    sizes = [0, 1, vocabulary, *torch.randint(0, vocabulary, (len(targets_T),), generator=generator).tolist()]
    kept = []
    for target, size in zip(targets_T.tolist(), sizes, strict=False):
        others = torch.randperm(vocabulary, generator=generator)
        kept.append([target, *others[others != target][: size - 1].tolist()] if size else [])
    return kept, KeptIds(torch.tensor([len(ids) for ids in kept]), torch.tensor([i for ids in kept for i in ids]))


def slow_among_kept(hidden_TH, weight_VH, targets_T, *, temperature, kept, bias_V=0.0):
    """Log-probs and entropies from a softmax over the kept logits alone, one token after another."""
    logprobs, entropies = [], []
    for hidden_H, target, ids in zip(hidden_TH, targets_T.tolist(), kept, strict=True):
        ids = ids or list(range(len(weight_VH)))
        logprobs_K = ((weight_VH @ hidden_H + bias_V) / temperature)[ids].log_softmax(-1)
        logprobs.append(logprobs_K[ids.index(target)])
        entropies.append(-(logprobs_K.exp() * logprobs_K).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("use", [("logprobs",), ("entropies",), ("logprobs", "entropies")])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_among_kept_ids_are_those_of_a_softmax_over_them(use, chunk_tokens, has_bias):
    tensors, targets_T = inputs()
    if not has_bias:
        del tensors["bias_V"]
    kept, kept_ids = kept_sets(targets_T)
    expected, expected_grads = value_and_gradients(slow_among_kept, tensors, targets_T, use, kept=kept)
    settings = {"chunk_tokens": chunk_tokens, "with_entropy": "entropies" in use}
    actual, grads = value_and_gradients(chunked_logprobs, tensors, targets_T, use, kept=kept_ids, **settings)
    whole, _ = value_and_gradients(chunked_logprobs, tensors, targets_T, use, **settings)
    for name, left, right, other in zip(("logprobs", "entropies"), actual, expected, whole, strict=True):
        if left is not None or name in use:
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
            assert (other - right).abs().max() > 0.3, "the kept ids matter"
    for left, right in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_a_count_for_each_target_is_required():
    tensors, targets_T = inputs()
    kept = KeptIds(torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(ShapeError, match=r"kept: expected counts of 13 tokens, got \(1,\)"):
        chunked_logprobs(**tensors, targets_T=targets_T, temperature=1.0, chunk_tokens=4, kept=kept)


@pytest.mark.parametrize("use", [("logprobs",), ("entropies",), ("logprobs", "entropies")])
@pytest.mark.parametrize("function", ["chunked", "full"])
def test_a_bias_of_minus_infinity_removes_its_token_from_the_vocabulary(function, use):
    """Values and gradients equal those of a vocabulary without the masked tokens. The rows of the masked tokens get
    zero gradients."""
    tensors, targets_T = inputs()
    kept_K = torch.tensor([0, 2, 3, 5, 6, 8, 10])
    small = {"hidden_TH": tensors["hidden_TH"], **{n: tensors[n][kept_K] for n in ("weight_VH", "bias_V")}}
    small = {name: tensor.detach().requires_grad_() for name, tensor in small.items()}
    small_targets_T = targets_T % len(kept_K)
    expected, expected_grads = value_and_gradients(full_logprobs, small, small_targets_T, use)
    bias_V = torch.full_like(tensors["bias_V"], -torch.inf).index_copy(0, kept_K, small["bias_V"].detach())
    masked = {**tensors, "bias_V": bias_V.detach().requires_grad_()}
    settings = {"chunk_tokens": 4} if function == "chunked" else {}
    function = {"chunked": chunked_logprobs, "full": full_logprobs}[function]
    actual, grads = value_and_gradients(function, masked, kept_K[small_targets_T], use, **settings)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
    for left, right in zip(grads, expected_grads, strict=True):
        assert left.isfinite().all()
        is_of_vocabulary = left.shape != right.shape
        torch.testing.assert_close(left[kept_K] if is_of_vocabulary else left, right, rtol=1e-10, atol=1e-12)
        if is_of_vocabulary:
            assert not left[[1, 4, 7, 9]].any()


def test_an_empty_stream_is_allowed():
    hidden_TH = torch.zeros(0, 3, requires_grad=True)
    logprobs_T, entropies_T = chunked_logprobs(
        hidden_TH, torch.zeros(5, 3), torch.zeros(0, dtype=torch.int64), temperature=1.0, chunk_tokens=4
    )
    (logprobs_T.sum() + entropies_T.sum()).backward()
    assert hidden_TH.grad.shape == (0, 3)


class LogitsMemory(TorchDispatchMode):
    """Counts the bytes of all live matrices that have a column per vocabulary entry, without the tensors `ignored`."""

    def __init__(self, vocabulary: int, ignored: list[torch.Tensor]):
        super().__init__()
        self.vocabulary, self.alive, self.peak = vocabulary, {}, 0
        self.ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[-1] == self.vocabulary:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    self.alive[storage.data_ptr()] = (
                        torch.multiprocessing.reductions.StorageWeakRef(storage),
                        storage.nbytes(),
                    )
        self.alive = {pointer: entry for pointer, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("function", [chunked_logprobs, full_logprobs, "among kept ids"])
def test_never_more_than_one_chunk_of_logits_is_alive(function, with_entropy):
    """Covers forward and backward pass. The version with full logits is the negative control."""
    has_kept = function == "among kept ids"
    function = chunked_logprobs if has_kept else function
    num_tokens, vocabulary, chunk_tokens = 64, 1000, 8
    tensors, targets_T = inputs(num_tokens, vocabulary, 4, torch.float32)
    settings = {"chunk_tokens": chunk_tokens, "with_entropy": with_entropy} if function is chunked_logprobs else {}
    if has_kept:
        settings["kept"] = kept_sets(targets_T, vocabulary)[1]
    use = ("logprobs", "entropies") if with_entropy else ("logprobs",)
    with LogitsMemory(vocabulary, [targets_T, *tensors.values()]) as memory:
        value_and_gradients(function, tensors, targets_T, use, **settings)
    one_chunk = chunk_tokens * vocabulary * 4
    if function is chunked_logprobs:
        # A bool per logit would add 25 %, one more row of logits 12.5 %.
        assert one_chunk <= memory.peak <= 1.1 * one_chunk
    else:
        assert memory.peak > num_tokens * vocabulary * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_TH": torch.zeros(3, 5)}, "hidden"),
        ({"targets_T": torch.zeros(3, dtype=torch.int32)}, "targets"),
        ({"targets_T": torch.zeros(4, dtype=torch.int64)}, "targets"),
        ({"bias_V": torch.zeros(6)}, "bias"),
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    arguments = {
        "hidden_TH": torch.zeros(3, 4),
        "weight_VH": torch.zeros(7, 4),
        "targets_T": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ShapeError, match=message):
        chunked_logprobs(**{**arguments, "temperature": 1.0, "chunk_tokens": 2, **change})
