"""The oracle against a double loop in plain Python, its edge cases, its gradients, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from flashlib import show
from flashlib.reference import attention, attention_varlen, naive_attention

RNG = np.random.default_rng(0)


def tensors(seqlen_q, seqlen_k, d=5, d_v=3, lead=(2, 3), dtype=np.float64, rng=None):
    rng = np.random.default_rng(1) if rng is None else rng
    shapes = (*lead, seqlen_q, d), (*lead, seqlen_k, d), (*lead, seqlen_k, d_v)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def loop(q, k, v, sees, scale=None, bias=None):
    """Attention of 2-D arrays, one Python float at a time; `sees(i, j)` says whether query i sees key j."""
    (seqlen_q, d), seqlen_k, d_v = q.shape, k.shape[0], v.shape[1]
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    out, lse = np.zeros((seqlen_q, d_v)), np.full(seqlen_q, -math.inf)
    for i in range(seqlen_q):
        scores = {}
        for j in range(seqlen_k):
            if sees(i, j):
                scores[j] = scale * math.fsum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True))
                scores[j] += 0.0 if bias is None else float(bias[i, j])
        if not scores:
            continue
        top = max(scores.values())
        total = math.fsum(math.exp(s - top) for s in scores.values())
        lse[i] = top + math.log(total)
        for c in range(d_v):
            out[i, c] = math.fsum(math.exp(s - top) * float(v[j, c]) for j, s in scores.items()) / total
    return out, lse


def against_loop(q, k, v, sees, options, **extra):
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert out.dtype == lse.dtype == np.float64
    for index in np.ndindex(q.shape[:-2]):
        want_out, want_lse = loop(q[index], k[index], v[index], sees, **extra)
        np.testing.assert_allclose(out[index], want_out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[index], want_lse, rtol=1e-12, atol=1e-13)


SIZES = [(1, 1), (4, 4), (2, 5), (5, 2), (7, 13), (13, 7), (1, 9), (9, 1)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SIZES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 0), (0, 0), (None, 1), (1, None), (3, 2)])
def test_equals_the_double_loop(seqlen_q, seqlen_k, causal, window):
    q, k, v = tensors(seqlen_q, seqlen_k)
    left, right = window or (None, None)

    def sees(i, j):
        distance = j - (i + seqlen_k - seqlen_q)
        return not (
            (causal and distance > 0)
            or (left is not None and distance < -left)
            or (right is not None and distance > right)
        )

    against_loop(q, k, v, sees, {"causal": causal, "window": window})


@pytest.mark.parametrize("scale", [None, 0.0, 0, -0.5, 1.0, 2, np.float32(0.5), np.float16(-2), np.int64(3)])
def test_scale(scale):
    q, k, v = tensors(4, 6)
    against_loop(q, k, v, lambda i, j: True, {"scale": scale}, scale=scale)


def test_scale_zero_is_the_mean_and_default_is_of_the_callers_head_dim():
    q, k, v = tensors(3, 6, d=7)
    np.testing.assert_allclose(attention(q, k, v, scale=0.0), np.broadcast_to(v.mean(-2, keepdims=True), (2, 3, 3, 3)))
    np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, scale=7**-0.5))


def test_mask_and_bias():
    q, k, v = tensors(5, 6)
    mask = np.random.default_rng(2).random((5, 6)) < 0.6
    mask[3] = False
    bias = np.random.default_rng(3).standard_normal((5, 6))
    bias[1, 2] = -math.inf
    against_loop(
        q,
        k,
        v,
        lambda i, j: mask[i, j] and (i, j) != (1, 2),
        {"mask": mask, "bias": bias},
        bias=np.maximum(bias, -1e300),
    )


def test_a_bias_of_minus_infinity_hides_as_a_mask_does():
    q, k, v = tensors(4, 6)
    hidden = np.zeros((4, 6), bool)
    hidden[1] = True
    hidden[:, 5] = True
    k[..., 5, :], v[..., 5, :] = np.nan, np.inf
    by_bias = attention(q, k, v, bias=np.where(hidden, -np.inf, 0.0), return_lse=True)
    by_mask = attention(q, k, v, mask=~hidden, return_lse=True)
    for a, b in zip(by_bias, by_mask, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (by_bias[0][..., 1, :] == 0).all()
    assert (by_bias[1][..., 1] == -np.inf).all()


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_read_without_a_warning():
    q, k, v = (np.broadcast_to(x[:1], (2, *x.shape[1:])) for x in tensors(4, 6))
    np.testing.assert_array_equal(attention(q, k, v)[0], attention(q, k, v)[1])


def test_mask_and_bias_broadcast_over_heads():
    q, k, v = tensors(4, 6)
    mask = np.random.default_rng(2).random((3, 1, 6)) < 0.5
    bias = np.random.default_rng(3).standard_normal((2, 1, 4, 6))
    out = attention(q, k, v, mask=mask, bias=bias)
    for b, h in np.ndindex(2, 3):
        one = attention(q[b, h], k[b, h], v[b, h], mask=mask[h], bias=bias[b, 0])
        np.testing.assert_allclose(out[b, h], one, rtol=1e-13)


def test_causal_is_bottom_right_aligned():
    q, k, v = tensors(2, 5, lead=())
    v = np.eye(5)
    weights = attention(q, k, v, causal=True) > 0
    assert weights.tolist() == [[True] * 4 + [False], [True] * 5]
    q, k, v = tensors(5, 2, lead=())
    out, lse = attention(q, k, np.eye(2), causal=True, return_lse=True)
    assert (out > 0).tolist() == [[False, False]] * 3 + [[True, False], [True, True]]
    assert np.isneginf(lse).tolist() == [True, True, True, False, False]


def test_window_counts_both_ends():
    q, k, _ = tensors(8, 8, lead=())
    weights = attention(q, k, np.eye(8), window=(2, 0)) > 0
    assert np.flatnonzero(weights[5]).tolist() == [3, 4, 5]
    assert np.array_equal(attention(q, k, np.eye(8), window=(8, 0)), attention(q, k, np.eye(8), causal=True))


def grads_of(q, k, v, weight_out, weight_lse, **options):
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True, **options)
    # A row without a key has lse = -inf: a loss leaves it out, as torch.where does.
    lse = torch.where(lse.isinf(), 0.0, lse)
    ((out * torch.tensor(weight_out)).sum() + (lse * torch.tensor(weight_lse)).sum()).backward()
    return [leaf.grad.numpy() for leaf in leaves]


def test_a_window_may_be_wider_than_any_integer_of_64_bits():
    q, k, v = tensors(4, 6)
    np.testing.assert_array_equal(attention(q, k, v, window=(10**30, 10**30)), attention(q, k, v))


def test_a_row_without_a_key_is_zero_with_lse_minus_infinity_and_no_gradient():
    q, k, v = tensors(5, 2)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out[..., :3, :] == 0).all()
    assert np.isneginf(lse[..., :3]).all()
    dq, dk, dv = grads_of(q, k, v, np.ones_like(out), np.ones(lse.shape), causal=True)
    assert (dq[..., :3, :] == 0).all()
    assert np.isfinite(dk).all()
    assert np.isfinite(dv).all()
    dq, dk, dv = grads_of(q, k, v, np.ones_like(out), np.ones(lse.shape), mask=np.zeros((5, 2), bool))
    assert not dq.any()
    assert not dk.any()
    assert not dv.any()


def test_a_nan_in_dout_of_a_row_without_a_key_goes_nowhere():
    q, k, v = tensors(4, 4)
    mask = np.ones((4, 4), bool)
    mask[2] = False
    dout = np.ones((2, 3, 4, 3))
    dout[..., 2, :] = math.nan
    for grad in grads_of(q, k, v, dout, np.zeros((2, 3, 4)), mask=mask):
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}, {"scale": -0.7}, {"scale": 0.0}])
def test_gradients_against_finite_differences(options):
    q, k, v = tensors(3, 4, d=3, d_v=2, lead=(1,))
    rng = np.random.default_rng(4)
    weight_out, weight_lse = rng.standard_normal((1, 3, 2)), rng.standard_normal((1, 3))

    def loss(*arrays):
        out, lse = attention(*arrays, return_lse=True, **options)
        return (out * weight_out).sum() + (np.where(np.isinf(lse), 0.0, lse) * weight_lse).sum()

    step = 1e-6
    for position, grad in enumerate(grads_of(q, k, v, weight_out, weight_lse, **options)):
        for index in np.ndindex(grad.shape):
            values = []
            for sign in (1, -1):
                moved = [x.copy() for x in (q, k, v)]
                moved[position][index] += sign * step
                values.append(loss(*moved))
            # Central differences err by step² and by rounding over step: 1e-8 is ten times either.
            assert grad[index] == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)


def test_bias_has_a_gradient():
    q, k, v = (torch.tensor(x) for x in tensors(3, 4, lead=(1, 1)))
    bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda b: attention(q, k, v, bias=b, causal=True), (bias,))


def test_lse_is_the_natural_log_of_the_sum_of_exponentials():
    q, k, v = (torch.tensor(x) for x in tensors(4, 6))
    _, lse = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.transpose(-1, -2) / 5**0.5, -1), rtol=1e-13, atol=1e-13)


def test_scores_beyond_float16():
    q = k = np.full((64, 64), 200, np.float16)
    v = np.full((64, 8), 200, np.float16)
    assert (attention(q, k, v) == 200).all()
    assert (attention(q, k, v, scale=1.0) == 200).all()


def test_huge_scores_do_not_overflow():
    q, k, v = tensors(3, 4)
    out, lse = attention(1e6 * q, k, v, return_lse=True)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_a_hidden_key_holds_never_shows(special, which):
    q, k, v = tensors(6, 6)
    poisoned = {"k": k.copy(), "v": v.copy()}
    poisoned[which][..., 4, :] = special
    clean = attention(q, k, v, causal=True, return_lse=True)
    out, lse = attention(q, poisoned["k"], poisoned["v"], causal=True, return_lse=True)
    np.testing.assert_array_equal(out[..., :4, :], clean[0][..., :4, :])
    np.testing.assert_array_equal(lse[..., :4], clean[1][..., :4])
    # The rows that see the key do show it.
    assert not np.isfinite(out[..., 5, :]).all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_do_not_meet_hidden_nans(which):
    arrays = list(tensors(4, 5))
    mask = np.ones((4, 5), bool)
    if which == 0:
        mask[1] = False
        hidden = np.s_[..., 1, :]
    else:
        mask[:, 3] = False
        hidden = np.s_[..., 3, :]
    weights = np.ones((2, 3, 4, 3)), np.ones((2, 3, 4))
    clean = grads_of(*arrays, *weights, mask=mask)
    arrays[which] = arrays[which].copy()
    arrays[which][hidden] = math.nan
    for got, want in zip(grads_of(*arrays, *weights, mask=mask), clean, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_empty_lengths(kind):
    for lead, seqlen_q, seqlen_k in [((2, 3), 4, 0), ((2, 3), 0, 4), ((2, 3), 0, 0), ((0, 3), 4, 4), ((2, 0), 4, 4)]:
        arrays = tensors(seqlen_q, seqlen_k, lead=lead)
        if kind == "torch":
            arrays = [torch.tensor(x, requires_grad=True) for x in arrays]
        for causal in (False, True):
            out, lse = attention(*arrays, causal=causal, return_lse=True)
            assert tuple(out.shape) == (*lead, seqlen_q, 3)
            assert tuple(lse.shape) == (*lead, seqlen_q)
            assert (out == 0).all() or seqlen_k
            assert (lse == -math.inf).all() or seqlen_k
        if kind == "torch":
            out.sum().backward()
            assert all(not x.grad.any() for x in arrays if seqlen_k == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_torch_in_torch_out_in_float64(dtype):
    q, k, v = (torch.tensor(x).to(dtype) for x in tensors(4, 6))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    np.testing.assert_array_equal(out.numpy(), attention(q.double().numpy(), k.double().numpy(), v.double().numpy()))


def test_layout_does_not_matter_and_inputs_stay_as_they_were():
    q, k, v = tensors(4, 6)
    before = [x.copy() for x in (q, k, v)]
    want = attention(q, k, v)
    strided = [np.asfortranarray(x) for x in (q, k, v)]
    np.testing.assert_allclose(attention(*strided), want, rtol=1e-13)
    for x, y in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_two_stacked_calls_with_a_padding_row_have_finite_gradients():
    x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[5] = False
    y = attention(x, x, x, mask=mask)
    z = attention(y, y, y)
    z[..., :5, :].sum().backward()
    assert x.grad.isfinite().all()


# --- the lesson ----------------------------------------------------------------------------------------------------


def test_naive_is_short_enough_to_read():
    assert len(show.source_of(naive_attention, docstring=False).splitlines()) <= 15


@pytest.mark.parametrize("scale", [None, 0.0, -0.5, 2.0])
def test_naive_in_numpy_and_torch_equals_the_oracle(scale):
    q, k, v = tensors(4, 6)
    want = attention(q, k, v, scale=scale)
    np.testing.assert_allclose(naive_attention(q, k, v, scale), want, rtol=1e-12, atol=1e-13)
    as_torch = naive_attention(*(torch.tensor(x) for x in (q, k, v)), scale)
    np.testing.assert_allclose(as_torch.numpy(), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_naive_does_not_overflow(kind):
    # Scores up to 3000 in float32, whose exponential overflows from 89 on.
    q = np.linspace(-50, 50, 20, dtype=np.float32).reshape(5, 4)
    assert np.isfinite(np.asarray(naive_attention(kind(q), kind(q), kind(q)))).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_naive_keeps_the_dtype(dtype):
    q, k, v = tensors(4, 6, dtype=dtype)
    assert naive_attention(q, k, v).dtype == dtype
    assert naive_attention(*(torch.tensor(x) for x in (q, k, v))).dtype == torch.tensor(q).dtype


# --- what is refused -----------------------------------------------------------------------------------------------


Q, K, V = tensors(4, 6)
BAD = {
    "q must be a numpy array or a torch tensor, got list": ([[1.0]], K, V, {}),
    "k must be a numpy array as q is, got Tensor": (Q, torch.tensor(K), V, {}),
    "v must be a torch tensor as q is, got ndarray": (torch.tensor(Q), torch.tensor(K), V, {}),
    "q must have a floating-point dtype, got int64": (Q.astype(np.int64), K, V, {}),
    "k must have a floating-point dtype, got torch.int32": (
        torch.tensor(Q),
        torch.tensor(K).int(),
        torch.tensor(V),
        {},
    ),
    "q must have at least 2 axes": (Q[0, 0, 0], K, V, {}),
    "k must have the leading axes of q, (2, 3), got (2, 2)": (Q, K[:, :2], V, {}),
    "k must have the head_dim of q, 5, got 4": (Q, K[..., :4], V, {}),
    "v must have the seqlen of k, 6, got 5": (Q, K, V[..., :5, :], {}),
    "q must have a head_dim of at least 1": (Q[..., :0], K[..., :0], V, {}),
    "v must have a head_dim of at least 1": (Q, K, V[..., :0], {}),
    "window must be a pair (left, right) or None, got 3": (Q, K, V, {"window": 3}),
    "window left must be an int of at least 0 or None, got -1": (Q, K, V, {"window": (-1, 0)}),
    "window right must be an int of at least 0 or None, got 1.5": (Q, K, V, {"window": (0, 1.5)}),
    "scale must be a finite number or None, got 'x'": (Q, K, V, {"scale": "x"}),
    "scale must be a finite number or None, got nan": (Q, K, V, {"scale": math.nan}),
    "scale must be a finite number or None, got True": (Q, K, V, {"scale": True}),
    "scale must be a finite number or None, got np.complex64(1+0j)": (Q, K, V, {"scale": np.complex64(1)}),
    "scale must be a finite number or None, got 1000": (Q, K, V, {"scale": 10**400}),
    "causal must be True or False, got 'yes'": (Q, K, V, {"causal": "yes"}),
    "causal must be True or False, got tensor": (Q, K, V, {"causal": torch.tensor([True, False])}),
    "mask must be a numpy array or a torch tensor, got list": (Q, K, V, {"mask": [True]}),
    "mask must have dtype bool, True where a query sees a key, got float64": (Q, K, V, {"mask": np.ones((4, 6))}),
    "mask must broadcast to (2, 3, 4, 6), got shape (6, 4)": (Q, K, V, {"mask": np.ones((6, 4), bool)}),
    "bias must have a floating-point dtype, got bool": (Q, K, V, {"bias": np.ones((4, 6), bool)}),
    "bias must broadcast to (2, 3, 4, 6), got shape (5, 6)": (Q, K, V, {"bias": np.ones((5, 6))}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name(message):
    q, k, v, options = BAD[message]
    with pytest.raises(ValueError, match="must") as caught:
        attention(q, k, v, **options)
    assert message in str(caught.value)


# --- what models add --------------------------------------------------------------------------------------------------


def _scores_as_rows(scores, **options):
    """Attention whose scores are given, over the values 1, 10, 100, …: head_dim 1, one query a row."""
    scores = torch.tensor(scores, dtype=torch.float64)
    v = 10.0 ** torch.arange(len(scores), dtype=torch.float64)[:, None]
    return attention(torch.ones(1, 1, 1, 1), scores[None, None, :, None], v[None, None], scale=1.0, **options)


def test_softcap_saturates_and_its_gradient_is_one_minus_tanh_squared():
    s = torch.tensor([1.0, 100.0, 4400.0, 1e4, -1e4], dtype=torch.float64)
    k = s[None, None, :, None].clone().requires_grad_()
    out, lse = attention(torch.ones(1, 1, 1, 1), k, torch.eye(5)[None, None], scale=1.0, softcap=50.0, return_lse=True)
    capped = torch.tensor([50 * math.tanh(x / 50) for x in s.tolist()], dtype=torch.float64)
    assert torch.allclose(out[0, 0, 0], torch.softmax(capped, 0))
    lse.sum().backward()
    assert torch.allclose(k.grad[0, 0, :, 0], torch.softmax(capped, 0) * (1 - (capped / 50) ** 2))
    assert k.grad[0, 0, -1, 0] == 0


def test_softcap_comes_before_the_mask():
    """The future capped to -1 instead of hidden would leak into every row."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    changed = v.clone()
    changed[:, :, 5:] = 1e6
    before, after = (attention(q, k, x, causal=True, softcap=1.0) for x in (v, changed))
    assert torch.equal(before[:, :, :5], after[:, :, :5])


