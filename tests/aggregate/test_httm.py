"""Heads that merge their own tokens: blocks, destinations, outliers, and attention on what is left."""

import pytest
import torch
import torch.nn.functional as F

import manyheads as mh
from manyheads.aggregate import HTTM, HeadMerge, build, keep_outliers, merging
from manyheads.core.kernel import Call, attend
from manyheads.core.mask import Axis, Mask


def problem(b=2, h=2, n=12, d=4):
    q, k, v = (torch.randn(b, h, n, d, dtype=torch.float64) for _ in range(3))
    axis = Axis(n, 0)
    return Call(q, k, v, Mask(axis, axis, ()), d**-0.5)


def run(call, options):
    tap = HeadMerge(options)
    return tap.out(attend(tap.ask(call, None)).o, None)


def test_one_block_is_a_bipartite_match_of_all_tokens():
    x = torch.randn(1, 12, 4, dtype=torch.float64)
    found = build("httm(ratio=0.75)", 4)(x)
    ends = [0, 4, 8]
    near = torch.cosine_similarity(x[0, :, None], x[0, ends], dim=-1).argmax(-1)
    for m, end in enumerate(ends):
        members = [n for n in range(12) if n == end or (n not in ends and near[n] == m)]
        torch.testing.assert_close(found.out[0, m], x[0, members].mean(0))
        assert found.size[0, m] == len(members)


