"""Compile a kernel for a GPU that is not here, in a child process; `device.compile_for` is this module's function.

A process that interprets kernels cannot compile them, so the compiler gets a process of its own. Triton's private
modules are used in this file only; a test names the releases that it was tried with.

Source: Triton's `triton.compile`; NVIDIA's cuobjdump (--dump-resource-usage), which comes with Triton.
"""

import dataclasses
import os
import re
import sys
from pathlib import Path

from flashlib import device

# The releases of Triton that this file was tried with.
CHECKED_TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
# Scalars, pointers to them (k: constant), and tensor descriptors.
_TYPE = re.compile(r"\*?k?(?:i1|[iu](?:8|16|32|64)|fp(?:16|32|64)|bf16|fp8\w+)|(?:tensordesc|nvTmaDesc).*")
CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 120, 121)
# Of one multiprocessor, by compute capability: warps, programs, KiB of shared memory. All have four parts with 16,384
# registers each, given out in blocks of 256 to each warp, and keep 1 KiB of shared memory for themselves in each
# program, but for 7.5. Source: "CUDA C++ Programming Guide", section "Compute Capabilities".
_WARPS = {75: 32, 86: 48, 89: 48, 120: 48, 121: 48}
_PROGRAMS = {75: 16, 86: 16, 89: 24, 120: 24, 121: 24}
_SHARED_KIB = {75: 64, 80: 164, 86: 100, 89: 100, 120: 100, 121: 100}


class CompileError(RuntimeError):
    """A kernel does not compile for the GPU it was meant for; the message is the compiler's, without its traceback."""


