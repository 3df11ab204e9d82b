"""Objectives: closed forms at the start, head sizes, where gradients are exactly zero, and that they can learn."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpp import Encoder, MaskedPatchPrediction, Supervised, UserError
from mpp.data.sources import photo_crops
from mpp.objectives.mpp import to_pixels

Batch = dict[str, Tensor]


@pytest.fixture
def batch() -> Batch:
    """Eight crops of eight photographs."""
    images = torch.from_numpy(np.stack(photo_crops("train", np.arange(8))[0])).permute(0, 3, 1, 2)
    return {"image": images, "key": torch.arange(8), "label": torch.arange(8)}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def unfreeze_head(objective: MaskedPatchPrediction | Supervised) -> None:
    """The head starts at zero, which hides everything behind it."""
    nn.init.normal_(objective.head.weight)


# ---------------------------------------------------------------------------------------------------- masked


def test_the_first_loss_is_ln_512(encoder: Encoder, batch: Batch):
    loss = MaskedPatchPrediction(encoder)(batch)["loss"]
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(math.log(512), abs=1e-6)


def test_the_head_of_vit_b_has_393728_parameters():
    with torch.device("meta"):
        objective = MaskedPatchPrediction(Encoder("vit_base_patch16_224"))
    assert count(objective.head) == 393_728
    assert objective.corruption.count == 98
    assert count(objective) == 85_798_656 + 393_728 + 768


def test_the_loss_is_cross_entropy_at_every_corrupted_patch_and_nowhere_else(encoder: Encoder, batch: Batch):
    objective = MaskedPatchPrediction(encoder).eval()
    unfreeze_head(objective)
    tokens, masked = objective.corruption(encoder.embed(to_pixels(batch["image"])), batch["key"])
    prediction = objective.head(encoder.encode(tokens).patches)[masked]
    labels = objective.target.labels(batch["image"], (4, 4))[masked]
    assert len(labels) == 8 * 32
    out = objective(batch)
    assert float(out["loss"].detach()) == pytest.approx(float(F.cross_entropy(prediction, labels).detach()), rel=1e-5)
    assert float(out["accuracy"]) == pytest.approx(float((prediction.argmax(-1) == labels).float().mean()))


def test_gradients_at_uncorrupted_outputs_are_exactly_zero(encoder: Encoder, batch: Batch):
    objective = MaskedPatchPrediction(encoder)
    unfreeze_head(objective)
    seen: list[Tensor] = []
    hook = encoder.vit.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    loss = objective(batch)["loss"]
    hook.remove()
    gradient = torch.autograd.grad(loss, seen[0])[0]
    masked = objective.corruption.draw(batch["key"]).masked
    assert gradient.shape == (8, 1 + 64, encoder.dim)
    assert (gradient[:, 0] == 0).all()  # the class token's output has no loss
    assert (gradient[:, 1:][~masked] == 0).all()
    assert (gradient[:, 1:][masked] != 0).any(-1).all()


def test_labels_come_from_the_clean_image_whatever_the_mask(encoder: Encoder, batch: Batch):
    """Predictions that are right for the image are right under any keys: labels do not depend on the mask."""
    objective = MaskedPatchPrediction(encoder)
    labels = objective.target.labels(batch["image"], encoder.patch)
    for key in (0, 100):
        keys = batch["key"] + key
        prediction, where = objective.predict(batch["image"], keys)
        assert prediction.shape == (8, 32, 512)
        masked = objective.corruption.draw(keys).masked
        assert torch.equal(where, masked.nonzero()[:, 1].view(8, 32))
        oracle = F.one_hot(labels, 512).float()[masked] * 100
        assert float(objective.target.loss(oracle.view(8, 32, 512), labels[masked].view(8, 32))) < 1e-6


def test_what_is_hidden_cannot_be_seen(encoder: Encoder, batch: Batch):
    """Pixels of patches that became [mask], and are nobody's donor, change no output."""
    objective = MaskedPatchPrediction(encoder, mask_ratio=1.0, donor_ratio=0.0).eval()
    unfreeze_head(objective)
    masked = objective.corruption.draw(batch["key"]).masked.view(8, 1, 8, 8)
    hidden = masked.repeat_interleave(4, 2).repeat_interleave(4, 3)
    noise = torch.randint(0, 256, batch["image"].shape, dtype=torch.uint8)
    other = torch.where(hidden, noise, batch["image"])
    assert not torch.equal(other, batch["image"])
    with torch.no_grad():
        before, after = objective.predict(batch["image"], batch["key"]), objective.predict(other, batch["key"])
    assert torch.equal(before[0], after[0])


def test_an_image_sees_its_partner_and_nobody_else(encoder: Encoder, batch: Batch):
    objective = MaskedPatchPrediction(encoder).eval()
    unfreeze_head(objective)
    image = batch["image"].clone()
    image[5] = 255 - image[5]
    with torch.no_grad():
        before, after = objective.predict(batch["image"], batch["key"])[0], objective.predict(image, batch["key"])[0]
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == [False] * 4 + [True, True, False, False]


