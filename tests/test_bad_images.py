"""Bad images: a defined result for every kind of odd or damaged file, and what training and evaluation make of them."""

import gc
import io
import os
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from mpp import UserError
from mpp.data import Loader, Plan, Transform, load_data, read_batches
from mpp.data.decoding import BadImageError, decode, suffixes
from mpp.data.loader import ATTEMPTS, BadImagesError, Images
from mpp.errors import LocalError
from mpp.eval.features import compute
from mpp.randomness import fold

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (40, 30, 3), dtype=np.uint8)
many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine has cores


def file(image: np.ndarray | PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    (image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image)).save(out, kind, **options)
    return out.getvalue()


def read(content: bytes | None, channels: int = 3, path: str | None = None) -> np.ndarray:
    return decode({"bytes": content, "path": path}, channels)


def refusal(content: bytes | None, path: str | None = "x.png") -> str:
    """The reason why a file is refused."""
    with pytest.raises(BadImageError) as met:
        read(content, path=path)
    assert "\n" not in str(met.value)
    return met.value.reason


# ---------------------------------------------------------------------------------------------------- odd files


def test_cmyk_becomes_rgb():
    red = PIL.Image.new("CMYK", (2, 2), (0, 255, 255, 0))
    assert (read(file(red, "TIFF")) == [255, 0, 0]).all()
    assert np.abs(read(file(red, "JPEG")).astype(int) - [255, 0, 0]).max() <= 3


