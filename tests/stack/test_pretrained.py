"""Both bodies, a zoo of specs: forward, generate, save, load."""

import pytest
import torch
from safetensors import safe_open
from tests.stack.tiny import BODIES, COMMON, DIM, HEADS, LAYERS, MERGES, VOCAB, ZOO, batch, greedy, model
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, QuantizedCache, StaticCache

from manyheads import Cache, Links
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM

PADDING = (0, 5, 2)
FITS = [case for case in ZOO if case not in MERGES]
pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags.*")

both = pytest.mark.parametrize("body", BODIES)
zoo = pytest.mark.parametrize("case", ZOO)


def logits(of, **inputs):
    with torch.no_grad():
        return of(**inputs).logits


def step_by_step(of, inputs, tokens=8):
    """Greedy text by the full forward alone."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for _ in range(tokens):
        newest = logits(of, input_ids=ids, attention_mask=mask, use_cache=False)[:, -1].argmax(-1, keepdim=True)
        ids, mask = torch.cat([ids, newest], 1), torch.cat([mask, torch.ones_like(newest)], 1)
    return ids


@both
@zoo
def test_padding_changes_nothing(case, body):
    of, inputs = model(case, body), batch(PADDING)
    full = logits(of, **inputs)
    for row, pad in enumerate(PADDING):
        alone = logits(of, input_ids=inputs["input_ids"][row : row + 1, pad:])[0]
        torch.testing.assert_close(full[row, pad:], alone, atol=5e-5, rtol=1e-4)


@both
@zoo
def test_greedy(case, body):
    of, inputs = model(case, body), batch(PADDING)
    want = step_by_step(of, inputs)
    assert torch.equal(greedy(of, inputs), want)
    assert torch.equal(greedy(of, inputs, use_cache=False), want)
    assert torch.equal(greedy(of, inputs, prefill_chunk_size=5), want)
    for row, pad in enumerate(PADDING):
        alone = greedy(of, {name: value[row : row + 1, pad:] for name, value in inputs.items()})
        assert torch.equal(alone[0], want[row, pad:]), f"row {row} depends on its batch"


@both
@zoo
def test_sampling(case, body):
    of, inputs, texts = model(case, body), batch(PADDING), []
    for options in ({}, {}, {"use_cache": False}):
        torch.manual_seed(5)
        texts.append(of.generate(**inputs, max_new_tokens=6, do_sample=True, top_k=20, **options))
    assert torch.equal(texts[0], texts[1]), "a seed gives the same text"
    assert torch.equal(texts[0], texts[2]), "with and without cache"


@both
@zoo
def test_beams_and_many_returned(case, body):
    of, inputs = model(case, body), batch(PADDING)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    assert torch.equal(greedy(of, inputs, **options), greedy(of, inputs, use_cache=False, **options))
    torch.manual_seed(5)
    many = of.generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=4)
    torch.manual_seed(5)
    again = of.generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=4, use_cache=False)
    assert len(many) == 9 and torch.equal(many, again)


@both
@zoo
def test_drafts(case, body):
    of, inputs = model(case, body), batch((0,))
    ids = {"input_ids": inputs["input_ids"][:, :6].repeat(1, 3)}  # something to look up
    assistant = model("gqa", "own", num_hidden_layers=1)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        if case in MERGES:
            with pytest.raises(ValueError, match=r"drafts cannot be taken back: layer 0 \(mtla.*merges tokens"):
                greedy(of, ids, **options)
        else:
            assert torch.equal(greedy(of, ids, **options), greedy(of, ids))


@both
@zoo
def test_stock_caches(case, body):
    of, inputs = model(case, body), batch(PADDING)
    for make in (lambda: {"cache_implementation": "static"}, lambda: {"cache": DynamicCache()}):
        if case in MERGES:
            with pytest.raises(ValueError, match=r"layer 0 \(mtla.* merges tokens into slots.* use manyheads.Cache"):
                greedy(of, inputs, **make())
        else:
            assert torch.equal(greedy(of, inputs, **make()), greedy(of, inputs))


@both
@pytest.mark.parametrize("case", FITS)
def test_fp8_cache(case, body):
    of, inputs = model(case, body), batch((0, 0))
    inputs.pop("attention_mask")
    text = greedy(of, inputs, cache_implementation="quantized", cache_config={"backend": "fp8"})
    assert text.shape == (2, 20)
    got, want = [], []
    for cache, steps in ((QuantizedCache("fp8", of.config.get_text_config()), got), (Cache(), want)):
        for part in inputs["input_ids"].split((8, 1, 1, 1, 1), 1):
            steps.append(logits(of, input_ids=part, cache=cache))
    far = (torch.cat(got, 1) - torch.cat(want, 1)).norm() / torch.cat(want, 1).norm()
    assert 0 < far < 0.1


def test_fp8_cache_and_sliding_layers():
    base = MistralConfig(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=40, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, sliding_window=5, **COMMON,
    )  # fmt: skip
    of = ManyheadsForCausalLM(ManyheadsConfig(base, "gqa(kv_heads=2) + window(size=5)")).eval()
    with pytest.raises(ValueError, match="liding"):
        greedy(of, batch((0,)), cache_implementation="quantized", cache_config={"backend": "fp8"})


@both
@zoo
def test_save_and_load(tmp_path, case, body):
    of, inputs = model(case, body), batch(PADDING)
    of.save_pretrained(tmp_path)
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert type(again) is ManyheadsForCausalLM and not again.training
    assert torch.equal(logits(again, **inputs), logits(of, **inputs))
    assert torch.equal(greedy(again, inputs), greedy(of, inputs))


@both
def test_tied_embeddings(tmp_path, body):
    of = model("gqa", body)
    head, embedding = of.get_output_embeddings(), of.get_input_embeddings()
    assert head.weight is embedding.weight
    of.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        whole = [name for name in file.keys() if tuple(file.get_slice(name).get_shape()) == (VOCAB, DIM)]  # noqa: SIM118
    assert len(whole) == 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.get_output_embeddings().weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()
    again.resize_token_embeddings(VOCAB + 3)
    assert again.get_output_embeddings().weight.shape == (VOCAB + 3, DIM)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert logits(again, input_ids=torch.tensor([[VOCAB + 2]])).shape[-1] == again.config.vocab_size == VOCAB + 3


@both
def test_untied_embeddings(tmp_path, body):
    of = model("gqa", body, tie_word_embeddings=False)
    assert of.get_output_embeddings().weight is not of.get_input_embeddings().weight
    of.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, **batch()), logits(of, **batch()))


@both
@zoo
def test_bfloat16(tmp_path, case, body):
    of = model(case, body, initializer_range=0.05)
    of.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, p in half.named_parameters() if p.dtype != torch.bfloat16}
    assert all(name.endswith("attends.0.vectors") for name in kept), "only what a part keeps in float32"
    got, want = logits(half, **batch((0,))), logits(of, **batch((0,)))
    assert got.dtype == torch.bfloat16 and (got - want).norm() < 0.05 * want.norm()
    assert greedy(half, batch()).shape == (3, 20)


@both
@pytest.mark.parametrize("plus", ["kha", "talking_heads", "kha(kind=mlp)"])
def test_a_part_that_a_checkpoint_lacks_starts_as_it_says(tmp_path, plus, body):
    """Load weights of one spec under another: new parts that start as an identity change nothing."""
    of = model("gqa", body)
    of.save_pretrained(tmp_path)
    config = type(of.config).from_pretrained(tmp_path)
    config.specs = [f"gqa(kv_heads=2) + {plus}" if body == "llama" else f"gqa + {plus}"] * LAYERS
    config.specs = [line.replace("gqa +", of.config.specs[0] + " +") for line in config.specs]
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert said["missing_keys"]
    torch.testing.assert_close(logits(again, **batch()), logits(of, **batch()), atol=1e-5, rtol=1e-5)


@both
def test_first_weights(body):
    of = model({"specs": "gqa(kv_heads=2) + kha"}, body, hidden_size=128, initializer_range=0.02)
    layer = of.attentions[2]
    assert layer.project.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.project.o_proj.weight.std().item() == pytest.approx(0.02 / (2 * LAYERS) ** 0.5, rel=0.1)
    assert torch.equal(layer.transforms[0].q, torch.eye(32))


@both
def test_what_forward_takes_and_gives(body):
    of, inputs = model("mla+moh", body), batch(PADDING)
    full = logits(of, **inputs)
    torch.testing.assert_close(logits(of, **inputs, logits_to_keep=1), full[:, -1:])
    embeds = of.get_input_embeddings()(inputs["input_ids"])
    assert torch.equal(logits(of, inputs_embeds=embeds, attention_mask=inputs["attention_mask"]), full)
    assert isinstance(of(**inputs).cache, Cache) and of(**inputs, use_cache=False).cache is None
    assert torch.equal(of(**inputs, return_dict=False)[0], full)
    states = of(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1 and torch.equal(states[0], embeds)
    triangle = torch.ones(12, 12, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None]
    given = logits(of, input_ids=inputs["input_ids"], attention_mask=triangle)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(given[seen], full[seen], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"layer 0 \(mtla.* merges tokens into slots or a state: no 4-D mask fits"):
        logits(model("mtla", body), input_ids=inputs["input_ids"], attention_mask=triangle)


@both
def test_a_cache_is_the_callers(body):
    of, inputs = model("gqa", body), batch((0,))
    cache = Cache()
    parts = [logits(of, input_ids=part, cache=cache) for part in inputs["input_ids"].split((5, 1, 6), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits(of, **inputs), atol=1e-5, rtol=1e-4)
    assert cache.length() == 12 and cache.bytes() == LAYERS * 12 * 2 * 2 * 8 * 4
    static = StaticCache(of.config.get_text_config(), max_cache_len=20)
    parts = [logits(of, input_ids=part, cache=static) for part in inputs["input_ids"].split((5, 1, 6), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits(of, **inputs), atol=1e-5, rtol=1e-4)


@both
def test_links_are_the_callers(body):
    of, links = model("mla+moh", body).train(), Links()
    of(**batch(), links=links)
    assert set(links.aux) == {f"{layer}.moh" for layer in range(LAYERS)}


def test_nothing_is_stored_on_modules():
    of = model("shared", "llama")
    before = {name: set(vars(module)) for name, module in of.named_modules()}
    logits(of, **batch())
    assert {name: set(vars(module)) for name, module in of.named_modules()} == before
