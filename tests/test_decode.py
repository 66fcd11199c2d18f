"""Decoding: values, lengths, pages, splits, appended tokens, errors; a cache is NaN where it is not used."""

import math
import re

import pytest
import torch
from attention_cases import DEVICE, ON_GPU, allowed, error, tensor

from flashlib import decode, device, reference, tiles
from flashlib.compiler import compile_many
from flashlib.decode import flash_decode

DTYPES = [torch.float16, torch.bfloat16, torch.float32] + ([] if ON_GPU else [torch.float64])
LENGTHS = [0, 1, 31, 64, 65, 150]


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def case(lengths, nheads=2, nheads_kv=1, seqlen_q=1, head_dim=32, head_dim_v=None, capacity=160, dtype=torch.float32,
         layouts=("contiguous",) * 3, seed=0):  # fmt: skip
    """Return (q, k_cache, v_cache, cache_seqlens); behind the lengths the caches are NaN."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q = tensor((len(lengths), nheads, seqlen_q, head_dim), dtype, layouts[0], seed)
    k = tensor((len(lengths), nheads_kv, capacity, head_dim), dtype, layouts[1], seed + 1)
    v = tensor((len(lengths), nheads_kv, capacity, head_dim_v), dtype, layouts[2], seed + 2)
    for b, length in enumerate(lengths):
        for x in (k, v):
            # One head that is shown as all can be written once only.
            x[b, : 1 if x.stride(1) == 0 else nheads_kv, length:] = math.nan
    return q, k, v, numbers(*lengths)


def paged(k, v, lengths, page, spare=3):
    """Return (k_pages, v_pages, block_table): the same caches in shuffled pages; what no sequence uses is NaN."""
    batch, nheads_kv, capacity, _ = k.shape
    max_pages = -(-capacity // page)
    num_pages = batch * max_pages + spare
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page)).tolist()
    # Behind a length the table holds what no page has.
    table = torch.full((batch, max_pages), -(2**31), dtype=torch.int32, device=DEVICE)
    pools = [
        torch.full((num_pages, nheads_kv, page, x.shape[3]), math.nan, dtype=x.dtype, device=DEVICE) for x in (k, v)
    ]
    for b, length in enumerate(lengths.tolist()):
        for n in range(-(-length // page)):
            table[b, n] = order.pop()
            for pool, x in zip(pools, (k, v), strict=True):
                rows = x[b, :, n * page : (n + 1) * page]
                pool[table[b, n], :, : rows.shape[1]] = rows
    return *pools, table


def oracle(q, k, v, lengths, dtype, window=None, scale=None, softcap=None, sinks=None, alibi_slopes=None):
    """Compute (out, lse) in `dtype`, one sequence after the other, scores in full: float64 is the truth."""
    outs, lses = [], []
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5 if scale is None else scale
    for b, length in enumerate(lengths.tolist()):
        keys, values = (x[b, :, :length].repeat_interleave(group, 0).to(dtype) for x in (k, v))
        s = (q[b].to(dtype) @ keys.transpose(-1, -2)) * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        away = torch.arange(q.shape[2], device=DEVICE)[:, None] + length - q.shape[2]
        away = away - torch.arange(length, device=DEVICE)[None, :]
        if alibi_slopes is not None:
            slope = alibi_slopes[b] if alibi_slopes.ndim == 2 else alibi_slopes
            s = s - (slope[:, None, None].double() * away).to(dtype)
        left = None if window is None else window[0]
        s = s.masked_fill((away < 0) | (away > (length if left is None else left)), -math.inf)
        # One more key, whose value is 0: the sink, or nothing.
        sink = s.new_full((q.shape[1],), -math.inf) if sinks is None else sinks.to(dtype)
        s = torch.cat([s, sink[:, None, None].expand(-1, q.shape[2], 1)], -1)
        values = torch.cat([values, values.new_zeros(q.shape[1], 1, v.shape[3])], 1)
        lse = torch.logsumexp(s.float() if dtype != torch.float64 else s, -1)
        p = torch.softmax(torch.where(lse[..., None] == -math.inf, 0.0, s), -1)
        outs.append(torch.where(lse[..., None] == -math.inf, 0.0, p @ values))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def check(q, k, v, lengths, table=None, caches=None, num_splits=None, **options):
    """Hold flash_decode against the oracle; returns its (out, lse). Twice the error of plain PyTorch is allowed."""
    exact = oracle(q, k, v, lengths, torch.float64, **options)
    plain = oracle(q, k, v, lengths, q.dtype, **options)
    got = flash_decode(
        q, *(caches or (k, v)), lengths, block_table=table, num_splits=num_splits, return_lse=True, **options
    )
    assert got[0].dtype == q.dtype
    assert got[1].dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    nothing = exact[1] == -math.inf
    assert (got[0][nothing] == 0).all()
    assert (got[1][nothing] == -math.inf).all()
    for ours, theirs, truth in zip(got, plain, exact, strict=True):
        assert ours.shape == truth.shape
        some = ~nothing
        if some.any():
            assert error(ours[some], truth[some]) <= allowed(theirs[some], truth[some], q.dtype)
    return got


def test_the_oracle_agrees_with_the_reference():
    q, k, v, lengths = case([5, 40], nheads=2, nheads_kv=2, seqlen_q=3)
    slopes = torch.tensor([0.5, 0.1], device=DEVICE)
    for window in (None, (4, None)):
        out, lse = oracle(q, k, v, lengths, torch.float64, window=window, alibi_slopes=slopes)
        for b, n in enumerate((5, 40)):
            away = torch.arange(3, device=DEVICE)[:, None] + n - 3 - torch.arange(n, device=DEVICE)[None, :]
            want = reference.attention(q[b], k[b, :, :n], v[b, :, :n], causal=True, window=window,
                                       bias=-slopes[:, None, None].double() * away, return_lse=True)  # fmt: skip
            torch.testing.assert_close((out[b], lse[b]), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_lengths(dtype, seqlen_q):
    check(*case(LENGTHS, seqlen_q=seqlen_q, dtype=dtype))


@pytest.mark.parametrize(("nheads", "nheads_kv", "seqlen_q"), [(2, 2, 1), (6, 2, 5), (8, 1, 1), (8, 1, 7), (3, 1, 16)])
def test_groups_of_heads(nheads, nheads_kv, seqlen_q):
    check(*case([70, 4], nheads, nheads_kv, seqlen_q, head_dim=16))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 64), (40, 24), (128, 128), (64, 256)])
def test_head_dims(head_dim, head_dim_v):
    check(*case([90, 17], 2, 1, 2, head_dim, head_dim_v, dtype=torch.float16))


FEATURES = {
    "window": {"window": (20, None)},
    "window of one key": {"window": (0, 5)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": [0.3, 4.0]},
    "a sink of nothing": {"sinks": [-2.0, -math.inf]},
    "slopes": {"alibi_slopes": [0.5, -0.1]},
    "scale 0": {"scale": 0.0},
    "scale below 0": {"scale": -0.5},
    "all": {"window": (40, 0), "softcap": 3.0, "sinks": [1.0, 3.0], "alibi_slopes": [0.1, 0.3]},
}


def on_device(options):
    return {k: torch.tensor(v, device=DEVICE) if isinstance(v, list) else v for k, v in options.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature):
    check(*case([0, 3, 131], seqlen_q=4), num_splits=3, **on_device(FEATURES[feature]))


def test_features_in_one_piece():
    check(*case([0, 3, 131], seqlen_q=4), num_splits=1, **on_device(FEATURES["all"]))


def test_slopes_of_each_sequence():
    check(*case([30, 60]), alibi_slopes=torch.rand(2, 2, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_features_in_16_bits(dtype):
    options = on_device(FEATURES["all"])
    check(*case([0, 3, 64], seqlen_q=4, dtype=dtype), **{**options, "sinks": options["sinks"].to(dtype)})


LAYOUTS = ["contiguous", "transposed", "sliced", "strided", "turned", "expanded"]


@pytest.mark.parametrize("layouts", [LAYOUTS[i:] + LAYOUTS[:i] for i in range(6)], ids=lambda x: "-".join(x[:3]))
def test_any_layout(layouts):
    check(*case([40, 33], seqlen_q=2, head_dim=24, capacity=48, layouts=layouts[:3]))


# --- a row's bits --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_splits(monkeypatch):
    """Splits of one tile, of which small caches have several."""
    monkeypatch.setattr(decode, "SPLIT", 128 if ON_GPU else 32)


@pytest.mark.parametrize("options", [{}, {"window": (400, 0), "sinks": [1.0, 3.0]}], ids=["plain", "window and sinks"])
def test_who_adds_up_the_splits_changes_no_bit(options, small_splits, monkeypatch):
    # 17 splits of two tiles: three groups, two pairs.
    monkeypatch.setattr(decode, "SPLIT", 2 * decode.SPLIT)
    n = decode.SPLIT
    inputs = case([0, 17 * n - 5], seqlen_q=2, head_dim=16, capacity=17 * n)
    want = None
    for enough, walk in ((2**31, 1), (2 * 3, 8), (2 * 2, 16)):
        monkeypatch.setattr(decode, "enough_programs", lambda _, enough=enough: enough)
        launched = []
        launch = tiles.launch
        monkeypatch.setattr(tiles, "launch", lambda *a, launch=launch, to=launched: (to.append(a[3]), launch(*a)))
        got = check(*inputs, **on_device(options))
        monkeypatch.setattr(tiles, "launch", launch)
        assert launched[0]["WALK"] == walk
        want = want or got
        assert all(map(torch.equal, got, want)), walk
    one = flash_decode(*inputs, num_splits=1, **on_device(options))
    # Another size of a split is another order of additions.
    assert not torch.equal(one, want[0])


def test_a_pair_that_is_the_whole_row_is_finished_at_once(small_splits, monkeypatch):
    inputs = case([0, 1, 5 * decode.SPLIT], seqlen_q=2, head_dim=16, capacity=16 * decode.SPLIT)
    want = check(*inputs, **on_device(FEATURES["all"]))
    monkeypatch.setattr(decode, "enough_programs", lambda _: 3)
    monkeypatch.setattr(decode, "_combine_kernel", None)
    assert all(map(torch.equal, check(*inputs, **on_device(FEATURES["all"])), want))


def test_bits_do_not_depend_on_the_batch_or_the_capacity(small_splits):
    q, k, v, lengths = case([130, 7], seqlen_q=2)
    out = flash_decode(q, k, v, lengths)
    for b in range(2):
        alone = slice(b, b + 1)
        assert torch.equal(flash_decode(q[alone], k[alone], v[alone], lengths[alone]), out[alone])
    assert torch.equal(flash_decode(q[1:], k[1:, :, :70], v[1:, :, :70], lengths[1:]), out[1:])


@pytest.mark.parametrize("num_splits", [2, 3, 100])
def test_splits_change_nothing_but_rounding(num_splits):
    q, k, v, lengths = case([150, 7], head_dim=16)
    one = flash_decode(q, k, v, lengths, num_splits=1, return_lse=True)
    torch.testing.assert_close(flash_decode(q, k, v, lengths, num_splits=num_splits, return_lse=True), one)
    assert decode.splits_of(160, num_splits, 32)[1] == min(num_splits, 5)


def test_a_fixed_size_not_a_fixed_count():
    assert [decode.splits_of(n * decode.SPLIT, None, 32) for n in (1, 2, 64)] == [(decode.SPLIT, n) for n in (1, 2, 64)]


# --- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [16, 32, 48, 64, 256])
def test_pages_give_the_bits_of_a_cache_in_one_piece(page, small_splits):
    q, k, v, lengths = case([0, page - 1, page, page + 1], seqlen_q=2, head_dim=24, capacity=257)
    whole = check(q, k, v, lengths)
    *pools, table = paged(k, v, lengths, page)
    assert all(map(torch.equal, flash_decode(q, *pools, lengths, block_table=table, return_lse=True), whole))
    # (num_pages, page_size, nheads_kv, head_dim) in memory, as other engines keep them.
    pools = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pools]
    assert all(map(torch.equal, flash_decode(q, *pools, lengths, block_table=table, return_lse=True), whole))


def test_pages_that_two_sequences_share():
    q, k, v, lengths = case([50, 40])
    k[1, :, :32], v[1, :, :32] = k[0, :, :32], v[0, :, :32]
    whole = check(q, k, v, lengths)
    *pools, table = paged(k, v, lengths, 16)
    for pool in pools:
        pool[table[1, :2]] = math.nan
    table[1, :2] = table[0, :2]
    check(q, k, v, lengths, table, pools)
    assert torch.equal(flash_decode(q, *pools, lengths, block_table=table), whole[0])


def test_a_block_table_that_is_a_view():
    q, k, v, lengths = case([50, 40])
    *pools, table = paged(k, v, lengths, 16)
    wider = torch.full((2, 40), -7, dtype=torch.int32, device=DEVICE)
    wider[:, 2:22:2] = table
    check(q, k, v, lengths, wider[:, 2:22:2].contiguous(), pools)
    check(q, k, v, lengths, torch.cat([table, wider], 1)[:, :10], pools)


# --- the window ----------------------------------------------------------------------------------------------------


def test_a_window_sees_the_last_keys_and_no_others():
    q, k, v, lengths = case([256], 1, 1, 1, 16, capacity=256)
    want = check(q, k, v, lengths, window=(127, 0))[0]
    changed = [x.clone() for x in (k, v)]
    for x in changed:
        x[:, :, :128] = 1e4
    assert torch.equal(flash_decode(q, *changed, lengths, window=(127, 0)), want)
    changed[1][:, :, 128] += 1
    assert not torch.equal(flash_decode(q, *changed, lengths, window=(127, 0)), want)


@pytest.mark.parametrize("left", [None, 95, 96, 2**40])
def test_a_window_that_covers_everything(left):
    q, k, v, lengths = case([96, 30])
    torch.testing.assert_close(flash_decode(q, k, v, lengths, window=(left, None)), flash_decode(q, k, v, lengths))


# --- appending -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "dtype"), [(None, torch.bfloat16), (16, torch.bfloat16), (48, torch.float32), (16, torch.float16)], ids=str
)
def test_appended_tokens_are_stored_and_attended(page, dtype, small_splits):
    seqlen_q, before = 5, [0, 11, 30, 91]
    q, k, v, lengths = case(
        [n + seqlen_q for n in before], seqlen_q=seqlen_q, nheads_kv=2, head_dim_v=24, capacity=96, dtype=dtype
    )
    caches, table = (k, v), None
    if page:
        *caches, table = paged(k, v, lengths, page)
    want = check(q, k, v, lengths, table, caches)
    emptied = [x.clone() for x in caches]
    new = [torch.stack([x[b, :, n : n + seqlen_q] for b, n in enumerate(before)]) for x in (k, v)]
    for x in emptied:
        for b, n in enumerate(before):
            for i in range(n, n + seqlen_q):
                if page:
                    x[table[b, i // page], :, i % page] = math.nan
                else:
                    x[b, :, i] = math.nan
    short = numbers(*before)
    got = flash_decode(
        q, *emptied, short, block_table=table, k_new=new[0].transpose(1, 2).contiguous().transpose(1, 2), v_new=new[1],
        return_lse=True,
    )  # fmt: skip
    for x, y in zip(emptied, caches, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert short.tolist() == before
    assert all(map(torch.equal, got, want))


def test_tokens_one_by_one_are_tokens_together():
    q, k, v, lengths = case([20, 33], seqlen_q=3)
    together = flash_decode(q, k, v, lengths)
    for i in range(3):
        before = lengths - 3 + i
        rows = [torch.stack([x[b, :, n : n + 1] for b, n in enumerate(before.tolist())]) for x in (k, v)]
        one = flash_decode(q[:, :, i : i + 1], k, v, before, k_new=rows[0], v_new=rows[1])
        torch.testing.assert_close(one, together[:, :, i : i + 1])


# --- lse, empty inputs, ops ----------------------------------------------------------------------------------------


def test_lse_is_natural_and_two_caches_merge_by_it():
    q, k, v, lengths = case([64], 2, 2, 1, 32, capacity=64)
    out, lse = flash_decode(q, k, v, lengths, return_lse=True)
    torch.testing.assert_close(lse[0, :, 0], torch.logsumexp((k[0] @ q[0].mT)[..., 0] * 32**-0.5, -1))
    halves = [
        flash_decode(q, k[:, :, s], v[:, :, s], numbers(s.stop - s.start), return_lse=True)
        for s in (slice(0, 40), slice(40, 64))
    ]
    weights = torch.softmax(torch.stack([part for _, part in halves]), 0)[..., None]
    torch.testing.assert_close(sum(w * x for w, (x, _) in zip(weights, halves, strict=True)), out)


def test_a_row_that_sees_no_key_has_its_sink():
    q, k, v, lengths = case([0, 2], seqlen_q=4)
    sinks = torch.tensor([0.3, -2.0], device=DEVICE)
    for num_splits in (1, 3):
        out, lse = flash_decode(q, k, v, lengths, sinks=sinks, num_splits=num_splits, return_lse=True)
        assert (out[0] == 0).all()
        assert (out[1, :, :2] == 0).all()
        torch.testing.assert_close(lse[0], sinks[:, None].expand(2, 4))
        torch.testing.assert_close(lse[1, :, :2], sinks[:, None].expand(2, 2))


@pytest.mark.parametrize(("batch", "capacity"), [(0, 16), (2, 0)])
def test_empty_inputs(batch, capacity):
    q, k, v = (torch.randn(batch, 2, n, 16, device=DEVICE) for n in (1, capacity, capacity))
    out, lse = flash_decode(q, k, v, numbers(*[0] * batch), return_lse=True)
    assert out.shape == (batch, 2, 1, 16)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_large_scores_do_not_overflow():
    q, k, v = (torch.full((1, 1, n, 64), 200.0, dtype=torch.float16, device=DEVICE) for n in (1, 40, 40))
    assert (flash_decode(q, k, v, numbers(40)) - 200).abs().max() <= 0.25
    assert (flash_decode(q, k, v, numbers(40), softcap=50.0) - 200).abs().max() <= 0.25


def test_the_ops_are_what_their_schemas_say():
    q, k, v, lengths = case([20, 9])
    torch.library.opcheck(
        torch.ops.flashlib.decode.default, (q, k, v, lengths, None, None, None, 0, None, 0.2, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    new = torch.randn(2, 1, 1, 32, device=DEVICE)
    torch.library.opcheck(
        torch.ops.flashlib.append.default,
        (k, v, new, new, lengths, None),
        test_utils=("test_schema", "test_faketensor"),
    )


# --- bad input -----------------------------------------------------------------------------------------------------


def _wrong(**changes):
    x = {
        "q": torch.zeros(2, 4, 1, 16, device=DEVICE),
        "k_cache": torch.zeros(2, 2, 32, 16, device=DEVICE),
        "v_cache": torch.zeros(2, 2, 32, 16, device=DEVICE),
        "cache_seqlens": numbers(3, 4),
    }
    return {**x, **{name: change(x[name]) if callable(change) else change for name, change in changes.items()}}


NEW = torch.zeros(2, 2, 1, 16, device=DEVICE)
TABLE = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_wrong(q=lambda q: q.cpu().numpy()), "q must be a tensor, got ndarray"),
        (_wrong(cache_seqlens=[3, 4]), "cache_seqlens must be a tensor, got list"),
        (_wrong(q=lambda q: q[0]), r"q must have 4 axes .* got shape \(4, 1, 16\)"),
        (_wrong(q=lambda q: q.int()), "q must have dtype float16, .* got torch.int32"),
        (_wrong(q=lambda q: q.repeat(1, 1, 17, 1)), "q must have 1 to 16 tokens a sequence, got 17"),
        (_wrong(q=lambda q: q[:, :3]), "k_cache must have a number of heads that divides the 3 of q, got 2"),
        (_wrong(q=lambda q: q[:1]), "k_cache must have the batch of q, 1, got 2"),
        (_wrong(k_cache=lambda k: k.half()), "k_cache must have dtype torch.float32, got torch.float16"),
        (_wrong(k_cache=lambda k: k.repeat(1, 1, 1, 2)), "k_cache must have the head_dim of q, 16, got 32"),
        (_wrong(v_cache=lambda v: v[:, :, :31]), r"v_cache must have the shape of k_cache .*, got \(2, 2, 31\)"),
        (_wrong(v_cache=lambda v: v.repeat(1, 1, 1, 17)), "v_cache must have a head_dim .* from 16 to 256, got 272"),
        (_wrong(v_cache=lambda v: v.to("meta")), "v_cache must be on the device of q, .* got meta"),
        (_wrong(cache_seqlens=lambda x: x.long()), "cache_seqlens must have dtype torch.int32, got torch.int64"),
        (_wrong(cache_seqlens=lambda x: x[:1]), r"cache_seqlens must have shape \(2,\), got \(1,\)"),
        (_wrong(block_table=TABLE[0]), r"block_table must have shape \(2, max_pages\), got \(2,\)"),
        (_wrong(block_table=TABLE.long()), "block_table must have dtype torch.int32, got torch.int64"),
        (_wrong(block_table=TABLE, k_cache=lambda k: k[:, :, :8], v_cache=lambda v: v[:, :, :8]),
         "k_cache must have a page_size that is a multiple of 16 from 16 to 256, got 8"),
        (_wrong(k_new=NEW), "k_new and v_new must be given together, got one of them"),
        (_wrong(k_new=NEW, v_new=NEW[:, :1]), r"v_new must have shape \(2, 2, 1, 16\), got \(2, 1, 1, 16\)"),
        (_wrong(k_new=NEW, v_new=NEW, k_cache=lambda k: k[:, :1].expand(2, 2, 32, 16)), "must not show one element"),
        (_wrong(num_splits=0), "num_splits must be an int of at least 1 or None, got 0"),
        (_wrong(window=(-1, 0)), "window left must be an int of at least 0 or None, got -1"),
        (_wrong(window=3), r"window must be a pair \(left, right\) or None, got 3"),
        (_wrong(scale=math.nan), "scale must be a finite number or None, got nan"),
        (_wrong(softcap=0.0), "softcap must be greater than 0 or None, got 0.0"),
        (_wrong(sinks=torch.zeros(3, device=DEVICE)), r"sinks must have shape \(4,\), got \(3,\)"),
        (_wrong(alibi_slopes=torch.zeros(2, device=DEVICE)), r"alibi_slopes must have shape \(4,\) or \(2, 4\), got"),
        (_wrong(q=lambda q: q.requires_grad_()), "q must not require grad, since flash_decode has no gradient"),
        (_wrong(sinks=torch.zeros(4, device=DEVICE, requires_grad=True)), "sinks must not require grad"),
    ],
)  # fmt: skip
def test_errors_name_argument_rule_and_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_decode(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_wrong(cache_seqlens=numbers(3, 33)), "cache_seqlens must be from 0 to 32, got 33 for sequence 1"),
        (_wrong(cache_seqlens=numbers(-1, 3)), "cache_seqlens must be from 0 to 32, got -1 for sequence 0"),
        (_wrong(cache_seqlens=numbers(32, 3), k_new=NEW, v_new=NEW), "cache_seqlens must be from 0 to 31, got 32"),
        (_wrong(block_table=TABLE + 2), r"block_table must name pages from 0 to 1, got \[2\] for sequence 0"),
        (_wrong(block_table=TABLE - 1), r"block_table must name pages from 0 to 1, got \[-1\] for sequence 0"),
    ],
)
def test_values_are_checked_where_they_may_be(arguments, message, monkeypatch):
    monkeypatch.setenv("FLASHLIB_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        flash_decode(**arguments)


def test_values_are_checked_on_a_gpu_only_when_asked(monkeypatch):
    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("FLASHLIB_CHECK", raising=False)
    assert not device.checks_values(OnGpu)
    monkeypatch.setenv("FLASHLIB_CHECK", "1")
    assert device.checks_values(OnGpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not device.checks_values(OnGpu)
    assert device.checks_values(torch.zeros(1))


def test_without_grad_mode_parameters_are_welcome():
    q, k, v, lengths = case([20])
    with torch.no_grad():
        flash_decode(q, k, v, lengths, sinks=torch.zeros(2, device=DEVICE, requires_grad=True))


# --- compiled, and on a GPU ----------------------------------------------------------------------------------------


def job(dtype, head_dim, capability, page=None, walk=1):
    """Return a job for `compile_many`: what a launch of the kernel compiles, with the tile from the table."""
    itemsize = 4 if dtype == "fp32" else 2
    columns = tiles.padded(head_dim)
    tile = tiles.tile_for("decode", capability, itemsize, columns, False)
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    signature |= {"lse_ptr": "*fp32", "states_ptr": "*fp32", "length_ptr": "*i32"}
    signature |= {f"stride_{name}": ["i32", "i32", "i32", 1] for name in ("q", "k", "v", "out")}
    signature |= dict.fromkeys(("nheads_kv", "group", "capacity", "appended", "split", "n_parts", "n_states"), "i32")
    signature |= {"seqlen_q": 1, "qk_scale": "fp32"}
    constants = dict.fromkeys(("sink_ptr", "slope_ptr", "stride_slope", "left", "softcap"))
    constants |= {"table_ptr": None, "stride_table": None} if page is None else {}
    signature |= {} if page is None else {"table_ptr": "*i32", "stride_table": "i32"}
    constants |= {"WALK": walk, "LAST": walk > 1, "PAGE": page, "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim}
    constants |= {"COLS": columns, "COLS_V": columns, "BLOCK_M": 16, "BLOCK_N": tile.block_n, "WIDE": False}
    constants |= {"PRECISION": "tf32x3" if capability >= 80 else "ieee", "EARLY": capability >= 90}
    return {
        "kernel": "flashlib.decode:_decode_kernel",
        "signature": signature,
        "constexprs": constants,
        "capability": capability,
        "options": {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        "divisible": ["stride_q", "stride_k", "stride_v", "stride_out", "capacity", "split", "n_states"],
    }


def check_compiled(jobs):
    limits = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
    for one, compiled in zip(jobs, compile_many(jobs), strict=True):
        assert compiled.shared_bytes <= 1024 * limits[one["capability"]], compiled
        if one["capability"] >= 80:
            # float32 in three TF32 products has no tile at head_dim 256 that spills nothing.
            wide = one["constexprs"]["HEAD_DIM"] == 256 and one["signature"]["q_ptr"] == "*fp32"
            assert compiled.stack_bytes <= (256 if wide else 64), compiled
            # 16 bytes a thread, and asynchronous: the next tiles are under way while this one is computed.
            assert len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", compiled.ptx)) > 0


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_it_compiles_and_fits(capability):
    check_compiled([job("bf16", 128, capability), job("bf16", 128, capability, 16, 16)])


@pytest.mark.compile
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_whole_table_fits(capability, dtype):
    widest = 128 if capability == 75 else 256
    sizes = [(d, page, walk) for d in (16, 64, 128, 256) for page in (None, 16, 64) for walk in (1, 8, 16)]
    check_compiled([job(dtype, d, capability, page, walk) for d, page, walk in sizes if d <= widest])


gpu_only = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [pytest.param(d, marks=gpu_only) for d in (16, 40, 64, 96, 128, 192, 256)])
def test_on_a_gpu_long_caches(dtype, head_dim):
    for nheads_kv, seqlen_q, options in ((8, 1, {}), (2, 4, on_device(FEATURES["all"]))):
        heads = {k: v.repeat(4) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        q, k, v, lengths = case([0, 1, 511, 513, 5000, 20000], 8, nheads_kv, seqlen_q, head_dim, None, 20480, dtype)
        got = check(q, k, v, lengths, **heads)
        for page in (16, 64, 256):
            *pools, table = paged(k, v, lengths, page)
            again = flash_decode(q, *pools, lengths, block_table=table, return_lse=True, **heads)
            assert all(map(torch.equal, again, got)), page


@pytest.mark.parametrize("batch", [pytest.param(n, marks=gpu_only) for n in (1, 16, 200)])
def test_on_a_gpu_bits_and_graphs(batch):
    q, k, v, lengths = case([8192 - 37 * i for i in range(batch)], 32, 8, 1, 128, None, 8192, torch.bfloat16)
    parts = [slice(b, b + 1) for b in range(batch)]
    alone = torch.cat([flash_decode(q[b], k[b], v[b], lengths[b]) for b in parts])
    assert torch.equal(flash_decode(q, k, v, lengths), alone)
    new = torch.randn(batch, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [flash_decode(q, k, v, lengths, k_new=new, v_new=new) for _ in range(3)]
    # Lengths live on the device: a captured call follows them.
    lengths.fill_(100)
    graph.replay()
    torch.cuda.synchronize()
    want = flash_decode(q, k, v, lengths + 1)
    assert torch.equal(k[:, :, 100], new[:, :, 0])
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("context", [pytest.param(131072, marks=gpu_only)])
def test_on_a_gpu_offsets_past_32_bits(context):
    # Rows of the cache lie 2**15 elements apart: the last ones lie past 2**31.
    k, v = (torch.randn(context, 32768, device="cuda", dtype=torch.bfloat16)[None, None, :, -64:] for _ in range(2))
    q, lengths = torch.randn(1, 4, 1, 64, device="cuda", dtype=torch.bfloat16), numbers(context)
    torch.testing.assert_close(flash_decode(q, k, v, lengths), flash_decode(q, k.contiguous(), v.contiguous(), lengths))
