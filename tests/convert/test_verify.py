import logging
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from manyheads.convert import verify
from manyheads.convert.verify import Reference, compare, decode_equals_forward, greedy, quality

SMALL = dict(vocab_size=70, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
GROUPED = SMALL | dict(num_key_value_heads=2, head_dim=8)
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "softcap": Gemma2Config(**GROUPED, final_logit_softcapping=0.5, sliding_window=16),
    "scaled": GraniteConfig(**SMALL, num_key_value_heads=2, logits_scaling=0.25),
}


def model(config, seed=0):
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # as drawn the logits are nearly flat
            if parameter.ndim > 1:
                parameter.mul_(8)
    return made


@pytest.fixture
def tokens():
    return torch.randint(70, (3, 41))


@torch.no_grad()
def plainly(source, candidate, tokens):
    p = source(tokens).logits[:, :-1].double().log_softmax(-1)
    q = candidate(tokens).logits[:, :-1].double().log_softmax(-1)
    nll = F.nll_loss(q.flatten(0, 1), tokens[:, 1:].flatten())
    top1 = (p.argmax(-1) == q.argmax(-1)).double().mean()
    return nll.exp().item(), nll.item(), (p.exp() * (p - q)).sum(-1).mean().item(), top1.item()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("batch", [1, 2])
def test_equals_the_plain_computation(family, batch, tokens, monkeypatch):
    monkeypatch.setattr(verify, "_ROWS", 16)  # several blocks of positions, the last one shorter
    source, candidate = model(CONFIGS[family], 0), model(CONFIGS[family], 1)
    measured = compare(source, candidate, tokens, batch=batch)
    expected = plainly(source, candidate, tokens)
    got = measured.perplexity, measured.nll, measured.kl, measured.top1
    assert got == pytest.approx(expected, rel=1e-4)
    assert measured.tokens == 3 * 40 and measured.kl > 0.01
    alone = quality(candidate, tokens, batch=batch)
    assert alone.nll == pytest.approx(measured.nll) and alone.kl != alone.kl and alone.top1 != alone.top1


def test_a_model_equals_itself(tokens):
    source = model(CONFIGS["llama"])
    same = quality(source, tokens, Reference(source, tokens))
    assert same.kl == 0 and same.top1 == 1


def test_reference_keeps_hidden_states_and_leaves_no_hook(tokens):
    source = model(CONFIGS["llama"])
    reference = Reference(source, tokens)
    assert reference(1).hidden.shape == (1, 41, 32) and reference(1).full is None
    assert not source.get_output_embeddings()._forward_pre_hooks
    assert reference(1) is reference(1)
    whole = Reference(model(CONFIGS["scaled"]), tokens)
    assert whole(1) is not whole(1)  # whole logits are computed anew, not held


def test_progress(tokens):
    seen = []
    quality(model(CONFIGS["llama"]), tokens, batch=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]


def test_not_finite(tokens):
    broken = model(CONFIGS["llama"])
    with torch.no_grad():
        tokens[tokens == 5] = 6
        tokens[1, 30] = 5
        broken.get_input_embeddings().weight[5] = torch.nan  # a masked NaN still spreads to earlier positions
    with pytest.raises(FloatingPointError, match="window 1 at position"):
        quality(broken, tokens)
    with pytest.raises(FloatingPointError, match="not finite"):
        decode_equals_forward(broken, tokens)


def test_refusals(tokens):
    source = model(CONFIGS["llama"])
    with pytest.raises(ValueError, match="other windows"):
        quality(source, tokens, Reference(source, tokens[:2]))
    with pytest.raises(ValueError, match="outside the model's vocabulary of 70"):
        quality(source, tokens + 70)
    with pytest.raises(ValueError, match=r"\[count, length >= 2\]"):
        quality(source, tokens[0])
    other = model(LlamaConfig(**GROUPED | {"vocab_size": 80}))
    with pytest.raises(ValueError, match="predicts 80 tokens, the model 70"):
        compare(other, source, tokens)
    short = model(GPT2Config(vocab_size=70, n_embd=32, n_layer=1, n_head=2, n_positions=40))
    with pytest.raises(ValueError, match="41 tokens are longer than the model's 40 positions"):
        quality(short, tokens)


@pytest.mark.parametrize("block", [1, 3, 5])
@pytest.mark.parametrize("config", [CONFIGS["llama"], MistralConfig(**GROUPED, sliding_window=8)])
def test_decode_equals_forward(config, block, tokens):
    assert decode_equals_forward(model(config), tokens, block=block) < 1e-4


def test_decode_differs_where_the_cache_is_wrong(tokens):
    wrong = model(CONFIGS["llama"])
    attention = wrong.model.layers[0].self_attn

    def double_cached_keys(module, args, kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length() > 0:
            cache.layers[0].keys *= 1.5

    attention.register_forward_pre_hook(double_cached_keys, with_kwargs=True)
    assert decode_equals_forward(wrong, tokens) > 1e-2


def test_greedy(tokens):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(70)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w69")
    source = model(CONFIGS["llama"])
    source.generation_config.update(do_sample=True, temperature=0.5, top_p=0.9, eos_token_id=None)
    text = greedy(source, tokenizer, "w3 w4", tokens=6)
    ids = [3, 4]
    with torch.no_grad():
        for _ in range(6):
            ids.append(source(torch.tensor([ids])).logits[0, -1].argmax().item())
    assert text == tokenizer.decode(ids[2:], skip_special_tokens=True)


def test_a_sample_longer_than_the_positions_is_no_word_to_the_user():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words, heard = Tokenizer(WordLevel({f"w{i}": i for i in range(70)}, unk_token="w0")), []
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w69", model_max_length=4)
    source = model(CONFIGS["llama"])
    source.config.max_position_embeddings = 4
    listen = logging.Handler()
    listen.emit = heard.append
    logging.getLogger("transformers").addHandler(listen)
    try:
        greedy(source, tokenizer, "w3 w4 w5 w6 w7", tokens=3)
        assert not heard
        PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=4)("w3 w4 w5 w6 w7")  # elsewhere as ever
        assert len(heard) == 1
    finally:
        logging.getLogger("transformers").removeHandler(listen)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the text, and so the figure, is of Python 3.11's help")
def test_smollm2_on_the_default_protocol(smollm2_gguf):
    from manyheads.convert.source import load_source
    from manyheads.convert.text import Texts, default_text, second_text, windows

    source = load_source("smollm2")
    texts = Texts.from_text(source.tokenizer, default_text())
    start = time.time()
    measured = quality(source.model, texts.evaluation)
    print(f"{measured}, {time.time() - start:.0f} s")
    assert measured.perplexity == pytest.approx(10.04, abs=0.05)
    assert measured.tokens == 5 * 2047
    second = quality(source.model, windows(source.tokenizer, second_text(), count=5, length=2048))
    print("second text", second)
    assert second.perplexity < 40
    assert decode_equals_forward(source.model, texts.evaluation[:1, :48]) < 1e-3
