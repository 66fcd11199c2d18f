"""The cost model against bytes counted on real arrays, its limits, and the benchmark script that measures it."""

import csv
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from flashlib import bench, cost

ROOT = Path(__file__).resolve().parent.parent
SIZES = [(1, 1, 1), (2, 3, 4), (8, 8, 4), (5, 16, 3), (64, 32, 16)]
FIELDS = (
    *("pass", "head_dim", "causal", "seqlen_q", "seqlen_k", "batch", "nheads", "nheads_kv", "dtype", "impl"),
    *("ms_p20", "ms_p50", "ms_p80", "tflops"),
    *("gpu", "driver", "torch", "triton", "commit", "date"),
)


class Ledger:
    """Runs the naive form on real arrays and books what each kernel reads and writes."""

    def __init__(self):
        self.passes = {}

    def kernel(self, name, function, *inputs):
        result = function(*inputs)
        self.passes[name] = (sum(x.nbytes for x in inputs), result.nbytes)
        return result


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "d"), SIZES)
@pytest.mark.parametrize(("batch", "nheads"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("mask", "dropout"), list(itertools.product([False, True], repeat=2)))
def test_passes_move_what_the_arrays_hold(seqlen_q, seqlen_k, d, batch, nheads, dtype, mask, dropout):
    q = np.full((batch, nheads, seqlen_q, d), 0.125, dtype)
    k, v = (np.full((batch, nheads, seqlen_k, d), 0.125, dtype) for _ in range(2))
    ledger = Ledger()
    s = ledger.kernel("qk", lambda q, k: q @ k.swapaxes(-1, -2), q, k)
    if mask:
        s = ledger.kernel("mask", lambda s: np.where(s > 0, s, s), s)
    p = ledger.kernel("softmax", lambda s: np.exp(s), s)
    if dropout:
        p = ledger.kernel("dropout", lambda p: p * p.dtype.type(1), p)
    out = ledger.kernel("pv", lambda p, v: p @ v, p, v)

    sizes = {"batch": batch, "nheads": nheads, "itemsize": np.dtype(dtype).itemsize}
    passes = cost.naive_passes(seqlen_q, seqlen_k, d, mask=mask, dropout=dropout, **sizes)
    assert [(x.name, (x.read_bytes, x.written_bytes)) for x in passes] == list(ledger.passes.items())
    assert cost.compulsory_bytes(seqlen_q, seqlen_k, d, **sizes) == sum(x.nbytes for x in (q, k, v, out))
    assert cost.naive_extra_bytes(seqlen_q, seqlen_k, **sizes) == s.nbytes + p.nbytes
    rows = np.zeros((batch, nheads, seqlen_q), np.float32)
    assert cost.flash_extra_bytes(seqlen_q, batch=batch, nheads=nheads) == rows.nbytes


def test_flops_are_counted_one_by_one():
    seqlen_q, seqlen_k, d = 3, 4, 5
    # Each score is d multiplications and d additions (from zero); each output seqlen_k of both.
    by_hand = seqlen_q * seqlen_k * 2 * d + seqlen_q * d * 2 * seqlen_k
    assert cost.naive_flops(seqlen_q, seqlen_k, d) == by_hand == 240
    passes = cost.naive_passes(seqlen_q, seqlen_k, d)
    assert sum(x.flops for x in passes if x.name in ("qk", "pv")) == by_hand


def test_operations_of_the_passes_that_are_no_product():
    # A softmax compares, subtracts, takes an exponential, adds and divides; dropout compares and multiplies.
    by_hand = {"mask": 1, "softmax": 5, "dropout": 2}
    passes = cost.naive_passes(6, 7, 3, batch=2, nheads=5, mask=True, dropout=True)
    assert {x.name: x.flops for x in passes if x.name in by_hand} == {k: v * 2 * 5 * 6 * 7 for k, v in by_hand.items()}
    assert all(x.intensity == x.flops / (x.read_bytes + x.written_bytes) for x in passes)


def test_numpy_ints_do_not_overflow():
    n, d = np.int32(2**17), np.int32(128)
    assert cost.naive_flops(n, n, d) == 4 * 2**17 * 2**17 * 128
    assert sum(x.moved_bytes for x in cost.naive_passes(n, n, d)) == (4 * 2**34 + 4 * 2**17 * 128) * 2
    assert cost.compulsory_bytes(n, n, d, batch=n) == 4 * 2**17 * 2**17 * 128 * 2
    assert cost.naive_extra_bytes(n, n) == 4 * 2**34
    assert cost.flash_extra_bytes(n, batch=n) == 4 * 2**34


def test_conventions():
    full = cost.flash_flops(128, 256, 64, batch=2, nheads=4)
    assert full == cost.naive_flops(128, 256, 64, batch=2, nheads=4) == 4 * 2 * 4 * 128 * 256 * 64
    assert cost.flash_flops(128, 256, 64, batch=2, nheads=4, causal=True) == full / 2
    assert cost.flash_flops(128, 256, 64, batch=2, nheads=4, backward=True) == 2.5 * full
    assert cost.flash_flops(128, 256, 64, batch=2, nheads=4, causal=True, backward=True) == 1.25 * full


def moved(n, d=64, **options):
    return sum(x.moved_bytes for x in cost.naive_passes(n, n, d, **options))


def test_mask_and_dropout_each_cost_a_read_and_a_write_of_the_square():
    n = 1024
    assert moved(n, mask=True) - moved(n) == moved(n, dropout=True) - moved(n) == 2 * n * n * 2
    assert moved(n, mask=True, dropout=True) - moved(n) == 4 * n * n * 2


def test_growth():
    for n in (256, 1024, 4096):
        assert 2 < moved(2 * n) / moved(n) < 4
        assert cost.naive_extra_bytes(2 * n, 2 * n) == 4 * cost.naive_extra_bytes(n, n)
        assert cost.flash_extra_bytes(2 * n) == 2 * cost.flash_extra_bytes(n)
        assert cost.compulsory_bytes(2 * n, 2 * n, 64) == 2 * cost.compulsory_bytes(n, n, 64)
        # The naive form always moves more than what no form can avoid.
        assert moved(n) > cost.compulsory_bytes(n, n, 64)
    # Long rows: the ratio tends to 4, since S and P are all that counts.
    assert moved(2**16) / moved(2**15) == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("name", cost.GPUS)
def test_roofline(name):
    gpu = cost.GPUS[name]
    assert cost.roofline(name, 0) == 0
    assert cost.roofline(name, gpu.ridge) == pytest.approx(gpu.peak_tflops)
    assert cost.roofline(name, 2 * gpu.ridge) == gpu.peak_tflops
    assert cost.roofline(gpu, gpu.ridge / 2) == pytest.approx(gpu.peak_tflops / 2)
    speeds = cost.roofline(name, np.logspace(-2, 5, 50))
    assert (np.diff(speeds) >= 0).all()
    # Time and speed are the same statement.
    flops, moved_bytes = 3e12, 1e9
    for bytes_ in (moved_bytes, 1000 * moved_bytes):
        speed = flops / (cost.bound_ms(name, flops, bytes_) * 1e-3) / 1e12
        assert speed == pytest.approx(cost.roofline(name, flops / bytes_))


def test_gpus_are_plausible():
    assert list(cost.GPUS) == ["T4", "A100", "RTX 4090", "H100", "H200", "B200"]
    for key, gpu in cost.GPUS.items():
        assert gpu.shared_kib_block <= gpu.shared_kib_sm
        assert gpu.shared_kib_block == {"T4": 64, "A100": 163, "RTX 4090": 99}.get(key, 227)
        # On-chip memory is at least a hundred times smaller than the GPU's own.
        assert gpu.shared_bytes * 100 < gpu.capacity_gb * 1e9
        assert gpu.shared_bytes == gpu.sms * gpu.shared_kib_sm * 1024
        assert gpu.source.startswith("NVIDIA")
        assert (gpu.dtype == "fp16") == (gpu.name == "T4 16GB")


@pytest.mark.parametrize("bad", [0, -1, 1.5, "4", None, True])
@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k", "head_dim", "batch", "nheads", "itemsize"])
def test_bad_sizes_are_refused_by_name(name, bad):
    sizes = {"seqlen_q": 4, "seqlen_k": 4, "head_dim": 4, "batch": 1, "nheads": 1, "itemsize": 2, name: bad}
    with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got"):
        cost.naive_passes(**sizes)
    with pytest.raises(ValueError, match=f"{name} must be"):
        cost.compulsory_bytes(**sizes)
    if name not in ("itemsize",):
        sizes.pop("itemsize")
        with pytest.raises(ValueError, match=f"{name} must be"):
            cost.flash_flops(**sizes)


def test_bad_roofline_input_is_refused():
    with pytest.raises(
        ValueError, match="gpu must be a Gpu or one of T4, A100, RTX 4090, H100, H200, B200, got 'V100'"
    ):
        cost.roofline("V100", 1)
    with pytest.raises(ValueError, match="intensity must be at least 0"):
        cost.roofline("T4", [1, -1])
    with pytest.raises(ValueError, match="intensity must be at least 0"):
        cost.roofline("T4", float("nan"))
    for bad in ("a", [1, "b"], 1j):
        with pytest.raises(ValueError, match="intensity must be a number or an array of numbers"):
            cost.roofline("T4", bad)
    for bad in (None, ["T4"], {}):
        with pytest.raises(ValueError, match="gpu must be a Gpu or one of"):
            cost.roofline(bad, 1)
    for bad in ("1", None, np.array([1, 2])):
        with pytest.raises(ValueError, match="flops must be a number of at least 0"):
            cost.bound_ms("T4", bad, 1)
    with pytest.raises(ValueError, match="flops must be a number of at least 0, got -1"):
        cost.bound_ms("T4", -1, 1)
    with pytest.raises(ValueError, match="moved_bytes must be a number of at least 0"):
        cost.bound_ms("T4", 1, float("nan"))


# --- the benchmark -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_cost", ROOT / "benchmarks" / "cost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_runs_on_a_cpu_and_writes_the_long_format(script, tmp_path, monkeypatch, capsys):
    out = tmp_path / "box" / "cost.csv"
    script.main(["--smoke", "--out", str(out), "--commit", "abc1234"])
    capsys.readouterr()
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    rows = bench.read_results("cost", gpu="box")
    assert set(FIELDS) <= set(rows[0])
    assert {row["commit"] for row in rows} == {"abc1234"}
    impls = {row["impl"] for row in rows}
    assert {"naive", "fa2", "naive_mask", "fa2_mask", "naive_mask_dropout", "fa2_mask_dropout"} <= impls
    assert {"pass_qk", "pass_scale", "pass_mask", "pass_softmax", "pass_dropout", "pass_pv"} <= impls
    assert {"ceiling_gemm", "ceiling_copy"} <= impls
    for row in rows:
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]