def test_blocks_are_the_same_run_of_several_frames():
    x = torch.randn(1, 24, 4)  # 4 frames of 6 tokens, in runs of 3 of 2 frames
    found = build("httm(ratio=0.5, frame=6, spatial=3, temporal=2)", 4)(x)
    assert found.out.shape[1] == 12
    block = [(n // 6 // 2, n % 6 // 3) for n in range(24)]
    for m in range(12):
        assert len({block[n] for n in range(24) if found.assign[0, n] == m}) == 1


def test_a_match_inside_a_block_is_no_better_than_one_among_all():
    x = torch.randn(1, 16, 4, dtype=torch.float64)

    def least(found):  # of each token with its destination, where destinations are the same
        ends = {m: min(n for n in range(16) if found.assign[0, n] == m and n % 2 == 0) for m in range(8)}
        to = [ends[m] for m in found.assign[0].tolist()]
        return torch.cosine_similarity(x[0], x[0, to], dim=-1)

    within, among = (build(f"httm(ratio=0.5, spatial={s})", 4)(x) for s in (4, 16))
    assert (least(within) <= least(among) + 1e-12).all() and (least(within) < least(among)).any()


def test_the_first_frame_may_anchor():
    x = torch.randn(1, 18, 4)
    found = build("httm(ratio=0.8, frame=6, anchor=true)", 4)(x)
    assert len(set(found.assign[0, :6].tolist())) == 6
    assert found.out.shape[1] == build("httm(ratio=0.8, frame=6)", 4)(x).out.shape[1] + 4  # it had two of them


def test_nothing_merged_is_plain_attention():
    call = problem()
    assert HeadMerge(HTTM(0.0)).ask(call, None) is call
    only_keys = run(call, HTTM((0.0, 0.5)))
    assert only_keys.shape == call.q.shape and (only_keys - attend(call).o).abs().max() > 1e-3


def test_equal_queries_merge_exactly_and_keys_where_each_is_there_as_often():
    call = problem(n=6)
    twice = call.q.repeat_interleave(2, 2)
    axis = Axis(12, 0)
    many = Call(twice, call.k, call.v, Mask(axis, Axis(6, 0), ()), call.scale)
    torch.testing.assert_close(run(many, HTTM((0.5, 0.0))), attend(many).o)

    def doubled(times):
        k, v = (t.repeat_interleave(torch.tensor(times), 2) for t in (call.k, call.v))
        cols = Axis(k.shape[2], 0)
        return Call(call.q, k, v, Mask(Axis(6, 0), cols, ()), call.scale)

    even, uneven = doubled([2] * 6), doubled([4, 1, 3, 1, 2, 1])
    torch.testing.assert_close(run(even, HTTM((0.0, 0.5))), attend(even).o)
    merged = {}
    for proportional in (False, True):
        tap = HeadMerge(HTTM((0.0, 0.5), proportional=proportional))
        merged[proportional] = tap.ask(uneven, None)
    # the groups of both are the same, and sizes are what tells them apart
    torch.testing.assert_close(merged[True].k, merged[False].k)
    assert merged[True].bias is not None and merged[False].bias is None


def test_with_sizes_unequal_numbers_of_equal_keys_are_exact():
    call = problem(n=4)
    index = torch.tensor([0, 0, 1, 0, 2, 0, 3, 3])  # places 0, 2, 4, 6 are destinations, one of each key
    k, v = (t[:, :, index] for t in (call.k, call.v))
    many = Call(call.q, k, v, Mask(Axis(4, 0), Axis(8, 0), ()), call.scale)
    torch.testing.assert_close(run(many, HTTM((0.0, 0.5), proportional=True)), attend(many).o)
    assert (run(many, HTTM((0.0, 0.5))) - attend(many).o).abs().max() > 1e-3


def test_outliers_leave_their_means_and_stay_themselves():
    call, merger = problem(n=10), build("httm(ratio=0.8)", 4)
    found = merger(call.q.flatten(0, 1))
    to = found.assign.unflatten(0, (2, 2))
    mask = torch.ones(2, 10, dtype=torch.bool)
    out, now = keep_outliers(call.q, to, found.out.shape[1], 0.25, mask)
    m = found.out.shape[1]
    for b in range(2):
        mean = found.out.unflatten(0, (2, 2))[b]
        far = [((call.q[b, h, n] - mean[h, to[b, h, n]]).norm().item(), h, n) for h in range(2) for n in range(10)]
        outliers = {(h, n) for _, h, n in sorted(far)[-5:]}  # floor(0.25 · 2 · 10), of both heads together
        for h in range(2):
            for n in range(10):
                if (h, n) in outliers:
                    assert now[b, h, n] >= m
                    torch.testing.assert_close(out[b, h, now[b, h, n]], call.q[b, h, n])
                else:
                    same = [i for i in range(10) if now[b, h, i] == now[b, h, n]]
                    torch.testing.assert_close(out[b, h, now[b, h, n]], call.q[b, h, same].mean(0))
                    old = [i for i in range(10) if to[b, h, i] == to[b, h, n]]
                    gone = [i for i in old if (h, i) in outliers]
                    less = (len(old) * mean[h, to[b, h, n]] - call.q[b, h, gone].sum(0)) / (len(old) - len(gone))
                    torch.testing.assert_close(out[b, h, now[b, h, n]], less)


def test_where_all_queries_are_outliers_none_is_merged():
    call = problem()
    torch.testing.assert_close(run(call, HTTM((0.8, 0.0), outliers=1.0)), attend(call).o)


def test_heads_are_independent_but_for_the_budget():
    call = problem()
    other = call.q.clone()
    other[:, 1] = 10 * torch.randn_like(other[:, 1])
    changed = Call(other, call.k, call.v, call.mask, call.scale)
    for outliers, same in ((0.0, True), (0.2, False)):
        options = HTTM((0.8, 0.5), outliers=outliers)
        one, two = run(call, options)[:, 0], run(changed, options)[:, 0]
        assert torch.equal(one, two) == same


def test_heads_that_are_alike_merge_as_one():
    """With one map for all heads it is the merging of whole tokens that sources compare with."""
    call, tap = problem(), HeadMerge(HTTM(0.75, outliers=0.0))
    same = Call(*(t[:, :1].expand(-1, 2, -1, -1) for t in (call.q, call.k, call.v)), call.mask, call.scale)
    asked = tap.ask(same, None)
    found = build("httm(ratio=0.75)", 4)(call.q[:, 0])
    assert torch.equal(tap.to[:, 0], found.assign) and torch.equal(tap.to[:, 1], found.assign)
    torch.testing.assert_close(asked.q[:, 1], found.out)


def test_outputs_are_constant_in_a_group():
    call, options = problem(), HTTM(0.75, outliers=0.0)
    tap = HeadMerge(options)
    asked = tap.ask(call, None)
    to = tap.to
    o = tap.out(attend(asked).o, None)
    assert asked.q.shape[2] == asked.k.shape[2] == 3
    for m in range(3):
        rows = o[0, 1, to[0, 1] == m]
        assert (rows == rows[:1]).all()


def test_grouped_heads_merge_keys_once_a_key_head():
    call = problem(h=4)
    grouped = Call(call.q, call.k[:, :2], call.v[:, :2], call.mask, call.scale)
    spread = Call(
        call.q, call.k[:, :2].repeat_interleave(2, 1), call.v[:, :2].repeat_interleave(2, 1), call.mask, call.scale
    )
    options = HTTM(0.6, proportional=True)
    torch.testing.assert_close(run(grouped, options), run(spread, options))


def test_against_a_head_at_a_time_in_a_model():
    model = mh.Encoder("gqa(kv_heads=2) + rope", 16, 4, 2).double().eval()
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    with torch.no_grad(), merging(model, "httm(ratio=0.5, outliers=0.1)") as merged:
        y = model(x, mask=mask)
        alone = model(x[1:, :7])
    assert merged.tokens[0][1] == 4 and 4 <= merged.tokens[0][0] <= 6
    torch.testing.assert_close(y[1:, :7], alone)
    with torch.no_grad():
        attention, inner = model.stack.blocks[0].attention, model.stack.blocks[0].attention_norm(x[1:, :7])
        q = attention.project.q_proj(inner).unflatten(-1, (4, 4)).transpose(1, 2)
        q = attention.positions[0].turn(q, Axis(7, 0))
        found = build("httm(ratio=0.5)", 4)(q[0])
        assert found.out.shape == (4, 4, 4)
        cosine = F.normalize(q[0, 2, 1], dim=0) @ F.normalize(q[0, 2, ::2], dim=-1).T
        assert found.assign[2, 1] == cosine.argmax()


def test_masks_and_biases_of_pairs_are_refused():
    call = problem()
    ordered = Call(call.q, call.k, call.v, Mask(call.mask.q, call.mask.k), call.scale)
    with pytest.raises(ValueError, match="a mask or a bias over pairs of tokens"):
        run(ordered, HTTM(0.5))
