"""What this machine can run: finds the GPU without starting CUDA, and settles how Triton runs kernels.

Triton runs a kernel in one of two ways: compiled for a GPU, or by its interpreter, line by line in NumPy on the CPU.
Which of the two is fixed for the process when Triton is imported, so it has to be settled before.

Kernel modules begin with `from flashlib.device import tl, triton`. That is Triton itself, or a RuntimeError whose one
line says why kernels cannot be imported here and what to do. The error comes there and not with `import flashlib`:
part I needs no Triton, and PyTorch may import it at any time. `compile_for` compiles for GPUs that are not here.

Source: NVIDIA's NVML API reference (device queries), CUDA C++ Programming Guide (CUDA_VISIBLE_DEVICES), and Triton's
documentation (Debugging Triton: TRITON_INTERPRET).
"""

import dataclasses
import functools
import importlib
import os
import re
import sys
from pathlib import Path

COURSE_TORCH = "2.13.0"
COURSE_TRITON = "3.7.1"
OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = 75

# Where the driver's library lies: on the loader's path, or where WSL and hosted notebooks keep it; on Windows its name.
_NVML = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1", "/usr/lib64-nvidia/libnvidia-ml.so.1", "nvml.dll")
# The values that Triton itself takes for "on".
_ON = ("1", "true", "on", "yes", "y")
_NO_TRITON = {
    "darwin": ("macOS", "Linux or a hosted notebook"),
    "win32": ("Windows", "WSL (Linux inside Windows), Linux or a hosted notebook"),
}
_BF16 = ("bf16", "bfloat16", "torch.bfloat16")
_TURING = "float16 and float32 only, and slow: Triton emits no matrix instructions for compute capability 7.5"
_COMPILER = ("compile_for", "compile_many", "Compiled", "CompileError", "CAPABILITIES", "CHECKED_TRITON")


# --- the GPU -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU of this machine: `capability` is 90 for compute capability 9.0."""

    name: str
    capability: int
    memory_bytes: int
    uuid: str


