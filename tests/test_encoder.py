"""The encoder: bit-equal to timm for every kind of ViT, published parameter counts, resampled positions, errors."""

import json

import numpy as np
import pytest
import timm
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.ndimage import zoom

from mpp import Encoder, UserError
from mpp.masking import take

KINDS = {
    "plain": ("vit_tiny_patch16_224", dict(size=64)),
    "rectangle": ("vit_tiny_patch16_224", dict(size=(32, 80))),
    "micro": ("vit_micro_patch4_32", dict(size=(16, 24))),
    "grey": ("vit_micro_patch2_8", dict(channels=1)),
    "four channels": ("vit_micro_patch4_32", dict(channels=4, mean=(0.1, 0.2, 0.3, 0.4), std=(0.5, 0.6, 0.7, 0.8))),
    "positions on patches alone": ("deit3_small_patch16_224", dict(size=64)),
    "class token and registers": ("vit_small_patch14_reg4_dinov2", dict(size=56)),
    "registers, no class token": ("vit_medium_patch16_reg4_gap_256", dict(size=64)),
    "no class token": ("vit_base_patch16_siglip_gap_224", dict(size=64)),
    "norm before the blocks": ("vit_base_patch16_clip_224", dict(size=64)),
    "hybrid": ("vit_tiny_r_s16_p8_224", dict(size=64)),
    "hybrid, deep": ("vit_small_r26_s32_224", dict(size=64)),
}  # fmt: skip


def build(kind: str) -> Encoder:
    """Two layers, every parameter random, so that no token, scale or position is a constant that hides a mistake."""
    name, arguments = KINDS[kind]
    torch.manual_seed(0)
    encoder = Encoder(name, depth=2, **arguments).eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return encoder


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_equals_timm_bit_for_bit(kind: str):
    encoder = build(kind)
    pool = "token" if encoder.vit.cls_token is not None else ""
    theirs = timm.create_model(
        encoder.name, img_size=encoder.size, in_chans=encoder.channels, num_classes=0, depth=2, global_pool=pool,
        fc_norm=False,
    ).eval()  # fmt: skip
    theirs.load_state_dict(encoder.vit.state_dict())
    pixels = torch.rand(2, encoder.channels, *encoder.size)
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (encoder.mean, encoder.std))
    with torch.no_grad():
        want, features, tokens = theirs.forward_features((pixels - mean) / std), encoder(pixels), encoder.embed(pixels)
        again = encoder.encode(tokens)
    assert torch.equal(features.patches, want[:, theirs.num_prefix_tokens :])
    assert (features.cls is None) == (pool == "")
    if features.cls is not None:
        assert torch.equal(features.cls, want[:, 0])
        assert torch.equal(features.pool("cls"), theirs((pixels - mean) / std))
    assert tokens.shape == features.patches.shape == (2, encoder.num_patches, encoder.dim)
    assert torch.equal(again.patches, features.patches)
    assert torch.equal(features.pool("mean"), features.patches.mean(1))
    assert encoder.grid[0] * encoder.patch[0] == encoder.size[0]
    assert encoder.grid[1] * encoder.patch[1] == encoder.size[1]


def test_pixels_are_normalised_once_by_what_timm_says():
    assert Encoder("vit_tiny_patch16_224", size=32, depth=1).mean == (0.5, 0.5, 0.5)
    deit = Encoder("deit3_small_patch16_224", size=32, depth=1)
    assert deit.mean == pytest.approx((0.485, 0.456, 0.406))
    assert deit.std == pytest.approx((0.229, 0.224, 0.225))
    assert not any(name.endswith(("_mean", "_std")) for name in deit.state_dict())


def test_embedding_is_local_and_has_no_positions(encoder: Encoder):
    pixels = torch.rand(1, 3, 32, 32)
    changed = pixels.clone()
    changed[..., 4:8, 8:12] = 0  # row 1, column 2
    with torch.no_grad():
        different = (encoder.embed(pixels) != encoder.embed(changed)).any(-1)[0].nonzero().flatten()
        assert different.tolist() == [1 * 8 + 2]
        constant = encoder.embed(torch.full((1, 3, 32, 32), 0.3))[0]
    torch.testing.assert_close(constant, constant[:1].expand_as(constant))


