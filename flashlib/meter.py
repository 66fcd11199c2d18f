"""A meter for Triton kernels: counts, per tensor, the bytes that interpreted kernels load and store.

Chapter 05's `traffic.HBM` does it for NumPy code. Here `tl.load` and `tl.store` are wrapped while kernels run in
Triton's interpreter: each lane whose mask is True counts, with the size of the caller's dtype; nothing is cached. The
addresses show as well what no interpreter and no GPU complains about: lanes that lie outside of every tensor.

Source: ours. It relies on how Triton's interpreter is built; a test names the releases that it was tried with.
"""

import os
import sys
from pathlib import Path

from flashlib import device

# The releases of Triton that this file was tried with.
CHECKED_TRITON = ("3.7.1", "3.8.0", "3.9.0")
# Other doors to memory: a kernel that uses one of them would be counted wrongly, so it is refused.
_UNCOUNTED = ("make_block_ptr", "make_tensor_descriptor", "load_tensor_descriptor", "store_tensor_descriptor")
_REFUSED = (IndexError, NotImplementedError)
_ATOMICS = ("add", "and", "cas", "max", "min", "or", "xchg", "xor")


class Meter:
    """Counts what the kernels load and store that are launched inside `with Meter() as meter:`.

    A tensor is called like the kernel's argument, without `_ptr`. Tensors may be views into each other's memory, as the
    q, k and v of one packed tensor are: an address belongs to the first tensor that has an element there.

    Args:
        itemsize: dict, name -> bytes of one element, where a kernel is given another dtype than the caller's (as when
            a launcher makes a float32 buffer for a bfloat16 result).
        tolerate: tensors whose memory lanes may touch outside of the kernel's arguments; these lanes are counted in
            `outside`. Anywhere else such a lane raises an IndexError before memory is touched.

    Attributes:
        loads, stores: dict, name -> bytes.
        outside: dict, "load" and "store" -> elements outside of every tensor.
        kernels: names of the kernels launched, in order.
    """

    def __init__(self, *, itemsize=None, tolerate=()):
        self.loads, self.stores, self.kernels = {}, {}, []
        self.outside = {"load": 0, "store": 0}
        self._itemsize = dict(itemsize or {})
        self._tolerate = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tolerate]
        self._tensors = {}
        self._saved = []

    @property
    def total(self):
        """All bytes counted so far."""
        return sum(self.loads.values()) + sum(self.stores.values())

    def count(self):
        """Return the counts in the form of `cost.requested_bytes`: a dict of loads, stores and total."""
        return {"loads": dict(self.loads), "stores": dict(self.stores), "total": self.total}

    def __enter__(self):
        if not device.interpreting():
            raise RuntimeError("the meter works in Triton's interpreter, which is off here: use meter.count")
        tl = device.tl
        load, store, kind = tl.load, tl.store, type(tl.sum)
        run = kind.run

        def counted_load(pointer, mask=None, *args, **kwargs):
            self._touch("load", pointer, mask)
            return load(pointer, mask, *args, **kwargs)

        def counted_store(pointer, value, mask=None, *args, **kwargs):
            self._touch("store", pointer, mask)
            return store(pointer, value, mask, *args, **kwargs)

        def counted_run(kernel, *args, **kwargs):
            before, self._tensors = self._tensors, _tensors_of(kernel.fn, args, kwargs)
            self.kernels.append(kernel.fn.__name__)
            try:
                return run(kernel, *args, **kwargs)
            except Exception as error:
                if isinstance(error.__cause__, _REFUSED):
                    # The interpreter wrapped it in an error of its own.
                    raise error.__cause__ from None
                raise
            finally:
                self._tensors = before

        self._replace(tl, "load", _builtin(counted_load))
        self._replace(tl, "store", _builtin(counted_store))
        for name in (*_UNCOUNTED, *(f"atomic_{name}" for name in _ATOMICS)):
            if hasattr(tl, name):
                self._replace(tl, name, _builtin(_refusal(name)))
        self._replace(kind, "run", counted_run)
        return self

    def __exit__(self, *_):
        while self._saved:
            owner, name, value = self._saved.pop()
            setattr(owner, name, value)

    def _replace(self, owner, name, value):
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _touch(self, what, pointer, mask):
        import numpy as np

        addresses = np.asarray(pointer.handle.data)
        lanes = getattr(mask, "handle", None)
        lanes = getattr(mask, "value", mask) if lanes is None else lanes.data
        if lanes is not None:
            addresses = addresses[np.broadcast_to(np.asarray(lanes, dtype=bool), addresses.shape)]
        addresses = addresses.reshape(-1).astype(np.int64)
        counts = self.loads if what == "load" else self.stores
        for name, tensor in self._tensors.items():
            if not addresses.size:
                return
            inside = _elements_of(tensor, addresses)
            if inside.any():
                nbytes = self._itemsize.get(name, tensor.element_size())
                counts[name] = counts.get(name, 0) + int(inside.sum()) * nbytes
                addresses = addresses[~inside]
        self.outside[what] += addresses.size
        for start, size in self._tolerate:
            addresses = addresses[(addresses < start) | (addresses >= start + size)]
        if addresses.size:
            name = min(self._tensors, key=lambda n: int(np.abs(addresses - self._tensors[n].data_ptr()).min()))
            raise IndexError(
                f"{self.kernels[-1]} wants to {what} {addresses.size} elements outside of its tensors, near {name}"
            )