def test_a_palette_gives_its_colours():
    image = PIL.Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([200, 100, 50, 0, 255, 0, 1, 2, 3])
    assert read(file(image)).tolist() == [[[200, 100, 50], [0, 255, 0], [1, 2, 3]]]
    assert read(file(image, "GIF")).tolist() == [[[200, 100, 50], [0, 255, 0], [1, 2, 3]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_of_16_bits_the_high_byte_is_kept(kind: str):
    values = np.array([[0, 255, 256, 257, 0x1234, 0x80FF, 0xFF00, 0xFFFF]], np.uint16)
    high = [0, 0, 1, 1, 0x12, 0x80, 0xFF, 0xFF]
    assert read(file(values, kind), 1)[0, :, 0].tolist() == high
    assert read(file(values, kind), 2)[0].tolist() == [[value, 255] for value in high]
    assert read(file(values, kind), 3)[0].tolist() == [[value] * 3 for value in high]
    assert read(file(values, kind), 4)[0].tolist() == [[value] * 3 + [255] for value in high]


@pytest.mark.filterwarnings("error")
def test_floats_are_shares_or_levels_and_what_is_no_number_is_black():
    shares = np.array([[0, 0.5, 1, -3, np.nan]], np.float32)
    assert read(file(shares, "TIFF"), 1)[0, :, 0].tolist() == [0, 127, 255, 0, 0]
    levels = np.array([[0, 0.5, 1, 200, 300, np.inf]], np.float32)
    assert read(file(levels, "TIFF"), 1)[0, :, 0].tolist() == [0, 0, 1, 200, 255, 255]


def test_alpha_is_dropped_or_kept_never_blended():
    image = np.array([[[200, 100, 50, 0], [1, 2, 3, 128]]], np.uint8)
    assert read(file(image), 3).tolist() == [[[200, 100, 50], [1, 2, 3]]]
    assert read(file(image), 4).tolist() == image.tolist()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_a_turned_photograph_is_upright(kind: str):
    halves = np.zeros((16, 48, 3), np.uint8)
    halves[:, 24:] = 255  # black left, white right
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    out = read(file(halves, kind, exif=exif))
    assert out.shape == (48, 16, 3)
    assert out[:20].max() < 20
    assert out[28:].min() > 235


def test_an_animation_gives_its_first_frame():
    frames = [PIL.Image.new("RGB", (3, 2), (shade, 0, 0)) for shade in (250, 10)]
    assert (read(file(frames[0], "PNG", save_all=True, append_images=frames[1:])) == [250, 0, 0]).all()
    assert (read(file(frames[0], "WEBP", lossless=True, save_all=True, append_images=frames[1:])) == [250, 0, 0]).all()


def views(*size: int, **arguments: Any) -> list[Transform]:
    transform = Transform(size, **{"crop_scale": (0.05, 1.0), "crop_pct": 0.875} | arguments)  # type: ignore[arg-type]
    return [transform, Transform(size), transform.evaluation()]


def apply(transform: Transform, array: np.ndarray, key: int = 0) -> torch.Tensor:
    return transform(torch.from_numpy(array).permute(2, 0, 1), transform.draw(torch.tensor([key]))[0])


def test_an_image_of_one_pixel_becomes_a_plane():
    array = read(file(np.array([[[9, 8, 7]]], np.uint8)))
    for view in views(32, 48):
        assert torch.equal(
            apply(view, array), torch.tensor([9, 8, 7], dtype=torch.uint8).view(3, 1, 1).expand(3, 32, 48)
        )


@pytest.mark.parametrize(("height", "width"), [(1, 30_000), (30_000, 1)])
@pytest.mark.parametrize("size", [(224, 224), (8, 8), (8, 100)])
def test_a_strip_takes_neither_gigabytes_nor_seconds(height: int, width: int, size: tuple[int, int]):
    ramp = np.linspace(0, 255, 30_000).astype(np.uint8).reshape(height, width, 1).repeat(3, 2)
    array = read(file(ramp))
    assert np.array_equal(array, ramp)
    for view in views(*size):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        out = apply(view, array)
        assert out.shape == (3, *size)
        assert time.perf_counter() - start < 2
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
        if view.train:
            assert int(out.max()) - int(out.min()) > 200 or min(size) < 30  # the whole strip
        else:
            assert 120 <= int(out.min()) <= int(out.max()) <= 135  # its middle


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 30), st.integers(1, 30), st.sampled_from([0.2, 0.875, 1]))
def test_only_strips_are_cut_before_they_are_resized(height: int, width: int, tall: int, wide: int, crop_pct: float):
    """Below an aspect ratio of 16, relative to that of the result, the pixels are those without the cut."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as T

    image = torch.from_numpy(np.random.default_rng(height * 61 + width).integers(0, 256, (3, height, width), np.uint8))
    transform = Transform((tall, wide), crop_pct=crop_pct).evaluation()
    out = transform(image, [0.0])
    assert out.shape == (3, tall, wide)
    scale = max(tall / height, wide / width) / crop_pct
    resized = max(tall, round(height * scale)), max(wide, round(width * scale))
    ratio = max(height / tall, width / wide) / min(height / tall, width / wide)
    if ratio < 15.9 and resized != (height, width):
        whole = T.resize(image, list(resized), interpolation=InterpolationMode.BICUBIC, antialias=True)
        assert torch.equal(out, T.center_crop(whole, [tall, wide]))


def test_the_middle_of_a_strip_looks_as_if_all_of_it_had_been_resized():
    wave = (127 + 120 * np.sin(np.arange(800) / 9)).astype(np.uint8)
    image = torch.from_numpy(wave).expand(3, 10, 800)
    out = Transform((32, 32)).evaluation()(image, [0.0])
    whole = torch.nn.functional.interpolate(image[None].float(), size=(32, 2560), mode="bicubic", antialias=True)
    assert (out.float() - whole[0, :, :, 1264:1296]).abs().max() <= 2


# ---------------------------------------------------------------------------------------------------- damaged files


def png_of(height: int, width: int) -> bytes:
    """A header that promises so many black pixels, and a few bytes behind it."""
    import struct
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 14_000, 40_000])  # Pillow warns of the first and raises for the others
def test_a_decompression_bomb_is_refused_at_once(side: int):
    bomb, start = png_of(side, side), time.perf_counter()
    assert refusal(bomb) == f"{side * side:,} pixels, more than 89,478,485: a decompression bomb?"
    assert time.perf_counter() - start < 0.2


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "the file is empty"), (b"<html>404</html>", "not an image, or damaged from its beginning"),
     (b"\xff\xd8\xff", "not an image, or damaged from its beginning")],
)  # fmt: skip
def test_what_is_no_image_is_refused(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    assert refusal(None, str(path)) == reason
    assert refusal(content) == reason


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_truncated_file_is_refused_never_filled_with_grey(kind: str, share: float):
    whole = file(NOISE, kind)
    assert read(whole).shape == (40, 30, 3)
    assert refusal(whole[: int(share * len(whole))])


def test_rows_without_an_image_and_files_that_are_none_are_refused(tmp_path: Path):
    for row in (None, {"bytes": None, "path": None}, {"bytes": None, "path": ""}):
        with pytest.raises(BadImageError, match=r"an image without a name .*neither a file nor its content"):
            decode(row, 3)
    assert refusal(None, str(tmp_path / "gone.png")) == "No such file or directory"
    assert refusal(None, str(tmp_path)) == "Is a directory"


def test_postscript_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pillow would run Ghostscript on it, whatever the file is called."""
    import PIL.EpsImagePlugin

    monkeypatch.setattr(PIL.EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("started"))
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    assert PIL.Image.open(io.BytesIO(script)).format == "EPS"
    assert refusal(script, "photo.jpg") == "not an image, or damaged from its beginning"
    assert {".eps", ".ps", ".pdf", ".mpg"}.isdisjoint(suffixes())
    assert {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".gif", ".bmp", ".ppm", ".jp2"} <= suffixes()


