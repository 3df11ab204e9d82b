"""Corruption: shares, provenance of every token, gradients to donors and mask, independence of how a batch is split."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from mpp import UserError
from mpp.corruption import DONOR, KEPT, MASK, UNTOUCHED, Corruption
from mpp.randomness import fold, fold_each

MASK_VALUE = -7.0


def keys(count: int, seed: int = 0) -> Tensor:
    return fold_each(fold(seed, "test"), torch.arange(count))


def tagged(batch: int, n: int) -> Tensor:
    """(B, N, 2) tokens that carry their own image and position."""
    image, position = torch.meshgrid(torch.arange(batch), torch.arange(n), indexing="ij")
    return torch.stack([image, position], dim=-1).float()


def corruption(n: int, **arguments: object) -> Corruption:
    made = Corruption(2, n, **arguments)
    torch.nn.init.constant_(made.mask_token, MASK_VALUE)
    return made


@pytest.mark.parametrize(("ratio", "count"), [(0.5, 98), (0.15, 29)])
def test_shares_of_more_than_a_million_corrupted_patches(ratio: float, count: int):
    """80 / 10 / 10 within binomial error, of exactly `count` in every image."""
    made = corruption(196, ratio=ratio)
    total = torch.zeros(4)
    images = -(-1_000_000 // count) // 2 * 2 + 2
    for part in keys(images).split(4000):
        kind = made.draw(part).kind
        assert ((kind != UNTOUCHED).sum(1) == count).all()
        total += torch.bincount(kind.flatten(), minlength=4)
    n = images * count
    assert n >= 1_000_000
    assert total[1:].sum() == n
    for kind, share in ((MASK, 0.8), (DONOR, 0.1), (KEPT, 0.1)):
        assert abs(float(total[kind]) - n * share) < 4 * (n * share * (1 - share)) ** 0.5


def test_what_a_token_becomes_does_not_depend_on_where_it_is():
    kind = corruption(64).draw(keys(4000)).kind
    table = torch.stack([(kind == k).sum(0) for k in (MASK, DONOR, KEPT)])
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("donor", ["partner", "same"])
def test_every_token_comes_from_where_the_draw_says(donor: str):
    n, batch = 64, 400
    tokens, some = tagged(batch, n), keys(batch)
    made = corruption(n, donor=donor)
    out, masked = made(tokens, some)
    draw = made.draw(some)
    assert torch.equal(masked, draw.masked)
    assert torch.equal(masked, draw.kind != UNTOUCHED)

    same = (draw.kind == UNTOUCHED) | (draw.kind == KEPT)
    assert torch.equal(out[same], tokens[same])
    assert (out[draw.kind == MASK] == MASK_VALUE).all()
    from_image, from_patch = out[draw.kind == DONOR].long().T
    image, patch = tokens[draw.kind == DONOR].long().T
    assert len(image) > 1000
    assert (from_patch >= 0).all()  # never a mask token: donors are clean
    if donor == "partner":
        assert torch.equal(from_image, image ^ 1)
        assert stats.chisquare(torch.bincount(from_patch, minlength=n).numpy()).pvalue > 1e-3
        assert (from_patch == patch).any()  # its own position is as good as any
    else:
        assert torch.equal(from_image, image)
        assert (from_patch != patch).all()
        offset = (from_patch - patch) % n
        assert stats.chisquare(torch.bincount(offset, minlength=n)[1:].numpy()).pvalue > 1e-3


def test_donated_tokens_are_clean_even_where_everything_is_masked():
    """All patches are corrupted, half of them [mask]: the donors of the others are the tokens before that."""
    made = corruption(16, ratio=1.0, mask_ratio=0.5, donor_ratio=0.5)
    out, masked = made(tagged(100, 16), keys(100))
    kind = made.draw(keys(100)).kind
    assert masked.all()
    assert (kind != KEPT).all()
    assert (out[kind == DONOR] >= 0).all()


@pytest.mark.parametrize("donor", ["partner", "same"])
def test_gradients_flow_to_donors_and_to_the_mask_token(donor: str):
    """d(sum of outputs) / d(token) = how often that token appears in the output."""
    n, batch = 16, 6
    made, some = corruption(n, donor=donor), keys(batch)
    tokens = tagged(batch, n).requires_grad_()
    made(tokens, some)[0].sum().backward()
    draw = made.draw(some)
    appears = ((draw.kind == UNTOUCHED) | (draw.kind == KEPT)).double()
    for b, p in (draw.kind == DONOR).nonzero().tolist():
        appears[draw.donor_image[b], draw.donor_patch[b, p]] += 1
    assert (draw.kind == DONOR).any()
    assert torch.equal(tokens.grad.double(), appears[..., None].expand(-1, -1, 2))
    assert made.mask_token.grad.tolist() == [float((draw.kind == MASK).sum())] * 2


@pytest.mark.parametrize("donor", ["partner", "same"])
def test_a_batch_may_be_split_in_even_pieces(donor: str):
    made, some, tokens = corruption(16, donor=donor), keys(8), tagged(8, 16)
    whole = made.draw(some)
    pieces = [made.draw(some[:4]), made.draw(some[4:6]), made.draw(some[6:])]
    assert torch.equal(torch.cat([piece.kind for piece in pieces]), whole.kind)
    assert torch.equal(torch.cat([piece.donor_patch for piece in pieces]), whole.donor_patch)
    offsets = (0, 4, 6)
    moved = [piece.donor_image + offset for piece, offset in zip(pieces, offsets, strict=True)]
    assert torch.equal(torch.cat(moved), whole.donor_image)
    out = torch.cat([made(tokens[i : i + 2], some[i : i + 2])[0] for i in range(0, 8, 2)])
    assert torch.equal(out, made(tokens, some)[0])


def test_odd_batches_are_refused_only_where_partners_are_needed():
    with pytest.raises(UserError, match="even batch; got 3"):
        corruption(16).draw(keys(3))
    assert corruption(16, donor="same").draw(keys(3)).kind.shape == (3, 16)
    assert corruption(16, mask_ratio=1.0, donor_ratio=0.0).draw(keys(3)).kind.shape == (3, 16)


def test_bfloat16_tokens_stay_bfloat16_while_the_mask_token_is_float32():
    made = Corruption(8, 16)
    tokens = torch.randn(4, 16, 8).bfloat16()
    out, _ = made(tokens, keys(4))
    kind = made.draw(keys(4)).kind
    assert made.mask_token.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    assert (out[kind == MASK] == made.mask_token.bfloat16()).all()
    assert torch.equal(out[kind == UNTOUCHED], tokens[kind == UNTOUCHED])


def test_the_mask_token_starts_as_a_normal_of_002():
    assert abs(float(Corruption(20_000, 4).mask_token.detach().std()) - 0.02) < 0.001


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask_ratio": 0.95}, "sum to 1"),
        ({"donor_ratio": -0.1}, "sum to 1"),
        ({"donor": "batch"}, "partner or same, got 'batch'"),
        ({"ratio": 0.0}, "ratio"),
    ],
)
def test_impossible_shares_are_refused(arguments: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Corruption(2, 16, **arguments)


def test_a_single_patch_has_no_other_of_the_same_image():
    with pytest.raises(UserError, match="two patches"):
        Corruption(2, 1, donor="same")
