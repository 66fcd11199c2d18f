"""Measurements: recorded results name their machine, flawed ones are found, wrong kernels are not timed."""

import contextlib
import re
import sys
import types

import pytest
import torch

from book import course
from flashlib import bench, cost, peers, reference
from flashlib.check import parts_10

FILES = sorted(bench.RESULTS.glob("*/*.csv"))


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "speed.csv").write_text(
        "pass,head_dim,ms_p50,tflops,gpu,torch,date\nfwd,128,1.50,,NVIDIA H200,2.11.0,2026\n", encoding="utf-8"
    )
    return tmp_path


def test_numbers_are_numbers_and_names_are_text(results):
    assert bench.read_results("speed") == [
        {
            "pass": "fwd",
            "head_dim": 128,
            "ms_p50": 1.5,
            "tflops": None,
            "gpu": "NVIDIA H200",
            "torch": "2.11.0",
            "date": "2026",
        }
    ]


@pytest.mark.parametrize(("subject", "gpu"), [("none", "h200"), ("speed", "a100"), ("", "h200")])
def test_unknown_result_is_refused_and_the_known_are_listed(results, subject, gpu):
    with pytest.raises(ValueError, match=rf"subject must .*\['h200/speed'\]\), got {gpu}/{subject}"):
        bench.read_results(subject, gpu)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_file_is_read_and_names_its_machine(path):
    rows = bench.read_results(path.stem, path.parent.name)
    assert rows
    for row in rows:
        assert None not in row, "a row has more fields than the header"
        assert row["gpu"]
        assert row["torch"]
        # A chapter may be drafted with invented numbers; they must not be committed.
        assert "fake" not in str(row).lower()


# --- what is wrong with a table of times -----------------------------------------------------------------------------

ATTENTION = [path.stem for path in FILES if path.stem.startswith("attention")]
# What is said about a benchmark with each flaw; its other rows may raise further doubts.
FLAWS = {
    "counted": ["causal 1, seqlen 16384: 1[0-9]{3} TFLOP/s is above the peak", "seqlen 512: the usual FLOPs in"],
    "idle": ["seqlen 1024: 4 times the work of the shorter row in 1.0"],
    "no_wait": ["TFLOP/s is above the peak", "seqlen 16384: 2 times the work of the shorter row in"],
    "compile": [
        "causal 0, seqlen 512: for a FLOP the first row takes over 3 times",
        "causal 1, seqlen 512: for a FLOP",
    ],
    "flag": ["causal 1, seqlen 16384: causal takes [01].[0-9]{2} of the time without"],
    "cached": ["new_copy: [0-9]{4,5} GB/s is above the memory's 4800 GB/s"],
}


def test_recorded_attention_leaves_no_doubt():
    assert {"attention", "attention_fp32"} <= set(ATTENTION)
    for subject in ATTENTION:
        assert bench.doubts(bench.read_results(subject)) == []


@pytest.mark.parametrize("flaw", parts_10.FLAWS)
def test_flawed_benchmark_is_found(flaw):
    rows = parts_10.flawed(flaw)
    assert rows == parts_10.flawed(flaw), "the same seed must give the same table"
    found = "\n".join(bench.doubts(rows))
    for said in FLAWS[flaw]:
        assert re.search(said, found), found


@pytest.mark.parametrize("flaw", ["counted", "flag", "idle", "compile"])
def test_without_its_flaw_the_same_benchmark_leaves_no_doubt(flaw, monkeypatch):
    """The doubts come from the flaw, not from how the table is made."""
    recorded = [dict(r, us_p50=0.0) if "us_p50" in r else r for r in parts_10.bench.read_results("host")]
    monkeypatch.setattr(parts_10, "COMPILE_MS", 0.0)
    real = bench.read_results
    monkeypatch.setattr(bench, "read_results", lambda subject: recorded if subject == "host" else real(subject))
    rows = [row for row in parts_10.flawed(flaw) if flaw in ("idle", "compile") or not row["causal"]]
    assert bench.doubts(rows) == []


