"""flashlib inside models of Hugging Face's transformers: the same logits and gradients as with their own attention."""

import sys
from types import SimpleNamespace

import pytest
import torch
from attention_cases import DEVICE

from flashlib import dropout, hf, reference

try:
    import transformers
except ImportError:
    transformers = None

needs_transformers = pytest.mark.skipif(
    transformers is None, reason="transformers is not installed: pip install transformers (it is no dependency)"
)
SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes))


def gemma(**changes):
    # A layer with a window of 9 keys and one without; a cap and weights that make the cap count.
    special = {
        "sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4, "initializer_range": 0.3,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES | special | changes))


def gpt_oss(**changes):
    special = {
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES | special | changes))


def made(maker, **changes):
    torch.manual_seed(0)
    model = maker(**changes).to(DEVICE)
    if maker is gpt_oss:
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.eval()


def tokens(seqlen, padding):
    ids = torch.randint(1, 61, (2, seqlen), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    seen = torch.ones_like(ids)
    if padding == "left":
        seen[1, :7] = 0
    if padding == "right":
        seen[1, -7:] = 0
    return ids, seen


def outcome(model, implementation, ids, seen):
    """Return the logits where there are tokens, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=seen).logits[seen.bool()]
    goal = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    (logits * goal).sum().backward()
    return {"logits": logits.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name] - want[name]).abs().max()
        assert error <= 2e-5 * want[name].abs().max() + 1e-7, name


@needs_transformers
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("maker", [llama, gemma, gpt_oss], ids=lambda f: f.__name__)
def test_logits_and_gradients_are_those_of_eager(maker, padding, monkeypatch):
    hf.register()
    model, (ids, seen), calls = made(maker), tokens(20, padding), []
    attend = hf.flash_attention
    monkeypatch.setattr(hf, "flash_attention", lambda *x, **options: calls.append(options) or attend(*x, **options))
    ours = outcome(model, hf.NAME, ids, seen)
    assert len(calls) == 2
    # Only padding and a window need a mask; a layer without either is causal and skips tiles.
    masked = [call["bias"] is not None for call in calls]
    assert masked == ([True, True] if padding != "none" else [maker is not llama, False])
    equal(ours, outcome(model, "eager", ids, seen))
    if maker is llama:
        equal(ours, outcome(model, "sdpa", ids, seen))


@needs_transformers
def test_the_name_is_not_taken_for_a_package():
    from transformers.utils.generic import is_flash_attention_requested

    assert not is_flash_attention_requested(requested_attention_implementation=hf.register())


@needs_transformers
def test_a_model_made_with_it_generates_the_same_tokens():
    ids, seen = tokens(12, "left")
    found = []
    for name in ("eager", hf.register()):
        model = made(gemma, attn_implementation=name)
        assert model.config._attn_implementation == name
        found.append(model.generate(input_ids=ids, attention_mask=seen, max_new_tokens=4, do_sample=False))
    assert found[0].shape == (2, 16)
    assert torch.equal(*found)


# --- the function by itself ------------------------------------------------------------------------------------------


def layer(**values):
    return SimpleNamespace(**{"training": False, "is_causal": True} | values)


def qkv(seqlen_q, seqlen_k):
    shapes = (2, 4, seqlen_q, 16), (2, 2, seqlen_k, 16), (2, 2, seqlen_k, 24)
    return [torch.randn(s, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n, s in enumerate(shapes)]


def close(got, want):
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_window_without_a_mask_and_the_other_options():
    q, k, v = qkv(20, 20)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)
    out, weights = hf.attention(
        layer(), q, k, v, None, scaling=0.4, softcap=1.5, sliding_window=5, s_aux=sinks, output_attentions=True
    )
    assert weights is None
    close(out, reference.attention(q, k, v, causal=True, window=(4, None), scale=0.4, softcap=1.5, sinks=sinks))


def test_causality_of_the_call_goes_before_that_of_the_layer():
    q, k, v = qkv(7, 20)
    close(hf.attention(layer(), q, k, v, None, is_causal=False)[0], reference.attention(q, k, v))
    close(hf.attention(layer(is_causal=False), q, k, v, None)[0], reference.attention(q, k, v))


def test_keys_that_a_static_cache_has_yet_to_fill():
    q, k, v = qkv(7, 20)
    close(hf.attention(layer(), q, k, v, None)[0], reference.attention(q, k[:, :, :7], v[:, :, :7], causal=True))
    # One query is a step of decoding: it sees all that is there.
    q = q[:, :, :1]
    close(hf.attention(layer(), q, k, v, None, sliding_window=64)[0], reference.attention(q, k, v))


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_a_position_bias_joins_the_mask(kind):
    q, k, v = qkv(9, 9)
    bias = torch.randn((1, 4, 9, 9), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    seen = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril(2)
    mask = {"none": None, "bool": seen, "float": torch.where(seen, 0.0, torch.finfo(torch.float32).min)}[kind]
    out, _ = hf.attention(layer(), q, k, v, mask, position_bias=bias)
    close(out, reference.attention(q, k, v, bias=bias, causal=kind == "none", mask=None if kind == "none" else seen))


def test_dropout_only_while_training():
    q, k, v = qkv(9, 9)
    close(hf.attention(layer(), q, k, v, None, dropout=0.4)[0], reference.attention(q, k, v, causal=True))
    torch.manual_seed(5)
    seed = dropout.seed_for(None, DEVICE).tolist()
    keep = torch.from_numpy(dropout.keep_mask(*seed, 0.4, 2, 4, 9, 9)).to(DEVICE)
    torch.manual_seed(5)
    out, _ = hf.attention(layer(training=True), q, k, v, None, dropout=0.4)
    close(out, reference.attention(q, k, v, causal=True, dropout_p=0.4, keep=keep))


def test_a_sink_of_each_token_is_refused():
    q, k, v = qkv(9, 9)
    with pytest.raises(ValueError, match=r"sinks must be None: one logit a head is taken \(s_aux\)"):
        hf.attention(layer(), q, k, v, None, sinks=q[..., :1])


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        hf.register()