def test_the_benchmark_counts_as_the_library_does(script, tmp_path, monkeypatch, capsys):
    out = tmp_path / "box" / "cost.csv"
    script.main(["--smoke", "--out", str(out)])
    capsys.readouterr()
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    for row in bench.read_results("cost", gpu="box"):
        if row["impl"].startswith("ceiling"):
            continue
        sizes = (row["seqlen_q"], row["seqlen_k"], row["head_dim"])
        many = {"batch": row["batch"], "nheads": row["nheads"]}
        if row["impl"].startswith("pass_"):
            passes = cost.naive_passes(*sizes, **many, mask=True, dropout=True)
            moved = {x.name: x.moved_bytes for x in passes}
            name = row["impl"].removeprefix("pass_")
            want = moved["mask" if name == "scale" else name]
            assert row["gb_per_s"] * row["ms_p50"] * 1e6 == pytest.approx(want, rel=1e-3)
        else:
            causal = row["impl"].startswith("fa2_")
            want = cost.flash_flops(*sizes, **many, causal=causal)
            assert row["tflops"] * row["ms_p50"] * 1e9 == pytest.approx(want, rel=1e-3)


def test_the_benchmark_refuses_a_wrong_kernel(script):
    import torch

    right = torch.randn(4, 8, dtype=torch.float64)
    script.check("right", right.bfloat16(), right)
    with pytest.raises(RuntimeError, match="wrong must be within 2% of float64"):
        script.check("wrong", (1.1 * right).bfloat16(), right)
    with pytest.raises(RuntimeError, match="nan must be"):
        script.check("nan", right * float("nan"), right)