def test_alibi_counts_from_the_bottom_right():
    """Two queries over four keys stand at the positions 2 and 3."""
    out = attention(
        torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 4, 1), torch.eye(4)[None, None], alibi_slopes=torch.tensor([0.5])
    )
    bias = -0.5 * torch.tensor([[2.0, 1, 0, 1], [3, 2, 1, 0]], dtype=torch.float64)
    assert torch.allclose(out[0, 0], torch.softmax(bias, -1))
    two = attention(
        torch.zeros(2, 1, 2, 1), torch.zeros(2, 1, 4, 1), torch.eye(4).expand(2, 1, 4, 4),
        alibi_slopes=torch.tensor([[0.5], [0.0]]),
    )  # fmt: skip
    assert torch.equal(two[0], out[0])
    assert torch.allclose(two[1], torch.full((1, 2, 4), 0.25, dtype=torch.float64))


def test_a_sink_joins_the_sum_and_meets_no_value():
    out, lse = _scores_as_rows([0.0, 0.0], sinks=torch.tensor([math.log(2)]), return_lse=True)
    # Weights 1/4, 1/4 and, for the sink, 1/2.
    assert math.isclose(out.item(), 11 / 4)
    assert math.isclose(lse.item(), math.log(4))


def test_a_row_without_a_key_has_its_sink_as_lse():
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    sinks = torch.tensor([0.5, -math.inf], dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 2, 2, 4)
    out, lse = attention(q, k, k, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :, 0] == 0).all()
    assert lse[0, 0, 0] == 0.5
    assert lse[0, 1, 0] == -math.inf
    grad_q, grad_sinks = torch.autograd.grad(lse[0, 0, 0] + out.sum(), (q, sinks))
    assert (grad_q[:, :, 0] == 0).all()
    assert grad_sinks.isfinite().all()


