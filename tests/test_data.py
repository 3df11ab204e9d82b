"""Data: the order of samples, loading with and without workers, crops, decoding of odd files, and every source."""

import io
import os
import re
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from mpp import UserError
from mpp.data import Loader, Plan, Transform, load_data, read_batches
from mpp.data.decoding import decode
from mpp.data.loader import Images
from mpp.data.sources import PHOTOS, Data
from mpp.errors import LocalError
from mpp.randomness import fold

# ---------------------------------------------------------------------------------------------------- plan


@given(st.integers(1, 30), st.integers(0, 50), st.integers(0, 3))
def test_an_epoch_has_distinct_samples_and_epochs_differ(pairs: int, more: int, seed: int):
    batch = 2 * pairs
    plan = Plan(batch + more, batch, seed=seed)
    seen = []
    for epoch in range(2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        micro_batches = [plan.micro_batch(step, 0) for step in steps]
        assert [number for number, _ in micro_batches] == [epoch] * plan.steps_per_epoch
        ids = torch.cat([ids for _, ids in micro_batches])
        assert len(ids) == plan.steps_per_epoch * batch > more
        assert len(ids.unique()) == len(ids)
        assert int(ids.min()) >= 0
        assert int(ids.max()) < batch + more
        seen.append(ids)
    if batch > 8:
        assert not torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[0], Plan(batch + more, batch, seed=seed + 1).micro_batch(0, 0)[1][: len(seen[0])])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_a_step_has_the_same_samples_in_the_same_order_however_it_is_cut(world: int, accumulation: int):
    whole = Plan(203, 48, seed=1)
    plans = [Plan(203, 48, seed=1, rank=rank, world=world, accumulation=accumulation) for rank in range(world)]
    for step in (0, 3, 4, 11, 10_000):  # in any order, from anywhere
        pieces = [plan.micro_batch(step, micro) for micro in range(accumulation) for plan in plans]
        epoch, ids = whole.micro_batch(step, 0)
        assert {number for number, _ in pieces} == {epoch}
        assert all(len(piece) == 48 // (world * accumulation) for _, piece in pieces)
        assert all(len(piece) % 2 == 0 for _, piece in pieces)  # partners 2i and 2i + 1 stay together
        assert torch.equal(torch.cat([piece for _, piece in pieces]), ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_samples=10, batch_size=12), "batch_size=12 is larger than the data set of 10 images; use at most 10"),
        (dict(num_samples=10, batch_size=12, world=2), "use at most 8"),
        (dict(num_samples=99, batch_size=7), "needs an even number, so use a multiple of 2: 6 or 8"),
        (dict(num_samples=99, batch_size=6, world=2), "batches of 3; .* multiple of 4: 4 or 8"),
        (dict(num_samples=99, batch_size=12, world=2, accumulation=2), "multiple of 8: 8 or 16"),
        (dict(num_samples=99, batch_size=2, world=4), "multiple of 8: 8$"),
        (dict(num_samples=99, batch_size=0), "at least 2"),
        (dict(num_samples=99, batch_size=8, accumulation=0), "at least 1"),
    ],
)  # fmt: skip
def test_impossible_batches_are_refused(arguments: dict[str, int], message: str):
    with pytest.raises(UserError, match=message):
        Plan(**arguments, seed=0)


# ---------------------------------------------------------------------------------------------------- loader


many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine has cores


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data("digits")


def make_images(data: Data, *, seed: int = 0, train: bool = True) -> Images:
    transform = Transform((8, 8), crop_scale=(0.3, 1.0))
    return Images(data.train, transform if train else transform.evaluation(), channels=data.channels, seed=seed)


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@many_workers
def test_workers_and_the_first_step_change_nothing(digits: Data):
    images = make_images(digits)
    plan = Plan(len(images), 500, seed=3, accumulation=2)  # two steps an epoch
    straight = list(Loader(images, plan).batches(0, 5))
    assert len(straight) == 10
    assert {batch["image"].dtype for batch in straight} == {torch.uint8}
    assert straight[0]["image"].shape == (250, 1, 8, 8)
    for workers in (1, 3):
        assert same(list(Loader(images, plan, workers=workers).batches(0, 5)), straight)
        assert same(list(Loader(images, plan, workers=workers).batches(3, 5)), straight[6:])
    assert same(list(islice(Loader(images, plan).batches(2, 10**12), 2)), straight[4:6])  # O(1): nothing is skipped