def a_row(**changed):
    return dict(next(r for r in bench.read_results("attention") if r["impl"] == "flashlib_portable"), **changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ms_p20": 1.0}, "percentiles are out of order"),
        ({"ms_p50": 1e-3, "ms_p20": 1e-3}, "its inputs and outputs alone make"),
        ({"tflops": 400.0}, "the usual FLOPs in"),
        ({"tflops": 990.0}, "above the peak"),
        ({"ms_p80": 0.01}, "percentiles are out of order"),
        ({"tflops": None}, "is missing"),
        ({"ms_p50": None}, "is missing"),
        ({"ms_p20": 0}, "is missing, or not above 0"),
        ({"ms_p50": float("nan")}, "is missing, or not above 0"),
    ],
)
def test_one_impossible_row_is_found(changed, says):
    assert bench.doubts([a_row()]) == []
    assert says in "\n".join(bench.doubts([a_row(**changed)]))


def test_doubts_of_nothing_and_of_an_unknown_gpu():
    assert bench.doubts([]) == []
    with pytest.raises(ValueError, match=r"gpu must be one of .*H200.*, got 'H2000'"):
        bench.doubts([], "H2000")
    # A copy that is as fast as the memory allows, and one that is not.
    assert bench.doubts([{"impl": "copy", "gb_per_s": 4800}]) == []
    assert bench.doubts([{"impl": "copy", "gb_per_s": 4801}]) == ["copy: 4801 GB/s is above the memory's 4800 GB/s"]
    assert bench.doubts([{"impl": "copy", "gb_per_s": 4000}], "H100")


def timed_row(ms, **changed):
    """A row that took `ms`, whose other columns agree with it."""
    row = a_row(**changed)
    sizes = (row["batch"], row["nheads"], row["seqlen_q"], row["head_dim"], row["causal"])
    speed = bench.attention_flops(row["pass"] == "bwd", *sizes) / ms / 1e9
    return dict(row, ms_p20=ms, ms_p50=ms, ms_p80=ms, tflops=speed)


def test_doubts_compare_rows_of_one_kernel_by_length():
    """At the thresholds: what is said, and what is not said; the order of the rows does not hide a doubt."""
    small = {"batch": 1, "nheads": 8, "head_dim": 128}
    short, same, longer = (timed_row(ms, seqlen_q=n, **small) for n, ms in ((512, 1.0), (1024, 1.14), (1024, 1.16)))
    assert "seqlen 1024: 4 times the work of the shorter row in 1.14 of its time" in bench.doubts([short, same])[0]
    assert bench.doubts([same, short]) == bench.doubts([short, same])[:1]
    # Another kernel, pass, dtype or head_dim is another series.
    others = ({"impl": "other"}, {"pass": "bwd"}, {"dtype": "fp16"}, {"head_dim": 64})
    apart = [timed_row(1.14, **({"seqlen_q": 1024} | small | changed)) for changed in others]
    for row in (longer, *apart):
        assert "times the work" not in "".join(bench.doubts([short, row]))
    # The first row, for a FLOP, against the next: 3 times as long is still believed.
    for factor, said in ((2.9, 0), (3.1, 1)):
        found = bench.doubts([timed_row(factor, seqlen_q=512, **small), timed_row(4.0, seqlen_q=1024, **small)])
        assert ["for a FLOP the first row takes over 3 times" in doubt for doubt in found] == [True] * said
    # A causal flag saves time, from 2048 on.
    for n, ratio, said in ((2048, 0.84, 0), (2048, 0.86, 1), (1024, 0.86, 0)):
        full, causal = (timed_row(ms, seqlen_q=n, causal=c, **small) for c, ms in ((0, 10.0), (1, 10 * ratio)))
        found = bench.doubts([full, causal])
        assert [f"causal takes {ratio} of the time without" in doubt for doubt in found] == [True] * said
        assert bench.doubts([causal]) == []


