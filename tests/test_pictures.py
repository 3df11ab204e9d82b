"""Pictures show what happened, pixel for pixel, and the report is one safe file."""

import base64
import io
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mpp.corruption import DONOR, KEPT, MASK, UNTOUCHED
from mpp.encoder import Encoder
from mpp.errors import UserError
from mpp.eval.pictures import (
    DPI,
    FADED,
    GAP,
    HEADER,
    MARGIN,
    OUTLINES,
    STRIPES,
    loss_curve,
    prediction_panel,
    results_bars,
)
from mpp.eval.report import write_report
from mpp.eval.results import make_row
from mpp.objectives.mpp import MaskedPatchPrediction

ROWS = [
    make_row("linear_probe", "mpp", [0.84, 0.86], labels=10, chosen="C=0.1"),
    make_row("linear_probe", "untrained", [0.5], labels=10),
    make_row("finetune", "mpp", [0.9, 0.91, 0.92]),
    make_row("baseline", "raw_knn", [0.4, 0.6]),
]


def micro(**kwargs: object) -> MaskedPatchPrediction:
    torch.manual_seed(0)
    return MaskedPatchPrediction(Encoder("vit_micro_patch4_32", depth=1), **kwargs)


def read(path: Path) -> np.ndarray:
    """A PNG as uint8 (H, W, 3)."""
    with Image.open(path) as file:
        assert file.format == "PNG"
        return np.asarray(file.convert("RGB"))


def panel_cells(path: Path, *, rows: int, grid: tuple[int, int], cell: tuple[int, int], pitch: int) -> np.ndarray:
    """The cells of a panel: uint8 (4, B, N, p, q, 3)."""
    page = read(path)
    (h, w), (p, q) = grid, cell
    tiles = [
        [
            page[HEADER + i * (h * p + GAP) :, MARGIN + column * pitch :][: h * p, : w * q]
            .reshape(h, p, w, q, 3)
            .swapaxes(1, 2)
            .reshape(h * w, p, q, 3)
            for i in range(rows)
        ]
        for column in range(4)
    ]
    return np.array(tiles)


def micro_cells(path: Path, rows: int) -> np.ndarray:
    """The cells of a panel of 32 x 32 images in 8 x 8 patches, enlarged five times."""
    return panel_cells(path, rows=rows, grid=(8, 8), cell=(20, 20), pitch=168)


def cells_of(images: Tensor, patch: int, scale: int) -> np.ndarray:
    """What the first column should hold: uint8 (B, N, p, q, 3)."""
    big = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3).permute(0, 2, 3, 1).numpy()
    b, height, width, c = big.shape
    side = patch * scale
    return big.reshape(b, height // side, side, width // side, side, c).swapaxes(2, 3).reshape(b, -1, side, side, c)


@pytest.fixture(scope="module")
def noise() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (6, 3, 32, 32), generator=generator, dtype=torch.uint8), torch.arange(6) + 40


# ---------------------------------------------------------------------------------------------------- the panel