def test_a_name_of_several_lines_is_one_line():
    error = BadImageError("a\nb\udcff.png", "why")
    assert error.name() == r"a\nb\udcff.png"
    assert BadImageError("Füße.png", "why").name() == "Füße.png"


def test_a_file_name_that_is_no_text_is_named(tmp_path: Path):
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff.png")).write_bytes(file(NOISE))
    with pytest.raises(UserError, match=r"the name of '.*\\udcff\.png' is not UTF-8; rename it"):
        load_data("folder", path=str(tmp_path))


# ---------------------------------------------------------------------------------------------------- standing in

COUNT = 24


def make_source(bad: tuple[int, ...] = (), *, labels: bool = True, count: int = COUNT) -> datasets.Dataset:
    """Images of noise, labelled by their own number; those in `bad` are cut short."""
    files = [file(np.random.default_rng(i).integers(0, 256, (12, 12, 3), dtype=np.uint8)) for i in range(count)]
    rows: dict[str, list[Any]] = {
        "image": [{"bytes": f[: len(f) // 2] if i in bad else f, "path": f"{i}.png"} for i, f in enumerate(files)]
    }
    features: dict[str, Any] = {"image": datasets.Image(decode=False)}
    if labels:
        rows["label"], features["label"] = list(range(count)), datasets.Value("int64")
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def make_images(source: datasets.Dataset, **arguments: Any) -> Images:
    return Images(source, Transform((8, 8), crop_scale=(0.3, 1.0)), channels=3, seed=5, **arguments)


SOUND = make_images(make_source())
DAMAGED = make_images(make_source((3, 10, 11)))


def stand_in(i: int, bad: tuple[int, ...] = (3, 10, 11)) -> int:
    return next(other for a in range(ATTEMPTS) if (other := fold("replace", i, a) % COUNT) not in bad)


@given(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=12), st.integers(0, 3))
def test_another_image_stands_in_and_all_else_stays(ids: list[int], epoch: int):
    which = torch.tensor(ids)
    sound, batch = SOUND[epoch, which], DAMAGED[epoch, which]
    assert "bad" not in sound
    assert torch.equal(batch["key"], sound["key"])
    assert torch.equal(batch["id"], which)
    for place, i in enumerate(ids):
        if i not in (3, 10, 11):
            assert torch.equal(batch["image"][place], sound["image"][place])
            assert batch["label"][place] == i
            continue
        # Another image and its label, with the crop and the flip of the sample it stands in for.
        other = stand_in(i)
        draws = SOUND.transform.draw(batch["key"][place : place + 1])[0]
        array = decode(SOUND.source[other]["image"], 3)
        assert torch.equal(batch["image"][place], SOUND.transform(torch.from_numpy(array).permute(2, 0, 1), draws))
        assert batch["label"][place] == other
    assert [i for i, _ in batch.get("bad", [])] == [i for i in ids if i in (3, 10, 11)]
    for i, message in batch.get("bad", []):
        assert re.fullmatch(rf"{i}\.png \(.+\)", message)


@many_workers
def test_workers_change_nothing_about_it():
    plan = Plan(COUNT, 12, seed=1)
    runs = [list(Loader(DAMAGED, plan, workers=workers).batches(0, 4)) for workers in (0, 2)]
    for one, other in zip(*runs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in ("image", "key", "id", "label"))
        assert one.get("bad") == other.get("bad")
    bad = [entry for batch in runs[0] for entry in batch.get("bad", [])]
    assert sorted({i for i, _ in bad}) == [3, 10, 11]
    assert len(bad) == 6  # each in both epochs
    assert all(type(entry) is tuple and type(entry[0]) is int and type(entry[1]) is str for entry in bad)


def test_without_a_path_a_sample_is_named_by_its_number():
    source = make_source((3,), labels=False)
    rows = [{"bytes": row["image"]["bytes"], "path": None} for row in source]
    nameless = datasets.Dataset.from_dict({"image": rows}, features=source.features)
    batch = make_images(nameless)[0, torch.tensor([2, 3])]
    assert "label" not in batch
    [(i, message)] = batch["bad"]
    assert (i, message.startswith("sample 3 (")) == (3, True)


@many_workers
@pytest.mark.parametrize("workers", [0, 2])
def test_where_too_many_are_bad_one_line_says_so(workers: int):
    images = make_images(make_source(tuple(range(COUNT))))
    error = images[0, torch.tensor([4])]
    assert error.keys() == {"error"}
    assert re.fullmatch(r"cannot read 4\.png \(.+\), nor any of 8 other images; repair the data", error["error"])
    with pytest.raises(LocalError, match=r"cannot read \d+\.png .*, nor any of 8 other images"):
        list(Loader(images, Plan(COUNT, 12, seed=1), workers=workers).batches(0, 4))


def test_the_stand_in_is_the_first_that_can_be_read():
    tried = [fold("replace", 3, attempt) % COUNT for attempt in range(ATTEMPTS)]
    bad = tuple({3, *tried[:-1]} - {tried[-1]})
    assert 3 in bad
    assert make_images(make_source(bad))[0, torch.tensor([3])]["label"].tolist() == [stand_in(3, bad)]


def test_training_replaces_and_evaluation_does_not_unless_told():
    train = Transform((8, 8))
    assert not Images(DAMAGED.source, train, channels=3).strict
    assert Images(DAMAGED.source, train.evaluation(), channels=3).strict
    assert Images(DAMAGED.source, train, channels=3, strict=True).strict
    assert not Images(DAMAGED.source, train.evaluation(), channels=3, strict=False).strict


# ---------------------------------------------------------------------------------------------------- evaluation


@many_workers
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_names_all_bad_images_of_the_pass(workers: int):
    images = Images(make_source((5, 10, 11)), Transform((8, 8)).evaluation(), channels=3)
    yielded = []

    def consume(batches: Iterator[dict[str, Any]]) -> None:
        yielded.extend(batch["id"].tolist() for batch in batches)

    with pytest.raises(BadImagesError) as met:
        consume(read_batches(images, list(torch.arange(COUNT).split(4)), workers=workers))
    assert yielded == [[0, 1, 2, 3]]  # nothing after the first bad one
    assert re.fullmatch(
        r"3 of 24 images cannot be read: 5\.png \(.+\), 10\.png \(.+\), 11\.png \(.+\); repair or remove them",
        str(met.value),
    )
    assert isinstance(met.value, LocalError)
    assert sorted(met.value.bad) == [5, 10, 11]


def test_features_of_bad_images_are_refused_with_the_first_five_named():
    images = Images(make_source(tuple(range(8, 16))), Transform((8, 8)).evaluation(), channels=3)
    module = torch.nn.Linear(1, 1).train()
    with pytest.raises(UserError) as met:
        compute(lambda x: x.flatten(1), module, images, accelerator=Accelerator(cpu=True), batch_size=5)
    assert module.training  # put back
    named = re.findall(r"(\d+)\.png", str(met.value))
    assert named == ["8", "9", "10", "11", "12"]
    assert str(met.value).startswith("8 of 24 images cannot be read: ")
    assert str(met.value).endswith(", ...; repair or remove them")


# ---------------------------------------------------------------------------------------------------- fuzzing


def with_checksums(png: bytes) -> bytes:
    """A mutated PNG with right checksums, so that the damage comes past them."""
    import zlib

    out, at = bytearray(png), 8
    while at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = zlib.crc32(out[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(out)


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """One or two of: bits flipped, cut short, a run of bytes overwritten, two pieces swapped, noise inserted."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 3)):
        if not data:
            break
        # A third of the damage is done to the beginning, where headers are.
        at = int(rng.integers(0, len(data) if rng.random() < 0.67 else min(200, len(data))))
        match rng.integers(0, 5):
            case 0:
                for place in rng.integers(0, len(data), rng.integers(1, 16)):
                    data[place] ^= 1 << int(rng.integers(0, 8))
            case 1:
                del data[at:]
            case 2:
                data[at : at + 32] = bytes([rng.choice([0, 127, 255])]) * len(data[at : at + 32])
            case 3:
                length, other = int(rng.integers(1, 256)), int(rng.integers(0, len(data)))
                data[at : at + length], data[other : other + length] = (
                    data[other : other + length],
                    data[at : at + length],
                )
            case 4:
                data[at:at] = rng.bytes(int(rng.integers(1, 64)))
    return bytes(data)


def originals() -> dict[str, bytes]:
    """Real photographs of every common kind; the commonest come often."""
    import skimage

    photo = PIL.Image.open(Path(skimage.__file__).parent / "data" / "astronaut.png").convert("RGB").resize((96, 80))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    palette = photo.quantize(32)
    common = {
        "jpeg": file(photo, "JPEG", exif=exif),
        "progressive jpeg": file(photo, "JPEG", progressive=True),
        "png": file(photo, exif=exif),
        "palette png": file(palette),
        "16-bit png": file(np.asarray(photo.convert("L")).astype(np.uint16) * 257),
        "webp": file(photo, "WEBP", exif=exif),
        "lossless webp": file(photo, "WEBP", lossless=True),
    }
    rare = {
        "gif": file(palette, "GIF"),
        "animation": file(palette, "GIF", save_all=True, append_images=[palette.rotate(9)]),
        "tiff": file(photo, "TIFF"),
        "lzw tiff": file(photo, "TIFF", compression="tiff_lzw"),
        "cmyk jpeg": file(photo.convert("CMYK"), "JPEG"),
    }
    return {f"{name} {again}": f for again in range(3) for name, f in common.items()} | rare


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files through /proc")
def test_2000_damaged_files_give_an_array_or_one_line(tmp_path: Path, record_property: Callable[[str, object], None]):
    rng, kinds = np.random.default_rng(2024), originals()
    for content in kinds.values():
        assert read(content).shape[2] == 3
    path = tmp_path / "damaged"
    gc.collect()
    before, handles, start = memory(), len(os.listdir("/proc/self/fd")), time.perf_counter()
    decoded = refused = 0
    slowest = 0.0
    for number in range(2000):
        kind = list(kinds)[number % len(kinds)]
        content = mutate(kinds[kind], rng)
        if "png" in kind and rng.random() < 0.8:
            content = with_checksums(content)
        channels = int(rng.integers(1, 5))
        as_file = number % 4 == 0
        if as_file:
            path.write_bytes(content)
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                array = read(None if as_file else content, channels, str(path))
            assert array.dtype == np.uint8
            assert array.ndim == 3
            assert array.shape[2] == channels
            assert array.size
            decoded += 1
        except UserError as error:
            text = str(error)
            assert text.isprintable()
            assert " at 0x" not in text  # the same for the same file
            refused += 1
        slowest = max(slowest, time.perf_counter() - began)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == handles
    assert memory() - before < 300e6
    assert slowest < 5
    assert min(decoded, refused) > 200  # the damage is neither fatal nor harmless
    record_property("fuzz", f"{decoded} decoded, {refused} refused, {time.perf_counter() - start:.1f} s")
    print(f"{decoded} decoded, {refused} refused, {time.perf_counter() - start:.1f} s, slowest {1000 * slowest:.0f} ms")
