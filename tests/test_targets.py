"""Targets: the classes of known colours, mean before quantising, uint8 against floats, real photographs, entropy."""

import math

import numpy as np
import pytest
import torch
from einops import repeat
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from torch import Tensor

from mpp import UserError
from mpp.data.sources import photo_crops
from mpp.targets import MeanColour

COLOURS = {
    "black": ((0, 0, 0), 0),
    "white": ((1, 1, 1), 511),
    "red": ((1, 0, 0), 448),
    "green": ((0, 1, 0), 56),
    "blue": ((0, 0, 1), 7),
}


def plain(colour: tuple[float, ...], size: tuple[int, int] = (32, 48)) -> Tensor:
    """A constant image, float (1, C, H, W)."""
    return repeat(torch.tensor(colour, dtype=torch.float32), "c -> 1 c h w", h=size[0], w=size[1])


@pytest.mark.parametrize("name", COLOURS)
@pytest.mark.parametrize("kind", ["float", "uint8"])
def test_constant_images_have_the_class_of_their_colour(name: str, kind: str):
    colour, want = COLOURS[name]
    pixels = plain(colour)
    labels = MeanColour(3).labels((pixels * 255).to(torch.uint8) if kind == "uint8" else pixels, (16, 16))
    assert labels.shape == (1, 6)
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == [want]


def test_mid_grey_is_292():
    assert MeanColour(3).labels(plain((0.5, 0.5, 0.5)), (16, 16)).unique().tolist() == [292]
    assert MeanColour(3).labels((plain((1, 1, 1)) * 128).to(torch.uint8), (16, 16)).unique().tolist() == [292]
    assert MeanColour(3).labels((plain((1, 1, 1)) * 127).to(torch.uint8), (16, 16)).unique().tolist() == [3 * 73]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_mean_first_then_quantise(dtype: torch.dtype):
    """Half black, half white: the mean is 0.5, level 4; the mean of the levels 0 and 7 would be 3.5."""
    pixels = torch.zeros(1, 3, 16, 16, dtype=dtype)
    pixels[..., 8:] = 255 if dtype == torch.uint8 else 1.0
    assert MeanColour(3).quantise(pixels, (16, 16)).tolist() == [[[4, 4, 4]]]


def test_channels_and_patches_keep_their_order():
    """Each patch of a 2 x 3 grid has a colour of its own, and each channel another weight."""
    grid = torch.arange(18).view(2, 3, 3) * 14
    pixels = repeat(grid, "h w c -> 1 c (h p) (w q)", p=4, q=2).to(torch.uint8)
    level = 8 * grid.view(6, 3) // 255
    assert torch.equal(MeanColour(3).quantise(pixels, (4, 2))[0], level)
    assert MeanColour(3).labels(pixels, (4, 2))[0].tolist() == (level @ torch.tensor([64, 8, 1])).tolist()


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_uint8_is_exact_and_floats_agree_off_the_edges(
    data: st.DataObject, rows: int, columns: int, p: int, q: int, bits: int
):
    image = data.draw(hnp.arrays(np.uint8, (1, 3, rows * p, columns * q)))
    target, levels = MeanColour(3, bits=bits), 2**bits
    exact = target.quantise(torch.from_numpy(image), (p, q))
    floats = target.quantise(torch.from_numpy(image).float() / 255, (p, q))
    for n in range(rows * columns):
        row, column = divmod(n, columns)
        cell = image[0, :, row * p : (row + 1) * p, column * q : (column + 1) * q].reshape(3, -1)
        for c in range(3):
            total = int(cell[c].sum(dtype=np.int64))
            assert int(exact[0, n, c]) == min(levels * total // (255 * p * q), levels - 1)
            if (levels * total) % (255 * p * q):
                assert int(floats[0, n, c]) == int(exact[0, n, c])
            else:  # on a bin edge, float32 may fall to either side
                assert abs(int(floats[0, n, c]) - int(exact[0, n, c])) <= 1


def test_photographs_have_varied_labels():
    """The failure to exclude: every label the same, or a handful of classes."""
    images = torch.from_numpy(np.stack(photo_crops("train", np.arange(400))[0])).permute(0, 3, 1, 2)
    target = MeanColour(3)
    labels = target.labels(images, (4, 4))
    assert len(labels.unique()) > 100
    assert 2.5 < target.entropy(labels) < 5.5  # ln 512 = 6.24
    assert target.accuracy(torch.zeros(400, 64, 512), labels) < 0.25


@pytest.mark.parametrize(("channels", "classes"), [(1, 8), (2, 64), (3, 512), (4, 4096)])
def test_classes_are_joint_up_to_four_channels(channels: int, classes: int):
    """Every class -> its colour -> a patch of that colour -> the class."""
    target = MeanColour(channels)
    assert target.joint
    assert target.size == classes
    labels = torch.arange(classes)
    pixels = repeat(target.colour(labels), "k c -> k c h w", h=2, w=2)
    assert torch.equal(target.labels(pixels, (2, 2))[:, 0], labels)
    assert torch.equal(target.labels((pixels * 255).round().to(torch.uint8), (2, 2))[:, 0], labels)
    assert torch.equal(target.render(torch.eye(classes)), target.colour(labels))


def test_five_channels_are_predicted_each_by_itself():
    target = MeanColour(5)
    assert not target.joint
    assert target.size == 40
    levels = torch.randint(0, 8, (2, 6, 5))
    pixels = repeat(target.colour(levels), "b (h w) c -> b c (h p) (w q)", h=2, p=2, q=2)
    labels = target.labels(pixels, (2, 2))
    assert torch.equal(labels, levels)
    prediction = torch.nn.functional.one_hot(levels, 8).flatten(-2).float()
    assert float(target.accuracy(prediction, labels)) == 1
    assert torch.equal(target.render(prediction), target.colour(levels))
    logits = torch.randn(2, 6, 40)
    by_channel = [
        torch.nn.functional.cross_entropy(logits[..., 8 * c : 8 * c + 8].flatten(0, 1), labels[..., c].flatten())
        for c in range(5)
    ]
    assert float(target.loss(logits, labels)) == pytest.approx(float(sum(by_channel)) / 5, rel=1e-6)


@pytest.mark.parametrize(
    ("channels", "loss"), [(1, math.log(8)), (3, 6.238324625), (4, math.log(4096)), (5, math.log(8))]
)
def test_zero_outputs_lose_ln_k(channels: int, loss: float):
    target = MeanColour(channels)
    labels = target.labels(torch.rand(4, channels, 8, 8), (2, 2))
    assert float(target.loss(torch.zeros(4, 16, target.size), labels)) == pytest.approx(loss, abs=1e-6)


def test_the_loss_is_computed_in_float32():
    loss = MeanColour(3).loss(torch.zeros(2, 4, 512, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log(512), abs=1e-6)


@given(hnp.arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 511)))
def test_entropy_equals_scipys(labels: np.ndarray):
    _, counts = np.unique(labels, return_counts=True)
    assert MeanColour(3).entropy(torch.from_numpy(labels)) == pytest.approx(stats.entropy(counts), abs=1e-12)


def test_entropy_of_separate_channels_is_their_mean():
    labels = torch.tensor([[0, 1, 0, 0, 0], [0, 2, 0, 0, 0]])
    assert MeanColour(5).entropy(labels) == pytest.approx(math.log(2) / 5)


@pytest.mark.parametrize("bits", [0, 9])
def test_impossible_bits_are_refused(bits: int):
    with pytest.raises(UserError, match="1 to 8"):
        MeanColour(3, bits=bits)
