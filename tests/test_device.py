"""device.py, compiler.py and first_kernel.py: import behaviour in fresh processes, gates, the report, compiling."""

import ast
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import flashlib
from flashlib import device

first_kernel = pytest.importorskip("flashlib.first_kernel", reason="kernels do not run here", exc_type=RuntimeError)
_double_kernel, double = first_kernel._double_kernel, first_kernel.double
tl, triton = first_kernel.tl, first_kernel.triton

ROOT = Path(flashlib.__file__).resolve().parent.parent
TRITON_HERE = sys.platform.startswith("linux")
# Triton before 3.7 does not interpret with numpy 2.4 and later; compiled, it runs.
INTERPRETS = device._numbers(device._version("triton"))[:2] >= (3, 7) or device._numbers(np.__version__)[:2] < (2, 4)

# Put before a child's code: the child has no GPU, whatever the machine has.
WITHOUT_GPU = """
import ctypes
def refuse(name, *args, **kwargs):
    raise OSError(name)
ctypes.CDLL, _real = refuse, ctypes.CDLL
import flashlib
ctypes.CDLL = _real
"""
# What every kernel module begins with.
KERNEL_MODULE = "from flashlib.device import tl, triton"
BLOCK_TRITON = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def python(code, **env):
    """Run code in a fresh process and return its output; an environment value of None takes the variable away."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": None, **env}
    environ = {key: value for key, value in environ.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal(code, **env):
    """Run code that must end in a RuntimeError, and return its message, which must be one line."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    text = python(f"try:\n{body}\nexcept RuntimeError as error:\n    print(error)\nelse:\n    print('imported')", **env)
    assert text != "imported"
    assert "\n" not in text
    return text


# --- importing the package -------------------------------------------------------------------------------------------


def test_import_brings_in_neither_torch_nor_triton_nor_numpy():
    code = "import sys, flashlib; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    assert python(code) == "[]"


def test_import_is_quick():
    # Processor time, so that a busy machine does not decide; importing torch takes more than a second of it.
    code = "import time; t = time.process_time(); import flashlib; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.1


def test_modules_are_fetched_on_first_use():
    code = """
        import sys, flashlib
        assert "flashlib.style" not in sys.modules
        print(flashlib.style.BLUE, "bench" in dir(flashlib), type(flashlib.report()).__name__)
        try:
            flashlib.no_such_module
        except AttributeError as error:
            print(error)
    """
    assert python(code) == "#0072B2 True Report\nmodule 'flashlib' has no attribute 'no_such_module'"


def test_without_a_gpu_the_interpreter_is_switched_on():
    code = "import os; print(os.environ['TRITON_INTERPRET'], flashlib.device.interpreting())"
    assert python(WITHOUT_GPU + code) == "1 True"


@pytest.mark.parametrize("hidden", ["", "-1", "no", "99"])
def test_hidden_gpus_count_as_none(hidden):
    code = "import os, flashlib; print(os.environ['TRITON_INTERPRET'])"
    assert python(code, CUDA_VISIBLE_DEVICES=hidden) == "1"


@pytest.mark.parametrize(("value", "on"), [("0", False), ("", False), ("1", True), ("true", True), ("2", False)])
def test_a_value_that_is_set_is_respected(value, on):
    code = "import os; print(os.environ['TRITON_INTERPRET'], flashlib.device.interpreting())"
    assert python(WITHOUT_GPU + code, TRITON_INTERPRET=value) == f"{value} {on}".strip()


@pytest.mark.skipif(not TRITON_HERE, reason="Triton has wheels for Linux only")
def test_our_reading_of_the_variable_is_tritons():
    code = """
        import os, triton
        from flashlib import device
        for value in ("1", "true", "TRUE", "on", "yes", "y", "0", "", "2", "false", "off"):
            os.environ["TRITON_INTERPRET"] = value
            print(triton.knobs.runtime.interpret == (value.lower() in device._ON), end=" ")
    """
    assert set(python(code, TRITON_INTERPRET="0").split()) == {"True"}