def test_two_processes_load_what_one_does(digits: Data):
    images = make_images(digits)
    whole = list(Loader(images, Plan(len(images), 40, seed=3)).batches(30, 40))  # across the end of an epoch
    ranks = [list(Loader(images, Plan(len(images), 40, seed=3, rank=r, world=2)).batches(30, 40)) for r in range(2)]
    joined = [{name: torch.cat([a[name], b[name]]) for name in a} for a, b in zip(*ranks, strict=True)]
    assert same(joined, whole)


def test_samples_keep_their_keys_labels_and_pixels(digits: Data):
    images = make_images(digits, seed=7, train=False)
    plan = Plan(len(images), 700, seed=7)
    truth = load_digits()
    known = {(truth.images[i] * (255 / 16)).round().astype(np.uint8).tobytes(): truth.target[i] for i in range(1797)}
    for step, batch in enumerate(Loader(images, plan).batches(0, 3)):
        epoch, ids = plan.micro_batch(step, 0)
        assert torch.equal(batch["id"], ids)
        assert batch["key"].tolist() == [fold(7, "sample", epoch, i) for i in ids.tolist()]
        for image, label in zip(batch["image"], batch["label"], strict=True):
            assert known[image.numpy().tobytes()] == int(label)


def test_augmentation_follows_the_sample_and_the_epoch_not_the_batch(digits: Data):
    images = make_images(digits)
    together = images[0, torch.arange(40)]["image"]
    assert torch.equal(torch.cat([images[0, torch.tensor([i])]["image"] for i in range(40)]), together)
    assert not torch.equal(images[1, torch.arange(40)]["image"], together)
    assert not torch.equal(make_images(digits, seed=1)[0, torch.arange(40)]["image"], together)


@many_workers
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_stops_an_evaluation_with_its_name(tmp_path: Path, workers: int):
    for i in range(6):
        save(tmp_path / f"{i}.png")
    broken = tmp_path / "3.png"
    broken.write_bytes(broken.read_bytes()[:60])
    images = Images(load_data("folder", path=str(tmp_path)).train, Transform((8, 8)).evaluation(), channels=3)
    with pytest.raises(LocalError, match=f"^1 of 6 images cannot be read: {re.escape(str(broken))} \\(.*; repair or"):
        list(read_batches(images, [torch.arange(3), torch.arange(3, 6)], workers=workers))


# ---------------------------------------------------------------------------------------------------- transforms


def apply(transform: Transform, image: torch.Tensor, key: int) -> torch.Tensor:
    return transform(image, transform.draw(torch.tensor([key]))[0])


