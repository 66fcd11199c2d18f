"""The state of a row and its merge: the article's numbers, every split and order, the edges, and rounding."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flashlib import online_softmax as osm
from flashlib.online_softmax import State, chain, finish, identity, lse_of, merge, merge_lse, state_of, tree

# Derandomized: the same examples in every run, so that a failure is never a matter of luck.
short = settings(max_examples=60, deadline=None, derandomize=True)

INF = np.inf
V = np.array([[10.0], [20.0], [30.0], [40.0]])


def oracle(s, v):
    """Return (out, lse) of one row with `math` alone: sums by fsum, the max subtracted; 0 and -inf without a key."""
    keys = [j for j, x in enumerate(s) if x != -INF]
    if not keys:
        return np.zeros(v.shape[1]), -INF
    m = max(float(s[j]) for j in keys)
    p = [math.exp(float(s[j]) - m) for j in keys]
    l = math.fsum(p)
    out = [math.fsum(w * float(v[j, c]) for w, j in zip(p, keys, strict=True)) / l for c in range(v.shape[1])]
    return np.array(out), m + math.log(l)


def cut(s, v, stops):
    """Return the states of the pieces of a row, cut before each index of `stops` (repeats give empty pieces)."""
    stops = [0, *sorted(stops), len(s)]
    return [state_of(s[a:b], v[a:b]) for a, b in itertools.pairwise(stops)]


def assert_state(state, s, v, ulps=64):
    """Hold a state of one float64 row against the oracle: rounding only."""
    eps = np.finfo(np.float64).eps
    out, lse = oracle(s, v)
    # The weights' relative error is that of exp's argument: eps times the largest finite difference, itself < 745.
    tolerance = eps * (ulps + 4 * len(s) + 2 * 745)
    np.testing.assert_allclose(finish(state), out, rtol=0, atol=tolerance * max(np.abs(v).max(initial=0), 1e-300))
    if lse == -INF:
        assert lse_of(state) == -INF
    else:
        assert abs(lse_of(state) - lse) <= tolerance * max(abs(lse), 1)


# --- the article's example -----------------------------------------------------------------------------------------


def test_article_numbers():
    a, b = state_of([1, 2], V[:2]), state_of([3, 4], V[2:])
    both = merge(a, b)
    assert (a.m, b.m, both.m) == (2, 4, 4)
    assert [f"{x.l:.4f}" for x in (a, b, both)] == ["1.3679", "1.3679", "1.5530"]
    # The article rounds 51.0364 up to 51.037.
    assert [f"{x.acc[0]:.3f}" for x in (a, b, both)] == ["23.679", "51.036", "54.241"]
    assert f"{finish(both)[0]:.2f}" == "34.93"
    assert math.isclose(lse_of(both), math.log(sum(math.exp(x) for x in (1, 2, 3, 4))), rel_tol=1e-15)


@pytest.mark.parametrize("s", [[1, 2, 3, 4], [4, 3, 2, 1], [1, 3, 2, 5, 4, 6], [0.5, 0.5, 0.5]])
def test_three_two_and_one_pass_agree_and_read_as_often_as_they_say(s):
    v = np.arange(2.0 * len(s)).reshape(len(s), 2)
    out, _ = oracle(s, v)
    for passes, function in [(3, osm.three_passes), (2, osm.two_passes), (1, osm.one_pass)]:
        counted = osm.Counted(s)
        np.testing.assert_allclose(function(counted, v), out, rtol=1e-14)
        assert counted.reads == passes * len(s)


def test_the_maximum_moves_twice():
    s, v = np.array([1.0, 3, 2, 5, 4, 6]), np.arange(6.0)[:, None]
    states = cut(s, v, [2, 4])
    running = list(itertools.accumulate(states, merge))
    assert [x.m for x in running] == [3, 5, 6]
    assert_state(running[-1], s, v)


# --- every split, order and tree -----------------------------------------------------------------------------------


def test_all_splits_and_orders_of_a_short_row():
    s, v = np.array([1.0, 3, 2, 5, 4, 6]), np.random.default_rng(0).normal(size=(6, 3))
    for mask in itertools.product([0, 1], repeat=5):
        states = cut(s, v, [j + 1 for j, here in enumerate(mask) if here])
        for order in itertools.permutations(states):
            assert_state(chain(order), s, v)
            assert_state(tree(order), s, v)


# Ordinary, masked, huge, tiny and equal scores; finite ones far enough inside the dtype for the oracle's own sums.
SCORES = st.one_of(
    st.floats(-30, 30),
    st.just(-INF),
    st.floats(-1e300, 1e300),
    st.floats(-1e-300, 1e-300),
    st.sampled_from([0.0, 1000.0, -1000.0, 745.0, -745.0]),
)


@st.composite
def rows(draw):
    s = np.array(draw(st.lists(SCORES, min_size=1, max_size=9)))
    v = draw(hnp.arrays(np.float64, (len(s), 2), elements=st.floats(-10, 10)))
    stops = draw(st.lists(st.integers(0, len(s)), max_size=5))
    return s, v, stops, draw(st.randoms(use_true_random=False))


def random_tree(states, random):
    """Merge in a random binary tree over a random order."""
    states = list(states)
    while len(states) > 1:
        random.shuffle(states)
        states.append(merge(states.pop(), states.pop()))
    return states[0]


@short
@given(rows())
def test_any_split_order_and_tree_equals_the_oracle(case):
    s, v, stops, random = case
    states = cut(s, v, stops)
    for state in (chain(states), tree(states), random_tree(states, random), state_of(s, v)):
        assert_state(state, s, v)
        if np.isneginf(s).all():
            assert state.l == 0
            assert (finish(state) == 0).all()
        else:
            assert state.m == s.max()
            assert 1 <= state.l <= len(s) * (1 + 1e-15)


@short
@given(rows())
def test_identity_changes_no_bit_and_merge_commutes_to_the_bit(case):
    s, v, stops, _ = case
    a, *rest = cut(s, v, stops)
    b = chain(rest) if rest else state_of(s, v)
    for x, y in [(a, merge(identity(2), a)), (a, merge(a, identity(2))), (merge(a, b), merge(b, a))]:
        for left, right in zip(x, y, strict=True):
            np.testing.assert_array_equal(left, right)


@short
@given(hnp.arrays(np.float64, 3, elements=st.floats(-30, 30)), hnp.arrays(np.float64, (3, 2), elements=st.floats(0, 1)))
def test_associative_to_rounding(s, v):
    a, b, c = (state_of(s[j : j + 1], v[j : j + 1]) for j in range(3))
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    assert left.m == right.m
    # All terms are positive: an error relative to the sum. Exponents differ by up to 60, so exp's argument by 60 eps.
    np.testing.assert_allclose(left.l, right.l, rtol=200 * np.finfo(np.float64).eps)
    np.testing.assert_allclose(left.acc, right.acc, rtol=200 * np.finfo(np.float64).eps, atol=1e-300)


def test_associative_is_not_bitwise():
    rng = np.random.default_rng(0)
    unequal = 0
    for _ in range(100):
        a, b, c = (state_of(rng.normal(size=1), np.ones((1, 1))) for _ in range(3))
        unequal += merge(merge(a, b), c).l != merge(a, merge(b, c)).l
    assert unequal > 0


@short
@given(hnp.arrays(np.float64, 5, elements=st.floats(-5, 5)), st.floats(-5, 5))
def test_any_reference_gives_the_same_output(s, reference):
    v = np.arange(10.0).reshape(5, 2)
    p = np.exp(s - reference)
    other = State(np.float64(reference), p.sum(), p @ v)
    np.testing.assert_allclose(finish(other), finish(state_of(s, v)), rtol=1e-13)
    np.testing.assert_allclose(lse_of(other), lse_of(state_of(s, v)), rtol=1e-13, atol=1e-13)
    # A state whose m is no maximum merges all the same.
    more = state_of(np.array([6.0]), np.ones((1, 2)))
    np.testing.assert_allclose(finish(merge(other, more)), finish(merge(state_of(s, v), more)), rtol=1e-13)


def test_a_chain_goes_from_left_to_right_and_a_tree_in_pairs():
    rng = np.random.default_rng(0)
    a, b, c, d, e = (state_of(rng.normal(size=(99, 1)), rng.normal(size=(1, 2))) for _ in range(5))
    for got, want in [
        (chain([a, b, c, d, e]), merge(merge(merge(merge(a, b), c), d), e)),
        (tree([a, b, c, d, e]), merge(merge(merge(a, b), merge(c, d)), e)),
        (tree([a, b, c]), merge(merge(a, b), c)),
        (tree([a]), a),
    ]:
        assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))


# --- the edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_piece_without_a_score_is_the_identity(dtype, n):
    empty = state_of(np.full((2, n), -INF, dtype), np.ones((n, 4), dtype))
    for got, want in zip(empty, identity(4, (2,), dtype), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == dtype
    for state in (empty, merge(empty, empty)):
        assert (finish(state) == 0).all()
        assert (lse_of(state) == -INF).all()
        assert finish(state).dtype == lse_of(state).dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_ends_of_the_range(dtype):
    big = np.finfo(dtype).max
    s = np.array([[-big, big], [big, big], [-big, -big], [-INF, -big]], dtype)
    state = merge(state_of(s[:, :1], np.zeros((1, 1), dtype)), state_of(s[:, 1:], np.ones((1, 1), dtype)))
    np.testing.assert_array_equal(finish(state)[:, 0], [1, 0.5, 0.5, 1])
    np.testing.assert_array_equal(lse_of(state), np.array([big, big, -big, -big], dtype))


@pytest.mark.parametrize("bad", [np.nan, INF])
def test_nan_and_inf_spoil_their_own_row_only(bad):
    s = np.array([[1.0, bad], [1.0, 2.0]])
    # numpy warns of inf minus inf; of NaN it says nothing.
    with np.errstate(invalid="ignore"):
        state = merge(state_of(s, V[:2]), state_of(s[:, :1], V[:1]))
        out, lse = finish(state), lse_of(state)
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0])
    assert np.isfinite(out[1]).all()


def test_inf_score_warns():
    with pytest.raises(RuntimeWarning):
        state_of([1.0, INF], V[:2])


def test_dtypes():
    for s, v, want in [
        (np.float32, np.float32, np.float32),
        (np.float64, np.float64, np.float64),
        (np.float32, np.float64, np.float64),
        (np.int64, np.float64, np.float64),
        (np.float16, np.float16, np.float32),
    ]:
        a = state_of(np.arange(3).astype(s), np.ones((3, 2), v))
        both = merge(a, a)
        assert {x.dtype for x in (*a, *both, finish(both), lse_of(both))} == {np.dtype(want)}
        lse, out = merge_lse(lse_of(a), finish(a), lse_of(a), finish(a))
        assert lse.dtype == out.dtype == want


def test_a_state_of_plain_numbers_merges():
    both = merge(State(2.0, 1, [3.0]), State(2, 1.0, np.array([5.0])))
    assert both == (2, 2, [8])
    assert finish(both) == 4


def test_leading_axes():
    rng = np.random.default_rng(1)
    s, v = rng.normal(size=(2, 3, 5, 7)), rng.normal(size=(2, 3, 7, 4))
    state = merge(state_of(s[..., :3], v[:, :, None, :3]), state_of(s[..., 3:], v[:, :, None, 3:]))
    p = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(finish(state), p @ v / p.sum(-1, keepdims=True), rtol=1e-12)
    assert state.m.shape == state.l.shape == (2, 3, 5)
    start = merge(identity(4), state)
    assert all((x == y).all() for x, y in zip(start, state, strict=True))
    # A row's bits do not depend on its neighbours.
    alone = state_of(s[1, 2, 4], v[1, 2])
    many = state_of(s, v[:, :, None])
    assert all(np.array_equal(x, y[1, 2, 4]) for x, y in zip(alone, many, strict=True))


def test_nothing_is_changed_in_place():
    s, v = np.array([1.0, 2.0]), V[:2].copy()
    a = state_of(s, v)
    before = [np.array(x) for x in a]
    merge(a, a)
    finish(a)
    lse_of(a)
    assert all(np.array_equal(x, y) for x, y in zip(before, a, strict=True))
    assert (s == [1, 2]).all()
    assert (v == V[:2]).all()


def test_value_errors_name_the_argument():
    a = state_of([1.0, 2.0], V[:2])
    rows = state_of(np.zeros((3, 2)), V[:2])
    for name, call in [
        ("s must have", lambda: state_of(1.0, V)),
        ("s must hold real numbers", lambda: state_of(["a"], V[:1])),
        ("v must hold real numbers", lambda: state_of([1.0], V[:1] * 1j)),
        (r"v must have shape \(\.\.\., 4, head_dim\)", lambda: state_of(np.zeros(4), np.zeros(4))),
        ("v must", lambda: state_of(np.zeros(4), np.zeros((3, 2)))),
        ("v must have rows", lambda: state_of(np.zeros((2, 4)), np.zeros((3, 4, 1)))),
        ("b must have the head_dim", lambda: merge(a, identity(2))),
        ("b must have rows", lambda: merge(rows, state_of(np.zeros((2, 2)), V[:2]))),
        ("out must", lambda: merge_lse(np.zeros(3), np.zeros(3), np.zeros(3), np.zeros((3, 1)))),
        ("a must be a State, got tuple", lambda: merge((1.0, 1.0, np.ones(1)), a)),
        ("b must be a State, got NoneType", lambda: merge(a, None)),
        (r"b must have m and l of shape .*, got \(3,\), \(3,\), \(2, 1\)", lambda: merge(a, rows._replace(acc=V[:2]))),
        (r"a must have m and l of shape .*, got \(\), \(\), \(\)", lambda: merge(State(1.0, 1.0, 1.0), a)),
        ("lse must hold real numbers", lambda: merge_lse("a", np.zeros(1), 0.0, np.zeros(1))),
        ("out must hold real numbers", lambda: merge_lse(0.0, np.zeros(1), 0.0, ["a"])),
        ("head_dim must", lambda: identity(-1)),
        ("head_dim must", lambda: identity(1.5)),
        ("dtype must", lambda: identity(1, dtype=np.int64)),
        ("s must hold at least one", lambda: osm.three_passes([], [])),
        ("s must hold at least one", lambda: osm.two_passes([], [])),
        ("s must hold at least one", lambda: osm.one_pass([], [])),
        ("v must hold one value a score, 2, got 1", lambda: osm.three_passes([1, 2], [1])),
        ("v must hold one value a score, 2, got 3", lambda: osm.two_passes([1, 2], [1, 2, 3])),
        ("v must hold one value a score, 2, got 1", lambda: osm.one_pass([1, 2], [1])),
        ("states must", lambda: chain([])),
        ("states must", lambda: tree(iter(()))),
    ]:
        with pytest.raises(ValueError, match=name):
            call()


# --- lse -----------------------------------------------------------------------------------------------------------


@short
@given(rows())
@example((np.array([1000.0, 1000.0, 999.0]), np.ones((3, 2)), [1], None))
def test_merge_lse_reproduces_full_attention(case):
    s, v, stops, _ = case
    parts = [(lse_of(x), finish(x)) for x in cut(s, v, stops)]
    lse, out = functools.reduce(lambda a, b: merge_lse(*a, *b), parts)
    want_out, want_lse = oracle(s, v)
    # lse carries a rounding error of eps |lse|, which the weights inherit.
    tolerance = np.finfo(np.float64).eps * (2000 + 8 * (abs(want_lse) if want_lse != -INF else 0))
    if tolerance < 1e-3:
        np.testing.assert_allclose(out, want_out, rtol=0, atol=10 * tolerance)
    assert lse == want_lse or abs(lse - want_lse) <= tolerance * max(abs(want_lse), 1)


def test_merge_lse_holds_where_the_plain_formula_overflows():
    s = np.array([1000.0, 1001.0])
    a, b = state_of(s[:1], V[:1]), state_of(s[1:], V[1:2])
    with np.errstate(over="ignore"):
        assert np.log(np.exp(lse_of(a)) + np.exp(lse_of(b))) == INF
    lse, out = merge_lse(lse_of(a), finish(a), lse_of(b), finish(b))
    want_out, want_lse = oracle(s, V[:2])
    np.testing.assert_allclose(out, want_out, rtol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-15)


def test_from_lse_gives_the_identity_where_there_was_no_key():
    for got, want in zip(osm.from_lse([-INF, 3.0], [[np.nan], [7.0]]), ([-INF, 3], [0, 1], [[0], [7]]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_merge_lse_ignores_what_an_empty_row_holds():
    lse, out = merge_lse(np.array([-INF, 0.0]), np.full((2, 1), np.nan), np.array([-INF, 1.0]), np.ones((2, 1)))
    assert lse[0] == -INF
    assert out[0] == 0
    lse, out = merge_lse(np.array(-INF), np.array([np.nan]), np.array(2.0), np.array([7.0]))
    assert lse == 2
    assert out == 7


# --- rounding: a chain against a tree ------------------------------------------------------------------------------


def test_float32_error_of_chain_and_tree():
    rng = np.random.default_rng(0)
    n, trials, eps = 1024, 40, np.finfo(np.float32).eps
    s = rng.normal(size=(trials, n)).astype(np.float32)
    v = rng.random((n, 1)).astype(np.float32)
    states = [state_of(s[:, j : j + 1], v[j : j + 1]) for j in range(n)]
    p = np.exp(s.astype(np.float64) - s.max(1, keepdims=True))
    errors = {}
    for name, fold in [("chain", chain), ("tree", tree)]:
        l = fold(states).l
        assert l.dtype == np.float32
        errors[name] = np.abs(l / p.sum(1) - 1)
    # Every merge rounds each term by at most a few eps: two products, a sum, an exponential and its argument.
    assert errors["chain"].max() < 6 * n * eps
    assert errors["tree"].max() < 6 * math.log2(n) * eps
    assert np.median(errors["tree"]) < np.median(errors["chain"])
