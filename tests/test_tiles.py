"""Tiles: the table fits the cards it is for, compiled without any of them, and the helpers around it."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_jobs import FEATURES, job

from flashlib import tiles
from flashlib.compiler import compile_many
from flashlib.device import triton

LIMIT_BYTES = {
    cap: 1024 * kib for cap, kib in ((75, 64), (80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
}
KERNELS = ("forward", "dkdv", "dq")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def check_fits(jobs):
    for one, compiled in zip(jobs, compile_many(jobs, timeout_s=1200), strict=True):
        # `make compile-test` shows these lines: registers and stack of every kernel of the table.
        print(compiled, *(f"{name} {one['constexprs'][name]}" for name in ("HEAD_DIM", "CAUSAL", "DESCRIPTOR")))
        assert compiled.shared_bytes <= LIMIT_BYTES[one["capability"]], compiled
        short = "forward" in one["kernel"] and one["signature"]["out_ptr"] != "*fp32" and one["capability"] >= 80
        # Not where a Hopper tile, chosen for descriptors, is read through pointers: there head_dim 128 spills 150 B.
        if short and one["constexprs"]["DESCRIPTOR"] == (one["capability"] >= 90):
            assert compiled.stack_bytes <= 64, compiled


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_table_fits(capability):
    check_fits([job(kernel, "fp16", 128, True, capability) for kernel in ("forward", "dkdv")])


@pytest.mark.compile
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_whole_table_fits(capability, dtype):
    if dtype == "bf16" and capability == 75:
        pytest.skip("Turing has no bfloat16")
    widest = 128 if capability == 75 else 256
    # bfloat16 has float16's rows and differs in few instructions: the forward, whose stack is bounded, is enough.
    kernels = KERNELS[:1] if dtype == "bf16" else KERNELS
    sizes = [
        (kernel, dtype, d, causal) for kernel in kernels for d in (16, 32, 64, 128, 256) for causal in (False, True)
    ]
    jobs = [job(*size, capability) for size in sizes if size[2] <= widest]
    if capability >= 90:
        # Where there are descriptors, short and oddly laid out inputs are still read through pointers.
        jobs += [job(*size, capability, descriptors=False) for size in sizes if size[3]]
    check_fits(jobs)


@pytest.mark.parametrize(
    ("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, "tcgen05.mma")]
)
def test_the_matrix_unit_is_used(capability, instruction):
    (compiled,) = compile_many([job("forward", "fp16", 64, False, capability)])
    assert instruction in compiled.matrix_instructions


def unwritten_registers(ptx, folder):
    """Assemble for Hopper and return the uniform registers that are read before, in the text, they are written."""
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    subprocess.run([TOOLS / "ptxas", "-arch=sm_90a", source, "-o", cubin], check=True)
    listing = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    written, found = set(), set()
    for op, rest in re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);", listing, re.MULTILINE):
        first, *others = [part.strip() for part in rest.split(",")]
        is_write = re.fullmatch(r"UR\d+", first) and re.match(r"U|R2UR|S2UR|CS2UR|REDUX|VOTEU", op)
        for operand in others if is_write else [first, *others]:
            if "desc" not in operand:
                found |= {int(n) for n in re.findall(r"\bUR(\d+)", operand)} - written
        if is_write:
            width = 2 if ".64" in op or "WIDE" in op else 1
            written |= {int(first[2:]) + i for i in range(width)}
    return found


@pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="this Triton carries no disassembler")
@pytest.mark.parametrize("aligned", [True, False])
def test_the_assembler_writes_before_it_reads(aligned, tmp_path):
    # head_dim 40 and 24: in tiles of different width this is what CUDA 12.8's ptxas got wrong; see tiles.columns_of.
    one = job("forward", "fp16", 40, False, 90, descriptors=False)
    columns, columns_v = tiles.columns_of(40, 24, 2)
    one["constexprs"] |= {"HEAD_DIM_V": 24, "COLS": columns, "COLS_V": columns_v}
    one["divisible"] = one["divisible"] if aligned else []
    (compiled,) = compile_many([one])
    assert not unwritten_registers(compiled.ptx, tmp_path)


@pytest.mark.parametrize(
    ("dims", "itemsize", "columns"),
    [((64, 64), 2, (64, 64)), ((40, 24), 2, (64, 64)), ((256, 16), 2, (256, 64)), ((16, 24), 4, (32, 32))],
)
def test_columns(dims, itemsize, columns):
    assert tiles.columns_of(*dims, itemsize) == columns


def test_offsets_that_need_64_bits():
    assert not tiles.wide((2**22, 1))
    assert tiles.wide((1, 2**23))


@pytest.mark.parametrize(
    ("view", "answer"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x[..., ::2], False),
        (lambda x: x[..., 1:17], False),
        (lambda x: x[:, :1].expand(2, 4, 32, 40), False),
        (lambda x: x[:, :, :0], False),
        (lambda x: x.transpose(2, 3), False),
        (lambda x: x[..., :20].contiguous(), False),
    ],
)
def test_what_the_copy_engine_can_read(view, answer):
    x = torch.zeros(2, 4, 32, 40, dtype=torch.float16)
    assert tiles.describable(view(x), 90) == answer
    assert not tiles.describable(x, 80)


def test_a_card_that_is_too_small_says_so():
    with pytest.raises(RuntimeError, match="too little shared memory for head_dim 256"):
        tiles.tile_for("forward", 75, 2, 256, False)


def test_three_forward_programs_fit_on_a_multiprocessor_of_a_hopper_gpu():
    # Chapter 08 says so: at one stage K and V share a buffer. 228 KiB and 65536 registers a multiprocessor.
    (compiled,) = compile_many([job("forward", "bf16", 128, False, 90)])
    assert 3 * compiled.shared_bytes <= 228 * 1024 < 5 * compiled.shared_bytes
    assert 3 * 128 * compiled.registers <= 65536
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_features_compile_and_fit(capability):
    # One kernel each, in turn, so that the test stays short: what is a feature's own is in functions that all share.
    kernels = ("forward", "dkdv", "dq")
    jobs = [
        job("forward" if feature == "sinks" else kernels[i % 3], "bf16", 128, i % 2 == 0, capability, feature=feature)
        for i, feature in enumerate(FEATURES)
    ]
    most = {80: 163, 90: 227}[capability] * 1024
    for feature, compiled in zip(FEATURES, compile_many(jobs), strict=True):
        assert compiled.shared_bytes <= most, feature
        assert compiled.stack_bytes <= 128, feature
