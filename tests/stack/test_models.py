import pytest
import torch

from manyheads import Cache
from manyheads.stack import Decoder, Encoder


def test_decoder():
    model = Decoder(50, "gqa(kv_heads=2)", 32, 4, 3).eval()
    ids = torch.randint(50, (2, 7))
    full, cache = model(ids), Cache()
    assert full.shape == (2, 7, 50)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in ids.split((4, 1, 2), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full)
    torch.testing.assert_close(model(embeds=model.embedding(ids)), full)
    with pytest.raises(ValueError, match="one of them"):
        model(ids, embeds=model.embedding(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_or_not(tied):
    model = Decoder(50, "gqa", 32, 4, 2, tied=tied)
    assert (model.head.weight is model.embedding.weight) == tied
    for weight in (model.head.weight, model.embedding.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_decoder_learns():
    model = Decoder(20, "mla(rank=16, rope_dim=4)", 32, 4, 2, kv_source=[None, 0], std=0.1)
    ids = torch.arange(60).reshape(3, 20) % 7
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    "spec", ["gqa(kv_heads=2)", "gqa + rope", "mla(rank=12, rope_dim=4) + rope", "gqa + window(size=3)"]
)
def test_encoder(spec):
    model = Encoder(spec, 32, 4, 3, vocab=50, std=0.2).double().eval()
    ids, valid = torch.randint(50, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    valid[1, :4] = valid[2, 6:] = False
    full = model(ids, mask=valid)
    for row, keep in enumerate(valid):
        torch.testing.assert_close(full[row, keep], model(ids[row : row + 1, keep])[0], atol=1e-9, rtol=1e-9)
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 50
    assert not torch.equal(model(other)[0, -2], full[0, -2]), "the last token is not seen by the one before"


def test_positions_enter_an_encoder_by_its_spec_only():
    ids = torch.randint(50, (1, 9))
    for spec, moved in (("gqa", False), ("gqa + rope", True)):
        model = Encoder(spec, 32, 4, 2, vocab=50, std=0.2).double().eval()
        same = torch.allclose(model(ids.flip(1)).flip(1), model(ids), atol=1e-9)
        assert same != moved


def test_encoder_of_features():
    model = Encoder("gqa", 32, 4, 2)
    assert model(torch.randn(2, 5, 32)).shape == (2, 5, 32)
    with pytest.raises(ValueError, match="no vocabulary"):
        model(torch.randint(9, (2, 5)))


def test_encoder_and_decoder():
    encoder = Encoder("gqa + rope", 32, 4, 2, vocab=50, std=0.2).double().eval()
    decoder = Decoder(50, "gqa(kv_heads=2)", 32, 4, 2, cross=True, std=0.2).double().eval()
    source, ids = torch.randint(50, (2, 6)), torch.randint(50, (2, 5))
    full, cache = decoder(ids, context=encoder(source)), Cache()
    with torch.no_grad():
        parts = [decoder(part, context=encoder(source), cache=cache) for part in ids.split((2, 1, 2), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-9, rtol=1e-9)
