"""Sources of images: embedded sets, folders, and whatever `datasets.load_dataset` takes.

A source is a `datasets.Dataset` with a column `image` of undecoded bytes or paths and, where there are labels, a column
`label`. Decoding happens in the workers.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import torch
from huggingface_hub.constants import HF_HUB_CACHE

from mpp.data.decoding import MODES, BadImageError, encode, is_grey, suffixes
from mpp.data.transforms import Transform
from mpp.errors import UserError
from mpp.randomness import fold, fold_each, uniform

PHOTOS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
PHOTO_SIDE = 32
SPLIT_NAMES = {"train": ("train", "training"), "test": ("test", "testing", "val", "valid", "validation", "eval")}
HELD_OUT = 5  # one image in so many is held out where a labelled set has no test split


@dataclass(frozen=True)
class Data:
    """A data set: a source to train on, one to test on, and what is known of them.

    Attributes:
        name: for people.
        train, test: `datasets.Dataset` with `image` and maybe `label`; test is None if there is nothing to test on.
        classes: names of the labels, or None without labels.
        channels: channels that images are decoded to.
        size: (height, width) if all images are known to share one, else None.
        note: one line for the user on how the split was made, or "".
        crop_scale, flip, crop_pct: see `Transform`.
    """

    name: str
    train: datasets.Dataset
    test: datasets.Dataset | None
    classes: tuple[str, ...] | None
    channels: int
    size: tuple[int, int] | None = None
    note: str = ""
    crop_scale: tuple[float, float] | None = None
    flip: float = 0.5
    crop_pct: float = 1.0

    def transform(self, size: tuple[int, int]) -> Transform:
        """The training transform to a size; `.evaluation()` of it is the one for testing."""
        return Transform(size, crop_scale=self.crop_scale, flip=self.flip, crop_pct=self.crop_pct)

    def fingerprint(self) -> dict[str, Any]:
        """What a run that is continued must find again: the number of training images, and a SHA-256 of the names of
        their files, as far as they have any, and of their labels, in order. Samples are known by their number alone."""
        digest = hashlib.sha256(json.dumps([len(self.train), self.classes]).encode())
        flat = self.train.flatten()
        for column in ("image.path", "label"):
            if column in flat.column_names:
                part = flat.select_columns([column]).with_format("arrow")
                for i in range(0, len(part), 100_000):
                    digest.update(json.dumps(part[i : i + 100_000][column].to_pylist()).encode())
        return {"images": len(self.train), "sha256": digest.hexdigest()}

    def labels(self, split: str = "train") -> np.ndarray:
        """int64 (n,) labels of a split.

        Raises:
            UserError: there are none.
        """
        source, where = (self.train, "") if split == "train" else (self.test, " to test on")
        if self.classes is not None and source is None:
            raise UserError(f"data {self.name} has no test split, which this recipe needs, and too few images for one")
        if self.classes is None or source is None or "label" not in source.column_names:
            raise UserError(
                f"data {self.name} has no labels{where}, which this recipe needs; it takes two or more class "
                "folders, or a label column (data=hub, data.label_column=)"
            )
        labels = np.asarray([-1 if label is None else label for label in source["label"]], dtype=np.int64)
        if labels.min() < 0:
            raise UserError(f"data {self.name}: {(labels < 0).sum()} images{where or ' to train on'} have no label")
        return labels


def load_data(
    source: str,
    *,
    path: str | None = None,
    channels: int | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    per_class: int = 4000,
    test_per_class: int = 200,
    crop_scale: tuple[float, float] | None = None,
    flip: float = 0.5,
    crop_pct: float = 1.0,
) -> Data:
    """Open a data set.

    Args:
        source: "photos" or "digits" (embedded), "folder" (images in `path`; links in it are followed), or "hub"
            (anything that `datasets.load_dataset` takes: a hub name, a parquet file or folder, an image folder; it may
            name no files outside of its own folder).
        path: for "folder" and "hub".
        channels: decode to so many channels (1, 2, 3 or 4); None looks at the images.
        image_column, label_column: for "hub"; None finds them by type and name.
        per_class, test_per_class: for "photos", crops of each photograph.
        crop_scale, flip, crop_pct: see `Transform`.

    Raises:
        UserError: no such path, no images in it, no such column, or files outside of the data set are named.
    """
    if min(per_class, test_per_class) < 1:
        raise UserError(
            f"data.per_class and data.test_per_class must be positive, got {per_class} and {test_per_class}"
        )
    if source in ("photos", "digits"):
        if path is not None:
            raise UserError(f"data={source} is embedded and takes no data.path; for your own images use data=folder")
        data = _photos(per_class, test_per_class) if source == "photos" else _digits()
    elif source in ("folder", "hub"):
        if path is None:
            raise UserError(
                f"data={source} needs data.path=, the {'folder' if source == 'folder' else 'name or path'} to read"
            )
        data = _folder(path) if source == "folder" else _hub(path, image_column, label_column)
    else:
        raise UserError(f"data.source must be photos, digits, folder or hub, got {source!r}")
    if channels is not None and channels not in MODES:
        raise UserError(f"data.channels must be 1, 2, 3 or 4, got {channels}")
    return replace(data, channels=channels or data.channels, crop_scale=crop_scale, flip=flip, crop_pct=crop_pct)


def _find_channels(source: datasets.Dataset, looked_at: int = 32) -> int:
    """1 if all of the first images that can be read are grey, else 3.

    Raises:
        UserError: none of them can be read.
    """
    bad, readable = [], 0
    for row in source.select(range(min(looked_at, len(source)))):
        try:
            if not is_grey(row["image"]):
                return 3
            readable += 1
        except BadImageError as error:
            bad.append(error)
    if bad and not readable:
        raise UserError(f"none of the first {len(bad)} images can be read; the first: {bad[0]}")
    return 1


# ---------------------------------------------------------------------------------------------------- embedded sets


@cache
def _photographs() -> tuple[np.ndarray, ...]:
    """The eight colour photographs of scikit-image, uint8 (H, W, 3)."""
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    return tuple(np.asarray(PIL.Image.open(folder / name).convert("RGB")) for name in PHOTOS)


def photo_crops(split: str, index: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Crops of the photographs by number: uint8 (32, 32, 3) each, and the numbers of their photographs.

    A pure function of the split and each index. Training crops lie in the left 60 % of the photograph's columns, test
    crops in the right 40 %: no pixel is shared.
    """
    keys = fold_each(fold("photos", split), torch.as_tensor(index))
    place = uniform(keys, "place", 2).numpy()
    labels = index % len(PHOTOS)
    crops = []
    for (down, right), label in zip(place, labels, strict=True):
        photo = _photographs()[label]
        border = photo.shape[1] * 3 // 5
        region = photo[:, :border] if split == "train" else photo[:, border:]
        top = int(down * (region.shape[0] - PHOTO_SIDE + 1))
        left = int(right * (region.shape[1] - PHOTO_SIDE + 1))
        crops.append(region[top : top + PHOTO_SIDE, left : left + PHOTO_SIDE])
    return crops, labels


