"""Log-probs and entropies from hidden states: every implementation against fp64 truth."""

import pytest
import torch
from torch import Tensor

from longstraw_kernels import selective_logprob as package
from longstraw_kernels.availability import is_triton_installed
from longstraw_kernels.selective_logprob import (
    params,
    selective_logprob,
    selective_logprob_backward,
)

needs_triton = pytest.mark.skipif(not is_triton_installed(), reason="Triton is not installed")
IMPLEMENTATIONS = ["reference", pytest.param("triton", marks=needs_triton)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (tokens, width, vocabulary): whole runs of 64 and a rest, less than a run, one token.
SHAPES = [(5, 16, 150), (3, 24, 37), (1, 8, 128), (9, 7, 65)]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch) -> None:
    """So that small vocabularies take several."""
    monkeypatch.setattr(params, "VOCABULARY_RUN", 64)


def operands(shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool = True):
    """hidden, weight, targets, bias, and gradients of both results."""
    number, width, vocabulary = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def random(*size: int) -> Tensor:
        made = torch.randn(*size, generator=generator, dtype=torch.float64)
        return made.to(dtype).to(DEVICE)

    targets = torch.randint(vocabulary, (number,), generator=generator).to(DEVICE)
    targets[0] = vocabulary - 1
    bias = random(vocabulary) if has_bias else None
    return random(number, width), random(vocabulary, width), targets, bias, random(2, number)


def truth(hidden, weight, targets, bias, grads, temperature, with_entropy=True):
    """By autograd over all logits in fp64."""
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = leaves[0] @ leaves[1].T
    log_p = torch.log_softmax((logits + (0 if bias is None else leaves[2])) / temperature, -1)
    logps = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    roots = [logps, entropies][: 1 + with_entropy]
    found = torch.autograd.grad(roots, leaves, list(grads.double())[: len(roots)])
    return [logps.detach(), entropies.detach(), *found]


def computed(hidden, weight, targets, bias, grads, temperature, impl, with_entropy=True):
    options = {"bias": bias, "temperature": temperature, "impl": impl}
    results = selective_logprob(hidden, weight, targets, **options)
    entropy_grad = grads[1] if with_entropy else None
    found = selective_logprob_backward(
        grads[0], entropy_grad, hidden, weight, targets, results, **options
    )
    gradients = [x for x in (found.hidden, found.weight, found.bias) if x is not None]
    return [results.logps, results.entropies, *gradients]


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition_is_autograd_over_all_logits(shape, has_bias, with_entropy) -> None:
    """fp64: a difference is a mistake."""
    given = operands(shape, torch.float64, has_bias)
    found = computed(*given, 0.7, "reference", with_entropy)
    for ours, exact in zip(found, truth(*given, 0.7, with_entropy), strict=True):
        assert torch.allclose(ours, exact, rtol=0, atol=1e-12)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_that_of_the_definition_in_the_same_dtype(shape, with_entropy, dtype) -> None:
    """error <= 2 * (error of the definition in the same dtype + one rounding of the largest)."""
    given = operands(shape, dtype)
    exact = truth(*given, 1.3, with_entropy)
    plain = computed(*given, 1.3, "reference", with_entropy)
    found = computed(*given, 1.3, "triton", with_entropy)
    for ours, theirs, value in zip(found, plain, exact, strict=True):
        rounding = torch.finfo(dtype).eps * value.abs().max()
        assert (ours - value).abs().max() <= 2 * ((theirs - value).abs().max() + rounding)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tokens_that_are_ruled_out_have_no_part(impl: str) -> None:
    """A logit of -inf: probability 0, and no NaN in entropy or gradient."""
    hidden, weight, targets, bias, grads = operands((4, 8, 100), torch.float32)
    bias[70:90] = -torch.inf
    targets = targets.clamp(max=60)
    found = computed(hidden, weight, targets, bias, grads, 1.0, impl)
    kept = torch.tensor([*range(70), *range(90, 100)], device=DEVICE)
    less = computed(hidden, weight[kept], targets, bias[kept], grads, 1.0, impl)
    for whole, part in zip(found[:3], less[:3], strict=True):
        assert torch.allclose(whole, part, rtol=1e-5, atol=1e-6)
    assert torch.allclose(found[3][kept], less[3], rtol=1e-5, atol=1e-6)
    assert not found[3][70:90].any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_frozen_head_has_no_gradient_and_no_tokens_have_none(impl: str) -> None:
    hidden, weight, targets, bias, grads = operands((4, 8, 100), torch.float32)
    results = selective_logprob(hidden, weight, targets, bias=bias, impl=impl)
    given = hidden, weight, targets, results
    frozen = selective_logprob_backward(
        *grads, *given, bias=bias, needs_weight=False, impl=impl
    )  # fmt: skip
    assert frozen.weight is None and frozen.bias is None and frozen.hidden.any()
    none = computed(hidden[:0], weight, targets[:0], bias, grads[:, :0], 1.0, impl)
    assert [len(x) for x in none] == [0, 0, 0, 100, 100] and not none[3].any()


@needs_triton
def test_equal_inputs_give_equal_bits_from_any_layout() -> None:
    hidden, weight, targets, bias, grads = operands((5, 16, 150), torch.float32)
    first = computed(hidden, weight, targets, bias, grads, 1.0, "triton")
    lying = [x.T.contiguous().T for x in (hidden, weight)]
    again = computed(hidden, weight, targets, bias, grads, 1.0, "triton")
    others = computed(*lying, targets, bias, grads, 1.0, "triton")
    for x, y, z in zip(first, again, others, strict=True):
        assert torch.equal(x, y) and torch.allclose(x, z, rtol=1e-5, atol=1e-6)


def test_the_largest_tensor_is_a_run_of_logits(monkeypatch) -> None:
    """Not all logits: what the operation is for."""
    sizes = []
    plain = params.logits_of

    def watched(hidden, weight, bias, run):
        sizes.append(plain(hidden, weight, bias, run).shape[-1])
        return plain(hidden, weight, bias, run)

    monkeypatch.setattr(package.reference, "logits_of", watched)
    given = operands((5, 16, 150), torch.float64)
    computed(*given, 1.0, "reference")
    assert sizes == [64, 64, 22] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 7)}, r"hidden \(4, 7\)"),
        ({"weight": torch.zeros(100, 8).double()}, "same dtype"),
        ({"targets": torch.zeros(3).long()}, r"targets \(3,\)"),
        ({"targets": torch.zeros(4)}, "integers"),
        ({"bias": torch.zeros(99)}, r"bias \(99,\)"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"impl": "fused"}, "choose one of auto, reference, triton"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_bad_operands_are_named(change, message: str) -> None:
    given = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(100, 8)}
    given |= {"targets": torch.zeros(4).long()} | change
    with pytest.raises(ValueError, match=message):
        selective_logprob(**given)


@needs_triton
def test_triton_refuses_fp64() -> None:
    hidden, weight, targets, _, _ = operands((4, 8, 100), torch.float64)
    with pytest.raises(ValueError, match="add up in fp32"):
        selective_logprob(hidden, weight, targets, impl="triton")
