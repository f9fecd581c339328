"""An encoder-decoder model's text is its own whatever is drafted; half precision is refused, with the reason."""

import pytest
import torch
from tests.convert.test_adopt_inside import both, inputs
from tests.decode.laws import prompts
from tests.decode.test_generate import Half
from tests.stack.tiny import VOCAB, model

from manyheads.decode import Jakiro, MedusaHeads, PromptLookup, RandomDrafter, Tree, Verifier, generate
from manyheads.decode.verify import Kept

pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags.*", "ignore::manyheads.decode.SlowDraft")
NEW = 14


def whisper():
    original, made = both("whisper")
    heard = {"input_features": inputs("whisper")["input_features"].double()}
    made, original = made.double(), original.double()
    with torch.no_grad():
        found = original.generate(**heard, max_new_tokens=NEW, do_sample=False)
    return made, heard, found[:, -NEW:].tolist()


def test_greedy_text_of_sound_is_the_models_own_with_any_drafter():
    made, heard, want = whisper()
    rows = [[1]] * 3
    assert generate(made, rows, None, NEW, encoder=heard).tokens == want
    heads, layer = MedusaHeads(made, heads=3, width=3), Jakiro(made, heads=3, width=3, window=5)
    for parameter in [*heads.parameters(), *layer.parameters()]:
        torch.nn.init.normal_(parameter, std=0.3)
    drafters = (Half(rows, want), RandomDrafter(VOCAB), PromptLookup(depth=3, width=3), heads, layer)
    for drafter in drafters:
        for tree in (Tree.full([3, 2, 1]), Tree.chain(3), "auto"):
            assert generate(made, rows, drafter, NEW, tree=tree, encoder=heard).tokens == want
    stop = {want[0][3]}  # a batch that shrinks hears no other sound
    cut = [text[: next((i + 1 for i, token in enumerate(text) if token in stop), NEW)] for text in want]
    assert generate(made, rows, drafters[0], NEW, tree=Tree.full([3, 2]), encoder=heard, stop=stop).tokens == cut
    assert len({*map(len, cut)}) > 1


def test_text_may_end_at_the_decoders_last_position():
    made, heard, _ = whisper()
    plain = generate(made, [[1]] * 3, None, 39, encoder=heard).tokens
    assert generate(made, [[1]] * 3, Half([[1]] * 3, plain), 39, tree=Tree.chain(3), encoder=heard).tokens == plain


def test_what_was_heard_stays_when_drafts_are_taken_back():
    from manyheads.decode.encoded import Encoded

    made, heard, _ = whisper()
    verifier = Verifier(Encoded(made, heard))
    verifier.start(torch.ones(3, 2, dtype=torch.long))
    verifier.check()
    before = [each.clone() for layer in verifier.cache.layers[3:] for each in layer.tensors()]
    tree = Tree.full([2, 2])
    verifier.read(tree, torch.ones(3, len(tree), dtype=torch.long))
    verifier.keep(tree, Kept(torch.tensor([3, 1, 0]), torch.tensor([2, 1, 0])))
    after = [each for layer in verifier.cache.layers[3:] for each in layer.tensors()]
    assert len(before) == 6 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_does_not_fit_is_refused():
    made, heard, _ = whisper()
    with pytest.raises(TypeError, match="needs what its encoder takes"):
        generate(made, [[1]])
    with pytest.raises(TypeError, match="adopt it first"):
        generate(both("whisper")[0].double(), [[1]] * 3, encoder=heard)
    with pytest.raises(ValueError, match="2 prompts for 3 inputs"):
        generate(made, [[1]] * 2, encoder=heard)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_drafts_only_where_rounding_is_allowed(dtype):
    made, rows = model("gqa").to(dtype), prompts(VOCAB)[:1]
    assert len(generate(made, rows, None, 6).tokens[0]) == 6
    with pytest.raises(ValueError, match=rf"in {dtype} a pass of several rows rounds otherwise.*rounding=True"):
        generate(made, rows, RandomDrafter(VOCAB), 6)
    assert len(generate(made, rows, RandomDrafter(VOCAB), 6, rounding=True, tree=Tree.chain(2)).tokens[0]) == 6
