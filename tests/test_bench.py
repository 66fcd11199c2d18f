"""Measurements: recorded results name their machine, flawed ones are found, wrong kernels are not timed."""

import re

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
    "idle": ["seqlen 1024: 4 times the work of the row before in 1.0"],
    "no_wait": ["TFLOP/s is above the peak", "seqlen 16384: 2 times the work of the row before in"],
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
    ],
)
def test_one_impossible_row_is_found(changed, says):
    assert bench.doubts([a_row()]) == []
    assert says in "\n".join(bench.doubts([a_row(**changed)]))


# --- percentiles, turns, checks before the clock ---------------------------------------------------------------------


def test_percentiles_of_a_skewed_sample():
    assert bench.percentiles([5.0]) == (5.0, 5.0, 5.0)
    p20, p50, p80 = bench.percentiles([1.0] * 9 + [2000.0])
    assert (p20, p50) == (1.0, 1.0)
    assert p80 == 1.0
    assert bench.percentiles(list(range(11))) == (2, 5, 8)
    assert bench.percentiles([3, 1, 2])[1] == 2


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
        raise RuntimeError("not for this GPU")

    monkeypatch.setattr(torch, "randn", on_cpu(torch.randn))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(peers, "TOKENS", 32)
    monkeypatch.setattr(peers, "WIDTH", 32)
    found = {
        "right": lambda q, k, v: reference.attention(q, k, v, causal=True),
        "flag ignored": lambda q, k, v: reference.attention(q, k, v),
        "broken": broken,
    }
    monkeypatch.setattr(peers, "implementations", lambda *shape: found)
    rows = list(peers.attention_rows(16, True, 32, "fp32", rounds=2))
    assert [(row["impl"], row["pass"]) for row in rows] == [("right", "fwd"), ("right", "bwd")]
    assert all(row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"] for row in rows)
    said = capsys.readouterr().err
    assert "flag ignored is not timed: its results are wrong" in said
    assert "broken is left out: RuntimeError: not for this GPU" in said


# --- writing, printing, drawing --------------------------------------------------------------------------------------


def test_written_rows_are_read_back(results):
    where = bench.machine(commit="abc1234")
    rows = [{"impl": "x", "us_p50": 1.23456789, **where}, {"impl": "y", **where}]
    bench.write_results(results / "h200" / "new.csv", rows, ["impl", "us_p50"])
    first, second = bench.read_results("new")
    assert (first["us_p50"], second["us_p50"], first["commit"]) == (1.2346, None, "abc1234")
    assert list(first) == ["impl", "us_p50", *bench.MACHINE]


def test_flops_are_those_of_chapter_02():
    for backward, causal in ((False, False), (False, True), (True, False), (True, True)):
        expected = cost.flash_flops(64, 64, 32, batch=2, nheads=3, causal=causal, backward=backward)
        assert bench.attention_flops(backward, 2, 3, 64, 32, causal) == expected


def test_table_has_a_line_a_shape_and_a_column_a_kernel():
    rows = [row for row in bench.read_results("attention") if row["head_dim"] == 64]
    lines = bench.table(rows).splitlines()
    assert len(lines) == 1 + 24
    assert lines[0].split() == ["pass", "d", "causal", "seqlen", *dict.fromkeys(row["impl"] for row in rows)]
    # FlashAttention-3 was not timed backward.
    assert "-" in next(line for line in lines if line.startswith("bwd")).split()


def test_chart_shows_every_kernel_and_names_the_machine():
    rows = bench.read_results("attention")
    figure = bench.chart(rows)
    assert len(figure.axes) == 8
    drawn = [line for ax in figure.axes for line in ax.lines]
    assert len(drawn) == len({(r["pass"], r["head_dim"], r["causal"], r["impl"]) for r in rows})
    caption = figure.get_suptitle()
    for key in ("gpu", "driver", "torch", "triton", "commit"):
        assert rows[0][key] in caption


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
        "The graph makes twenty times of it go away": host["flashlib_portable"] / host["flashlib_portable_graph"] / 20,
    }
    for said, factor in factors.items():
        assert said in text
        assert factor == pytest.approx(1, abs=0.1), said
    assert counted["requested_bytes"] / longest["ms_p50"] / 1e6 > cost.GPUS["H200"].bandwidth_gb_s
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
