"""The Hopper kernel: what it compiles to without a GPU, what it refuses, and on a Hopper GPU that it is right."""

import faulthandler
import math
import re
import subprocess
from pathlib import Path

import attention_cases
import pytest
import torch
from attention_cases import ON_GPU, allowed, error, plain_attention, poisoned, seen_by, tensor

from flashlib import device, flash_attention, hopper, reference, tiles
from flashlib.attention import backend_of

HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
LENGTHS = [(1, 1), (1, 257), (64, 64), (127, 129), (129, 127), (300, 1000), (1000, 300), (1025, 1025), (65, 4000)]
# Shared memory of a block on a Hopper GPU.
MOST_SHARED = 232448


@pytest.fixture(autouse=True)
def time_limit():
    """A kernel whose barriers wait for each other never ends: then this process does, and says where."""
    faulthandler.dump_traceback_later(180, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


# --- compiled, without a GPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    import hopper_jobs

    jobs = [hopper_jobs.job("bf16", *config) for config in hopper_jobs.CONFIGS]
    jobs.append(hopper_jobs.job("fp16", 64, True, 4096, True))
    return device.compile_many(jobs)


def test_instructions(compiled):
    for one in compiled:
        assert one.matrix_instructions == ["wgmma.mma_async"]
        assert "cp.async.bulk.tensor.4d.shared" in one.ptx
        assert "cp.async.bulk.tensor.4d.global" in one.ptx
        assert "setmaxnreg" in one.ptx


def test_resources(compiled):
    for one in compiled:
        assert one.shared_bytes <= MOST_SHARED
        # The warp that loads has 24 registers a thread and may put a few numbers aside; the warpgroups need not.
        assert one.stack_bytes is None or one.stack_bytes <= 16, one


def test_the_assembler_does_not_serialize(compiled, tmp_path):
    """The assembler says so (C75xx) when it must wait after every wgmma, because registers or branches forbid more."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not tool.exists():
        pytest.skip("this Triton has no ptxas of its own")
    for number, one in enumerate(compiled):
        source = tmp_path / f"{number}.ptx"
        source.write_text(one.ptx)
        command = [tool, "-v", "--gpu-name", "sm_90a", source, "-o", tmp_path / "out.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "registers" in said
        assert re.findall(r"C75\d\d.*", said) == []


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_reasons(monkeypatch):
    def x(*shape, dtype=torch.float16):
        return torch.zeros(shape, dtype=dtype)

    good = x(1, 4, 100, 64)
    assert hopper.applies(good, good, good) == "needs a Hopper GPU (compute capability 9.0), got cpu"
    monkeypatch.setattr(tiles, "architecture_of", lambda device: 80)
    assert "got 8.0" in hopper.applies(good, good, good)
    monkeypatch.setattr(tiles, "architecture_of", lambda device: 90)
    assert hopper.applies(good, good, good) is None
    assert hopper.applies(good, x(1, 2, 50, 64), x(1, 2, 50, 128)) is None
    assert "float16 or bfloat16, got torch.float32" in hopper.applies(*[x(1, 1, 8, 64, dtype=torch.float32)] * 3)
    assert "up to 128, got 192 for v" in hopper.applies(good, good, x(1, 4, 100, 192))
    assert "for k" in hopper.applies(good, x(1, 4, 100, 128)[..., ::2], good)
    assert "for q" in hopper.applies(x(1, 4, 64, 100).transpose(2, 3), good, good)
    assert "multiple of nheads_kv, got 4 and 3" in hopper.applies(good, x(1, 3, 100, 64), x(1, 3, 100, 64))


def test_forward_says_why_it_refuses():
    x = torch.zeros(1, 1, 8, 64)
    with pytest.raises(ValueError, match="must be inputs of the Hopper kernel, which needs a Hopper GPU"):
        hopper.forward(x, x, x, False, 1.0)


# --- right, on a Hopper GPU ------------------------------------------------------------------------------------------


def check(q, k, v, causal, scale=None, options=None):
    """Hold out and lse against the float64 oracle, by the rule of `attention_cases`."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with poisoned():
        out, lse = hopper.forward(q, k, v, causal, scale, options)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    exact, exact_lse = reference.attention(
        q.double(), k.double(), v.double(), causal=causal, scale=scale, return_lse=True
    )
    seen = seen_by(q.shape[2], k.shape[2], causal, place=q.device).expand(*q.shape[:3], k.shape[2])
    plain, plain_lse = plain_attention(q, k, v, seen, scale)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    some = seen.any(-1)
    assert (out[~some] == 0).all()
    assert (lse[~some] == -math.inf).all()
    assert out.isfinite().all()
    assert error(out, exact) <= allowed(plain, exact, q.dtype)
    if some.any():
        assert error(lse[some], exact_lse[some]) <= allowed(plain_lse[some], exact_lse[some], q.dtype)


def qkv(lengths, head_dim, head_dim_v=None, dtype=torch.bfloat16, nheads=(4, 2), layouts=("contiguous",) * 3):
    batch = 32 if lengths[0] < 8 else 2
    return (
        tensor((batch, nheads[0], lengths[0], head_dim), dtype, layouts[0], seed=1),
        tensor((batch, nheads[1], lengths[1], head_dim), dtype, layouts[1], seed=2),
        tensor((batch, nheads[1], lengths[1], head_dim_v or head_dim), dtype, layouts[2], seed=3),
    )


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 128])
    @pytest.mark.parametrize("causal", [False, True])
    def test_matrix(self, dtype, head_dim, causal):
        for lengths in LENGTHS:
            check(*qkv(lengths, head_dim, dtype=dtype), causal)

    @pytest.mark.parametrize("scale", [0.0, 0.3, -0.2])
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("causal", [False, True])
    def test_scales(self, scale, head_dim, causal):
        for lengths in [(300, 428), (500, 333), (1500, 1500)]:
            check(*qkv(lengths, head_dim), causal, scale)

    @pytest.mark.parametrize("shape", [(64, 128), (128, 64), (16, 8)])
    def test_head_dims_that_differ(self, shape):
        for causal in (False, True):
            check(*qkv((600, 700), *shape), causal)

    def test_layouts(self):
        for layouts in [("transposed", "sliced", "transposed"), ("sliced", "transposed", "contiguous")]:
            inputs = qkv((300, 428), 64, nheads=(4, 4), layouts=layouts)
            assert hopper.applies(*inputs) is None
            for causal in (False, True):
                check(*inputs, causal)

    def test_nothing_to_do(self):
        q, k, v = qkv((9, 5), 64)
        out, lse = hopper.forward(q, k[:, :, :0], v[:, :, :0], False, 1.0)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
        assert hopper.forward(q[:, :, :0], k, v, True, 1.0)[0].shape == (2, 4, 0, 64)

    @pytest.mark.parametrize("causal", [False, True])
    def test_the_same_bits_1000_times_while_another_stream_works(self, causal):
        q, k, v = (torch.randn(2, 8, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        first = hopper.forward(q, k, v, causal, 0.125)
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        for _ in range(10):
            results = []
            for _ in range(50):
                for stream in streams:
                    with torch.cuda.stream(stream):
                        results.append(hopper.forward(q, k, v, causal, 0.125))
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for one in results for a, b in zip(one, first, strict=True))

    def test_cuda_graphs_that_run_side_by_side(self):
        q, k, v = (torch.randn(2, 8, 1500, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        first = hopper.forward(q, k, v, True, 0.125)
        graphs, results = [], []
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                results.append(hopper.forward(q, k, v, True, 0.125))
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        for _ in range(20):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for one in results for a, b in zip(one, first, strict=True))


# --- the public op ---------------------------------------------------------------------------------------------------


def test_where_it_does_not_apply_the_portable_kernel_does_unless_it_is_forced():
    q = torch.randn(1, 2, 20, 16)
    place = device.kernel_device()
    q = q.to(place)
    assert backend_of(q, q, q, causal=True) == "portable"
    with pytest.raises(ValueError, match=r'got "hopper", which (needs a Hopper GPU|needs float16)'):
        flash_attention(q, q, q, backend="hopper")


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_the_op_takes_it_and_its_gradients_are_right(head_dim, causal):
    q, k, v = (tensor((1, 4, n, head_dim), torch.bfloat16, seed=s) for s, n in enumerate((1100, 1300, 1300)))
    assert backend_of(q, k, v, causal=causal) == "hopper"
    attention_cases.check(q, k, v, causal=causal)
    ours = flash_attention(q, k, v, causal=causal)
    assert torch.equal(ours, flash_attention(q, k, v, causal=causal, backend="hopper"))
    portable = flash_attention(q, k, v, causal=causal, backend="portable")
    assert not torch.equal(ours, portable), "two kernels with the same bits: which one ran?"
    torch.testing.assert_close(ours, portable, rtol=2e-2, atol=2e-2)
    assert backend_of(q, k, v, window=(100, 0)) == "portable"
    with pytest.raises(ValueError, match="knows no window"):
        flash_attention(q, k, v, window=(100, 0), backend="hopper")