def count(program, inputs, *, dtype="float32", itemsize=None, **options):
    """Count the bytes that a launcher's kernels load and store; they run in a child process that interprets.

    Args:
        program: "module:function", the launcher.
        inputs: dict, argument -> shape; filled with random numbers.
        dtype: of all inputs, such as "float16".
        itemsize: as for `Meter`.
        options: the launcher's other arguments, numbers and strings.

    Returns:
        dict of loads, stores (each a dict, name -> bytes) and total.

    Raises:
        ValueError: program names nothing, or the launcher refuses its arguments.
        RuntimeError: the child failed; the message is its last line.
    """
    job = {"program": program, "inputs": inputs, "dtype": dtype, "itemsize": itemsize, "options": options}
    return count_many([job])[0]


def count_many(jobs, *, timeout_s=300):
    """Run several counts in one child process, which saves the start of Python for all but the first.

    Args:
        jobs: list of dict with the arguments of `count`, the launcher's own under "options".
        timeout_s: seconds until the child is ended.

    Returns:
        list of dict, as of `count`.

    Raises:
        as `count`.
    """
    import json
    import subprocess

    if not device._installed("triton"):
        raise RuntimeError(device.kernel_problem())
    paths = [str(Path(__file__).resolve().parent.parent), *filter(None, sys.path)]
    # No GPU for the child: its tensors belong on the CPU.
    environ = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", "from flashlib.meter import _child; _child()"]
    try:
        child = subprocess.run(
            command, env=environ, input=json.dumps(jobs), capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the metered kernels did not finish in {timeout_s} s") from None
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"the child ended with code {child.returncode}"]
        raise RuntimeError(lines[-1])
    answer = json.loads(child.stdout.splitlines()[-1])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["counts"]


def _child():
    """Run the jobs that stand on standard input, in JSON, and print the counts: the child process of `count_many`."""
    import importlib
    import json

    import torch

    counts = []
    for job in json.load(sys.stdin):
        torch.manual_seed(0)
        try:
            module, _, name = job["program"].partition(":")
            program = getattr(importlib.import_module(module), name)
            dtype = getattr(torch, job.get("dtype") or "float32")
            inputs = {name: torch.randn(shape).to(dtype) for name, shape in job["inputs"].items()}
            with Meter(itemsize=job.get("itemsize")) as meter:
                program(**inputs, **(job.get("options") or {}))
        except (ValueError, ImportError, AttributeError) as error:
            print(json.dumps({"error": str(error)}))
            return
        counts.append(meter.count())
    print(json.dumps({"counts": counts}))


def _builtin(function):
    # The mark by which the interpreter knows the functions of the language.
    function.__triton_builtin__ = True
    return function


def _refusal(name):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"the meter counts tl.load and tl.store, and this kernel uses tl.{name}")

    return refuse


def _tensors_of(function, args, kwargs):
    """Return the tensors among a kernel's arguments: name without `_ptr` -> tensor; of a tuple, name[index]."""
    import inspect

    given = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
    found = {}
    for name, value in given.items():
        parts = {f"[{i}]": part for i, part in enumerate(value)} if isinstance(value, tuple) else {"": value}
        for suffix, part in parts.items():
            if hasattr(part, "data_ptr"):
                if part.device.type != "cpu":
                    raise ValueError(f"{name} must be on the CPU to be metered, got {part.device}")
                found[name.removesuffix("_ptr") + suffix] = part
            elif hasattr(part, "block_shape"):
                raise NotImplementedError(f"the meter counts pointers, and {name} is a tensor descriptor")
    return found


def _elements_of(tensor, addresses):
    """Tell for each address whether an element of the tensor begins there."""
    rest = addresses - tensor.data_ptr()
    inside = (rest >= 0) & (rest % tensor.element_size() == 0)
    if not tensor.numel():
        return inside & False
    rest = rest // tensor.element_size()
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
        if stride:
            rest = rest - (rest // stride).clip(0, size - 1) * stride
    return inside & (rest == 0)
