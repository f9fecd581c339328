"""Models whose heads do what they were made for."""

import torch
from torch import nn

from manyheads import Attention, Decoder


class Copier(nn.Module):
    """Two layers of attention alone: a head that looks at the token before, and one that completes what it has seen.

    The stream is [token | place | the token before | what is written], each one-hot.
    """

    def __init__(self, vocab=30, places=64, sharp=60.0):
        super().__init__()
        self.vocab, self.places = vocab, places
        dim, wide = 3 * vocab + places, max(vocab, places)
        spec = f"gqa(head_dim={wide}, scale=1.0) + rope(none)"
        self.first, self.second = (Attention(spec, dim, 2) for _ in range(2))
        for p in self.parameters():
            nn.init.zeros_(p)
        token, place, before, out = torch.eye(dim).split([vocab, places, vocab, vocab])
        with torch.no_grad():

            def put(name, layer, rows):  # head 0's channels from the stream, or back
                weight = getattr(layer.project, name).weight
                (weight[: len(rows)] if name != "o_proj" else weight.T[: len(rows)]).copy_(rows)

            put("q_proj", self.first, sharp * place)
            put("k_proj", self.first, torch.cat([torch.zeros(1, dim), place[:-1]]))
            put("v_proj", self.first, token)
            put("o_proj", self.first, before)
            put("q_proj", self.second, sharp * token)
            put("k_proj", self.second, before)
            put("v_proj", self.second, token)
            put("o_proj", self.second, out)

    def forward(self, ids):
        x = torch.zeros(*ids.shape, 3 * self.vocab + self.places)
        x.scatter_(-1, ids[..., None], 1.0)
        x[..., self.vocab : self.vocab + self.places] = torch.eye(self.places)[: ids.shape[1]]
        x = x + self.first(x)
        x = x + self.second(x)
        return x[..., -self.vocab :]

    def generate(self, ids, max_new_tokens, **options):
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def counting(vocab=12):
    """Two layers whose first head turns each token into the next, and whose second copies it."""
    model = Decoder(vocab, "gqa(head_dim=12) + rope(none)", vocab, 2, layers=2, ffn="none").eval()
    shift = torch.eye(vocab).roll(1, 1)  # e_t becomes e_t+1
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(vocab))
        for block in model.stack.blocks:
            project = block.attention.project
            project.v_proj.weight.copy_(torch.cat([torch.eye(vocab)] * 2))
            project.o_proj.weight.copy_(torch.cat([shift.T, torch.eye(vocab)], 1))
    return model
