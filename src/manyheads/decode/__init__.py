"""Heads and look-ups that let a model write several tokens a step, the same tokens that it would have written."""

from manyheads.decode.buckets import attention_buckets, choose_bases, mix_logits, waveform
from manyheads.decode.distil import Distillation, train
from manyheads.decode.drafter import Drafter, RandomDrafter, Seen
from manyheads.decode.guard import Guard
from manyheads.decode.jakiro import Jakiro
from manyheads.decode.learned import LearnedDrafter, load
from manyheads.decode.lookup import PromptLookup
from manyheads.decode.medusa import MedusaHeads
from manyheads.decode.mtp import MTP
from manyheads.decode.speed import Acceptance, Costs, Plan, costs, plan
from manyheads.decode.steps import Decoded, SlowDraft, generate
from manyheads.decode.tree import Tree
from manyheads.decode.verify import Typical, Verifier

__all__ = [
    "MTP",
    "Acceptance",
    "Costs",
    "Decoded",
    "Distillation",
    "Drafter",
    "Guard",
    "Jakiro",
    "LearnedDrafter",
    "MedusaHeads",
    "Plan",
    "PromptLookup",
    "RandomDrafter",
    "Seen",
    "SlowDraft",
    "Tree",
    "Typical",
    "Verifier",
    "attention_buckets",
    "choose_bases",
    "costs",
    "generate",
    "load",
    "mix_logits",
    "plan",
    "train",
    "waveform",
]