@dataclasses.dataclass(frozen=True, repr=False)
class Compiled:
    """A kernel compiled for one kind of GPU.

    Args:
        kernel: "module:name".
        capability: 90 for compute capability 9.0.
        triton: version of the compiler.
        shared_bytes: shared memory of one program.
        registers: 32-bit registers of one thread; None without cuobjdump.
        stack_bytes: stack of one thread, where registers are spilled to; None without cuobjdump.
        ttgir, ptx: the program in Triton's GPU form and in NVIDIA's assembly language.
        metadata: dict, everything else that Triton notes (num_warps, num_stages, …).
    """

    kernel: str
    capability: int
    triton: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    ttgir: str
    ptx: str
    metadata: dict

    @property
    def matrix_instructions(self):
        """The kinds of tensor-core instruction in the PTX, such as ["wgmma.mma_async"]."""
        return sorted(set(re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)", self.ptx)))

    @property
    def programs_per_multiprocessor(self):
        """How many programs of this kernel a multiprocessor can hold at once; None without cuobjdump."""
        if self.registers is None:
            return None
        warps = self.metadata["num_warps"]
        registers_of_a_warp = -(-32 * self.registers // 256) * 256
        reserved = 1024 if self.capability >= 80 else 0
        shared = 1024 * _SHARED_KIB.get(self.capability, 228)
        return min(
            16384 // registers_of_a_warp * 4 // warps,
            _PROGRAMS.get(self.capability, 32),
            _WARPS.get(self.capability, 64) // warps,
            shared // (self.shared_bytes + reserved),
        )

    def __repr__(self):
        return (
            f"{self.kernel} for sm_{self.capability}: {self.metadata['num_warps']} warps, {self.registers} registers, "
            f"{self.stack_bytes} B stack, {self.shared_bytes} B shared memory"
        )


def compile_for(kernel, signature, constexprs=None, capability=90, options=None, *, divisible=(), timeout_s=300):
    """Compile a kernel for a GPU that need not be here, in a child process; takes one to three seconds.

    That a kernel compiles does not prove that the GPU supports it: only running it does.

    Args:
        kernel: "module:name" of a `@triton.jit` (or Gluon) function at the top level of a module.
        signature: dict, argument -> type: "*fp16" for a pointer, "i32", "fp32"; a tuple of types for a tuple. An int in
            place of a type is an argument with that value, compiled in, as a launch does with a stride of 1.
        constexprs: dict, argument -> value. "module:name" means a jit function, "tl.float16" a dtype of Triton.
        capability: 75 for compute capability 7.5; one of CAPABILITIES.
        options: dict: num_warps, num_stages, ….
        divisible: names of integer arguments that are multiples of 16. Pointers always count as such: a launch finds
            the memory that PyTorch gives aligned.
        timeout_s: seconds until the child is ended.

    Returns:
        Compiled.

    Raises:
        ValueError: an argument is not what it must be.
        CompileError: the kernel does not compile.
        RuntimeError: Triton cannot be used here, or the GPU has no bfloat16.
    """
    job = {
        "kernel": kernel,
        "signature": signature,
        "constexprs": constexprs,
        "capability": capability,
        "options": options,
        "divisible": divisible,
    }
    return compile_many([job], timeout_s=timeout_s)[0]


def compile_many(jobs, *, timeout_s=600):
    """Compile several kernels in one child process, which saves the start of Python for all but the first.

    Args:
        jobs: list of dict with the arguments of `compile_for`.
        timeout_s: seconds until the child is ended.

    Returns:
        list of Compiled.

    Raises:
        as `compile_for`, for the first job that fails.
    """
    import json
    import subprocess
    import tempfile

    if not isinstance(jobs, (list, tuple)) or not all(isinstance(job, dict) for job in jobs):
        raise ValueError(f"jobs must be a list of dict, got {jobs!r}")
    jobs = [_checked(dict(job)) for job in jobs]
    if not device._installed("triton"):
        raise RuntimeError(device.kernel_problem())
    # "0", not unset: without a GPU the child's own `import flashlib` would switch the interpreter on.
    paths = [str(Path(__file__).resolve().parent.parent), *filter(None, sys.path)]
    environ = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        told, heard = Path(folder, "jobs.json"), Path(folder, "results.json")
        told.write_text(json.dumps(jobs))
        command = [sys.executable, "-c", "from flashlib.compiler import _child; _child()", str(told), str(heard)]
        try:
            child = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CompileError(f"the compiler did not finish in {timeout_s} s") from None
        results = json.loads(heard.read_text()) if heard.exists() else []
        if len(results) < len(jobs) and not (results and "error" in results[-1]):
            tail = "\n".join(child.stderr.strip().splitlines()[-12:])
            name = jobs[len(results)]["kernel"]
            raise CompileError(f"the compiler ended with code {child.returncode} at {name}:\n{tail}")
    for job, result in zip(jobs, results, strict=False):
        if result.get("error") == "ValueError":
            raise ValueError(result["message"])
        if "error" in result:
            raise CompileError(f"{job['kernel']} does not compile for sm_{job['capability']}: {result['message']}")
    return [Compiled(**result) for result in results]


def _checked(job):
    """Check the arguments of one job as far as it can be done without Triton, and make them plain enough for JSON."""
    job = {"kernel": None, "signature": None, "constexprs": None, "options": None, "divisible": ()} | job
    job.setdefault("capability", 90)
    module, _, name = job["kernel"].partition(":") if isinstance(job["kernel"], str) else ("", "", "")
    if not module or not name.isidentifier():
        raise ValueError(f"kernel must be a string 'module:name', got {job['kernel']!r}")
    for key in ("signature", "constexprs", "options"):
        value = job[key] = {} if job[key] is None and key != "signature" else job[key]
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise ValueError(f"{key} must be a dict with names as keys, got {value!r}")
    warps = job["options"].get("num_warps", 4)
    if not isinstance(warps, int) or warps < 1 or warps & (warps - 1):
        raise ValueError(f"options must give num_warps a power of two, got {warps!r}")
    if not isinstance(job["capability"], int) or job["capability"] not in CAPABILITIES:
        raise ValueError(f"capability must be one of {CAPABILITIES}, got {job['capability']!r}")
    for name, kind in job["signature"].items():
        for one in kind if isinstance(kind, (tuple, list)) else (kind,):
            if not isinstance(one, int) and not (isinstance(one, str) and _TYPE.fullmatch(one)):
                raise ValueError(f"signature must give {name} a type such as '*fp16' or 'i32', got {one!r}")
            device.check_capability(job["capability"], one)
    for key in ("constexprs", "options"):
        for name, value in job[key].items():
            if not _is_plain(value):
                raise ValueError(f"{key} must give {name} a number, a string or a tuple of them, got {value!r}")
    divisible = [job["divisible"]] if isinstance(job["divisible"], str) else job["divisible"]
    if not isinstance(divisible, (list, tuple, set)) or not all(isinstance(name, str) for name in divisible):
        raise ValueError(f"divisible must be names of arguments, got {divisible!r}")
    return job | {"divisible": sorted(divisible)}


def _is_plain(value):
    if isinstance(value, (tuple, list)):
        return all(_is_plain(one) for one in value)
    return isinstance(value, (bool, int, float, str, type(None)))


def _child():
    """Compile the jobs of a file and write the results to another: the child process of `compile_many`."""
    import json

    told, heard = sys.argv[1:]
    results = []
    for job in json.loads(Path(told).read_text()):
        try:
            results.append(_compiled(job))
        except Exception as error:
            kind = "ValueError" if type(error) is ValueError else "other"
            results.append({"error": kind, "message": _message(error)})
        Path(heard).write_text(json.dumps(results))
        if "error" in results[-1]:
            return


def _message(error):
    """Return what the compiler has to say, with the errors that led to it; at most 40 lines."""
    said = []
    while error is not None:
        # Triton's own errors show the place in the kernel; of others the kind is needed to make sense of the text.
        own = hasattr(error, "error_message") or isinstance(error, (ValueError, RuntimeError))
        text = str(error).strip() if own else f"{type(error).__name__}: {error}".strip()
        if not any(text in earlier for earlier in said):
            said.append(text)
        error = error.__cause__
    return "\n".join("\n".join(said).splitlines()[:40])


def _compiled(job):
    import triton
    from triton.backends.compiler import GPUTarget

    fn = _object(job["kernel"], "kernel")
    if not hasattr(fn, "arg_names"):
        raise ValueError(f"kernel must name a @triton.jit function, got {job['kernel']}")
    # Autotuned kernels wrap the function that is to be compiled.
    while not isinstance(fn, triton.JITFunction):
        fn = fn.fn
    signature, constants, attrs = _arguments(fn, job)
    if fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    target = GPUTarget("cuda", job["capability"], 32)
    known = {field.name for field in dataclasses.fields(_options_class(target))}
    for name in job["options"]:
        if name not in known:
            raise ValueError(f"options must be Triton's, such as num_warps, num_stages or maxnreg, got {name}")
    source = Source(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
    kernel = triton.compile(source, target=target, options=job["options"])
    registers, stack_bytes = _resources(kernel.asm["cubin"])
    metadata = {
        k: v for k, v in kernel.metadata._asdict().items() if isinstance(v, (int, float, str, bool, type(None)))
    }
    return {
        "kernel": job["kernel"],
        "capability": job["capability"],
        "triton": triton.__version__,
        "shared_bytes": kernel.metadata.shared,
        "registers": registers,
        "stack_bytes": stack_bytes,
        "ttgir": kernel.asm["ttgir"],
        "ptx": kernel.asm["ptx"],
        "metadata": metadata,
    }


def _object(path, argument):
    import importlib

    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{argument} must be importable as 'module:name', got {path}: {error}") from None


def _options_class(target):
    from triton.compiler import make_backend

    return type(make_backend(target).parse_options({}))


def _arguments(fn, job):
    """Turn a job's signature and constants into Triton's: types by name, values and alignment by position."""
    given, fixed = job["signature"], job["constexprs"]
    for name in [*given, *fixed, *job["divisible"]]:
        if name not in fn.arg_names:
            argument = "signature" if name in given else "constexprs" if name in fixed else "divisible"
            raise ValueError(f"{argument} must name arguments of {fn.__name__} {fn.arg_names}, got {name}")
    signature, constants, attrs = {}, {}, {}
    for index, param in enumerate(fn.params):
        name = param.name
        if name in fixed:
            signature[name] = "constexpr"
            constants[(index,)] = _constant(fixed[name])
        elif name in given:
            aligned = name in job["divisible"]
            signature[name] = _argument_type(given[name], (index,), aligned, constants, attrs)
        elif param.has_default:
            signature[name] = "constexpr"
            constants[(index,)] = param.default
        else:
            where = "constexprs" if param.is_constexpr else "signature"
            raise ValueError(f"{where} must give every argument of {fn.__name__}, got none for {name}")
    return signature, constants, attrs


def _argument_type(kind, path, aligned, constants, attrs):
    if isinstance(kind, list):
        return tuple(_argument_type(one, (*path, i), aligned, constants, attrs) for i, one in enumerate(kind))
    if isinstance(kind, int):
        constants[path] = kind
        return "constexpr"
    if kind.startswith("*") or aligned:
        attrs[path] = [["tt.divisibility", 16]]
    return kind


def _constant(value):
    if isinstance(value, list):
        return tuple(_constant(one) for one in value)
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language

        return getattr(triton.language, value.removeprefix("tl."))
    if isinstance(value, str) and ":" in value:
        return _object(value, "constexprs")
    return value


def _resources(cubin):
    """Ask NVIDIA's cuobjdump, which comes with Triton: (registers, bytes of stack) of a thread, or (None, None)."""
    import subprocess
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else (None, None)