def test_image_column_holds_every_pixel_enlarged(noise: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    images, keys = noise
    path = prediction_panel(micro(), images, keys, tmp_path / "panel.png")
    assert path == tmp_path / "panel.png"
    assert np.abs(micro_cells(path, 6)[0].astype(int) - cells_of(images, 4, 5)).max() <= 1


def test_corrupted_column_shows_each_kind(noise: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    images, keys = noise
    objective = micro(ratio=0.9, mask_ratio=0.4, donor_ratio=0.3)
    draw = objective.corruption.draw(keys)
    shown = micro_cells(prediction_panel(objective, images, keys, tmp_path / "panel.png"), 6)[1].astype(int)
    clean = cells_of(images, 4, 5).astype(int)
    kind = draw.kind.numpy()
    assert {UNTOUCHED, MASK, DONOR, KEPT} == set(kind.flatten().tolist())
    assert np.abs(shown - clean)[kind == UNTOUCHED].max() <= 1

    greys = {round(255 * grey) for grey in STRIPES}
    stripes = shown[kind == MASK]
    assert (stripes == stripes[..., :1]).all()
    assert set(np.unique(stripes)) <= {grey + d for grey in greys for d in (-1, 0, 1)}
    assert len(np.unique(stripes[0])) == 2  # never flat

    donated = clean[draw.donor_image.numpy()[:, None], draw.donor_patch.numpy()]
    for which, inside in ((DONOR, donated), (KEPT, clean)):
        cells = shown[kind == which]
        assert np.abs(cells[:, 0] - 255 * np.array(OUTLINES[which])).max() <= 1
        assert np.abs(cells[:, 3:-3, 3:-3] - inside[kind == which][:, 3:-3, 3:-3]).max() <= 1


def test_colour_columns_hold_true_and_predicted_colours(tmp_path: Path) -> None:
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    images[1] = 255
    keys = torch.tensor([5, 6])
    objective = micro()
    nn.init.constant_(objective.head.bias[7:8], 1.0)  # class 7 is blue
    masked = objective.corruption.draw(keys).masked.numpy()
    cells = micro_cells(prediction_panel(objective, images, keys, tmp_path / "panel.png"), 2).astype(int)
    _, _, true, predicted = cells
    inner = (slice(None), slice(1, -1), slice(1, -1))
    assert true[0][masked[0]][inner].max() < 32  # near black
    assert true[1][masked[1]][inner].min() > 223  # near white
    for i in range(2):
        colours = predicted[i][masked[i]][inner]
        assert (colours[..., 2] > 223).all()
        assert colours[..., :2].max() < 32
        # Elsewhere both columns show the same faded image, so that black does not pass for a black patch.
        assert (true[i][~masked[i]] == predicted[i][~masked[i]]).all()
    assert np.abs(true[0][~masked[0]] - 255 * (1 - FADED)).max() <= 1
    assert (true[1][~masked[1]] == 255).all()
    # A white patch on white paper is set off by its rim.
    assert true[1][masked[1]][:, 0].max() < 200


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("vit_micro_patch2_8", 1, (8, 8)),
        ("vit_micro_patch4_32", 2, (16, 32)),
        ("vit_micro_patch4_32", 5, (32, 16)),  # 2^15 joint classes would be too many: one head a channel
        ("vit_micro_patch4_32", 3, (300, 400)),
        ("vit_micro_patch4_32", 3, (4, 400)),
        ("vit_micro_patch4_32", 3, (4, 4)),
    ],
)
def test_any_channels_and_grid(name: str, channels: int, size: tuple[int, int], tmp_path: Path) -> None:
    objective = MaskedPatchPrediction(Encoder(name, depth=1, channels=channels, size=size))
    images = torch.randint(256, (2, channels, *size), dtype=torch.uint8)
    page = read(prediction_panel(objective, images, torch.tensor([1, 2]), tmp_path / "panel.png"))
    assert page.shape[1] >= 4 * 168
    assert 80 < page.shape[0] < 2000
    if channels < 3:
        column = page[HEADER : HEADER + 80, MARGIN : MARGIN + 80].astype(int)
        assert (column == column[..., :1]).all()
        assert column.std() > 20


def test_any_page_keeps_its_pixels() -> None:
    assert all(int(pixels / DPI * DPI) == pixels for pixels in range(1, 5000))  # as matplotlib computes it