@pytest.mark.skipif(not INTERPRETS, reason="this Triton does not interpret with this numpy")
def test_triton_first_is_refused_when_a_kernel_is_needed_and_not_before():
    first = "import triton\n" + WITHOUT_GPU
    assert python(first + "import flashlib.style, os; print('TRITON_INTERPRET' in os.environ)") == "False"
    said = refusal(first + KERNEL_MODULE)
    assert said.startswith("Triton was imported before flashlib")
    assert "import flashlib first" in said
    assert python(first + "print(flashlib.report().problem)") == said


@pytest.mark.skipif(not TRITON_HERE, reason="Triton has wheels for Linux only")
def test_the_other_mode_is_refused_too():
    code = "import os, triton\nos.environ['TRITON_INTERPRET'] = '{}'\n" + KERNEL_MODULE
    assert "interpreter mode" in refusal(code.format("0"), TRITON_INTERPRET="1")
    assert "before flashlib" in refusal(code.format("1"), TRITON_INTERPRET="0")


@pytest.mark.skipif(not INTERPRETS, reason="this Triton does not interpret with this numpy")
def test_torch_first_works():
    code = "import torch\n" + WITHOUT_GPU + "import flashlib.first_kernel as f; print(f.double(torch.ones(3)).tolist())"
    assert python(code) == "[2.0, 2.0, 2.0]"


def test_without_triton_part_one_works_and_kernels_say_what_to_do():
    code = (
        BLOCK_TRITON
        + "import flashlib.style, flashlib.check, flashlib.bench; r = flashlib.report(); print(r.parts['I'])"
    )
    assert python(code) == "runs"
    said = refusal(BLOCK_TRITON + KERNEL_MODULE)
    assert f"pip install triton=={device.COURSE_TRITON}" in said
    said = refusal(
        BLOCK_TRITON + "import flashlib.device as d; d.compile_for('flashlib.first_kernel:_double_kernel', {})"
    )
    assert "pip install" in said


@pytest.mark.parametrize(("system", "name", "instead"), [("darwin", "macOS", "hosted"), ("win32", "Windows", "WSL")])
def test_macos_and_windows_run_part_one_and_name_what_runs_the_rest(system, name, instead):
    # The platform is changed after ctypes is in, which asks for it.
    fake = "import ctypes, sys\n" + BLOCK_TRITON + f"sys.platform = {system!r}\n"
    said = refusal(fake + KERNEL_MODULE)
    assert said.startswith(f"Triton has no build for {name}")
    assert instead in said
    shown = python(fake + "import flashlib, flashlib.style; print(flashlib.report())")
    assert re.search(r"part I +runs", shown)
    assert re.search(r"part II +Triton has no build", shown)
    assert re.search(r"kernels run +not here", shown)