def test_query_heads_share_kv_heads_in_groups():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 3)
    out = attention(q, k, v)
    for h in range(6):
        assert torch.equal(out[:, h], attention(q[:, h], k[:, h // 3], v[:, h // 3]))


def test_dropout_scales_what_it_keeps_and_leaves_lse():
    keep = torch.tensor([True, False, True])
    out, lse = _scores_as_rows([0.0, 0.0, 0.0], dropout_p=0.25, keep=keep, return_lse=True)
    assert math.isclose(out.item(), (1 + 100) / 3 / 0.75)
    assert math.isclose(lse.item(), math.log(3))


def test_all_options_together_have_the_right_gradients():
    torch.manual_seed(0)
    q = torch.randn(1, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 2, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(4, 1, 6, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(1, 4, 5, 6) > 0.3

    def function(q, k, v, bias, sinks):
        return attention(
            q, k, v, window=(2, 1), softcap=1.5, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]), bias=bias,
            sinks=sinks, dropout_p=0.3, keep=keep, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (q, k, v, bias, sinks))


def test_packed_sequences_are_a_loop_over_them():
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 3), torch.randn(8, 2, 3), torch.randn(8, 2, 5)
    slopes = torch.rand(3, 4)
    out, lse = attention_varlen(
        q, k, v, [0, 3, 3, 7], torch.tensor([0, 2, 5, 8]), causal=True, alibi_slopes=slopes, return_lse=True
    )
    assert out.shape == (9, 4, 5)
    assert lse.shape == (4, 9)
    one = attention(*(x.transpose(0, 1)[None] for x in (q[3:7], k[5:8], v[5:8])), causal=True, alibi_slopes=slopes[2])
    assert torch.equal(out[3:7], one[0].transpose(0, 1))
    assert (out[7:] == 0).all()
    assert (lse[:, 7:] == -math.inf).all()
    # Sequence 0 has three queries and two keys: its first query sees none.
    assert (lse[:, 0] == -math.inf).all()


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("softcap must be a positive number or None, got 0.0", {"softcap": 0.0}),
        ("alibi_slopes must have shape (2,) or (1, 2), got (3,)", {"alibi_slopes": torch.ones(3)}),
        ("sinks must have shape (2,), got (1, 2)", {"sinks": torch.ones(1, 2)}),
        ("dropout_p must be a number from 0 up to, but not, 1, got 1.0", {"dropout_p": 1.0}),
        ("keep must say which weights are kept", {"dropout_p": 0.5}),
        ("keep must have dtype bool", {"dropout_p": 0.5, "keep": torch.ones(3, 3)}),
    ],
)
def test_bad_options_of_models_are_refused(message, options):
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="must") as caught:
        attention(x, x, x, **options)
    assert message in str(caught.value)