def _photos(per_class: int, test_per_class: int) -> Data:
    names = tuple(name.split(".")[0] for name in PHOTOS)
    made = {}
    for split, count in (("train", per_class), ("test", test_per_class)):
        crops, labels = photo_crops(split, np.arange(count * len(PHOTOS)))
        made[split] = _in_memory([encode(crop) for crop in crops], labels.tolist())
    return Data(
        "photos",
        made["train"],
        made["test"],
        names,
        channels=3,
        size=(PHOTO_SIDE, PHOTO_SIDE),
        note="crops of 8 photographs of scikit-image; train: left 60 % of each, test: right 40 %",
    )


def _digits() -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # 0..16 -> 0..255
    parts = _split_by_key(len(pixels), fold("digits"))
    made = [_in_memory([encode(pixels[i]) for i in part], digits.target[part].tolist()) for part in parts]
    return Data(
        "digits", made[0], made[1], tuple("0123456789"), channels=1, size=(8, 8),
        note=f"1,797 scans of scikit-learn; one in {HELD_OUT} held out for testing; a smoke test, never evidence",
    )  # fmt: skip


def _in_memory(files: Sequence[bytes], labels: Sequence[int]) -> datasets.Dataset:
    rows = {"image": [{"bytes": file, "path": None} for file in files], "label": list(labels)}
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(rows, features=features)


