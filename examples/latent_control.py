"""A small model that knows when it does not know: a head on its states decides what a large model is asked.

The small model, a Llama of two layers, learned by heart the answers to questions on some topics (a word for the topic,
one for the question, three of answer) and none on the others; the large one knows all, at ten times the price. A
capability head reads the small model's states at the tokens of its own answers, and was told of part of the questions
whether they were right. At a budget for each question (`mh.multi.affordable`), answers that the head doubts are asked
for again. Printed: how well the head tells right from wrong on questions that it was not told of, and how many end
right at each price, beside asking again at random.

With `--model` (smollm2, or a name or folder of transformers) the small model is that one, and the questions are sums.

Source: Multi-Head Latent Control, arXiv 2607.14277.

    python examples/latent_control.py [--steps 300] [--model smollm2 --questions 120]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import manyheads as mh
from manyheads.convert.source import load_source

WORDS, ANSWER, SMALL, LARGE = 24, 3, 1.0, 10.0


def questions(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts `[Q, 2]`, answers `[Q, ANSWER]`, and which the small model has learned."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.cartesian_prod(torch.arange(WORDS), torch.arange(WORDS))
    answers = torch.randint(WORDS, (len(prompts), ANSWER), generator=generator)
    return prompts, answers, (torch.randperm(WORDS, generator=generator) < WORDS // 2)[prompts[:, 0]]


def small_model(prompts: Tensor, answers: Tensor, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, eos_token_id=None, **size))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    ids = torch.cat([prompts, answers], 1)
    for _ in range(steps):
        optimiser.zero_grad()
        logits = model(input_ids=ids).logits[:, 1:-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten()).backward()
        optimiser.step()
    return model.eval().requires_grad_(False)


def learn(head: mh.multi.Trajectory, states: Tensor, right: Tensor, steps: int) -> None:
    """A capability head, from states of answers `[Q, N, D]` and whether they were right."""
    balance = (float((right < 0.5).sum()), float((right >= 0.5).sum()))
    optimiser = torch.optim.AdamW(head.train().parameters(), 1e-3)
    for _ in range(steps):
        rows = torch.randint(len(states), (32,))
        optimiser.zero_grad()
        mh.multi.capability_loss(head(states[rows])[:, 0].sigmoid(), right[rows], balance=balance).backward()
        optimiser.step()
    head.eval()


def told(said: Tensor, right: Tensor) -> float:
    """How often a right answer is held better than a wrong one."""
    above = said[right >= 0.5][:, None] - said[right < 0.5]
    return float(((above > 0) + 0.5 * (above == 0)).double().mean())


@torch.no_grad()
def routed(said: Tensor, right: Tensor, budget: float) -> tuple[float, float, float]:
    """What a question costs, how many end right, and how many would with as many asked again at random."""
    least = mh.multi.affordable(said, SMALL, LARGE, budget)
    again = torch.tensor([each == "escalate" for each in mh.multi.decide(said, least=least)])
    share, ends = float(again.double().mean()), float(torch.where(again, 1.0, right).mean())
    return SMALL + LARGE * share, ends, float(right.mean()) * (1 - share) + share


@torch.no_grad()
def sums(name: str, count: int) -> tuple[Tensor, Tensor]:
    """States of a real model at its answers to sums, and whether they are right."""
    source = load_source(name)
    tokenizer, model = source.reader(), source.model.eval()
    states, right = [], []
    for a, b in torch.randint(2, 60, (count, 2), generator=torch.Generator().manual_seed(0)).tolist():
        ids = tokenizer(f"3 + 4 = 7\n12 + 5 = 17\n{a} + {b} =", return_tensors="pt").input_ids
        whole = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
        states.append(model(whole, output_hidden_states=True).hidden_states[-1][0, ids.shape[1] :].float())
        said = tokenizer.decode(whole[0, ids.shape[1] :]).strip().split("\n")[0].split()
        right.append(float(said[:1] == [str(a + b)]))
    return torch.stack(states), torch.tensor(right)


def experiment(steps: int) -> tuple[Tensor, Tensor]:
    """What the head says of questions that it was not told of, and whether the small model is right."""
    prompts, answers, known = questions()
    model = small_model(prompts[known], answers[known], steps)
    ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=ANSWER, do_sample=False)
    right = (ids[:, 2:] == answers).all(1).float()
    control = mh.multi.LatentControl(model, width=48, places=ANSWER, layers=1)
    rest, half = torch.randperm(len(ids)).chunk(2)
    learn(control.capability, control.states(ids[half])[0][:, 2:], right[half], steps // 2)
    with torch.no_grad():
        return control.eval()(ids[rest], 2)[0], right[rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model")
    parser.add_argument("--questions", type=int, default=120)
    given = parser.parse_args()
    if given.model:
        (states, right), half = sums(given.model, given.questions), given.questions // 2
        head = mh.multi.Trajectory(states.shape[-1], width=48, places=4, layers=1)
        learn(head, states[:half], right[:half], given.steps)
        with torch.no_grad():
            said, right = head(states[half:])[:, 0].sigmoid(), right[half:]
    else:
        said, right = experiment(given.steps)
    print(
        f"the small model is right in {right.mean():.2f}; right answers are told from wrong by {told(said, right):.2f}"
    )
    for budget in (1.0, 2.0, 4.0, 6.0, 11.0):
        cost, ends, chance = routed(said, right, budget)
        print(f"at {budget:4.1f} a question: costs {cost:5.2f}, {ends:.2f} end right; asked at random {chance:.2f}")


if __name__ == "__main__":
    main()