def test_one_batch_can_be_learned_far_below_the_entropy_of_its_labels(encoder: Encoder, batch: Batch):
    objective = MaskedPatchPrediction(encoder)
    entropy = objective.target.entropy(objective.target.labels(batch["image"], (4, 4)))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=2e-3)
    for _ in range(120):
        optimizer.zero_grad()
        out = objective(batch)
        out["loss"].backward()
        optimizer.step()
    assert entropy > 2
    assert float(out["loss"].detach()) < entropy / 4
    assert float(out["accuracy"]) > 0.9


@pytest.mark.parametrize("channels", [1, 4, 5])
def test_other_channels(channels: int):
    objective = MaskedPatchPrediction(Encoder("vit_micro_patch2_8", channels=channels, depth=1))
    image = torch.randint(0, 256, (2, channels, 8, 8), dtype=torch.uint8)
    loss = objective({"image": image, "key": torch.arange(2)})["loss"].detach()
    assert float(loss) == pytest.approx({1: math.log(8), 4: math.log(4096), 5: math.log(8)}[channels], abs=1e-6)


def test_a_hybrid_predicts_the_colour_of_its_whole_stride():
    objective = MaskedPatchPrediction(Encoder("vit_tiny_r_s16_p8_224", size=64, depth=1))
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    prediction, _ = objective.predict(image, torch.arange(2))
    assert prediction.shape == (2, 2, 512)
    assert objective.target.labels(image, objective.encoder.patch).shape == (2, 4)


def test_masked_objective_exempts_positions_and_tokens_from_decay(encoder: Encoder):
    objective = MaskedPatchPrediction(encoder)
    names = {name for name, _ in objective.named_parameters()}
    assert objective.no_weight_decay() & names == {
        "encoder.vit.pos_embed", "encoder.vit.cls_token", "corruption.mask_token",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- with labels


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_zero_head_gives_zero_logits_and_no_gradient_to_the_backbone(encoder: Encoder, batch: Batch, pool: str):
    objective = Supervised(encoder, 1000, pool=pool)
    assert (objective.logits(batch["image"]) == 0).all()
    loss = objective(batch)["loss"]
    assert float(loss.detach()) == pytest.approx(6.907755, abs=1e-6)
    loss.backward()
    assert all((parameter.grad == 0).all() for parameter in encoder.parameters())
    assert (objective.head.weight.grad != 0).any()


def test_sigmoid_loss_starts_at_10_045(encoder: Encoder, batch: Batch):
    loss = Supervised(encoder, 1000, loss="sigmoid")(batch)["loss"]
    # One label of 1000 at logit -10: softplus(10) + 999 softplus(-10); float32 knows the latter to 1 %.
    assert float(loss.detach()) == pytest.approx(math.log1p(math.exp(10)) + 999 * math.log1p(math.exp(-10)), abs=1e-3)


def test_tanh_head_adds_d_squared_plus_d_parameters():
    with torch.device("meta"):
        encoder = Encoder("vit_base_patch16_224")
    with torch.device("meta"):
        linear, tanh = (Supervised(encoder, 1000, head=head) for head in ("linear", "tanh"))
    assert count(linear) == 86_567_656
    assert count(tanh) - count(linear) == 768**2 + 768
    assert count(tanh) == 87_158_248


def test_logits_read_the_pooled_vector(encoder: Encoder, batch: Batch):
    encoder.eval()
    features = encoder(to_pixels(batch["image"]))
    for pool, vector in (("cls", features.cls), ("mean", features.patches.mean(1))):
        objective = Supervised(encoder, 10, pool=pool)
        unfreeze_head(objective)
        torch.testing.assert_close(objective.logits(batch["image"]), F.linear(vector, objective.head.weight))
        out = objective(batch)
        logits = objective.logits(batch["image"])
        torch.testing.assert_close(out["loss"], F.cross_entropy(logits, batch["label"]))
        assert float(out["accuracy"]) == float((logits.argmax(1) == batch["label"]).float().mean())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pool": "max"}, "objective.pool must be cls or mean, got 'max'"),
        ({"head": "mlp"}, "objective.head"),
        ({"loss": "mse"}, "objective.loss"),
        ({"num_classes": 1}, "two classes, found 1"),
    ],
)
def test_unknown_choices_are_refused(encoder: Encoder, arguments: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Supervised(encoder, **{"num_classes": 10, **arguments})


# ---------------------------------------------------------------------------------------------------- both


@pytest.mark.parametrize("which", ["mpp", "mpp, same", "cls", "mean", "tanh", "registers"])
def test_every_parameter_has_a_gradient(encoder: Encoder, batch: Batch, which: str):
    """No parameter is unused, which would stop distributed training; and with a head, all gradients are alive."""
    objective: MaskedPatchPrediction | Supervised
    if which.startswith("mpp"):
        objective = MaskedPatchPrediction(encoder, donor="same" if "same" in which else "partner")
    elif which == "registers":
        registers = Encoder("vit_small_patch14_reg4_dinov2", patch_size=4, size=32, depth=2)
        objective = MaskedPatchPrediction(registers)
    else:
        objective = Supervised(
            encoder, 8, pool="mean" if which == "mean" else "cls", head="tanh" if which == "tanh" else "linear"
        )
    unfreeze_head(objective)
    for name, parameter in objective.named_parameters():
        if name.endswith(("cls_token", "reg_token", "gamma")):
            nn.init.normal_(parameter)
    objective(batch)["loss"].backward()
    dead = [name for name, p in objective.named_parameters() if p.grad is None or not (p.grad != 0).any()]
    assert dead == []