def test_visible_keeps_those_patches_alone(encoder: Encoder):
    encoder.eval()
    pixels, order = torch.rand(2, 3, 32, 32), torch.randperm(64)
    with torch.no_grad():
        tokens = encoder.embed(pixels)
        everything = encoder.encode(tokens)
        same = encoder.encode(tokens, torch.arange(64).expand(2, -1))
        assert torch.equal(same.patches, everything.patches)
        assert torch.equal(same.cls, everything.cls)
        shuffled = encoder.encode(tokens, order.expand(2, -1))
        torch.testing.assert_close(shuffled.patches, everything.patches[:, order], rtol=1e-4, atol=1e-5)
        # What is not visible has no influence, and what is keeps its own position.
        some = torch.tensor([[3, 40, 7], [0, 63, 5]])
        other = torch.randn_like(tokens).scatter(1, some[..., None].expand(-1, -1, encoder.dim), take(tokens, some))
        assert torch.equal(encoder.encode(other, some).patches, encoder.encode(tokens, some).patches)
        assert encoder.encode(tokens, some).patches.shape == (2, 3, encoder.dim)


def test_gradient_checkpointing_changes_nothing(encoder: Encoder):
    pixels = torch.rand(2, 3, 32, 32)
    results = []
    for checkpointing in (False, True):
        encoder.vit.set_grad_checkpointing(checkpointing)
        encoder.zero_grad()
        features = encoder(pixels)
        features.patches.square().mean().backward()
        results.append((features.patches.detach(), encoder.vit.blocks[0].attn.qkv.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("vit_tiny_patch16_224", 224, 5_524_416),
        ("vit_small_patch32_224", 224, 22_493_952),
        ("vit_small_patch16_224", 224, 21_665_664),
        ("vit_base_patch32_224", 224, 87_455_232),
        ("vit_base_patch16_224", 224, 85_798_656),
        ("vit_base_patch16_224", 384, 86_859_496 - 769_000),
        ("vit_large_patch16_224", 224, 303_301_632),
        ("vit_huge_patch14_224", 224, 630_764_800),
        ("vit_small_r26_s32_224", 224, 36_431_912 - 385_000),
    ],
)
def test_parameter_counts_of_the_paper(name: str, size: int, count: int):
    with torch.device("meta"):
        encoder = Encoder(name, size=size)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == count


def test_same_size_is_the_identity(encoder: Encoder):
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    assert encoder.resize(32) is encoder
    assert encoder.resize((32, 32)) is encoder
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


@settings(max_examples=15)
@given(st.tuples(*[st.integers(1, 9)] * 2), st.tuples(*[st.integers(1, 9)] * 2))
@example((14, 14), (24, 24))
@example((7, 7), (12, 12))
@example((2, 8), (4, 4))  # as many patches as before, on another grid
@example((4, 4), (8, 2))
def test_resampled_positions_equal_scipys_zoom(old: tuple[int, int], new: tuple[int, int]):
    encoder = Encoder("vit_micro_patch2_8", size=(2 * old[0], 2 * old[1]), depth=1)
    torch.nn.init.normal_(encoder.vit.pos_embed)
    before = encoder.vit.pos_embed.detach().double().numpy()[0]
    encoder.resize((2 * new[0], 2 * new[1]))
    after = encoder.vit.pos_embed.detach().double().numpy()[0]
    want = zoom(before[1:].reshape(*old, -1), (new[0] / old[0], new[1] / old[1], 1), order=1)
    got = after[1:].reshape(*new, -1)
    assert np.array_equal(after[0], before[0])
    assert np.abs(got - want).max() < 1e-5
    if min(*old, *new) > 1:
        for corner in (np.s_[0, 0], np.s_[0, -1], np.s_[-1, 0], np.s_[-1, -1]):
            np.testing.assert_allclose(got[corner], before[1:].reshape(*old, -1)[corner], atol=1e-6)
    assert encoder.grid == new
    with torch.no_grad():
        assert encoder(torch.rand(1, 3, 2 * new[0], 2 * new[1])).patches.shape == (1, new[0] * new[1], encoder.dim)