def gpus():
    """List the NVIDIA GPUs that this process may use; CUDA is not started.

    Returns:
        list of Gpu, in the driver's order, those that CUDA_VISIBLE_DEVICES hides left out.
    """
    return _visible(_driver()[0], os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_problem():
    """Say in a few words why no GPU of this machine can run kernels; None if one can."""
    found, driver_cuda = _driver()
    visible = gpus()
    if not found:
        return "no NVIDIA GPU was found"
    if not visible:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every GPU"
    best = max(visible, key=lambda gpu: gpu.capability)
    if best.capability < OLDEST_CAPABILITY:
        return f"the {best.name} has compute capability {_dotted(best.capability)}, and Triton needs 7.5 or later"
    if not _installed("torch"):
        return "PyTorch is not installed"
    torch_cuda = _torch_cuda()
    if torch_cuda is None:
        return "the installed PyTorch is a CPU build"
    if torch_cuda > driver_cuda:
        return f"the GPU driver knows CUDA up to {driver_cuda}, and PyTorch needs {torch_cuda}: update the driver"
    return None


@functools.cache
def _driver():
    """Ask NVIDIA's management library: ([Gpu], the driver's CUDA major version)."""
    import ctypes

    for path in _NVML:
        try:
            nvml = ctypes.CDLL(path)
        except OSError:
            continue
        break
    else:
        return [], 0
    if nvml.nvmlInit_v2():
        return [], 0
    count, version = ctypes.c_uint(), ctypes.c_int()
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = [_ask(nvml, index) for index in range(count.value)]
    nvml.nvmlShutdown()
    return [gpu for gpu in found if gpu], version.value // 1000


def _ask(nvml, index):
    import ctypes

    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlDeviceGetUUID(handle, uuid, 96)
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    nvml.nvmlDeviceGetMemoryInfo(handle, memory)
    return Gpu(name.value.decode(), 10 * major.value + minor.value, memory[0], uuid.value.decode())


def _visible(found, setting):
    """Apply CUDA_VISIBLE_DEVICES: numbers or UUID prefixes, and the first entry that names no GPU ends the list."""
    if setting is None:
        return list(found)
    visible = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(found):
            gpu = found[int(entry)]
        elif entry.startswith("MIG-") and found:
            # A slice of a GPU. Its number says nothing about its parent, but slices of one machine are of one kind.
            gpu = found[0]
        else:
            gpu = next((g for g in found if entry.startswith("GPU-") and g.uuid.startswith(entry)), None)
        if gpu is None:
            break
        visible.append(gpu)
    return visible


def _dotted(capability):
    return f"{capability // 10}.{capability % 10}"


# --- what is installed -----------------------------------------------------------------------------------------------


def _installed(module):
    """Tell whether a module could be imported, without importing it."""
    import importlib.util

    if sys.modules.get(module) is not None:
        return True
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _version(package):
    """Return the version of an installed package as text, or None."""
    import importlib.metadata

    if not _installed(package):
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Other distributions carry the module too, such as a system's own build.
        return getattr(sys.modules.get(package), "__version__", None)


def _numbers(version):
    """Return the leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", version or "0")[0]))


def _torch_cuda():
    """Return the CUDA major version that PyTorch was built for, or None for a CPU build; PyTorch is not imported."""
    import importlib.util

    path = Path(importlib.util.find_spec("torch").origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)", path.read_text() if path.is_file() else "", re.MULTILINE)
    return int(match[1]) if match else None


# --- Triton's mode ---------------------------------------------------------------------------------------------------


def settle():
    """Switch Triton's interpreter on where no GPU can run kernels; `import flashlib` calls it once.

    It sets TRITON_INTERPRET=1. A value that is already set is respected, "0" too. Where Triton was imported before, the
    mode is fixed and nothing is set: `kernel_problem` then says what to do, as soon as a kernel is needed.
    """
    if "TRITON_INTERPRET" not in os.environ and sys.modules.get("triton") is None and gpu_problem() is not None:
        os.environ["TRITON_INTERPRET"] = "1"


def interpreting():
    """Tell whether this process runs kernels in Triton's interpreter (on the CPU) rather than compiled on a GPU."""
    language = sys.modules.get("triton.language")
    if language is not None:
        # Triton's own helpers were made in the mode that it was imported in.
        return not isinstance(language.sum, sys.modules["triton"].JITFunction)
    return os.environ.get("TRITON_INTERPRET", "").lower() in _ON


def kernel_device():
    """Return where the tensors of a kernel belong: "cpu" when kernels are interpreted, otherwise "cuda"."""
    return "cpu" if interpreting() else "cuda"


def kernel_problem():
    """Say in one line why kernels cannot be imported here and what to do; None if they can."""
    if not _installed("triton"):
        if sys.platform in _NO_TRITON:
            system, instead = _NO_TRITON[sys.platform]
            return f"Triton has no build for {system}: part I (00 to 06) runs here; for kernels use {instead}"
        return f"Triton is not installed: pip install triton=={COURSE_TRITON}; part I (00 to 06) runs without it"
    version = _version("triton")
    if version and _numbers(version)[:2] < OLDEST_TRITON:
        return f"Triton {version} is too old, 3.6 is the oldest that works: pip install triton=={COURSE_TRITON}"
    setting = os.environ.get("TRITON_INTERPRET")
    wanted = gpu_problem() is not None if setting is None else setting.lower() in _ON
    if wanted and not interpreting():
        return (
            "Triton was imported before flashlib, in the mode that needs a GPU: "
            "restart Python and import flashlib first, or set TRITON_INTERPRET=1 before the first import"
        )
    if interpreting() and not wanted:
        return (
            "Triton was imported in its interpreter mode, and TRITON_INTERPRET was changed since: "
            "restart Python with the value that you want"
        )
    # These releases turn a one-element array into an int in a way that numpy 2.4 refuses.
    if wanted and version and _numbers(version)[:2] < (3, 7) and _numbers(_version("numpy"))[:2] >= (2, 4):
        return (
            f"Triton {version} cannot interpret kernels with numpy {_version('numpy')}: "
            f"pip install triton=={COURSE_TRITON}, or numpy older than 2.4"
        )
    return None


def require_kernels():
    """Raise a RuntimeError that says what to do, where kernels cannot be imported."""
    problem = kernel_problem()
    if problem:
        raise RuntimeError(problem)


def __getattr__(name):
    if name in _COMPILER:
        # Its process, files and JSON are of no use to those who only run kernels.
        return getattr(importlib.import_module("flashlib.compiler"), name)
    if name not in ("tl", "triton"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_kernels()
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise RuntimeError(f"Triton is installed, but its import fails: {error}") from error
    return triton if name == "triton" else triton.language


# --- gates -----------------------------------------------------------------------------------------------------------


def check_capability(capability, dtype=None):
    """Refuse a GPU that kernels cannot run on, or a dtype that it does not have.

    Args:
        capability: 75 for compute capability 7.5, or the pair (7, 5).
        dtype: torch dtype, or its name ("bf16", "*bf16", "float16"); None leaves it out.

    Raises:
        ValueError: capability is neither.
        RuntimeError: says what to do instead.
    """
    pair = capability if isinstance(capability, tuple) else (capability, 0)
    if len(pair) != 2 or not all(isinstance(number, int) for number in pair):
        raise ValueError(f"capability must be a number such as 75 or a pair such as (7, 5), got {capability!r}")
    if isinstance(capability, tuple):
        capability = 10 * capability[0] + capability[1]
    if capability < OLDEST_CAPABILITY:
        raise RuntimeError(
            f"kernels need a GPU of compute capability 7.5 or later, this one has {_dotted(capability)}; "
            "set TRITON_INTERPRET=1 before the first import to run them on the CPU"
        )
    if capability < 80 and str(dtype).removeprefix("*") in _BF16:
        raise RuntimeError(
            f"bfloat16 needs a GPU of compute capability 8.0 or later, this one has {_dotted(capability)}; "
            "use float16 or float32"
        )


def check_launch(tensor, name):
    """Refuse a kernel launch on a tensor that no kernel can run on, before Triton's own, less helpful, error.

    Args:
        tensor: torch tensor.
        name: what the caller calls it.

    Raises:
        RuntimeError: the tensor is on the CPU and the interpreter is off, or its GPU lacks something.
    """
    if interpreting():
        return
    if tensor.device.type != "cuda":
        where = "move it to the GPU" if gpu_problem() is None else "restart Python with TRITON_INTERPRET=1"
        raise RuntimeError(f"{name} is on the {tensor.device.type}, and Triton's interpreter is off: {where}")
    import torch

    check_capability(torch.cuda.get_device_capability(tensor.device), tensor.dtype)


def checks_values(tensor):
    """Tell whether the values in index tensors beside `tensor` are to be checked: lengths, page numbers.

    On the CPU always. On a GPU the host would have to wait for them, so only where the environment variable
    FLASHLIB_CHECK is set to 1, and never while a CUDA graph is being captured.
    """
    if tensor.device.type == "cpu":
        return True
    if os.environ.get("FLASHLIB_CHECK", "").lower() not in _ON:
        return False
    import torch

    return not torch.cuda.is_current_stream_capturing()


# --- the report ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What runs on this machine; prints as a small table.

    Args:
        platform, python: the system with its processor, the version of Python.
        packages: dict, name -> version, None where it is missing.
        gpu: the first usable GPU, or None.
        no_gpu: why there is none, in a few words; None if there is one.
        interpreter: True where kernels run in Triton's interpreter.
        problem: why kernels do not run here and what to do; None if they run.
        bf16: True where kernels take bfloat16.
        parts: dict, part of the course -> how it runs here.
    """

    platform: str
    python: str
    packages: dict
    gpu: Gpu
    no_gpu: str
    interpreter: bool
    problem: str
    bf16: bool
    parts: dict

    def __repr__(self):
        gpu = f"none: {self.no_gpu}"
        if self.gpu:
            capability, size = _dotted(self.gpu.capability), self.gpu.memory_bytes / 2**30
            gpu = f"{self.gpu.name}, compute capability {capability}, {size:.0f} GiB"
        how = "in Triton's interpreter, on the CPU" if self.interpreter else "compiled, on the GPU"
        rows = {"platform": self.platform, "Python": self.python}
        rows |= {name: version or "missing" for name, version in self.packages.items()}
        rows |= {
            "GPU": gpu,
            "kernels run": "not here" if self.problem else how,
            "bfloat16": "yes" if self.bf16 else "no",
        }
        rows |= {f"part {part}": text for part, text in self.parts.items()}
        return "\n".join(f"{name:<12} {text}" for name, text in rows.items())


def report():
    """Find out what of the course runs on this machine; imports neither PyTorch nor Triton.

    Returns:
        Report.
    """
    import platform

    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    system += " (WSL)" if "microsoft" in platform.release().lower() else ""
    why, problem = gpu_problem(), kernel_problem()
    gpu = next((gpu for gpu in gpus() if gpu.capability >= OLDEST_CAPABILITY), None) if why is None else None
    interpreter = problem is None and interpreting()
    if problem is None and gpu is None and not interpreter:
        problem = "there is no GPU, and TRITON_INTERPRET switches the interpreter off: restart Python without it"
    compiled = problem is None and not interpreter
    kernels = problem or "runs"
    if interpreter:
        kernels = "runs in the interpreter, on small inputs"
    elif compiled and gpu.capability < 80:
        kernels = f"runs; {_TURING}"
    hopper = "runs" if compiled and gpu.capability == 90 else "to read; to run it takes a Hopper GPU (H100, H200)"
    numpy_only = f"runs, except where PyTorch is used: pip install torch=={COURSE_TORCH}"
    return Report(
        platform=f"{system} {platform.machine()}",
        python=platform.python_version(),
        packages={"NumPy": _version("numpy"), "PyTorch": _version("torch"), "Triton": _version("triton")},
        gpu=gpu,
        no_gpu=why,
        interpreter=interpreter,
        problem=problem,
        bf16=interpreter or (compiled and gpu.capability >= 80),
        parts={"I": "runs" if _installed("torch") else numpy_only, "II": kernels, "III": kernels, "IV": hopper},
    )