def test_bytes_of_a_row_are_those_of_its_dtype():
    """fp32 moves twice the bytes of bf16: a time that one allows is too short for the other."""
    sizes = {"batch": 4, "nheads": 16, "head_dim": 16, "seqlen_q": 256}
    moved = cost.compulsory_bytes(256, 256, 16, batch=4, nheads=16)
    ms = 1.5 * moved / 4800 / 1e6
    assert bench.doubts([timed_row(ms, dtype="bf16", **sizes)]) == []
    assert "its inputs and outputs alone make 6400 GB/s" in bench.doubts([timed_row(ms, dtype="fp32", **sizes)])[0]


# --- percentiles, turns, checks before the clock ---------------------------------------------------------------------


def test_percentiles_of_a_skewed_sample():
    assert bench.percentiles([5.0]) == (5.0, 5.0, 5.0)
    p20, p50, p80 = bench.percentiles([1.0] * 9 + [2000.0])
    assert (p20, p50) == (1.0, 1.0)
    assert p80 == 1.0
    assert bench.percentiles(list(range(11))) == (2, 5, 8)
    assert bench.percentiles([3, 1, 2])[1] == 2
    assert bench.percentiles([1.0, 2.0]) == pytest.approx((1.2, 1.5, 1.8))
    with pytest.raises(ValueError, match="values must hold one time at least, got none"):
        bench.percentiles([])


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"warmups": -1}])
def test_no_rounds_are_refused(wrong):
    with pytest.raises(ValueError, match="rounds must be at least 1 and warmups at least 0"):
        bench.time_in_turns({"A": lambda: pytest.fail("must not run")}, **wrong)


def test_clock_of_the_gpu_starts_behind_other_work_and_stops_behind_the_call(monkeypatch):
    """The order of what `_time_on_gpu` puts in the queue: 4 GiB, the start, the call, the end, and then the wait."""
    queue = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            queue.append(self)

        def synchronize(self):
            queue.append("wait")
            assert self is queue[-2]

        def elapsed_time(self, end):
            assert (self, end) == (queue[4], queue[6])
            return 7.0

    class Other:
        def zero_(self):
            queue.append("other")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert bench._time_on_gpu(lambda: queue.append("call"), Other()) == 7.0
    assert queue[:4] == ["other"] * 4
    assert (queue[5], queue[7]) == ("call", "wait")
    assert len(queue) == 8


def test_clock_of_the_host_counts_milliseconds(monkeypatch):
    clock = iter([1.0, 1.25])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    assert bench._time_on_host(lambda: None) == 250.0


