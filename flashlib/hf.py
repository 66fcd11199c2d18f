"""`flash_attention` inside the models of Hugging Face's transformers: `attn_implementation="Flashlib"`.

transformers looks attention up by a name. `register` puts two functions under the name "Flashlib": one attends, the
other says what mask the first wants. transformers is no dependency of this library, and imported only there.

Source: transformers' documentation, https://huggingface.co/docs/transformers/attention_interface
"""

from flashlib.attention import flash_attention
from flashlib.sdpa import as_bias

# With a capital: where a name holds "flash", transformers 5 looks for a package of FlashAttention's own interface, and
# some models leave out the mask.
NAME = "Flashlib"


def register():
    """Make `attn_implementation="Flashlib"` known to transformers, for every model that is loaded or made afterwards.

    Returns:
        the name, "Flashlib", for `from_pretrained(…, attn_implementation=…)` and `model.set_attn_implementation`.

    Raises:
        ImportError: transformers is not installed, or so old that it lacks these interfaces.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"flashlib.hf needs Hugging Face's transformers: pip install transformers (checked with 5.24; {error})"
        ) from error
    AttentionInterface.register(NAME, attention)
    # Booleans, or None where causality alone says it: a kernel then skips what nobody sees.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
    is_causal=None, s_aux=None, position_bias=None, sinks=None, **_,
):  # fmt: skip
    """Attend as transformers asks a registered function to.

    Args:
        module: the layer; `training` and, where is_causal is None, `is_causal` are read.
        query: (batch, nheads, seqlen_q, head_dim). key, value: (batch, nheads_kv, seqlen_k, head_dim or head_dim_v).
        attention_mask: booleans or floats that broadcast to (batch, nheads, seqlen_q, seqlen_k), which say all about
            who sees whom; or None: causal if is_causal, inside sliding_window.
        dropout: share of the weights that is dropped while the module trains.
        scaling, softcap: as `scale` and `softcap` of `flash_attention`.
        sliding_window: how many keys a query sees, its own included.
        s_aux: (nheads,), the sinks.
        position_bias: floats added to the scores, with a gradient.
        sinks: must be None: what one family of models calls so is a logit of each token.
        _: what else transformers hands to every function of its kind.

    Returns:
        (out, None): out (batch, seqlen_q, nheads, head_dim_v), contiguous; weights are never stored.

    Raises:
        ValueError: sinks are given, or `flash_attention` cannot take something, such as a head_dim that is no multiple
            of 8 from 16 to 256.
    """
    if sinks is not None:
        raise ValueError(f"sinks must be None: one logit a head is taken (s_aux), got shape {tuple(sinks.shape)}")
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    causal = causal and attention_mask is None
    bias = None if attention_mask is None else as_bias(attention_mask, query.dtype)
    seqlen_q = query.shape[2]
    if causal and 1 < seqlen_q < key.shape[2]:
        # More keys than queries and no mask: a cache that is filled up later on (transformers' StaticCache).
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        bias = position_bias if bias is None else position_bias + bias
    out = flash_attention(
        query, key, value,
        causal=causal,
        window=(sliding_window - 1, None) if causal and sliding_window is not None else None,
        scale=scaling,
        softcap=softcap,
        bias=bias,
        sinks=s_aux,
        dropout_p=dropout if module.training else 0.0,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
