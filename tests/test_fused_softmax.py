"""Fused softmax: right against float64 in every layout, and single-line mistakes in the kernels are found."""

import contextlib
import importlib.util
import inspect
import linecache
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from flashlib import check, device

if device.kernel_problem():
    pytest.skip(device.kernel_problem(), allow_module_level=True)

from flashlib import fused_softmax
from flashlib.fused_softmax import add, scores, softmax, softmax_unfused
from flashlib.meter import Meter

ROOT = Path(__file__).resolve().parent.parent
WHERE = device.kernel_device()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IDS = ["fp32", "fp16", "bf16"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN: what a kernel leaves out shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


def placed(x, layout):
    """Return x as a view with other strides, with NaN wherever the memory around it allows."""
    rows, columns = x.shape
    if layout == "contiguous":
        wide = x.new_full((rows + 2, columns), float("nan"))
        view = wide[1:-1]
    elif layout == "transposed":
        wide = x.new_full((columns + 2, rows + 3), float("nan"))
        view = wide.T[1:-2, 1:-1]
    elif layout == "sliced":
        wide = x.new_full((2 * rows + 2, 2 * columns + 3), float("nan"))
        view = wide[1 : 2 * rows + 1 : 2, 2 : 2 * columns + 2 : 2]
    view.copy_(x)
    return view


LAYOUTS = ["contiguous", "transposed", "sliced"]


def close_enough(out, exact, plain):
    """The course's bound: at most twice what plain PyTorch errs in the dtype, one rounding and 1e-5."""
    eps = torch.finfo(plain.dtype).eps
    bound = 2 * (plain.double().cpu() - exact).abs().max() + eps * exact.abs().max() + 1e-5
    error = (out.double().cpu() - exact).abs().max()
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def exact_softmax(s):
    return torch.softmax(s.double().cpu(), dim=1).nan_to_num(0.0)


def rows_of_scores(rows, columns, dtype, spread=3.0):
    torch.manual_seed(rows * 1000 + columns)
    s = spread * torch.randn(rows, columns)
    s[rows // 2] = float("-inf")
    s[0, columns // 3 :] = float("-inf")
    if columns > 1:
        s[-1, : columns // 2] = float("-inf")
    return s.to(WHERE, dtype)


FORMS = {
    "one block": softmax,
    "pieces": lambda s: softmax(s, block=8),
    "unfused": softmax_unfused,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_softmax_against_float64(form, layout, dtype):
    for rows, columns in [(1, 1), (3, 8), (5, 21)]:
        s = rows_of_scores(rows, columns, dtype)
        p = FORMS[form](placed(s, layout))
        assert p.shape == s.shape
        assert p.dtype == dtype
        close_enough(p, exact_softmax(s), torch.softmax(s, dim=1).nan_to_num(0.0))
        assert not p[rows // 2].any()


@pytest.mark.parametrize("form", FORMS)
def test_large_scores_do_not_overflow(form):
    for shift in (-30_000.0, 200.0, 30_000.0):
        s = rows_of_scores(4, 20, torch.float16) + shift
        p = FORMS[form](s)
        close_enough(p, exact_softmax(s), torch.softmax(s, dim=1).nan_to_num(0.0))


@pytest.mark.parametrize("form", FORMS)
def test_repeated_rows_are_read_where_they_are(form):
    s = torch.arange(12.0, device=WHERE)[None]
    torch.testing.assert_close(FORMS[form](s.expand(5, 12)), torch.softmax(s.expand(5, 12), dim=1))


def test_a_maximum_that_moves_from_piece_to_piece():
    s = torch.arange(40.0, device=WHERE)[None] * torch.tensor([[1.0], [-1.0], [0.0]], device=WHERE)
    torch.testing.assert_close(softmax(s, block=4), torch.softmax(s, dim=1))


@pytest.mark.parametrize("function", [softmax, softmax_unfused])
def test_long_rows_and_their_limit(function):
    s = torch.randn(1, fused_softmax.LONGEST_BLOCK + 1, device=WHERE)
    torch.testing.assert_close(function(s[:, :-1]), torch.softmax(s[:, :-1], dim=1))
    if function is softmax:
        torch.testing.assert_close(softmax(s), torch.softmax(s, dim=1))
    else:
        with pytest.raises(ValueError, match="s must have rows of at most 8192, got 8193"):
            softmax_unfused(s)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_add_is_rounded_once(dtype):
    torch.manual_seed(0)
    for n, block in [(1, 1), (7, 4), (8, 4), (33, 16), (100, 1024)]:
        x, y = (torch.randn(3 * n).to(WHERE, dtype) for _ in range(2))
        assert torch.equal(add(x[::3], y[1::3], block=block), x[::3] + y[1::3])
        assert torch.equal(add(x[:1].expand(n), y[:n], block=block), x[:1] + y[:n])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(("q_layout", "k_layout"), list(zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], strict=True)))
def test_scores_against_float64(q_layout, k_layout, dtype):
    for seqlen_q, seqlen_k, head_dim in [(1, 1, 1), (16, 32, 16), (33, 20, 40), (18, 65, 24)]:
        torch.manual_seed(head_dim)
        q, k = (torch.randn(n, head_dim).to(WHERE, dtype) for n in (seqlen_q, seqlen_k))
        s = scores(placed(q, q_layout), placed(k, k_layout), block_m=16, block_n=32)
        exact = q.double().cpu() @ k.double().cpu().T / head_dim**0.5
        assert s.dtype == torch.float32
        assert s.shape == (seqlen_q, seqlen_k)
        # float32 sums of exact or float32 products, whatever the dtype of q and k.
        assert (s.double().cpu() - exact).abs().max() <= 1e-5


@pytest.mark.parametrize("scale", [0.0, -0.5, 3])
def test_scale_is_honoured(scale):
    q, k = torch.randn(3, 16, device=WHERE), torch.randn(5, 16, device=WHERE)
    torch.testing.assert_close(scores(q, k, scale=scale), scale * (q @ k.T), atol=1e-4, rtol=1e-4)


def test_empty_inputs_give_empty_outputs():
    new = torch.zeros
    assert add(new(0, device=WHERE), new(0, device=WHERE)).shape == (0,)
    for shape in [(0, 5), (5, 0), (0, 0)]:
        assert softmax(new(shape, device=WHERE)).shape == shape
        assert softmax_unfused(new(shape, device=WHERE)).shape == shape
    assert scores(new(0, 16, device=WHERE), new(5, 16, device=WHERE)).shape == (0, 5)
    assert scores(new(5, 16, device=WHERE), new(0, 16, device=WHERE)).shape == (5, 0)


X, V = torch.zeros(4, 16, device=WHERE), torch.zeros(4, device=WHERE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: add(X, X), "x must be a tensor of 1 dimension, got shape"),
        (lambda: add([1.0], V), "x must be a tensor of 1 dimension, got list"),
        (lambda: add(V, V[:3]), "y must have the shape of x"),
        (lambda: add(V, V.half()), "y must have dtype and device of x"),
        (lambda: add(V, V, block=3), "block must be a power of two, got 3"),
        (lambda: add(V.double(), V.double()), "x must have dtype float16, bfloat16 or float32"),
        (lambda: softmax(V), "s must be a tensor of 2 dimensions"),
        (lambda: softmax(X.int()), "s must have dtype float16, bfloat16 or float32, got torch.int32"),
        (lambda: softmax(X, block=0), "block must be a power of two, got 0"),
        (lambda: softmax(X, block=True), "block must be a power of two, got True"),
        (lambda: softmax_unfused(X.double()), "s must have dtype"),
        (lambda: scores(X, X[:, :8]), "q and k must have one head_dim of 1 to 256, got 16 and 8"),
        (lambda: scores(X, X.half()), "k must have dtype and device of q"),
        (lambda: scores(X, X, scale="1"), "scale must be a finite number or None, got '1'"),
        (lambda: scores(X, X, block_m=8), "block_m must be a power of two of at least 16, got 8"),
        (lambda: scores(X, X, block_n=48), "block_n must be a power of two of at least 16, got 48"),
        (lambda: scores(X, V[:1, None].expand(2**20, 16), block_n=16), "k must have at most 65535 tiles"),
    ],
)
def test_bad_input_is_named_before_anything_is_made(call, message, monkeypatch):
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(ValueError, match=message):
        call()


def test_offsets_past_two_to_the_31():
    # One row each at the two ends of a stride that int32 cannot hold twice; only the touched pages take memory.
    stride = 2**30 + 64
    memory = torch.zeros(1, dtype=torch.float16, device=WHERE)
    try:
        memory.untyped_storage().resize_(2 * (2 * stride + 64))
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    s = memory.as_strided((3, 8), (stride, 1), 0)
    s.copy_(torch.randn(3, 8))
    across = memory.as_strided((2, 3), (1, stride), 0)
    q = memory.as_strided((3, 16), (stride, 1), 0)
    # In the interpreter the meter stops an address that has wrapped around.
    with Meter() if device.interpreting() else contextlib.nullcontext():
        mine = softmax(s), softmax(s, block=2), softmax_unfused(s)
        mine_across = softmax(across), softmax(across, block=1), softmax_unfused(across)
        product = scores(q, q, block_m=16, block_n=16)
    for p in mine:
        close_enough(p, exact_softmax(s), torch.softmax(s, dim=1))
    for p in mine_across:
        close_enough(p, exact_softmax(across), torch.softmax(across, dim=1))
    assert (product.cpu() - q.double().cpu() @ q.double().cpu().T / 4).abs().max() <= 1e-3


# --- compiled for GPUs that are not here -----------------------------------------------------------------------------


def test_kernels_compile_for_an_a100_and_an_h100():
    strides = {"stride_s": ["i32", 1], "stride_p": ["i64", "i32"]}
    softmax_types = {"s_ptr": "*bf16", "p_ptr": "*bf16", **strides, "seqlen_k": "i32"}
    pair = ["i32", 1]
    score_types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "s_ptr": "*fp32"}
    score_types |= {"stride_q": pair, "stride_k": pair, "stride_s": pair}
    score_types |= {"seqlen_q": "i32", "seqlen_k": "i32", "scale": "fp32"}
    sides = {"HEAD_DIM": 40, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 64}
    block = {"BLOCK_N": 1024}
    jobs = [
        ("_softmax_kernel", softmax_types, block, 80),
        ("_softmax_loop_kernel", softmax_types, block, 90),
        ("_scores_kernel", score_types, sides, 80),
        ("_scores_kernel", score_types, sides, 90),
        (
            "_scores_kernel",
            score_types | {"q_ptr": "*fp32", "k_ptr": "*fp32"},
            sides | {"BLOCK_M": 32, "BLOCK_N": 32},
            90,
        ),
    ]
    built = device.compile_many(
        [
            {
                "kernel": f"flashlib.fused_softmax:{name}",
                "signature": types,
                "constexprs": fixed,
                "capability": capability,
            }
            for name, types, fixed, capability in jobs
        ]
    )
    assert [one.stack_bytes for one in built] == [0] * len(built)
    assert all(one.shared_bytes <= 99 * 1024 for one in built)
    # Float32 stays float32: no matrix unit, which would round it to TF32.
    kinds = [one.matrix_instructions for one in built[2:]]
    assert kinds == [["mma.sync"], ["wgmma.mma_async"], []]


# --- mistakes that tests must find -----------------------------------------------------------------------------------

SOURCE = inspect.getsource(fused_softmax)
MISTAKES = [
    ("_add_kernel", "mask = offs < n", "mask = offs < n - 1"),
    ("_add_kernel", "offs * stride_y", "offs * stride_x"),
    ("_add_kernel", "x + y", "x - y"),
    ("_softmax_kernel", 'other=float("-inf")', "other=0.0"),
    ("_softmax_kernel", "row * stride_s[0] + ", ""),
    ("_softmax_kernel", "offs_n * stride_s[1]", "offs_n"),
    ("_softmax_kernel", "tl.where(l == 0.0, 1.0, l)", "m"),
    ("_softmax_kernel", 's - tl.where(m == float("-inf"), 0.0, m)', "s"),
    ("_softmax_kernel", "tl.where(l == 0.0, 1.0, l)", "l"),
    ("_softmax_kernel", "p, mask=mask_n", "p"),
    ("_softmax_loop_kernel", "tl.exp(m_i - m_safe) * l_i", "l_i"),
    ("_softmax_loop_kernel", "tl.maximum(m_i, tl.max(s, axis=0))", "tl.max(s, axis=0)"),
    ("_softmax_loop_kernel", "s_row + offs_n * stride_s[1]", "s_row + offs_n"),
    ("_softmax_loop_kernel", "stride_p[1], tl.exp", "stride_s[1], tl.exp"),
    ("_softmax_loop_kernel", "l_safe, mask=offs_n < seqlen_k", "l_safe"),
    ("_softmax_loop_kernel", "offs_n = start + ", "offs_n = "),
    ("_softmax_loop_kernel", "l_safe = tl.where(l_i == 0.0, 1.0, l_i)", "l_safe = l_i"),
    ("_scores_kernel", "pid_m.to(tl.int64) * BLOCK_M", "pid_m.to(tl.int64) * BLOCK_N"),
    ("_scores_kernel", "offs_n[None, :] * stride_k[0]", "offs_n[None, :] * stride_q[0]"),
    ("_scores_kernel", "offs_d[:, None] * stride_k[1]", "offs_d[:, None]"),
    ("_scores_kernel", "mask_m[:, None] & mask_d[None, :]", "mask_m[:, None]"),
    ("_scores_kernel", "s = scale * ", "s = "),
    (
        "_scores_kernel",
        "tl.store(s_tile, s, mask=mask_m[:, None] & mask_n[None, :])",
        "tl.store(s_tile, s, mask=mask_m[:, None])",
    ),
    ("_row_max_kernel", "m_ptr + row", "m_ptr"),
    ("_exp_kernel", "s_ptr + row * stride_s[0]", "s_ptr"),
    ("_row_sum_kernel", "other=0.0", "other=1.0"),
    ("_divide_kernel", "tl.where(l == 0.0, 1.0, l)", "l"),
]


def probe_add(module):
    x = torch.arange(14.0, device=WHERE)
    assert torch.equal(module.add(x[::2], x[:7], block=4), x[::2] + x[:7])


def probe_softmax(*forms):
    def probe(module):
        s = rows_of_scores(6, 7, torch.float32) - 2
        s[5] = torch.arange(7.0) * -100 + 300
        s = placed(s, "sliced")
        for name, options in forms:
            torch.testing.assert_close(getattr(module, name)(s, **options).cpu(), exact_softmax(s).float())

    return probe


def probe_scores(module):
    torch.manual_seed(1)
    q, k = torch.randn(20, 18, device=WHERE), torch.randn(35, 18, device=WHERE)
    s = module.scores(placed(q, "sliced"), placed(k, "transposed"), block_m=16, block_n=32, scale=0.3)
    torch.testing.assert_close(s, 0.3 * (q @ k.T))


# A few small inputs for each kernel: an AssertionError unless they come out right.
PROBES = {
    "_add_kernel": probe_add,
    "_softmax_kernel": probe_softmax(("softmax", {})),
    "_softmax_loop_kernel": probe_softmax(("softmax", {"block": 4})),
    "_scores_kernel": probe_scores,
}
UNFUSED = probe_softmax(("softmax_unfused", {}))


def mutant(kernel, old, new):
    start = SOURCE.index(f"def {kernel}(")
    end = SOURCE.index("\n\n\n", start)
    body = SOURCE[start:end]
    assert body.count(old) >= 1, f"{kernel} has no {old!r}"
    source = SOURCE[:start] + body.replace(old, new) + SOURCE[end:]
    module = types.ModuleType(f"mutant_{kernel}")
    name = f"<mutant {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def test_probes_pass_on_the_kernels_as_they_are():
    same = mutant("_add_kernel", "x + y", "x + y")
    for probe in (*PROBES.values(), UNFUSED):
        probe(same)


@pytest.mark.skipif(not device.interpreting(), reason="a mistake may write outside of its tensors, which ends CUDA")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kernel", "old", "new"), MISTAKES, ids=[f"{k}: {o}" for k, o, _ in MISTAKES])
def test_mistake_is_found(kernel, old, new):
    # The meter stops lanes that leave their tensors, before they touch memory.
    with pytest.raises((AssertionError, IndexError)), Meter():
        PROBES.get(kernel, UNFUSED)(mutant(kernel, old, new))


# --- the exercises' checker ------------------------------------------------------------------------------------------


def answer(exercise_id, *changes):
    exercise = next(e for e in check.exercises("07") if e.id == exercise_id)
    source = exercise.solution
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return check.diagnose(exercise_id, exercise.build(source, "answer"))


@pytest.mark.skipif(not device.interpreting(), reason="addresses can be watched in the interpreter only")
def test_checker_sees_loads_outside_of_a_tensor():
    # The store's mask hides what these lanes loaded: no number is wrong.
    verdict = answer("07.3", (", mask=mask_m[:, None], other=0.0)", ")"))
    assert verdict.status == "wrong"
    assert "loaded_outside should be 0" in verdict.message


@pytest.mark.skipif(not device.interpreting(), reason="a wild address ends CUDA")
def test_checker_survives_a_wild_address():
    verdict = answer("07.1", ("row * stride_row", "(row + 1) * 1000000000"))
    assert verdict.status == "wrong"
    assert "spread_kernel wants to load" in verdict.message


def test_checker_wants_a_kernel():
    assert "is @triton.jit missing" in answer("07.1", ("@triton.jit\n", "")).message


def test_checker_shows_the_kernels_own_error():
    # Interpreted: Python's NameError; compiled: Triton's CompilationError, which holds it.
    assert re.search(r"it raised \w+: .*offset'? is not defined", answer("07.1", ("offs <", "offset <")).message)


def test_kernel_of_a_notebook_cell_is_accepted(tmp_path):
    """A kernel that IPython compiled from a cell, and the same cell run again with another body."""
    InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = InteractiveShell.instance()
    right = check._find("07.1").solution
    try:
        for source, status in [(right.replace("largest - smallest", "largest"), "known mistake"), (right, "right")]:
            # C04 of public reports: an array among the notebook's globals broke every launch.
            cell = f"import numpy as np\nfrom flashlib.device import tl, triton\nz = np.zeros(10)\n\n\n{source}"
            shell.run_cell(cell).raise_error()
            assert check.diagnose("07.1", shell.user_ns["spread_kernel"]).status == status
    finally:
        InteractiveShell.clear_instance()


# --- the benchmark ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not device.interpreting(), reason="on a GPU the benchmark itself is run")
def test_benchmark_runs_on_tiny_shapes(tmp_path, monkeypatch):
    # As when the script is started: the scripts beside it can be imported.
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("benchmark_fused_softmax", ROOT / "benchmarks" / "fused_softmax.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(sys, "argv", ["fused_softmax.py"])
    benchmark.main(["--smoke", "--out", str(tmp_path / "out.csv"), "--commit", "abc"])
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) > 4
    assert all("abc" in line for line in lines[1:])