def test_functions_take_turns_and_warm_up_first(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    functions = {name: lambda name=name: calls.append(name) for name in "ABC"}
    times = bench.time_in_turns(functions, rounds=4, warmups=2)
    assert "".join(calls) == "ABC" * 6
    assert {name: len(ms) for name, ms in times.items()} == {"A": 4, "B": 4, "C": 4}


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 40, 16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = reference.attention(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    return [x.detach() for x in (q, k, v)], dout, (out.detach(), *grads)


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("spoil", [lambda x: 0.9 * x, lambda x: x * float("nan"), torch.zeros_like])
def test_wrong_result_is_not_good_enough_to_be_timed(inputs, tensor, spoil):
    qkv, dout, right = inputs
    wrong = tuple(spoil(x) if i == tensor else x for i, x in enumerate(right))
    results = {"right": right, "wrong": wrong, "forward only": right[:1]}
    good, bad = peers.check_results(results, *qkv, dout, True, 1e-4)
    assert good == ["right", "forward only"]
    assert list(bad) == ["wrong"]


def test_wrong_implementation_is_not_timed(monkeypatch, capsys):
    """The whole of `attention_rows`, on a CPU: what ignores the causal flag, or raises, has no row."""

    def on_cpu(function):
        return lambda *args, **kwargs: function(*args, **{k: v for k, v in kwargs.items() if k != "device"})

    def broken(q, k, v):
        raise RuntimeError("not for this GPU\nand more")

    def silent(q, k, v):
        raise AssertionError

    monkeypatch.setattr(torch, "randn", on_cpu(torch.randn))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(peers, "TOKENS", 32)
    monkeypatch.setattr(peers, "WIDTH", 32)
    found = {
        "right": lambda q, k, v: reference.attention(q, k, v, causal=True),
        "flag ignored": lambda q, k, v: reference.attention(q, k, v),
        "broken": broken,
        "silent": silent,
    }
    monkeypatch.setattr(peers, "implementations", lambda *shape: found)
    rows = list(peers.attention_rows(16, True, 32, "fp32", rounds=2))
    forward_only = lambda q, k, v: reference.attention(q.detach(), k.detach(), v.detach(), causal=True)  # noqa: E731
    seen = []
    found["right"] = lambda q, k, v: seen.append(q.detach()) or reference.attention(q, k, v, causal=True)
    found["no gradient"] = forward_only
    rows = list(peers.attention_rows(16, True, 32, "fp32", rounds=2))
    again = len(seen)
    list(peers.attention_rows(16, True, 32, "fp32", rounds=1, only=["right"]))
    assert torch.equal(seen[0], seen[again]), "each run must have the same inputs"
    assert [(row["impl"], row["pass"]) for row in rows] == [
        ("right", "fwd"),
        ("no gradient", "fwd"),
        ("right", "bwd"),
    ]
    assert [row["impl"] for row in peers.attention_rows(16, True, 32, "fp32", 1, ["right"])] == ["right", "right"]
    for row in rows:
        assert (row["head_dim"], row["causal"], row["dtype"], row["nheads_kv"]) == (16, 1, "fp32", 2)
        # Of a width of 32 and 32 tokens: two heads of 16, one sequence.
        assert (row["batch"], row["nheads"], row["seqlen_q"], row["seqlen_k"]) == (1, 2, 32, 32)
        flops = bench.attention_flops(row["pass"] == "bwd", 1, 2, 32, 16, True)
        assert row["tflops"] == pytest.approx(flops / row["ms_p50"] / 1e9)
    assert all(row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"] for row in rows)
    said = capsys.readouterr().err
    assert "flag ignored is not timed: its results are wrong" in said
    assert "broken is left out: RuntimeError: not for this GPU\n" in said
    assert "silent is left out: AssertionError: \n" in said
    assert "no gradient's backward is left out: RuntimeError" in said


@pytest.mark.parametrize("causal", [False, True])
def test_found_implementations_compute_attention(monkeypatch, causal):
    """Those that a CPU has; FlexAttention, and what is installed or not, are stand-ins here."""
    made = []
    monkeypatch.setattr(peers, "_flex", lambda torch, causal, seqlen: made.append((causal, seqlen)) or "flex")
    theirs = types.SimpleNamespace(flash_attn_func="theirs")
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", theirs)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setattr(peers, "_other_layout", lambda function, causal: (function, causal))
    found = peers.implementations("bf16", causal, 40)
    assert list(found) == ["flashlib_portable", "fa2", "cudnn", "flex", "fa3"]
    assert (found["flex"], made, found["fa3"]) == ("flex", [(causal, 40)], ("theirs", causal))
    assert list(peers.implementations("fp32", causal, 40)) == ["flashlib_portable", "mem_efficient"]
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    exact = reference.attention(q, k, v, causal=causal)
    for name in ("flashlib_portable", "fa2"):
        torch.testing.assert_close(found[name](q, k, v), exact.float(), rtol=1e-4, atol=1e-4)


def test_host_time_is_the_median_of_blocks_of_fifty_calls(monkeypatch):
    """On a clock that each call moves on: by 10 µs, or by 1 where a graph is replayed; one block is disturbed."""
    now, calls = [0.0], []

    def moves(name, us):
        def run(*inputs):
            calls.append(name)
            now[0] += us * 1e-6 + (0.5 if len(calls) == 60 else 0)

        return run

    class Graph:
        replay = staticmethod(moves("graph", 1))

    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: real(*shape))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    # The GPU works for a second that the host must not be charged with.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now[0])
    found = {"flashlib_portable": moves("ours", 10), "other": moves("other", 20)}
    monkeypatch.setattr(peers, "implementations", lambda *shape: dict(found))
    us = peers.host_microseconds(calls=150)
    assert us == pytest.approx({"flashlib_portable": 10, "other": 20, "flashlib_portable_graph": 1})
    # One call to warm up, ours once more to record the graph.
    assert [calls.count(name) for name in ("ours", "other", "graph")] == [152, 151, 150]


def test_recorded_shapes_are_those_that_are_timed():
    for row in bench.read_results("attention"):
        assert (row["batch"] * row["seqlen_q"], row["nheads"] * row["head_dim"]) == (peers.TOKENS, peers.WIDTH)


def test_tolerance_is_of_the_norm_of_the_result(inputs):
    qkv, dout, right = inputs
    for factor, good in ((1.009, ["near"]), (1.011, [])):
        assert peers.check_results({"near": (factor * right[0],)}, *qkv, dout, True, 1e-2)[0] == good


def test_other_layout_is_seqlen_before_heads_and_may_return_more():
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))

    def theirs(q, k, v, causal):
        out = reference.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)
        return (out, "lse") if causal else out

    for causal in (False, True):
        out = peers._other_layout(theirs, causal)(q, k, v)
        assert torch.equal(out, reference.attention(q, k, v, causal=causal))