def test_the_recorded_numbers_are_those_of_a_real_run():
    path = bench.RESULTS / "h200" / "cost.csv"
    if not path.is_file():
        pytest.skip("no recorded run on an H200 yet")
    with path.open(newline="") as file:
        assert set(FIELDS) <= set(csv.DictReader(file).fieldnames)
    rows = bench.read_results("cost")
    assert all("H200" in row["gpu"] and row["torch"] and row["commit"] and row["date"] for row in rows)
    assert {row["head_dim"] for row in rows if row["head_dim"]} == {64, 128}
    assert max(row["tflops"] or 0 for row in rows) < cost.GPUS["H200"].peak_tflops
    ceiling = {row["impl"]: row for row in rows}
    assert ceiling["ceiling_copy"]["gb_per_s"] < cost.GPUS["H200"].bandwidth_gb_s


def test_what_chapter_02_says_about_the_recorded_run_holds():
    rows = {(row["impl"], row["seqlen_q"], row["head_dim"]): row for row in bench.read_results("cost")}
    gpu, n = cost.GPUS["H200"], 4096

    def missed(impl, d, flops, moved_bytes):
        return rows[impl, n, d]["ms_p50"] / cost.bound_ms(gpu, flops, moved_bytes)

    for d in (64, 128):
        passes = {x.name: x for x in cost.naive_passes(n, n, d, batch=4, nheads=2048 // d, mask=True, dropout=True)}
        passes["scale"] = passes["mask"]
        factors = {name: missed(f"pass_{name}", d, x.flops, x.moved_bytes) for name, x in passes.items()}
        assert 1.1 < factors["scale"] <= 1.12
        assert max(factors["qk"], factors["pv"]) <= 1.45
        assert max(factors, key=factors.get) == "mask"
        assert 4.35 < factors["mask"] < 4.45
        assert round(factors["dropout"], 1) == 1.9
    flops = cost.naive_flops(n, n, 64, batch=4, nheads=32)
    plain = cost.naive_passes(n, n, 64, batch=4, nheads=32)
    bound = sum(cost.bound_ms(gpu, x.flops, x.moved_bytes) for x in plain)
    assert round(rows["naive", n, 64]["ms_p50"] / rows["fa2", n, 64]["ms_p50"]) == 5
    assert round(rows["naive", n, 64]["ms_p50"] / bound, 1) == 2.6
    assert round(missed("fa2", 64, flops, 0), 1) == 3.2
    assert round(rows["fa2", n, 64]["ms_p50"], 1) == 1.8
    assert round(rows["fa2", n, 64]["tflops"]) == 306
    assert round(rows["naive", 16384, 64]["peak_bytes"] / 1e9) == 34
    assert round(rows["naive_mask_dropout", 16384, 64]["peak_bytes"] / 1e9) == 60