@pytest.mark.parametrize(
    "kind", ["positions on patches alone", "class token and registers", "no class token", "hybrid"]
)
def test_every_kind_takes_another_size(kind: str):
    encoder = build(kind)
    before, prefix = encoder.vit.pos_embed.detach().clone(), encoder.vit.num_prefix_tokens
    prefix = 0 if encoder.vit.no_embed_class else prefix
    others = {name: tensor.clone() for name, tensor in encoder.state_dict().items() if name != "vit.pos_embed"}
    tall, wide = encoder.patch
    encoder.resize((2 * tall, 3 * wide))
    assert torch.equal(encoder.vit.pos_embed[:, :prefix], before[:, :prefix])
    assert encoder.vit.pos_embed.shape[1] == 6 + prefix
    assert encoder.vit.pos_embed.requires_grad
    assert all(torch.equal(encoder.state_dict()[name], tensor) for name, tensor in others.items())
    with torch.no_grad():
        assert encoder(torch.rand(1, 3, 2 * tall, 3 * wide)).patches.shape == (1, 6, encoder.dim)


@pytest.mark.parametrize("kind", KINDS)
def test_config_builds_the_same_encoder(kind: str):
    encoder = build(kind)
    config = json.loads(json.dumps(encoder.config()))
    again = Encoder(**config).eval()
    again.load_state_dict(encoder.state_dict())
    pixels = torch.rand(1, encoder.channels, *encoder.size)
    with torch.no_grad():
        assert torch.equal(again(pixels).patches, encoder(pixels).patches)
    assert again.config() == encoder.config()


def test_config_does_not_say_where_the_first_weights_came_from():
    """Otherwise loading an exported encoder would download them again, or fail without a network."""
    assert "pretrained" not in Encoder("vit_micro_patch4_32", depth=1, pretrained=False).config()


def test_config_of_a_resized_encoder_has_the_new_size(encoder: Encoder):
    assert encoder.resize((16, 24)).config()["size"] == [16, 24]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_and_tokens_do_not_decay(kind: str):
    encoder = build(kind)
    special = {name for name, _ in encoder.named_parameters() if name.endswith(("_embed", "_token"))}
    assert special
    assert special <= encoder.no_weight_decay()
    assert {name for name in encoder.no_weight_decay() if not name.endswith(("_embed", "_token"))} == set()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit_tiny_patch16_225", {}, "not a timm model; near: vit_tiny_patch16_224"),
        ("resnet18", {}, "VisionTransformer"),
        ("swin_tiny_patch4_window7_224", {}, "VisionTransformer"),
        ("vit_tiny_patch16_224.nonsense", {}, "nonsense"),
        ("vit_micro_patch4_32", {"size": 30}, "30 x 30 is not divisible by the patch 4 x 4 .* 32 x 32"),
        ("vit_micro_patch4_32", {"size": (32, 6)}, "32 x 6 is not divisible"),
        ("vit_tiny_r_s16_p8_224", {"size": 48}, "48 x 48 is not divisible by the patch 32 x 32"),
        ("vit_micro_patch4_32", {"size": 0}, "size"),
        ("vit_micro_patch4_32", {"mean": (0.5,)}, "3 channels, got 1 and 3"),
        ("vit_micro_patch4_32", {"depht": 2}, "depht"),
        ("vit_micro_patch4_32", {"patch_drop_rate": 0.5}, "patch_drop_rate"),
        ("vit_micro_patch4_32", {"dynamic_img_size": True}, "dynamic_img_size"),  # embeds as (B, h, w, D)
        ("vit_micro_patch4_32", {"pretrained": True}, "no pre-trained weights"),
        ("deit_tiny_distilled_patch16_224", {}, "deit_tiny_distilled_patch16_224"),
    ],
)
def test_what_cannot_be_built_is_named(name: str, arguments: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Encoder(name, **arguments)


def test_a_size_that_patches_do_not_divide_is_refused_when_resizing(encoder: Encoder):
    with pytest.raises(UserError, match="34 x 32 is not divisible"):
        encoder.resize((34, 32))


def test_pooling_what_is_not_there_is_refused():
    features = Encoder("vit_base_patch16_siglip_gap_224", size=32, depth=1)(torch.rand(1, 3, 32, 32))
    with pytest.raises(UserError, match="class token"):
        features.pool("cls")
    with pytest.raises(UserError, match="cls or mean, got 'max'"):
        features.pool("max")