def test_panel_with_donors_from_the_same_image(noise: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    images, keys = noise[0][:3], noise[1][:3]
    objective = micro(donor="same", mask_ratio=0.0, donor_ratio=1.0)
    draw = objective.corruption.draw(keys)
    shown = micro_cells(prediction_panel(objective, images, keys, tmp_path / "panel.png"), 3)[1].astype(int)
    donated = cells_of(images, 4, 5)[np.arange(3)[:, None], draw.donor_patch.numpy()].astype(int)
    where = draw.masked.numpy()
    assert np.abs(shown[where] - donated[where])[:, 3:-3, 3:-3].max() <= 1


def test_odd_batch_is_the_users_error(noise: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    objective = micro().train()
    with pytest.raises(UserError, match="even batch"):
        prediction_panel(objective, noise[0][:3], noise[1][:3], tmp_path / "panel.png")
    assert objective.training
    assert not (tmp_path / "panel.png").exists()


def test_objective_is_left_as_it_was(noise: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    objective = MaskedPatchPrediction(Encoder("vit_micro_patch4_32", depth=1, proj_drop_rate=0.5)).train()
    nn.init.normal_(objective.head.weight)
    objective.encoder.vit.patch_embed.eval()  # a part that its owner froze
    modes = [module.training for module in objective.modules()]
    state = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    first = prediction_panel(objective, *noise, tmp_path / "a.png").read_bytes()
    assert prediction_panel(objective, *noise, tmp_path / "b.png").read_bytes() == first  # no dropout
    assert [module.training for module in objective.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in objective.state_dict().items())
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_importing_does_not_load_pyplot() -> None:
    code = "import sys, mpp.eval.pictures; sys.exit('matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------------- charts


def metrics(*losses: float) -> list[dict[str, float]]:
    return [{"step": 50 * (i + 1), "loss": loss, "label_entropy": 3.9} for i, loss in enumerate(losses)]


def has_colour(page: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(page.astype(int) - colour).max(-1) <= 2).any())


@pytest.mark.parametrize(
    "rows",
    [
        [],
        metrics(6.2),
        metrics(6.2, 2.0),
        metrics(*np.linspace(6.2, 1.5, 300)),
        metrics(6.2, math.nan, math.inf, 2.0),
        metrics(math.nan, math.nan),
        [{"step": 1, "loss": 0.0, "label_entropy": math.nan}],
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
    ],
    ids=["none", "one", "two", "many", "gaps", "all NaN", "zero", "no entropy"],
)
def test_loss_curve(rows: list[dict[str, float]], tmp_path: Path) -> None:
    page = read(loss_curve(rows, tmp_path / "loss.png", title=r"$\broken{ & <b>"))
    assert 300 < page.shape[0] < 700
    assert 700 < page.shape[1] < 1100
    finite = [row for row in rows if math.isfinite(row["loss"])]
    assert has_colour(page, (0, 0x72, 0xB2)) == bool(finite)


def test_results_bars_are_as_long_as_their_numbers(tmp_path: Path) -> None:
    full = [make_row("linear_probe", "mpp", [1.0]), make_row("linear_probe", "untrained", [0.25])]
    page = read(results_bars(full, tmp_path / "bars.png")).astype(int)
    lengths = [(np.abs(page - colour).max(-1) <= 1).sum(1).max() for colour in ((0, 0x72, 0xB2), (0xB9, 0xBF, 0xC6))]
    assert lengths[1] / lengths[0] == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("rows", [[], ROWS[:1], ROWS, [make_row("finetune", "$_{" * 20, [1.0, 0.9])] * 30])
def test_results_bars(rows: list[dict[str, object]], tmp_path: Path) -> None:
    page = read(results_bars(rows, tmp_path / "bars.png", chance=0.125))
    assert page.shape[0] > 60
    assert page.shape[1] > 600
    assert has_colour(page, (0, 0x72, 0xB2)) == any(row["init"] == "mpp" for row in rows)


# ---------------------------------------------------------------------------------------------------- the report


class Text(HTMLParser):
    """The tags of a page and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def report(out: Path, text: str, *, pictures: int = 1) -> tuple[str, Text]:
    """A page in which every string is `text`."""
    picture = loss_curve(metrics(6.2, 2.0), out / "loss.png")
    rows = [make_row("linear_probe", text, [0.5, 0.6], labels=10, chosen=text), make_row(text, "mpp", [0.7])]
    path = write_report(
        out,
        title=text,
        rows=rows,
        pictures=[(picture, text)] * pictures,
        facts={text: text, "data": "photos"},
        config_yaml=f"data:\n  path: {text}\n",
        environment={"packages": {"torch": "2.11", "timm": None}, text: text},
    )
    assert path == out / "report.html"
    page = path.read_text(encoding="utf-8")
    parsed = Text()
    parsed.feed(page)
    return page, parsed


def test_report_says_everything_in_one_file(tmp_path: Path) -> None:
    page, parsed = report(tmp_path, "plain")
    for words in ("0.550 ± 0.071", "0.700", "linear probe, 10 labels a class", "plain, all labels", "packages.torch"):
        assert words in parsed.text
    assert "None" not in parsed.text
    for forbidden in ("http://", "https://", "{{", "{%", "<script", "<link", "@import", "url("):
        assert forbidden not in page
    sources = [value for name, value in parsed.attributes if name in ("src", "href")]
    assert len(sources) == 1
    match = re.fullmatch(r"data:image/png;base64,([A-Za-z0-9+/=]+)", sources[0] or "")
    assert match is not None
    embedded = base64.b64decode(match[1])
    assert embedded == (tmp_path / "loss.png").read_bytes()
    with Image.open(io.BytesIO(embedded)) as file:
        file.verify()


@pytest.mark.parametrize(
    "hostile",
    [
        "<b>",
        "</title></pre></td><script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onload='alert(1)",
        "{{ 7 * 7 }} {% if %} {# #} ${now:}",
        "&lt;&amp;",
        "ümläut 猫 \N{PILE OF POO}",
    ],
)
def test_report_escapes_all_text(hostile: str, tmp_path: Path) -> None:
    _, plain = report(tmp_path, "plain")
    page, parsed = report(tmp_path, hostile)
    assert parsed.tags == plain.tags
    assert [name for name, _ in parsed.attributes] == [name for name, _ in plain.attributes]
    assert parsed.text.count(hostile) == plain.text.count("plain")
    assert "49" not in parsed.text
    if "<" in hostile:
        assert hostile not in page


def test_report_takes_names_that_are_not_text(tmp_path: Path) -> None:
    _, parsed = report(tmp_path, "cafe\udce9")
    assert "cafe?" in parsed.text


def test_report_without_results_or_pictures(tmp_path: Path) -> None:
    path = write_report(tmp_path, title="a", rows=[], pictures=[], facts={}, config_yaml="a: 1\n", environment={})
    page = path.read_text(encoding="utf-8")
    assert "Accuracy" not in page
    assert "<img" not in page
    assert "a: 1" in page
