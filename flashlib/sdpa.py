"""`torch.nn.functional.scaled_dot_product_attention`, computed by `flash_attention`: same arguments, same meaning.

PyTorch aligns `is_causal` at the top left, this library at the bottom right; PyTorch's masks are tensors, which become
a bias here. What differs is translated here and nowhere else.

Source: PyTorch's documentation of torch.nn.functional.scaled_dot_product_attention
"""

import math

import torch

from flashlib.attention import flash_attention


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Compute attention as PyTorch's function of this name does; differentiable, attn_mask included.

    Args:
        query: (..., nheads, seqlen_q, head_dim) or (..., seqlen_q, head_dim), of a dtype of `flash_attention`.
        key: (..., seqlen_k, head_dim); value: (..., seqlen_k, head_dim_v). Leading axes broadcast.
        attn_mask: booleans, True where a query sees a key, or floats of query's dtype that are added to the scores;
            -inf hides a key, and so does anything below -1e8: a row of nothing else gives 0, where PyTorch averages.
            Broadcasts to (..., seqlen_q, seqlen_k).
        dropout_p: share of the weights that is dropped; whoever calls sets it to 0 outside of training.
        is_causal: query i sees the keys j <= i (aligned at the top left, unlike `causal` of `flash_attention`).
        scale: what a dot product is multiplied with; None means 1/sqrt(head_dim).
        enable_gqa: the third axis from the end of key and value may be a divisor of query's.

    Returns:
        (..., seqlen_q, head_dim_v), dtype of query. A row that sees no key is 0.

    Raises:
        ValueError: an argument is not as above, or flash_attention cannot take it, such as a head_dim that is no
            multiple of 8 from 16 to 256.
        RuntimeError: attn_mask together with is_causal; kernels cannot run here.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.ndim < 2:
            got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of at least 2 axes (..., seqlen, head_dim), got {got}")
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask must be None where is_causal is True: put both into the mask")
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    leading, key_leading = _leading(query, key, value, enable_gqa)
    bias = None
    if attn_mask is not None:
        _check_mask(attn_mask, query, (*leading, seqlen_q, seqlen_k))
        bias = _four_axes(as_bias(attn_mask, query.dtype).expand(*leading, seqlen_q, seqlen_k))
    window = None
    if is_causal:
        # Keys from seqlen_q on are seen by no query. Without them the top left is the bottom right, or lies seqlen_q -
        # seqlen_k positions further to the right.
        key, value = (x[..., :seqlen_q, :] for x in (key, value))
        window = (None, seqlen_q - key.shape[-2])
    q, k, v = (
        _four_axes(x.expand(*axes, *x.shape[-2:]))
        for x, axes in ((query, leading), (key, key_leading), (value, key_leading))
    )
    out = flash_attention(q, k, v, window=window, scale=scale, bias=bias, dropout_p=dropout_p)
    return out.reshape(*leading, *out.shape[-2:])


def _leading(query, key, value, enable_gqa):
    """Return the leading axes of query, and those of key and value, after broadcasting."""
    shapes = [tuple(x.shape[:-2]) for x in (query, key, value)]
    heads = [shape[-1:] for shape in shapes]
    if enable_gqa:
        if min(len(shape) for shape in shapes) == 0:
            raise ValueError(f"query, key and value must have an axis of heads for enable_gqa, got {shapes}")
        if heads[1] != heads[2] or 0 in heads[1] or heads[0][0] % heads[1][0]:
            raise ValueError(f"key and value must have one number of heads that divides query's, got {heads}")
        shapes = [shape[:-1] for shape in shapes]
    try:
        common = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(f"the leading axes of query, key and value must broadcast, got {shapes}") from None
    return (common + heads[0], common + heads[1]) if enable_gqa else (common, common)


def as_bias(attn_mask, dtype):
    """Return a mask as a bias: floats as they are, booleans as 0 where True and -inf where False.

    Args:
        attn_mask: tensor of booleans or floats.
        dtype: that of the bias made from booleans.

    Returns:
        tensor of the shape of attn_mask.
    """
    if attn_mask.dtype != torch.bool:
        return attn_mask
    return torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device).masked_fill_(~attn_mask, -math.inf)


def _check_mask(attn_mask, query, shape):
    if not isinstance(attn_mask, torch.Tensor):
        raise ValueError(f"attn_mask must be a tensor or None, got {type(attn_mask).__name__}")
    if attn_mask.dtype not in (torch.bool, query.dtype):
        raise ValueError(f"attn_mask must have dtype bool or query's, {query.dtype}, got {attn_mask.dtype}")
    try:
        attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"attn_mask must broadcast to {tuple(shape)}, got shape {tuple(attn_mask.shape)}") from None


def _four_axes(x):
    """Return (..., nheads, rows, columns) as (batch, nheads, rows, columns); without heads, nheads is 1."""
    if x.ndim < 4:
        return x[:, None] if x.ndim == 3 else x[None, None]
    return x if x.ndim == 4 else x.flatten(0, x.ndim - 4)
