"""Every byte that moves between slow memory and the chip, counted while the code of chapter 04 runs.

`HBM` holds arrays that can only be loaded and stored by slices; each slice is counted and nothing is cached, which is
the model of the papers. Two more programs are here to be metered beside `tiling.forward`: the naive form cut into the
same tiles, and the first FlashAttention's loop order, whose outer loop runs over the keys.

Source: FlashAttention (Dao et al. 2022), Algorithm 1 and Theorem 2, https://arxiv.org/abs/2205.14135.
"""

import numbers

import numpy as np

from flashlib.online_softmax import State, finish, merge, state_of
from flashlib.tiling import check_inputs, tile_kind, tiles, visible


class HBM:
    """Slow memory with a meter on its door.

    Args:
        makes: names of the arrays that a program will create here with `np.empty_like`, in that order.

    Attributes:
        loads, stores: bytes per tensor, dict of name to int.
        log: one (what, name, slices, bytes) per access, in order; what is "load" or "store".
    """

    def __init__(self, makes=("out", "lse")):
        self.loads, self.stores, self.log = {}, {}, []
        self.arrays = {}
        self._makes = iter(makes)

    def put(self, **arrays):
        """Place arrays in slow memory, under their names; this is not counted.

        Args:
            arrays: NumPy arrays.

        Returns:
            Metered, or a tuple of them for more than one.

        Raises:
            ValueError: a name is taken already, or what it names is no NumPy array.
        """
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name} must be a NumPy array, got {type(array).__name__}")
        metered = tuple(self._place(name, array) for name, array in arrays.items())
        return metered[0] if len(metered) == 1 else metered

    @property
    def total(self):
        """All bytes counted so far."""
        return sum(self.loads.values()) + sum(self.stores.values())

    def count(self):
        """Return the counts in the form of `cost.requested_bytes`: a dict of loads, stores and total."""
        return {"loads": dict(self.loads), "stores": dict(self.stores), "total": self.total}

    def make(self, shape, dtype):
        """Create an array here, under the next of the names that `makes` promised."""
        name = next(self._makes, None)
        if name is None:
            raise ValueError(f"makes must name every array that is created, got {len(self.arrays)} names for more")
        return self._place(name, np.empty(shape, dtype))

    def _place(self, name, array):
        if name in self.arrays:
            raise ValueError(f"{name} must be a new name, got one that is taken")
        self.arrays[name] = array
        return Metered(self, name, array)

    def _count(self, what, name, slices, nbytes):
        counts = self.loads if what == "load" else self.stores
        counts[name] = counts.get(name, 0) + nbytes
        self.log.append((what, name, slices, nbytes))


class Metered:
    """An array in `HBM`: `x[rows]` is a counted load and gives a copy, `x[rows] = y` is a counted store.

    It has shape and dtype, `np.empty_like` makes another one in the same memory, and nothing else touches it:
    arithmetic on slow memory is a TypeError. `value` reads it for the reader's eyes, uncounted.
    """

    __array_ufunc__ = None

    def __init__(self, hbm, name, array):
        self._hbm, self._name, self.value = hbm, name, array
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, slices):
        part = self._part(slices)
        self._hbm._count("load", self._name, slices, part.nbytes)
        return part.copy()

    def __setitem__(self, slices, new):
        part = self._part(slices)
        self._hbm._count("store", self._name, slices, part.nbytes)
        part[...] = new

    def __array_function__(self, function, types, args, kwargs):
        if function is not np.empty_like:
            return NotImplemented
        return self._hbm.make(kwargs.get("shape", self.shape), kwargs.get("dtype", self.dtype))

    def __array__(self, *args, **kwargs):
        raise TypeError(f"{self._name} lies in HBM: load a slice of it, or look at {self._name}.value")

    def __repr__(self):
        return f"Metered({self._name}, shape={self.shape}, dtype={self.dtype})"

    def _part(self, slices):
        each = slices if isinstance(slices, tuple) else (slices,)
        if not all(isinstance(s, slice) and s.step in (None, 1) for s in each):
            raise TypeError(f"{self._name} lies in HBM: it is loaded and stored by slices, got [{slices!r}]")
        return self.value[slices]