# --- writing, printing, drawing --------------------------------------------------------------------------------------


def test_written_rows_are_read_back(results):
    where = bench.machine(commit="abc1234")
    rows = [{"impl": "x", "us_p50": 1.23456789, **where}, {"impl": "y", **where}]
    bench.write_results(results / "h200" / "new.csv", rows, ["impl", "us_p50"])
    first, second = bench.read_results("new")
    assert (first["us_p50"], second["us_p50"], first["commit"]) == (1.2346, None, "abc1234")
    assert list(first) == ["impl", "us_p50", *bench.MACHINE]
    # A new GPU's folder is made.
    bench.write_results(results / "b200" / "old" / "new.csv", rows, ["impl", "us_p50"])
    assert (results / "b200" / "old" / "new.csv").is_file()


def test_flops_are_those_of_chapter_02():
    for backward, causal in ((False, False), (False, True), (True, False), (True, True)):
        expected = cost.flash_flops(64, 64, 32, batch=2, nheads=3, causal=causal, backward=backward)
        assert bench.attention_flops(backward, 2, 3, 64, 32, causal) == expected


def test_table_has_a_line_a_shape_and_a_column_a_kernel():
    rows = [row for row in bench.read_results("attention") if row["head_dim"] == 64]
    lines = bench.table(rows).splitlines()
    assert len(lines) == 1 + 24
    assert lines[0].split() == ["dtype", "pass", "d", "causal", "seqlen", *dict.fromkeys(row["impl"] for row in rows)]
    # FlashAttention-3 was not timed backward.
    assert "-" in next(line for line in lines if " bwd " in line).split()
    assert lines[1].split()[:5] == ["bf16", "fwd", "64", "0", "512"]
    # Rows in another order make as many lines; a shape of another dtype has its own; no speed is a dash.
    shuffled = sorted(rows, key=lambda row: (row["impl"], -row["seqlen_q"]))
    assert len(bench.table(shuffled).splitlines()) == 25
    two = bench.table([a_row(), a_row(dtype="fp16", tflops=None)]).splitlines()
    assert [line.split()[0] + line.split()[-1] for line in two[1:]] == [f"bf16{a_row()['tflops']:.0f}", "fp16-"]
    assert len(bench.table([]).splitlines()) == 1


def test_chart_shows_every_kernel_and_names_the_machine():
    rows = bench.read_results("attention")
    figure = bench.chart(rows)
    assert len(figure.axes) == 8
    drawn = [line for ax in figure.axes for line in ax.lines]
    assert len(drawn) == len({(r["pass"], r["head_dim"], r["causal"], r["impl"]) for r in rows})
    caption = figure.get_suptitle()
    for key in ("gpu", "driver", "torch", "triton", "commit"):
        assert rows[0][key] in caption