def test_a_triton_that_does_not_import_is_named(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libfoo is missing')")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    assert "libfoo is missing" in refusal(path + KERNEL_MODULE)


PART_ONE = sorted(path for path in (ROOT / "notebooks").glob("*.ipynb") if path.name < "07")


def code_cells(path):
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_part_one_imports_no_triton():
    lines = []
    for path in PART_ONE:
        for cell in code_cells(path):
            nodes = [node for node in ast.parse(cell).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            lines += [ast.unparse(node) for node in nodes]
    python(BLOCK_TRITON + "\n".join(dict.fromkeys(lines)))


def test_chapter_00_runs_where_triton_does_not():
    cells = code_cells(ROOT / "notebooks" / "00_start_here.ipynb")
    # What only Jupyter does is left out: a figure is drawn and not shown.
    fake = (
        "import matplotlib, torch\nmatplotlib.use('Agg')\nimport matplotlib.pyplot\n"
        + BLOCK_TRITON
        + "sys.platform = 'darwin'\n"
    )
    shown = python(fake + "\n".join(cells).replace("plt.show()", ""))
    assert "Triton has no build for macOS" in shown
    assert "00.1 ● The bytes of S: not attempted yet" in shown


# --- which GPU, which Triton -----------------------------------------------------------------------------------------


def card(name="NVIDIA H200", capability=90, uuid="GPU-aaaa-1"):
    return device.Gpu(name, capability, 140 * 2**30, uuid)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine: its GPUs, its driver's and PyTorch's CUDA versions, its mode."""

    def pretend(found=(), driver=13, torch_cuda=13, interpret="0", **versions):
        versions = {"triton": device.COURSE_TRITON} | versions
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(device, "_driver", lambda: (list(found), driver))
        monkeypatch.setattr(device, "_torch_cuda", lambda: torch_cuda)
        monkeypatch.setattr(device, "interpreting", lambda: interpret == "1")
        real = device._version
        monkeypatch.setattr(device, "_version", lambda name: versions.get(name) or real(name))
        if interpret is None:
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        else:
            monkeypatch.setenv("TRITON_INTERPRET", interpret)

    return pretend


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (None, "ab"),
        ("", ""),
        ("0", "a"),
        ("1,0", "ba"),
        ("1, 0", "ba"),
        ("0,-1,1", "a"),
        ("2", ""),
        ("GPU-bb", "b"),
        ("GPU-cc", ""),
        ("MIG-1234", "a"),
        ("no", ""),
    ],
)
def test_visible_devices(setting, names):
    found = [card("a", 80, "GPU-aaaa"), card("b", 90, "GPU-bbbb")]
    assert "".join(gpu.name for gpu in device._visible(found, setting)) == names


def test_gpu_problem_names_the_reason(machine, monkeypatch):
    machine([card()])
    assert device.gpu_problem() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "hides every GPU" in device.gpu_problem()
    for pretend, words in [
        ({"found": []}, "no NVIDIA GPU"),
        ({"found": [card("V100", 70)]}, "V100 has compute capability 7.0"),
        ({"found": [card()], "torch_cuda": None}, "CPU build"),
        ({"found": [card()], "driver": 12}, "update the driver"),
    ]:
        machine(**pretend)
        assert words in device.gpu_problem()
    machine([card("V100", 70), card("T4", 75)])
    assert device.gpu_problem() is None


@pytest.mark.parametrize(
    ("version", "numpy", "interpret", "words"),
    [
        ("3.5.1", "2.3.0", "1", "too old"),
        ("3.6.0", "2.4.6", "1", "cannot interpret kernels with numpy 2.4.6"),
        ("3.6.0", "2.3.5", "1", None),
        ("3.6.0", "2.5.2", "0", None),
        ("3.7.1", "2.4.6", "1", None),
        ("3.10.0", "2.4.6", "1", None),
        ("3.8.0+git1234", "2.4.6", "1", None),
    ],
)
def test_triton_versions(machine, version, numpy, interpret, words):
    machine([], interpret=interpret, triton=version, numpy=numpy)
    problem = device.kernel_problem()
    assert problem is None if words is None else words in problem


def test_report_of_a_machine_without_gpu(machine):
    machine([], interpret="1")
    report = flashlib.report()
    assert (report.gpu, report.interpreter, report.bf16, report.problem) == (None, True, True, None)
    assert "interpreter" in report.parts["II"]
    assert "no NVIDIA GPU" in repr(report)


def test_report_of_a_hopper(machine):
    machine([card()])
    report = flashlib.report()
    assert (report.gpu.name, report.interpreter, report.bf16) == ("NVIDIA H200", False, True)
    assert set(report.parts.values()) == {"runs"}
    assert "compute capability 9.0, 140 GiB" in repr(report)


def test_report_of_a_t4_says_slow_and_no_bf16(machine):
    machine([card("Tesla T4", 75)])
    report = flashlib.report()
    assert not report.bf16
    assert "float16 and float32 only, and slow" in report.parts["II"]
    assert report.parts["IV"].startswith("to read")


def test_report_of_a_v100_says_interpreter(machine):
    machine([card("V100", 70)], interpret="1")
    report = flashlib.report()
    assert report.interpreter
    assert "V100 has compute capability 7.0" in repr(report)


def test_report_of_an_interpreter_switched_off_without_a_gpu(machine):
    machine([], interpret="0")
    assert "switches the interpreter off" in flashlib.report().problem


# --- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "*bf16", "bfloat16"])
def test_turing_has_no_bf16(dtype):
    with pytest.raises(
        RuntimeError, match=r"bfloat16 needs .* 8\.0 or later, this one has 7\.5; use float16 or float32"
    ):
        device.check_capability((7, 5), dtype)
    device.check_capability(80, dtype)


@pytest.mark.parametrize("dtype", [None, torch.float16, "fp32"])
def test_turing_runs_the_others_and_volta_none(dtype):
    device.check_capability(75, dtype)
    with pytest.raises(RuntimeError, match=r"7\.5 or later, this one has 7\.0"):
        device.check_capability((7, 0), dtype)


@pytest.mark.parametrize("bad", ["9.0", 7.5, (7,), (7, 5, 0), ("7", "5"), None])
def test_a_capability_is_a_number_or_a_pair(bad):
    with pytest.raises(ValueError, match="capability must be a number such as 75 or a pair"):
        device.check_capability(bad)


def test_a_cpu_tensor_is_refused_when_the_interpreter_is_off(machine):
    x = torch.ones(3)
    machine([card()])
    with pytest.raises(RuntimeError, match="x is on the cpu, and Triton's interpreter is off: move it to the GPU"):
        double(x)
    machine([])
    with pytest.raises(RuntimeError, match="restart Python with TRITON_INTERPRET=1"):
        double(x)


# --- the first kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_double_is_exact(n, dtype):
    device_name = device.kernel_device()
    if device_name == "cuda" and torch.cuda.get_device_capability() < (8, 0) and dtype == torch.bfloat16:
        pytest.skip("this GPU has no bfloat16")
    # NaN around the data: nothing outside is read into it.
    buffer = torch.full((n + 16,), float("nan"), dtype=dtype, device=device_name)
    buffer[8 : n + 8] = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = buffer[8 : n + 8]
    assert torch.equal(double(x, block=64), 2 * x)
    assert buffer[:8].isnan().all()
    assert buffer[n + 8 :].isnan().all()


@pytest.mark.parametrize("n", [1, 7, 64, 65])
def test_nothing_is_written_past_the_end(n):
    where = device.kernel_device()
    out = torch.full((n + 128,), float("nan"), device=where)
    _double_kernel[(triton.cdiv(n, 64),)](torch.ones(n + 128, device=where), out, n, BLOCK=64)
    assert (out[:n] == 2).all()
    assert out[n:].isnan().all()


def test_double_takes_strided_input():
    x = torch.arange(20.0, device=device.kernel_device())[::3]
    assert torch.equal(double(x), 2 * x)


@triton.jit
def _count_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    total = 0
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + offs, mask=offs < n, other=0))
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, total, mask=total < 0)


def test_a_loop_of_run_time_length_a_masked_load_and_a_masked_scalar_store():
    where = device.kernel_device()
    x = torch.ones(13, dtype=torch.int32, device=where)
    out = torch.full((2,), -5, dtype=torch.int32, device=where)
    _count_kernel[(1,)](x[:11], out, 11, BLOCK=4)
    assert out.tolist() == [11, -5]


def test_six_numbers_in_blocks_of_two():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=device.kernel_device())
    assert double(x, block=2).tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


def test_a_numpy_array_among_the_globals_does_not_disturb_a_launch():
    _double_kernel.fn.__globals__["z"] = np.zeros(10)
    try:
        x = torch.ones(5, device=device.kernel_device())
        assert torch.equal(double(x), 2 * x)
    finally:
        del _double_kernel.fn.__globals__["z"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"x": [1.0]}, "x must be a tensor of one dimension, got list"),
        ({"x": torch.ones(2, 2)}, r"x must be a tensor of one dimension, got shape \(2, 2\)"),
        ({"x": torch.ones(3, dtype=torch.int32)}, "x must have dtype .*, got torch.int32"),
        ({"x": torch.ones(3), "block": 100}, "block must be a power of two .*, got 100"),
        ({"x": torch.ones(3), "block": 0}, r"block must be a power of two up to 2\*\*20, got 0"),
        ({"x": torch.ones(3), "block": 2**21}, "block must be a power of two .*, got 2097152"),
        (
            {"x": torch.empty(2**31 - 256, dtype=torch.float16, device="meta")},
            "x must have fewer than .*, got 2147483392",
        ),
    ],
)
def test_double_refuses(bad, words):
    with pytest.raises(ValueError, match=words):
        double(**bad)


# --- compiling for a GPU that is not here ----------------------------------------------------------------------------

KERNEL = "flashlib.first_kernel:_double_kernel"
SIGNATURE = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
BLOCK = {"BLOCK": 256}

# Kernels for the compiler only; a child process imports them by name.
KERNELS = """
from flashlib.device import tl, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def product(a_ptr, b_ptr, out_ptr, strides, fn: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr = 64):
    rows = tl.arange(0, BLOCK)[:, None] * strides[0]
    columns = tl.arange(0, BLOCK)[None, :] * strides[1]
    a, b = tl.load(a_ptr + rows + columns), tl.load(b_ptr + rows + columns)
    tl.store(out_ptr + rows + columns, fn(tl.dot(a, b)).to(dtype))


@triton.jit
def broken(x_ptr, BLOCK: tl.constexpr):
    for i in range(BLOCK):
        if i > 2:
            break
    tl.store(x_ptr, i)


@triton.jit
def killer(x_ptr, n):
    tl.store(x_ptr, n + die())


@triton.constexpr_function
def die():
    import os

    os._exit(7)


@gluon.jit
def by_hand(out_ptr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out_ptr + gl.arange(0, BLOCK, layout), gl.full([BLOCK], 7, gl.int32, layout))


not_a_kernel = 3
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "ch00_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    return "ch00_kernels"


def test_the_versions_that_compiling_was_tried_with():
    import triton

    # Triton's private modules may move in any release: after a change run this file, then add the version to the list.
    assert triton.__version__.partition("+")[0] in device.CHECKED_TRITON
    files = [*ROOT.glob("flashlib/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("notebooks/*.ipynb")]
    private = re.compile(r"triton\.(?:compiler|backends|runtime|_C|experimental\.gluon\._runtime)\b")
    assert [f.name for f in files if private.search(f.read_text())] == ["compiler.py"]


def test_kernels_do_without_what_is_deprecated_or_cannot_be_interpreted():
    # libdevice and a tuner with several configurations need a GPU; block pointers are being removed.
    files = [f for f in (*ROOT.glob("flashlib/**/*.py"), *ROOT.glob("benchmarks/*.py")) if f.name != "meter.py"]
    assert [f.name for f in files if re.search(r"libdevice|make_block_ptr|triton\.autotune", f.read_text())] == []


def test_the_cell_for_hosted_notebooks_ends_with_the_versions():
    (cell,) = re.findall(r"^```text\n(!git clone .*?)```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    found = re.fullmatch(r'!python -c "(.*)"', cell.splitlines()[-1])
    ran = subprocess.run([sys.executable, "-c", found[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    for name, package in (("NumPy", np), ("PyTorch", torch)):
        assert re.search(rf"^{name} +{re.escape(package.__version__)}$", ran.stdout, re.MULTILINE)


def test_compile_for_five_gpus(kernels):
    capabilities = (75, 80, 90, 100, 120)
    job = {
        "kernel": f"{kernels}:product",
        "signature": {"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp16", "strides": ("i32", 1)},
        "constexprs": {"fn": f"{kernels}:helper", "dtype": "tl.float16"},
        "options": {"num_warps": 4, "num_stages": 2},
        "divisible": "strides",
    }
    done = device.compile_many([job | {"capability": capability} for capability in capabilities])
    assert [c.capability for c in done] == list(capabilities)
    expected = [[], ["mma.sync"], ["wgmma.mma_async"], ["tcgen05.mma"], ["mma.sync"]]
    assert [c.matrix_instructions for c in done] == expected
    for c in done:
        assert f".target sm_{c.capability}" in c.ptx
        assert "tt.func" in c.ttgir
        assert c.metadata["num_warps"] == 4
        assert c.shared_bytes > 0
        assert c.registers is None or 0 < c.registers <= 255
        # Without matrix instructions (75) the product spills; 100 uses a few bytes without harm.
        assert c.stack_bytes in (None, 0) or c.capability in (75, 100)
        assert f"sm_{c.capability}: 4 warps" in repr(c)


def test_the_first_kernel_compiles():
    job = {"kernel": KERNEL, "signature": SIGNATURE, "constexprs": BLOCK}
    plain, divisible = device.compile_many([job, job | {"divisible": ["n"]}])
    assert plain.shared_bytes == divisible.shared_bytes == 0
    # 256 floats and 128 threads: two a thread, in one load if the mask cannot fall between them.
    assert "ld.global.v2" not in plain.ptx
    assert "ld.global.v2" in divisible.ptx


def test_a_gluon_kernel_compiles(kernels):
    compiled = device.compile_for(f"{kernels}:by_hand", {"out_ptr": "*i32"}, {"BLOCK": 128}, 90)
    assert "st.global" in compiled.ptx


def test_a_compile_error_shows_the_kernel_and_the_place(kernels):
    with pytest.raises(device.CompileError) as caught:
        device.compile_for(f"{kernels}:broken", {"x_ptr": "*i32"}, {"BLOCK": 8}, 80)
    message = str(caught.value)
    assert message.startswith(f"{kernels}:broken does not compile for sm_80")
    assert "break" in message
    assert "Traceback" not in message
    assert "site-packages" not in message


def test_a_compiler_that_dies_is_reported(kernels):
    with pytest.raises(device.CompileError, match=f"ended with code 7 at {kernels}:killer"):
        device.compile_for(f"{kernels}:killer", {"x_ptr": "*i32", "n": "i32"}, None, 80)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"kernel": "flashlib.first_kernel"}, "kernel must be a string 'module:name'"),
        ({"kernel": _double_kernel}, "kernel must be a string 'module:name'"),
        ({"signature": None}, "signature must be a dict"),
        ({"signature": {"x_ptr": "float*"}}, "signature must give x_ptr a type"),
        ({"signature": {"x_ptr": 1.5}}, "signature must give x_ptr a type"),
        ({"constexprs": {"BLOCK": object()}}, "constexprs must give BLOCK a number"),
        ({"constexprs": [256]}, "constexprs must be a dict"),
        ({"options": {"num_warps": 3}}, "options must give num_warps a power of two, got 3"),
        ({"capability": 70}, r"capability must be one of \(75,.*got 70"),
        ({"capability": "sm_90"}, "capability must be one of"),
        ({"capability": 90.0}, "capability must be one of"),
        ({"constexprs": {"BLOCK": (object(),)}}, "constexprs must give BLOCK a number"),
        ({"divisible": 5}, "divisible must be names of arguments, got 5"),
        ({"divisible": [5]}, "divisible must be names of arguments"),
    ],
)
def test_bad_arguments_are_refused_before_a_child_starts(bad, words, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    arguments = {"kernel": KERNEL, "signature": SIGNATURE, "constexprs": BLOCK, "capability": 90, "options": None} | bad
    with pytest.raises(ValueError, match=words):
        device.compile_for(**arguments)


@pytest.mark.parametrize(
    ("jobs", "words"), [("x", "jobs must be a list of dict"), ([1], "jobs must be"), ([{}], "kernel must be a string")]
)
def test_jobs_are_dicts(jobs, words):
    with pytest.raises(ValueError, match=words):
        device.compile_many(jobs)


def test_bf16_is_refused_for_turing_though_it_compiles():
    with pytest.raises(RuntimeError, match="use float16 or float32"):
        device.compile_for(KERNEL, SIGNATURE | {"x_ptr": "*bf16"}, BLOCK, 75)


def test_bad_arguments_that_only_the_child_sees(kernels):
    # One process for all: each job is tried alone, in the child's own function.
    cases = [
        ({"kernel": "flashlib.nope:x"}, "kernel must be importable"),
        ({"kernel": f"{kernels}:not_a_kernel"}, "kernel must name a @triton.jit function"),
        (
            {"signature": {"x_ptr": "*fp32"}},
            "signature must give every argument of _double_kernel, got none for out_ptr",
        ),
        ({"constexprs": {}}, "constexprs must give every argument of _double_kernel, got none for BLOCK"),
        ({"constexprs": {"BLOCK": 256, "M": 1}}, "constexprs must name arguments of _double_kernel"),
        ({"divisible": ["k"]}, "divisible must name arguments of _double_kernel"),
        ({"options": {"warps": 4}}, "options must be Triton's"),
    ]
    base = {"kernel": KERNEL, "signature": SIGNATURE, "constexprs": BLOCK}
    code = f"""
        from flashlib import compiler
        for bad in {[bad for bad, _ in cases]!r}:
            try:
                compiler._compiled(compiler._checked({base!r} | bad))
            except ValueError as error:
                print(str(error).splitlines()[0])
    """
    path = os.pathsep.join([str(ROOT), *sys.path])
    # Triton 3.9 warns unless the second variable is set.
    said = python(code, TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="1", PYTHONPATH=path).splitlines()
    assert len(said) == len(cases)
    for line, (_, words) in zip(said, cases, strict=True):
        assert words in line
    with pytest.raises(ValueError, match=r"kernel must be importable as 'module:name', got flashlib\.nope:x"):
        device.compile_for("flashlib.nope:x", SIGNATURE)


def test_the_platform_of_the_report_is_this_one():
    assert platform.machine() in flashlib.report().platform


# --- how many programs fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "registers", "num_warps", "shared_bytes", "programs"),
    [
        (90, 164, 4, 50176, 3),
        (90, 32, 4, 0, 16),
        # A warp gets its registers from one of four parts of 16,384: two of 7,168 fit there, and not nine in all.
        (90, 224, 1, 0, 8),
        # No more than 32 programs, 16 or 24 on smaller cards, however small they are.
        (90, 32, 1, 0, 32),
        (86, 32, 1, 0, 16),
        (89, 32, 1, 0, 24),
        (86, 32, 8, 0, 6),
        (86, 255, 8, 114688, 0),
        (75, 32, 4, 32768, 2),
        (80, 32, 4, 32768, 4),
    ],
)
def test_programs_that_fit_on_a_multiprocessor(capability, registers, num_warps, shared_bytes, programs):
    from flashlib.compiler import Compiled

    sizes = {"registers": registers, "stack_bytes": 0, "shared_bytes": shared_bytes}
    kernel = Compiled("m:k", capability, "3.7.1", ttgir="", ptx="", metadata={"num_warps": num_warps}, **sizes)
    assert kernel.programs_per_multiprocessor == programs
