"""Oracles of `bam` and of `convert.upcycle`, which makes such models of dense ones."""

import math

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, TOKENS, batch, close, decoded, differ, make, twin
from tests.stack.tiny import config, model

from manyheads import Attention, Cache, OptionError
from manyheads.convert.own import to_own
from manyheads.convert.upcycle import upcycle
from manyheads.core.router import route
from manyheads.stack import ManyheadsForCausalLM

WIDTH = DIM // HEADS
KV = ("expert", "shared")
N = 3


def line(kv, kv_heads=2):
    return f"bam(experts={N}, kv={kv}, kv_heads={kv_heads}, bias=qkv)"


def dense(layer, expert):
    """One expert as a layer of its own."""
    p = layer.project

    def rows(tensor, shared=False):
        return tensor.detach() if shared and p.shared else tensor.detach().chunk(N)[expert]

    weights = {"project__o_proj__weight": p.o_proj.weight.detach().chunk(N, 1)[expert]}
    for name in ("q_proj", "k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            weights[f"project__{name}__{kind}"] = rows(getattr(getattr(p, name), kind), name != "q_proj")
    return twin(layer, "gqa(kv_heads=2, bias=qkv)", **weights)


def equal_experts(layer):
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj")[: 1 if layer.project.shared else 3]:
            for tensor in getattr(layer.project, name).parameters():
                tensor.copy_(tensor.chunk(N)[0].repeat(N, *[1] * (tensor.ndim - 1)))
        weight = layer.project.o_proj.weight
        weight.copy_(weight.chunk(N, 1)[0].repeat(1, N))
    return layer


@pytest.mark.parametrize("kv", KV)
def test_one_attention_of_all_heads_is_a_loop_over_experts(kv):
    layer, x = make(line(kv)), batch()
    gates = layer.project.router(x).softmax(-1)
    want = sum(gates[..., [j]] * dense(layer, j)(x) for j in range(N))
    close(layer(x), want)


@pytest.mark.parametrize("kv", KV)
def test_equal_experts_are_one_whatever_the_router(kv):
    layer, x = equal_experts(make(line(kv))), batch()
    close(layer(x), dense(layer, 0)(x))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("expert", range(N))
def test_a_sure_router_leaves_one_expert(kv, expert):
    layer, x = make(line(kv)), batch()
    x[..., 0] = 1
    with torch.no_grad():
        layer.project.router.weight.zero_()[expert, 0] = 1e4
    close(layer(x), dense(layer, expert)(x))


def test_one_expert_is_the_seed():
    layer, x = make("bam(experts=1, kv_heads=2)"), batch()
    close(layer(x), twin(layer, "gqa(kv_heads=2)")(x))


def test_shared_keys_are_equal_keys():
    shared, x = make(line("shared")), batch()
    changes = {
        f"project__{name}__{kind}": getattr(getattr(shared.project, name), kind).detach().repeat(N, *ones)
        for name in ("k_proj", "v_proj") for kind, ones in (("weight", [1]), ("bias", []))
    }  # fmt: skip
    close(twin(shared, line("expert"), **changes)(x), shared(x))


def test_gates_sum_to_one():
    layer, x = make(line("expert")), batch()
    close(layer.project.gates(x).sum(-1), torch.ones(2, TOKENS).double())
    assert layer.project.float().gates(x.bfloat16().float()).dtype == torch.float32


def test_losses_at_their_ends():
    """Balance 1 where routing is even, z = (ln N)² where logits are zero."""
    valid, even = torch.ones(1, 8, dtype=torch.bool), torch.eye(4).repeat(2, 1)[None] * 1e-9
    assert math.isclose(route(even, 1).balance(valid), 1, rel_tol=1e-6)
    assert math.isclose(route(torch.zeros(1, 8, 4), 1).size(valid), math.log(4) ** 2, rel_tol=1e-6)


@pytest.mark.parametrize("kv", KV)
def test_decode_and_cache(kv):
    """N 2 G d numbers a token with keys of each expert's own, 2 G d with shared ones."""
    layer, x, cache = make(line(kv)), batch(size=1), Cache()
    close(decoded(layer, x, 4, cache), layer(x))
    assert cache.bytes() == TOKENS * 2 * 2 * WIDTH * 8 * (N if kv == "expert" else 1)


def test_cost():
    seed = Attention("gqa(kv_heads=2)", DIM, HEADS).spec.cost(DIM, HEADS)
    expert, shared = (
        Attention(f"bam(experts={N}, kv={kv}, kv_heads=2)", DIM, HEADS).spec.cost(DIM, HEADS) for kv in KV
    )
    assert expert.parameters == N * seed.parameters + N * DIM
    assert shared.parameters == N * seed.parameters + N * DIM - (N - 1) * 2 * DIM * 2 * WIDTH
    assert expert.pair_flops == shared.pair_flops == N * seed.pair_flops
    assert expert.token_flops == N * seed.token_flops + 2 * N * DIM


@pytest.mark.parametrize(
    ("options", "words"),
    [("experts=0", "experts=0"), ("kv_heads=3", r"4 heads of an expert cannot share kv_heads=3; .* \[1, 2, 4\]")],
)
def test_refusals(options, words):
    with pytest.raises(OptionError, match=words):
        Attention(f"bam({options})", DIM, HEADS)


# --- upcycling

CASE = {"specs": "gqa(kv_heads=2, bias=qkv) + qk-norm", "ffn": ["swiglu", "gelu", "none", "swiglu"]}


def grown(count, alike=False):
    """Dense models of one shape, and their states."""
    models = []
    for seed in range(count):
        models.append(model(CASE))
        torch.manual_seed(100 if alike else seed)
        for parameter in models[-1].parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return models, [each.state_dict() for each in models]


@pytest.mark.parametrize("kv", KV)
def test_equal_models_mix_to_themselves(kv):
    (seed, *_), states = grown(N, alike=True)
    ids = torch.randint(3, 61, (2, 9))
    mixed = upcycle(seed.config, states, kv=kv).eval()
    torch.testing.assert_close(mixed(ids).logits, seed(ids).logits, atol=2e-4, rtol=2e-4)
    literal = upcycle(seed.config, states, kv=kv, renormalise_topk=False).eval()
    differ(literal(ids).logits, seed(ids).logits)


@pytest.mark.parametrize("kv", KV)
def test_experts_are_copies_and_the_rest_is_the_mean(kv):
    (first, *_), states = grown(N)
    mixed = upcycle(first.config, states, kv=kv)
    made, block = mixed.state_dict(), "model.decoder.stack.blocks.0."
    for j, state in enumerate(states):
        own = {name: state[block + f"attention.project.{name}_proj.weight"] for name in "qkvo"}
        q, k, v, o = (made[block + f"attention.project.{name}_proj.weight"] for name in "qkvo")
        assert torch.equal(q.chunk(N)[j], own["q"]) and torch.equal(o.chunk(N, 1)[j], own["o"])
        if kv == "expert":
            assert torch.equal(k.chunk(N)[j], own["k"]) and torch.equal(v.chunk(N)[j], own["v"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            assert torch.equal(made[block + f"ffn.experts.{name}"][j], state[block + f"ffn.{name}.weight"])
    means = ["model.decoder.embedding.weight", "model.decoder.norm.weight", block + "attention_norm.weight"]
    means += [name for name in made if "transforms.0" in name]
    means += [block + f"attention.project.{name}_proj.weight" for name in "kv"] if kv == "shared" else []
    for name in means:
        torch.testing.assert_close(made[name], torch.stack([state[name] for state in states]).mean(0))


def test_a_mixture_saves_trains_and_generates(tmp_path):
    (first, *_), states = grown(2)
    mixed = upcycle(first.config, states)
    ids = torch.randint(3, 61, (2, 9))
    mixed.train()(ids, labels=ids).loss.backward()
    for name, parameter in mixed.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
    mixed.save_pretrained(tmp_path)
    again = ManyheadsForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids).logits, mixed.eval()(ids).logits)
    assert again.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_a_familys_models_mix():
    """Adopted, and moved into our decoder first."""
    from tests.convert.test_own import adopted
    from transformers import Qwen2Config

    seed = to_own(adopted(Qwen2Config))
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.normal_(std=0.2)
        mixed = upcycle(seed.config, [seed.state_dict()] * 2).eval()
        ids = torch.randint(3, 61, (2, 9))
        torch.testing.assert_close(mixed(ids).logits, seed(ids).logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"specs": "mla(rank=12, rope_dim=4)"}, "layer 0: experts are plain gqa, not mla"),
        ({"specs": "gqa(scale=0.5)"}, "experts are plain gqa, not gqa"),
        ({"specs": "gqa(bias=qkvo)"}, "the output of an expert has no bias"),
        ({"specs": "gqa + alibi"}, "alibi tells heads apart"),
        ({"specs": "gqa", "ffn": "moe"}, "a feed-forward moe does not become an expert"),
        ({"specs": "gqa", "kv_source": [None, 0, None, 2]}, "rows of its own"),
    ],
)
def test_models_that_do_not_mix(case, words):
    with pytest.raises(ValueError, match=words):
        upcycle(config(case), [{}, {}])


def test_states_that_do_not_agree():
    (first, *_), states = grown(2)
    with pytest.raises(ValueError, match="no models to mix"):
        upcycle(first.config, [])
    states[1].pop("model.decoder.norm.weight")
    with pytest.raises(ValueError, match=r"model 1 and model 0 do not agree about model\.decoder\.norm\.weight"):
        upcycle(first.config, states)