def forward_keys_outer(q, k, v, *, block_m, block_n, causal=False, scale=None):
    """Compute attention with the keys in the outer loop: every step reads and writes the state of its rows.

    Args:
        q, k, v, block_m, block_n, causal, scale: as for `tiling.forward`.

    Returns:
        out, (seqlen_q, head_dim of v), dtype of q; 0 for a row that sees no key.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    Source:
        FlashAttention (Dao et al. 2022), Algorithm 1: out is divided in every step.
    """
    scale, dtype = check_inputs(q, k, v, block_m, block_n, scale, causal)
    seqlen_q, seqlen_k, head_dim_v = q.shape[0], k.shape[0], v.shape[1]
    out = np.empty_like(q, shape=(seqlen_q, head_dim_v))
    l = np.empty_like(q, shape=(seqlen_q,), dtype=dtype)
    m = np.empty_like(q, shape=(seqlen_q,), dtype=dtype)
    offset = seqlen_k - seqlen_q
    for rows in tiles(seqlen_q, block_m):
        out[rows], l[rows], m[rows] = 0, 0, -np.inf
    for keys in tiles(seqlen_k, block_n):
        k_j, v_j = k[keys].astype(dtype), v[keys].astype(dtype)
        for rows in tiles(seqlen_q, block_m):
            kind = tile_kind(rows, keys, offset, causal)
            if kind == "empty":
                continue
            s = scale * (q[rows].astype(dtype) @ k_j.T)
            if kind == "diagonal":
                s = np.where(visible(rows, keys, offset), s, -np.inf)
            l_i = l[rows]
            before = State(m[rows], l_i, l_i[:, None] * out[rows].astype(dtype))
            after = merge(before, state_of(s, v_j))
            out[rows], l[rows], m[rows] = finish(after), after.l, after.m
    return out


def naive(q, k, v, *, block_m, block_n, scale=None):
    """Compute attention in three passes, S and P stored whole; its matrix products are cut into tiles too.

    Args:
        q, k, v, block_m, block_n, scale: as for `tiling.forward`.

    Returns:
        out, (seqlen_q, head_dim of v), dtype of q; so are S and P.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    Source:
        FlashAttention (Dao et al. 2022), Algorithm 0.
    """
    scale, dtype = check_inputs(q, k, v, block_m, block_n, scale)
    seqlen_q, seqlen_k, head_dim_v = q.shape[0], k.shape[0], v.shape[1]
    s = np.empty_like(q, shape=(seqlen_q, seqlen_k))
    p = np.empty_like(q, shape=(seqlen_q, seqlen_k))
    out = np.empty_like(q, shape=(seqlen_q, head_dim_v))
    for rows in tiles(seqlen_q, block_m):
        q_i = q[rows].astype(dtype)
        for keys in tiles(seqlen_k, block_n):
            s[rows, keys] = scale * (q_i @ k[keys].astype(dtype).T)
    for rows in tiles(seqlen_q, 1):
        s_row = s[rows].astype(dtype)
        e = np.exp(s_row - s_row.max(axis=1, keepdims=True))
        p[rows] = e / e.sum(axis=1, keepdims=True)
    for rows in tiles(seqlen_q, block_m):
        acc = np.zeros((rows.stop - rows.start, head_dim_v), dtype)
        for keys in tiles(seqlen_k, block_n):
            acc += p[rows, keys].astype(dtype) @ v[keys].astype(dtype)
        out[rows] = acc
    return out


# --- other attention: cheaper formulas, for comparison -------------------------------------------------------------


def windowed(q, k, v, width):
    """Compute attention where query i sees only the `width` keys nearest to i (not causal)."""
    _check_kept(width=width)
    s = q @ k.T / np.sqrt(q.shape[1])
    distance = np.abs(np.arange(len(k)) - np.arange(len(q))[:, None])
    # The key on the left comes first where two are equally far.
    order = np.argsort(distance, axis=1, kind="stable")[:, :width]
    return _softmax(_keep(s, order)) @ v


def top_k(q, k, v, count):
    """Compute sparse attention: each query keeps its `count` largest scores, chosen after all were computed."""
    _check_kept(count=count)
    s = q @ k.T / np.sqrt(q.shape[1])
    return _softmax(_keep(s, np.argsort(-s, axis=1, kind="stable")[:, :count])) @ v


def low_rank(q, k, v, rank):
    """Compute attention with the matrix of this rank that is nearest to P, found after all of P was computed."""
    _check_kept(rank=rank)
    u, sizes, w = np.linalg.svd(_softmax(q @ k.T / np.sqrt(q.shape[1])), full_matrices=False)
    return (u[:, :rank] * sizes[:rank]) @ (w[:rank] @ v)


def linear(q, k, v):
    """Compute linear attention: exp(q·k) is replaced by phi(q)·phi(k) with phi(x) = elu(x) + 1."""
    phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    return phi_q @ (phi_k.T @ v) / (phi_q @ phi_k.sum(axis=0))[:, None]


def _check_kept(**kept):
    for name, number in kept.items():
        if not isinstance(number, numbers.Integral) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, got {number!r}")


def _softmax(s):
    e = np.exp(s - s.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _keep(s, columns):
    kept = np.full_like(s, -np.inf)
    np.put_along_axis(kept, columns, np.take_along_axis(s, columns, axis=1), axis=1)
    return kept