def test_chart_of_few_rows_and_of_none():
    recorded = [row for row in bench.read_results("attention") if row["head_dim"] == 64]
    rows = [row for row in recorded if row["impl"] in ("flashlib_portable", "fa3")]
    one = bench.chart(rows[:1])
    assert len(one.axes) == 1
    # FlashAttention-3 has no backward: only the panels of what was measured.
    forward = bench.chart([row for row in rows if row["impl"] == "fa3"])
    assert [ax.get_title().split(",")[0] for ax in forward.axes] == ["forward"] * 2
    # Unsorted rows, rows without a speed and kernels without a line do not spoil the lines that there are.
    extra = [dict(rows[0], tflops=None, seqlen_q=64), dict(rows[0], impl="unknown", tflops=1e6)]
    for rows_ in (rows, rows[::-1] + extra):
        figure = bench.chart(rows_)
        for ax in figure.axes:
            assert all(list(line.get_xdata()) == sorted(line.get_xdata()) for line in ax.lines)
            assert 0 < ax.get_ylim()[1] < 1000
        assert [ax.get_title() for ax in figure.axes][1] == "forward, head_dim 64, causal"
    assert "= 16384 tokens" in figure.get_suptitle()
    assert "= 512 or 16384 tokens" in bench.chart([dict(rows[0], batch=1), *rows[1:]]).get_suptitle()
    for wrong in ([], extra, [rows[0], dict(rows[0], dtype="fp16")]):
        with pytest.raises(ValueError, match="rows must hold speeds of one dtype"):
            bench.chart(wrong)


@pytest.fixture
def bench_command(monkeypatch, tmp_path):
    """`python -m flashlib.bench` on a GPU that is made up: the rows of the recorded file, at another shape none."""
    recorded = bench.read_results("attention")

    def rows(head_dim, causal, seqlen, dtype, rounds, only):
        shape = {"head_dim": head_dim, "causal": int(causal), "seqlen_q": seqlen}
        found = [dict(row, dtype=dtype) for row in recorded if shape.items() <= row.items()]
        return [{f: row[f] for f in bench.FIELDS} for row in found if only is None or row["impl"] in only]

    where = {key: recorded[0][key] for key in bench.MACHINE}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "machine", lambda commit: where | ({"commit": commit} if commit else {}))
    monkeypatch.setattr(peers, "attention_rows", rows)
    return lambda *arguments: bench.main(["attention", "--out", str(tmp_path / "new.csv"), *arguments])


def test_command_writes_prints_and_draws_what_was_timed(bench_command, tmp_path, capsys):
    bench_command("--seqlens", "4096", "512", "--head-dims", "64", "--commit", "abc1234")
    said = capsys.readouterr()
    assert "look at this again" not in said.out
    lines = [line.split() for line in said.out.splitlines() if line.startswith("bf16")]
    assert [line[1:5] for line in lines] == [
        [pass_, "64", causal, seqlen] for pass_ in ("fwd", "bwd") for causal in "01" for seqlen in ("512", "4096")
    ]
    assert "4/4" in said.err
    text = (tmp_path / "new.csv").read_text()
    assert text.splitlines()[0] == ",".join([*bench.FIELDS, *bench.MACHINE])
    assert "abc1234" in text
    assert (tmp_path / "new.svg").exists()


def test_command_draws_a_chart_for_each_dtype(bench_command, tmp_path):
    bench_command("--seqlens", "512", "--head-dims", "64", "--causal", "0", "--dtypes", "bf16", "fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.bf16.svg", "new.csv", "new.fp16.svg"]


def test_command_with_one_kernel_that_has_no_backward(bench_command, tmp_path):
    bench_command("--impls", "fa3", "--seqlens", "512")
    assert (tmp_path / "new.svg").exists()


def test_command_says_why_nothing_is_timed(bench_command, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="nothing was timed"):
        bench_command("--impls", "misspelt")
    with pytest.raises(SystemExit):
        bench_command("--rounds", "0")
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for subject in ("attention", "host"):
        with pytest.raises(SystemExit, match="nothing is timed without a GPU"):
            bench.main([subject])


def test_command_times_the_host(bench_command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "host_microseconds", lambda: {"ours": 12.345})
    bench.main(["host", "--out", str(tmp_path / "host.csv")])
    assert "ours                          12.3 µs a call on the host" in capsys.readouterr().out
    assert (tmp_path / "host.csv").read_text().splitlines()[1].startswith("ours,12.345,NVIDIA H200")