def coordinates(height: int, width: int) -> torch.Tensor:
    """An image whose first two channels are y and x."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([y, x, y * 0]).to(torch.uint8)


def test_crops_have_the_area_and_shape_they_should():
    """The crop of an image of coordinates tells where it came from; sides are read off to within 3 %."""
    transform, image = Transform((32, 48), crop_scale=(0.2, 0.6), flip=0.3), coordinates(200, 250)
    areas, ratios, flips, tops, lefts = [], [], [], [], []
    for key in range(600):
        out = apply(transform, image, fold(key)).double()
        assert out.shape == (3, 32, 48)
        tall, wide = (float(out[c].mean(1 - c)[-8] - out[c].mean(1 - c)[8]) for c in range(2))
        tall, wide = tall / (32 - 16) * 32, wide / (48 - 16) * 48
        flips.append(wide < 0)
        areas.append(tall * abs(wide) / (200 * 250))
        ratios.append(abs(wide) / tall)
        tops.append((float(out[0].mean()) - tall / 2) / (200 - tall + 1))
        lefts.append((float(out[1].mean()) - abs(wide) / 2) / (250 - abs(wide) + 1))
    assert 0.2 * 0.95 < min(areas) < 0.22
    assert 0.57 < max(areas) < 0.6 * 1.05
    assert 0.75 * 0.95 < min(ratios) < 0.78
    assert 1.29 < max(ratios) < 4 / 3 * 1.05
    assert abs(np.mean(flips) - 0.3) < 4 * (0.3 * 0.7 / 600) ** 0.5
    for places in (tops, lefts):
        assert abs(np.mean(places) - 0.5) < 0.06
        assert min(places) < 0.05
        assert max(places) > 0.95


def test_a_transform_is_a_function_of_the_key():
    transform, image = (
        Transform((16, 24), crop_scale=(0.05, 1.0)),
        torch.randint(0, 256, (3, 40, 30), dtype=torch.uint8),
    )
    assert torch.equal(apply(transform, image, 5), apply(transform, image, 5))
    assert not torch.equal(apply(transform, image, 5), apply(transform, image, 6))
    draws = transform.draw(torch.arange(9))
    assert draws[4] == transform.draw(torch.tensor([4]))[0]


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_without_a_crop_only_the_flip_is_left(flip: float):
    image = coordinates(8, 12)
    out = apply(Transform((8, 12), flip=flip), image, 3)
    assert torch.equal(out, image.flip(-1) if flip else image)
    assert apply(Transform((4, 4), flip=flip), image, 3).shape == (3, 4, 4)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.sampled_from([0.875, 1.0]))
def test_any_image_becomes_any_size(height: int, width: int, tall: int, wide: int, crop_pct: float):
    transform = Transform((tall, wide), crop_scale=(0.05, 1.0), crop_pct=crop_pct)
    for one in (transform, transform.evaluation()):
        out = apply(one, coordinates(height, width), height * width)
        assert out.shape == (3, tall, wide)
        assert out.dtype == torch.uint8


def test_evaluation_cuts_out_the_centre_without_randomness():
    transform = Transform((50, 50), crop_scale=(0.1, 0.5), crop_pct=0.5).evaluation()
    out = apply(transform, coordinates(100, 200), 1)
    assert torch.equal(out, apply(transform, coordinates(100, 200), 2))
    # The shorter side is 50 / 0.5 = 100 already: the middle 50 x 50 pixels, unchanged.
    assert torch.equal(out, coordinates(100, 200)[:, 25:75, 75:125])
    assert torch.equal(apply(Transform((9, 7)).evaluation(), coordinates(9, 7), 1), coordinates(9, 7))


@pytest.mark.parametrize(
    "arguments", [{"crop_scale": (0.0, 1.0)}, {"crop_scale": (0.5, 0.2)}, {"crop_scale": (0.5, 1.1)}, {"flip": 1.5},
                  {"crop_pct": 0.0}],
)  # fmt: skip
def test_impossible_transforms_are_refused(arguments: dict[str, object]):
    with pytest.raises(UserError, match=next(iter(arguments))):
        Transform((8, 8), **arguments)


# ---------------------------------------------------------------------------------------------------- decoding

COLOUR = np.zeros((9, 7, 3), np.uint8) + np.array([200, 100, 50], np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)


def save(path: Path, array: np.ndarray = NOISE, *, mode: str | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = PIL.Image.fromarray(array)
    image = image.quantize(16) if mode == "P" else image.convert(mode or image.mode)
    image.save(path, **options)
    return path


def read(path: Path, channels: int = 3) -> np.ndarray:
    array = decode({"bytes": None, "path": str(path)}, channels)
    assert array.dtype == np.uint8
    assert array.shape[2] == channels
    assert np.array_equal(array, decode({"bytes": path.read_bytes(), "path": None}, channels))
    return array


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "ppm", "webp"])
def test_lossless_files_come_back_exactly(tmp_path: Path, suffix: str):
    options = {"lossless": True} if suffix == "webp" else {}
    assert np.array_equal(read(save(tmp_path / f"x.{suffix}", **options)), NOISE)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("rgb.jpg", "RGB"), ("cmyk.jpg", "CMYK"), ("ycbcr.jpg", "YCbCr"), ("palette.png", "P"), ("rgba.png", "RGBA"),
     ("palette.gif", "P"), ("lossy.webp", "RGB"), ("cmyk.tiff", "CMYK")],
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_colours_survive_every_mode(tmp_path: Path, name: str, mode: str, channels: int):
    array = read(save(tmp_path / name, COLOUR, mode=mode), channels).astype(int)
    luma = [round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)]
    want = {1: luma, 2: [*luma, 255], 3: [200, 100, 50], 4: [200, 100, 50, 255]}[channels]
    assert array.shape[:2] == (9, 7)
    assert np.abs(array - want).max() <= 6


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey_files(tmp_path: Path, mode: str):
    path = save(tmp_path / "grey.png", np.full((4, 5), 255, np.uint8), mode=mode)
    for channels in (1, 3):
        assert (read(path, channels) == 255).all()


def test_transparent_palettes_keep_their_alpha(tmp_path: Path):
    image = PIL.Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "x.png", transparency=1)
    assert read(tmp_path / "x.png", 4).tolist() == [[[255, 0, 0, 255], [0, 255, 0, 0]]]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bits_keep_their_high_byte(tmp_path: Path, suffix: str):
    values = np.arange(256, dtype=np.uint16).reshape(16, 16)
    assert np.array_equal(read(save(tmp_path / f"full.{suffix}", values * 257), 1)[..., 0], values)
    assert np.array_equal(read(save(tmp_path / f"colour.{suffix}", values * 257), 3)[..., 2], values)


def test_a_dark_16_bit_image_stays_dark(tmp_path: Path):
    """Its brightness must not depend on whether another pixel of the file exceeds 255."""
    values = np.arange(256, dtype=np.uint16).reshape(16, 16)
    assert read(save(tmp_path / "dark.png", values), 1).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "x.png", exif=exif)
    upright = {
        1: NOISE,
        2: NOISE[:, ::-1],
        3: NOISE[::-1, ::-1],
        4: NOISE[::-1],
        5: NOISE.transpose(1, 0, 2),
        6: np.rot90(NOISE, -1),
        7: NOISE[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(NOISE),
    }[orientation]
    assert np.array_equal(read(path), upright)


def test_exif_orientation_of_a_jpeg(tmp_path: Path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    halves = np.repeat(np.repeat(np.array([[0], [255]], np.uint8), 16, 0), 48, 1)  # black above white
    out = read(save(tmp_path / "x.jpg", halves, exif=exif, quality=95), 1)[..., 0]
    assert out.shape == (48, 32)  # turned clockwise: white left, black right
    assert out[:, 0].min() > 240
    assert out[:, -1].max() < 15


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.filterwarnings("error")
def test_odd_metadata_is_ignored_without_a_word(tmp_path: Path, suffix: str):
    """Photographs with broken EXIF are common (ImageNet has some); a warning for each would drown the output."""
    broken = b"Exif\0\0II*\0\x08\0\0\0\x05\0"
    assert np.abs(read(save(tmp_path / f"x.{suffix}", COLOUR, exif=broken)).astype(int) - [200, 100, 50]).max() <= 6


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "tiff", "bmp"])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, damage: str):
    path = save(tmp_path / f"holiday.{suffix}", np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "text": b"<html>not found</html>", "empty": b""}[damage])
    with pytest.raises(UserError, match=f"cannot read {re.escape(str(path))} as an image .*; repair or remove it"):
        decode({"bytes": None, "path": str(path)}, 3)


def test_a_file_that_has_gone_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"gone\.png"):
        decode({"bytes": None, "path": str(tmp_path / "gone.png")}, 3)


@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=5),
)
def test_no_damage_is_worse_than_a_user_error(kind: str, changes: list[tuple[float, int]]):
    file = io.BytesIO()
    PIL.Image.fromarray(NOISE).save(file, kind)
    data = bytearray(file.getvalue())
    for where, value in changes:
        data[int(where * (len(data) - 1))] = value
    try:
        assert decode({"bytes": bytes(data), "path": "x"}, 3).shape[2] == 3
    except UserError as error:
        assert "cannot read x" in str(error)  # noqa: PT017


# ---------------------------------------------------------------------------------------------------- embedded sets


def find(crop: np.ndarray, photo: np.ndarray) -> np.ndarray:
    """Left columns at which a crop occurs in a photograph, pixel for pixel."""
    code, wanted = (x.astype(np.int32) @ np.array([65536, 256, 1], np.int32) for x in (photo, crop))
    height, width = code.shape[0] - crop.shape[0] + 1, code.shape[1] - crop.shape[1] + 1
    rows, columns = np.nonzero(code[:height, :width] == wanted[0, 0])
    for down in range(crop.shape[0]):
        for right in range(0, crop.shape[1], 1 + 7 * (down % 8 > 0)):
            keep = code[rows + down, columns + right] == wanted[down, right]
            rows, columns = rows[keep], columns[keep]
    exact = [np.array_equal(code[r : r + 32, c : c + 32], wanted) for r, c in zip(rows, columns, strict=True)]
    return columns[np.array(exact, dtype=bool)]


def test_photo_crops_come_from_their_side_of_their_photograph():
    import skimage

    data = load_data("photos", per_class=4, test_per_class=3)
    assert (len(data.train), len(data.test)) == (32, 24)
    assert data.size == (32, 32)
    assert data.classes == tuple(name.split(".")[0] for name in PHOTOS)
    folder = Path(skimage.__file__).parent / "data"
    photos = [np.asarray(PIL.Image.open(folder / name).convert("RGB")) for name in PHOTOS]
    for split, source in (("train", data.train), ("test", data.test)):
        assert np.bincount(data.labels(split)).tolist() == [len(source) // 8] * 8
        for row in source:
            photo, crop = photos[row["label"]], decode(row["image"], 3)
            assert crop.shape == (32, 32, 3)
            border = photo.shape[1] * 3 // 5
            side = photo[:, :border] if split == "train" else photo[:, border:]
            assert len(find(crop, side)) >= 1
    crops = {decode(row["image"], 3).tobytes() for row in data.train}
    assert len(crops) > 28  # the dark sky of one photograph may repeat


def test_digits_are_split_once_and_for_all(digits: Data):
    truth = load_digits()
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.channels == 1
    assert digits.size == (8, 8)
    seen = sorted(decode(row["image"], 1).tobytes() for source in (digits.train, digits.test) for row in source)
    assert seen == sorted((image * (255 / 16)).round().astype(np.uint8).tobytes() for image in truth.images)
    assert set(np.unique(digits.labels("test"))) == set(range(10))
    assert digits.labels()[:8].tolist() == load_data("digits").labels()[:8].tolist()


# ---------------------------------------------------------------------------------------------------- folders


def names(source: datasets.Dataset | None, root: Path) -> list[str]:
    assert source is not None
    return [str(Path(row["image"]["path"]).relative_to(root)) for row in source]


def test_a_flat_folder_is_for_training_alone(tmp_path: Path):
    for name in ("b.png", "a.JPG", "c.webp", ".hidden.png", ".git/x.png", "deep/er/d.bmp"):
        save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    data = load_data("folder", path=str(tmp_path))
    assert names(data.train, tmp_path) == ["a.JPG", "b.png", "c.webp", "deep/er/d.bmp"]
    assert data.test is None
    assert data.classes is None
    assert data.channels == 3
    with pytest.raises(UserError, match="no labels"):
        data.labels()


def test_class_folders_give_labels_and_a_held_out_part(tmp_path: Path):
    for c in ("dog", "cat"):
        for i in range(10):
            save(tmp_path / c / f"sub{i % 2}" / f"{i}.png")
    data = load_data("folder", path=str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert data.test is not None
    both = [(name, label) for split, s in (("train", data.train), ("test", data.test))
            for name, label in zip(names(s, tmp_path), data.labels(split), strict=True)]  # fmt: skip
    assert len(both) == len({name for name, _ in both}) == 20
    assert (len(data.train), len(data.test)) == (16, 4)
    assert all(name.startswith(data.classes[label]) for name, label in both)
    assert "held out" in data.note
    assert names(load_data("folder", path=str(tmp_path)).test, tmp_path) == names(data.test, tmp_path)


@pytest.mark.parametrize("test", ["test", "val", "Validation"])
def test_train_and_test_folders(tmp_path: Path, test: str):
    for c in ("a", "b", "c"):
        save(tmp_path / "train" / c / "1.png")
    for c in ("b", "c"):
        save(tmp_path / test / c / "2.png")
    data = load_data("folder", path=str(tmp_path))
    assert names(data.train, tmp_path) == ["train/a/1.png", "train/b/1.png", "train/c/1.png"]
    assert names(data.test, tmp_path) == [f"{test}/b/2.png", f"{test}/c/2.png"]
    assert data.labels("test").tolist() == [1, 2]


def test_an_unknown_class_in_the_test_folder_is_named(tmp_path: Path):
    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/zebra/1.png"):
        save(tmp_path / name)
    with pytest.raises(UserError, match="zebra"):
        load_data("folder", path=str(tmp_path))


def test_a_test_folder_of_one_class_keeps_its_label(tmp_path: Path):
    for name in ("train/a/1.png", "train/b/1.png", "test/b/1.png", "test/b/2.png"):
        save(tmp_path / name)
    data = load_data("folder", path=str(tmp_path))
    assert data.labels("test").tolist() == [1, 1]


def test_a_test_folder_without_classes_is_said_to_have_no_labels(tmp_path: Path):
    for name in ("train/a/1.png", "train/b/1.png", "test/1.png", "test/2.png"):
        save(tmp_path / name)
    with pytest.raises(UserError, match="label"):
        load_data("folder", path=str(tmp_path)).labels("test")


def test_grey_folders_are_read_as_one_channel(tmp_path: Path):
    for i in range(3):
        save(tmp_path / f"{i}.png", NOISE[..., 0])
    assert load_data("folder", path=str(tmp_path)).channels == 1
    assert load_data("folder", path=str(tmp_path), channels=3).channels == 3
    save(tmp_path / "z.png")
    assert load_data("folder", path=str(tmp_path)).channels == 3


def test_a_damaged_file_does_not_keep_a_folder_from_opening(tmp_path: Path):
    (tmp_path / "first.png").write_text("not an image")
    (tmp_path / "second.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of the first 2 images can be read; the first: .*first\.png .*not an im"):
        load_data("folder", path=str(tmp_path))
    save(tmp_path / "third.png", NOISE[..., 0])
    assert load_data("folder", path=str(tmp_path)).channels == 1
    save(tmp_path / "fourth.png")
    assert load_data("folder", path=str(tmp_path)).channels == 3


def test_links_are_followed_but_not_in_circles(tmp_path: Path):
    save(tmp_path / "elsewhere" / "1.png")
    save(tmp_path / "root" / "2.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "root" / "link")
    assert len(load_data("folder", path=str(tmp_path / "root")).train) == 2
    os.symlink(tmp_path / "root", tmp_path / "root" / "circle")
    assert len(load_data("folder", path=str(tmp_path / "root")).train) == 2


def test_folders_without_images_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no images found in"):
        load_data("folder", path=str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        load_data("folder", path=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"needs data\.path="):
        load_data("folder")
    with pytest.raises(UserError, match=r"takes no data\.path"):
        load_data("digits", path=str(tmp_path))
    with pytest.raises(UserError, match="photos, digits, folder or hub, got 'cifar'"):
        load_data("cifar")
    with pytest.raises(UserError, match=r"1, 2, 3 or 4, got 5"):
        load_data("digits", channels=5)


# ---------------------------------------------------------------------------------------------------- datasets


def table(count: int = 10, **columns: list[object]) -> datasets.Dataset:
    """Images of one constant each, as `datasets` stores them, and any other columns."""
    files = []
    for i in range(count):
        file = io.BytesIO()
        PIL.Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(file, "PNG")
        files.append({"bytes": file.getvalue(), "path": None})
    return datasets.Dataset.from_dict({"picture": files, **columns}).cast_column("picture", datasets.Image())


def test_parquet_with_class_labels(tmp_path: Path):
    classes = datasets.ClassLabel(names=["even", "odd"])
    made = table(label=[i % 2 for i in range(10)], n=list(range(10))).cast_column("label", classes)
    made.to_parquet(str(tmp_path / "x.parquet"))
    data = load_data("hub", path=str(tmp_path / "x.parquet"))
    assert data.classes == ("even", "odd")
    assert (len(data.train), len(data.test)) == (8, 2)
    assert set(data.train.column_names) == {"image", "label"}
    values = [int(decode(row["image"], 3)[0, 0, 0]) for s in (data.train, data.test) for row in s]
    assert sorted(values) == list(range(10))
    assert [value % 2 for value in values] == [*data.labels(), *data.labels("test")]
    batch = Images(data.train, Transform((4, 4), flip=0), channels=3)[0, torch.tensor([3, 0])]
    assert batch["image"][:, 0, 0, 0].tolist() == [values[3], values[0]]


def test_parquet_with_text_labels_and_splits(tmp_path: Path):
    table(species=["b", "a"] * 5).to_parquet(str(tmp_path / "train-0.parquet"))
    table(2, species=["a", "b"]).to_parquet(str(tmp_path / "test-0.parquet"))
    data = load_data("hub", path=str(tmp_path), label_column="species")
    assert data.classes == ("a", "b")
    assert data.labels().tolist() == [1, 0] * 5
    assert data.labels("test").tolist() == [0, 1]
    assert load_data("hub", path=str(tmp_path)).classes is None


def test_image_folders_through_datasets(tmp_path: Path):
    for split in ("train", "test"):
        for c in ("a", "b"):
            save(tmp_path / split / c / "1.png", COLOUR)
    data = load_data("hub", path=str(tmp_path))
    assert data.classes == ("a", "b")
    assert data.labels("test").tolist() == [0, 1]
    assert np.array_equal(decode(data.train[0]["image"], 3), COLOUR)


def test_missing_columns_and_labels_are_named(tmp_path: Path):
    path = str(tmp_path / "x.parquet")
    table(n=list(range(10))).to_parquet(path)
    with pytest.raises(UserError, match=r"label_column=species: .* has the columns picture, n"):
        load_data("hub", path=path, label_column="species")
    with pytest.raises(UserError, match=r"image_column=photo: .* has the columns picture, n"):
        load_data("hub", path=path, image_column="photo")
    with pytest.raises(UserError, match="no labels"):
        load_data("hub", path=path).labels()
    other = str(tmp_path / "y.parquet")
    table(n=list(range(10))).remove_columns("picture").to_parquet(other)
    with pytest.raises(UserError, match=r"no image column; found n; name it with data\.image_column="):
        load_data("hub", path=other)


def test_a_column_that_holds_no_images_is_named(tmp_path: Path):
    path = str(tmp_path / "x.parquet")
    table(n=list(range(10))).to_parquet(path)
    with pytest.raises(UserError, match="image_column=n"):
        load_data("hub", path=path, image_column="n")


def test_what_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "x.parquet").write_text("not parquet")
    for path in (str(tmp_path / "x.parquet"), str(tmp_path / "nowhere"), "nobody/no-such-set"):
        with pytest.raises(UserError, match=f"data.path={re.escape(path)}: "):
            load_data("hub", path=path)