def _split_by_key(count: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """A fixed split of range(count) into training and held-out indices, each in order."""
    held_out = np.zeros(count, dtype=bool)
    order = fold_each(key, torch.arange(count)).argsort(stable=True).numpy()
    held_out[order[: count // HELD_OUT]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


# ---------------------------------------------------------------------------------------------------- folders


def _folder(path: str) -> Data:
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UserError(f"data.path={path}: no such folder")
    splits = {
        split: next(
            (root / found for found in sorted(os.listdir(root)) if found.lower() in names and (root / found).is_dir()),
            None,
        )
        for split, names in SPLIT_NAMES.items()
    }
    if splits["train"] is None:
        paths, labels, classes = _scan(root)
        train, test, note = _hold_out(paths, labels, classes, f"no train/ and test/ folders in {path}")
    else:
        paths, labels, classes = _scan(splits["train"])
        train, test, note = _from_paths(paths, labels, classes), None, ""
        if splits["test"] is not None:
            test_paths, test_labels, test_classes = _scan(splits["test"], classes)
            test = _from_paths(test_paths, test_labels, test_classes)
            note = f"train: {splits['train']}, test: {splits['test']}"
        elif classes is not None:
            train, test, note = _hold_out(paths, labels, classes, f"no test/ folder in {path}")
    return Data(root.name, train, test, classes, channels=_find_channels(train), note=note)


def _scan(
    root: Path, known: tuple[str, ...] | None = None
) -> tuple[list[str], list[int] | None, tuple[str, ...] | None]:
    """All image files below a folder in a fixed order, and labels if every file lies in a class folder.

    Links are followed, wherever they lead: a folder is what its owner made it.

    Labels are the names of the folders directly below `root`; there are none if an image lies in `root` itself or if
    there is only one such folder, unless it is one of the `known` classes.

    Returns:
        Paths, labels and the names that labels stand for: `known` if given.

    Raises:
        UserError: no images, or classes that are not known.
    """
    found, seen = [], set()
    for folder, below, files in os.walk(root, followlinks=True):
        here = Path(folder)
        if here.resolve() in seen:  # a link back up
            below.clear()
            continue
        seen.add(here.resolve())
        below[:] = sorted(name for name in below if not name.startswith("."))
        found += [here / f for f in sorted(files) if not f.startswith(".") and Path(f).suffix.lower() in suffixes()]
    if not found:
        raise UserError(f"no images found in {root} (looked for .jpg, .png, .webp, .tif and what else Pillow reads)")
    parts = [file.relative_to(root).parts for file in found]
    names = tuple(sorted({part[0] for part in parts})) if all(len(part) > 1 for part in parts) else ()
    if len(names) < 2 and not set(names) & set(known or ()):
        return [str(file) for file in found], None, None
    if known is not None and (unknown := sorted(set(names) - set(known))):
        raise UserError(f"{root} has classes that the training folder lacks: {', '.join(unknown[:5])}")
    number = {name: i for i, name in enumerate(known or names)}
    return [str(file) for file in found], [number[part[0]] for part in parts], known or names


def _hold_out(
    paths: list[str], labels: list[int] | None, classes: tuple[str, ...] | None, why: str
) -> tuple[datasets.Dataset, datasets.Dataset | None, str]:
    """Hold out a fixed share of a labelled set that has no test split; unlabelled sets are for training alone."""
    everything = _from_paths(paths, labels, classes)
    if classes is None or len(paths) < HELD_OUT:
        return everything, None, ""
    train, test = _split_by_key(len(paths), fold("hold out"))
    return everything.select(train), everything.select(test), f"{why}: one image in {HELD_OUT} is held out for testing"


def _from_paths(paths: list[str], labels: list[int] | None, classes: tuple[str, ...] | None) -> datasets.Dataset:
    try:
        "".join(paths).encode()
    except UnicodeEncodeError as error:
        first = next(path for path in paths if any("\ud800" <= c <= "\udfff" for c in path))
        raise UserError(f"the name of {first!a} is not UTF-8; rename it") from error
    rows: dict[str, list[Any]] = {"image": [{"bytes": None, "path": path} for path in paths]}
    features: dict[str, Any] = {"image": datasets.Image(decode=False)}
    if labels is not None and classes is not None:
        rows["label"], features["label"] = labels, datasets.Value("int64")
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


# ---------------------------------------------------------------------------------------------------- datasets


def _hub(path: str, image_column: str | None, label_column: str | None) -> Data:
    local = Path(path).expanduser()
    try:
        if local.is_file() and local.suffix in (".parquet", ".arrow", ".json", ".jsonl", ".csv"):
            kind = {".jsonl": "json"}.get(local.suffix, local.suffix[1:])
            loaded = datasets.load_dataset(kind, data_files=str(local))
        else:
            loaded = datasets.load_dataset(str(local) if local.exists() else path)
    except (
        OSError,
        ValueError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
        datasets.exceptions.DatasetNotFoundError,
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"data.path={path}: `datasets.load_dataset` could not read it: {reason}") from error
    splits = {
        split: next((loaded[found] for found in loaded if str(found).lower() in names), None)
        for split, names in SPLIT_NAMES.items()
    }
    train, test, note = splits["train"], splits["test"], ""
    if train is None:
        raise UserError(f"data.path={path} has no split named train; found {', '.join(map(str, loaded))}")
    image = _find_column(train, "image", image_column, lambda f: isinstance(f, datasets.Image), path)
    if image is None:
        raise UserError(
            f"data.path={path} has no image column; found {', '.join(train.column_names)}; "
            "name it with data.image_column="
        )
    label = _find_column(train, "label", label_column, lambda f: isinstance(f, datasets.ClassLabel), path)
    classes = _classes(train, label) if label is not None else None
    if test is None and classes is not None and len(train) >= HELD_OUT:
        parts = _split_by_key(len(train), fold("hold out"))
        train, test = train.select(parts[0]), train.select(parts[1])
        note = f"{path} has no test split: one image in {HELD_OUT} is held out for testing"
    train = _standardise(train, image, label, classes)
    test = _standardise(test, image, label, classes) if test is not None else None
    for split in (train, test):
        if split is not None:
            _check_paths(split, path, local)
    return Data(local.name if local.exists() else path, train, test, classes, channels=_find_channels(train), note=note)


def _check_paths(source: datasets.Dataset, path: str, local: Path) -> None:
    """Refuse rows that name a file outside of the data set's own folder or, for a hub name, outside of the caches.

    Otherwise a data set from a stranger could have any image on this machine opened. Links that lie in the folder
    itself are followed, as the last part of a path; folders are resolved.

    Raises:
        UserError: names the first of them and says how many there are.
    """
    if local.exists():
        roots = [str(local if local.is_dir() else local.parent)]
    else:
        roots = [str(datasets.config.HF_DATASETS_CACHE), str(datasets.config.DOWNLOADED_DATASETS_PATH),
                 str(datasets.config.EXTRACTED_DATASETS_PATH), HF_HUB_CACHE]  # fmt: skip
    inside = tuple(os.path.join(os.path.realpath(root), "") for root in roots)

    @cache
    def is_own(parent: str) -> bool:
        return os.path.isabs(parent) and os.path.join(os.path.realpath(parent), "").startswith(inside)

    foreign, count = None, 0
    for rows in source.data.column("image").chunks:
        named = rows.field("path").filter(rows.field("bytes").is_null())
        # Everything to the last slash: few of them are distinct, so that the file system is asked seldom.
        parents = pc.replace_substring_regex(named, r"[^/]*$", "").dictionary_encode()
        own = [is_own(parent) for parent in parents.dictionary.to_pylist()]
        good = pc.take(pa.array(own, pa.bool_()), parents.indices)
        bad = named.filter(pc.or_(pc.invert(good), pc.match_substring_regex(named, r"(^|/)\.{0,2}$")))
        foreign, count = foreign or (bad[0].as_py() if len(bad) else None), count + len(bad)
    if foreign is not None:
        raise UserError(
            f"data.path={path} names {count:,} file(s) outside of {roots[0]}, such as {ascii(foreign)[1:-1]}; "
            "a data set may only name files of its own, by absolute paths (unpack archives), or hold the images itself"
        )


def _find_column(source: datasets.Dataset, purpose: str, given: str | None, fits: Any, path: str) -> str | None:
    """The column that was named, else the first of the right type, else the one that is called like its purpose."""
    if given is not None:
        if given not in source.column_names:
            raise UserError(f"data.{purpose}_column={given}: {path} has the columns {', '.join(source.column_names)}")
        return given
    typed = [name for name, feature in source.features.items() if fits(feature)]
    if purpose in typed or (not typed and purpose == "label" and purpose in source.column_names):
        return purpose
    return typed[0] if typed else None


def _classes(source: datasets.Dataset, label: str) -> tuple[str, ...]:
    feature = source.features[label]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    return tuple(str(value) for value in sorted(set(source[label])))


def _standardise(
    source: datasets.Dataset, image: str, label: str | None, classes: tuple[str, ...] | None
) -> datasets.Dataset:
    """Columns `image`, undecoded, and `label`, int64."""
    if label not in source.column_names:  # a test split may have none
        label = None
    columns = {image: "image"} | ({label: "label"} if label is not None else {})
    try:
        source = source.select_columns(list(columns)).cast_column(image, datasets.Image(decode=False))
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise UserError(f"data.image_column={image} holds no images but {source.features[image]}") from error
    source = source.rename_columns({old: new for old, new in columns.items() if old != new})
    if label is None or classes is None:
        return source
    if isinstance(source.features["label"], datasets.ClassLabel):
        return source.cast_column("label", datasets.Value("int64"))
    number = {name: i for i, name in enumerate(classes)}
    values = source["label"]
    if unknown := sorted({str(value) for value in values} - set(classes)):
        raise UserError(f"the test split has labels that the training split lacks: {', '.join(unknown[:5])}")
    return source.remove_columns("label").add_column("label", [number[str(value)] for value in values])