def test_folder_of_a_gpu():
    assert bench.results_path("host", "NVIDIA GeForce RTX 4090") == bench.RESULTS / "geforce_rtx_4090" / "host.csv"


def test_chart_command_draws_the_same_file_twice(tmp_path):
    for name in ("a.svg", "b.svg"):
        bench.main(["chart", "--out", str(tmp_path / name)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# --- what chapter 10 says about the recorded numbers ------------------------------------------------------------------


def chapter():
    return course.read(bench.RESULTS.parent.parent / "notebooks" / "10_speed.ipynb")


def speed(subject, impl, seqlen=4096, causal=0, pass_="fwd"):
    wanted = {"impl": impl, "head_dim": 128, "seqlen_q": seqlen, "causal": causal, "pass": pass_}
    return next(row for row in bench.read_results(subject) if wanted.items() <= row.items())


def test_chapter_10_says_what_was_recorded():
    text = "\n".join(cell.source for cell in chapter().cells if cell.cell_type == "markdown")
    host = {row["impl"]: row["us_p50"] for row in bench.read_results("host")}
    ours = speed("attention", "flashlib_portable")
    flops = cost.flash_flops(4096, 4096, 128, batch=4, nheads=16)
    longest = speed("attention", "flashlib_portable", 16384)
    counted = next(r for r in bench.read_results("profile") if (r["seqlen"], r["causal"]) == (16384, 0))
    dram = counted["dram_read_bytes"] + counted["dram_write_bytes"]
    factors = {
        "about 600 TFLOP/s": ours["tflops"] / 600,
        "Eight times the peak": flops / host["flashlib_portable"] / 1e6 / cost.GPUS["H200"].peak_tflops / 8,
        "the kernel requests 34.5 GB": counted["requested_bytes"] / 34.5e9,
        "0.27 GB are compulsory": counted["compulsory_bytes"] / 0.27e9,
        "0.3 GB: the right end": dram / 0.3e9,
        "by a factor of sixty": 4.8e12 / (dram / longest["ms_p50"] * 1e3) / 60,
        "seven cycles in ten": counted["tensor_pct"] / 70,
        "The graph leaves a twentieth of it": host["flashlib_portable"] / host["flashlib_portable_graph"] / 20,
    }
    for said, factor in factors.items():
        assert said in text
        assert factor == pytest.approx(1, abs=0.1), said
    assert counted["requested_bytes"] / longest["ms_p50"] / 1e6 > cost.GPUS["H200"].bandwidth_gb_s
    # The roofline's left end: what memory could not have delivered of the requested bytes.
    requested_gb_s = counted["requested_bytes"] / longest["ms_p50"] / 1e6
    assert "half at length 16384" in text
    assert 1 - 4800 / requested_gb_s == pytest.approx(0.5, abs=0.03)
    assert 2 * speed("attention", "flashlib_portable", 16384, 1)["tflops"] > cost.GPUS["H200"].peak_tflops
    assert speed("forward_steps", "step_two_loops")["tflops"] < speed("cost", "naive")["tflops"]


def test_chapter_10_describes_its_bars_by_the_recorded_numbers():
    alts = [cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "") for cell in chapter().cells]
    ladder, host = (next(alt for alt in alts if start in alt) for start in ("the steps of chapter 08", "CUDA graph"))
    for name, impl in (("flashlib", "flashlib_portable"), ("FlashAttention-2", "fa2"), ("FlexAttention", "flex")):
        assert f"{name} {speed('attention', impl)['tflops']:.0f}" in ladder
    for name, impl in (("cuDNN", "cudnn"), ("FlashAttention-4", "fa4"), ("FlashAttention-3", "fa3")):
        assert f"{name} {speed('attention', impl)['tflops']:.0f}" in ladder
    assert f"the naive form {speed('cost', 'naive')['tflops']:.0f}" in ladder
    for row in bench.read_results("host"):
        assert f" {row['us_p50']:.0f}" in host
