"""Pictures for people: what a model sees and predicts, its loss, and the results.

All are drawn on `matplotlib.figure.Figure`, never through pyplot, so that nothing touches the state of the caller.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from mpp.corruption import DONOR, KEPT, MASK
from mpp.masking import take
from mpp.objectives.mpp import MaskedPatchPrediction, to_pixels

DPI = 128  # a power of two, so that inches become whole pixels again
INK, FAINT, RULE = "#222222", "#6b6b6b", "#e4e4e4"
# "mpp" has the one strong colour; its controls are quiet, yet differ in lightness.
ACCENT = "#0072b2"
QUIET = ("#b9bfc6", "#949ca5", "#d9c9a3", "#a8bfa4", "#cfb3ad", "#c5bbd3")

# ---------------------------------------------------------------------------------------------------- a few images


def image_sheet(images: Tensor, captions: Sequence[str], path: Path, *, columns: int = 8) -> Path:
    """Draw images, uint8 (B, C, H, W), each with its caption below. Channels are shown as in `prediction_panel`."""
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(1.25 * columns, 1.75 * rows), dpi=DPI, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in places:
        axes.axis("off")
    for axes, pixels, caption in zip(places, _to_rgb(to_pixels(images).movedim(1, -1)), captions, strict=False):
        axes.imshow(pixels.numpy(), interpolation="nearest")
        axes.text(0.5, -0.04, caption, ha="center", va="top", fontsize=7, color=INK, transform=axes.transAxes)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _save(figure, path)


# ---------------------------------------------------------------------------------------------------- the panel

TILE = 160  # about the side of an image in the panel, in pixels of the picture
PITCH = 168  # of the columns at least, for the headings' sake
GAP, MARGIN, HEADER, FOOTER, SAMPLE = 8, 10, 48, 40, 20
# Flat grey alone could be taken for a grey image; stripes cannot.
STRIPES = (0.56, 0.64)
# They differ in lightness as well as in hue, and are seldom the colours of a photograph.
OUTLINES = {DONOR: (1.0, 0.25, 0.70), KEPT: (0.0, 0.80, 0.95)}
FADED = 0.12  # how much is left of the patches about which nothing is predicted
HEADINGS = (
    ("image", ""),
    ("corrupted", "what the model gets"),
    ("true colours", "of the corrupted patches"),
    ("predicted colours", "of the corrupted patches"),
)
LEGEND = ((MASK, "hidden by [mask]"), (DONOR, "replaced by another patch"), (KEPT, "unchanged, yet predicted"))


def prediction_panel(objective: MaskedPatchPrediction, images: Tensor, keys: Tensor, path: Path) -> Path:
    """Draw a row an image: the image, its corruption, and the true and the predicted colours of the corrupted patches.

    The objective is drawn in evaluation mode, on its own device, and left as it was.

    Args:
        objective: whose corruption, target and prediction are shown.
        images: uint8 (B, C, H, W). The first 3 channels are shown; of 2 channels their mean, in grey.
        keys: int64 (B,), which decide what is corrupted and how.
        path: of the PNG to write.

    Raises:
        UserError: images are each other's donors and B is odd.
    """
    columns = _panel_columns(objective, images, keys)
    sheet = _tile(columns)
    # The page is made pixel by pixel, because axes would resample it; only text is put on top.
    page = np.pad(sheet, ((HEADER, FOOTER), (MARGIN, 0), (0, 0)), constant_values=1.0)
    height, width = page.shape[:2]
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    for i, (heading, below) in enumerate(HEADINGS):
        x = (MARGIN + i * sheet.shape[1] // len(HEADINGS)) / width
        figure.text(x, 1 - 24 / height, heading, size=9, color=INK, weight="bold")
        figure.text(x, 1 - 40 / height, below, size=6.5, color=FAINT)
    left, top = MARGIN, height - FOOTER + 10
    for kind, name in LEGEND:
        sample = torch.full((1, 1, SAMPLE, SAMPLE, 3), 0.88)
        page[top : top + SAMPLE, left : left + SAMPLE] = _mark(sample, torch.tensor([[kind]]))[0, 0].numpy()
        left += SAMPLE + 6
        y = 1 - (top + SAMPLE / 2) / height
        text = figure.text(left / width, y, name, size=7.5, color=INK, va="center_baseline")
        left += math.ceil(text.get_window_extent().width) + 20
    figure.figimage(page, origin="upper")
    figure.savefig(path, format="png", dpi=DPI)
    return path


def _panel_columns(objective: MaskedPatchPrediction, images: Tensor, keys: Tensor) -> Tensor:
    """The four pictures of each image, enlarged: float32 (4, B, H', W', 3) in [0, 1]."""
    encoder, target = objective.encoder, objective.target
    device = objective.head.weight.device
    images, keys = images.to(device), keys.to(device)
    modes = [(module, module.training) for module in objective.modules()]
    objective.eval()
    try:
        with torch.inference_mode():
            draw = objective.corruption.draw(keys)
            prediction, where = objective.predict(images, keys)
            true = target.colour(target.labels(images, encoder.patch))  # (B, N, C)
            at = repeat(where, "b k -> b k c", c=encoder.channels)
            predicted = torch.zeros_like(true).scatter(1, at, target.render(prediction.float()))
            cells = _to_cells(images, encoder.grid, encoder.patch)  # (B, N, p, q, 3)
            donated = take(cells[draw.donor_image], draw.donor_patch)
            corrupted = _mark(torch.where(_each(draw.kind == DONOR), donated, cells), draw.kind)
            faded = 1 - FADED * (1 - cells)
            coloured = [
                torch.where(_each(draw.masked), _swatch(_to_rgb(colour), cells), faded) for colour in (true, predicted)
            ]
            return torch.stack([_from_cells(x, encoder.grid) for x in (cells, corrupted, *coloured)]).cpu()
    finally:
        for module, training in modes:
            module.training = training


def _to_cells(images: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """uint8 (B, C, H, W) -> patches as they are shown, float32 (B, N, p, q, 3).

    Small images are enlarged a whole number of times, every pixel a square; large ones are shrunk to about `TILE`.
    """
    side = math.sqrt(math.prod(images.shape[-2:]))
    scale = max(1, round(TILE / side)) if side < 1.5 * TILE else 1 / round(side / TILE)
    tall, wide = (max(1, round(length * scale)) for length in patch)
    shown = F.interpolate(to_pixels(images), size=(grid[0] * tall, grid[1] * wide), mode="area")
    return _to_rgb(rearrange(shown, "b c (h p) (w q) -> b (h w) p q c", p=tall, q=wide))


def _from_cells(cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, N, p, q, 3) -> (B, H', W', 3)."""
    return rearrange(cells, "b (h w) p q c -> b (h p) (w q) c", h=grid[0])


def _to_rgb(colours: Tensor) -> Tensor:
    """(..., C) -> (..., 3): the first 3 channels, or the mean of fewer in grey."""
    if colours.shape[-1] >= 3:
        return colours[..., :3]
    return colours.mean(-1, keepdim=True).expand(*colours.shape[:-1], 3)


def _each(which: Tensor) -> Tensor:
    """(B, N) -> (B, N, 1, 1, 1), to choose among cells."""
    return which[..., None, None, None]


def _mark(cells: Tensor, kind: Tensor) -> Tensor:
    """Stripe the cells that became [mask], outline the donated and the kept: (B, N, p, q, 3) and (B, N) -> the same."""
    tall, wide = cells.shape[2:4]
    row, column = torch.arange(tall, device=cells.device)[:, None], torch.arange(wide, device=cells.device)
    stripes = torch.where((row + column) // max(2, min(tall, wide) // 4) % 2 == 0, *STRIPES)[..., None]
    cells = torch.where(_each(kind == MASK), stripes.to(cells.dtype), cells)
    outline = _edge(cells, max(1, min(tall, wide) // 10))
    for which, colour in OUTLINES.items():
        cells = torch.where(_each(kind == which) & outline, cells.new_tensor(colour), cells)
    return cells


def _swatch(colours: Tensor, cells: Tensor) -> Tensor:
    """Cells of one colour, (B, N, 3) -> (B, N, p, q, 3), with a darker rim that sets them off where all is pale."""
    flat = colours[:, :, None, None].expand_as(cells)
    roomy = min(cells.shape[2:4]) >= 8
    return torch.where(_edge(cells, 1), 0.75 * flat, flat) if roomy else flat


def _edge(cells: Tensor, width: int) -> Tensor:
    """Which pixels of a cell lie within `width` of its rim: bool (p, q, 1)."""
    tall, wide = cells.shape[2:4]
    inside = torch.zeros(max(0, tall - 2 * width), max(0, wide - 2 * width), 1, dtype=torch.bool, device=cells.device)
    return F.pad(inside, (0, 0, width, width, width, width), value=True)


def _tile(columns: Tensor) -> np.ndarray:
    """(4, B, H', W', 3) -> (B (H' + gap), 4 (W' + gap), 3), white between and behind."""
    gap = max(GAP, PITCH - columns.shape[3])
    return rearrange(F.pad(columns, (0, 0, 0, gap, 0, GAP), value=1.0), "n b h w c -> (b h) (n w) c").numpy()


# ---------------------------------------------------------------------------------------------------- charts


def loss_curve(metrics: Sequence[dict[str, Any]], path: Path, *, title: str = "") -> Path:
    """Draw the loss over steps, beside the loss of a guess that knows the labels' distribution and no image.

    Args:
        metrics: rows of metrics.jsonl: `step`, `loss` and maybe `label_entropy`; what is not finite is left out.
        path: of the PNG to write.
        title: above the picture.
    """
    steps = np.array([row["step"] for row in metrics], dtype=float)
    losses = np.array([_finite(row["loss"]) for row in metrics], dtype=float)
    entropy = _finite(metrics[-1].get("label_entropy")) if metrics else math.nan
    figure, axes = _chart(6.4, 3.4, title)
    axes.plot(steps, losses, color=ACCENT, linewidth=1.8, marker="o" if len(steps) <= 20 else "", markersize=4)
    if len(losses) and math.isfinite(losses[-1]):
        _beside(axes, f"{losses[-1]:.2f}", (steps[-1], losses[-1]), (5, 0), va="center", color=ACCENT, weight="bold")
    if math.isfinite(entropy):
        axes.axhline(entropy, color=INK, linewidth=1, linestyle=(0, (5, 3)))
        words = f"entropy of the labels, {entropy:.2f}: the best constant guess"
        _beside(axes, words, (1, entropy), (-2, 4), ha="right", xycoords=axes.get_yaxis_transform())
    shown = [value for value in (*losses, entropy) if math.isfinite(value)]
    axes.set_ylim(0, 1.1 * max(shown, default=1.0) or 1.0)
    axes.set_xlim(0, 1.06 * max(steps, default=1.0))
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("optimizer step", color=FAINT, size=8.5)
    axes.set_ylabel("loss (nats)", color=FAINT, size=8.5)
    return _save(figure, path)


def results_bars(rows: Sequence[dict[str, Any]], path: Path, *, chance: float | None = None) -> Path:
    """Draw rows of results.json as bars from 0 to 1, grouped by protocol and number of labels.

    Args:
        rows: see `mpp.eval.results.make_row`. Bars are means over seeds, whiskers one standard deviation to both sides.
        path: of the PNG to write.
        chance: the accuracy of guessing, drawn as a line.
    """
    groups: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["protocol"], row["labels"]), []).append(row)
    others = [init for init in dict.fromkeys(row["init"] for row in rows) if init != "mpp"]
    colours = {"mpp": ACCENT} | {init: QUIET[i % len(QUIET)] for i, init in enumerate(others)}

    # Bars lie on their sides, so that names of any length can be read; y counts lines of text from the top.
    lines = len(rows) + 1.5 * len(groups)
    figure, axes = _chart(5.2, 0.5 + 0.24 * lines)
    y = 0.0
    for (protocol, labels), group in groups.items():
        heading = f"{protocol.replace('_', ' ')}, {'all labels' if labels is None else f'{labels} labels a class'}"
        _write(axes, 0, y, heading, weight="bold", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
        for row in group:
            y += 1
            mean, std, ours = _finite(row["mean"]), _finite(row["std"]), row["init"] == "mpp"
            axes.barh(y, mean, height=0.72, color=colours[row["init"]])
            if math.isfinite(std):
                axes.errorbar(mean, y, xerr=std, color=INK, linewidth=1, capsize=2.5)
            weight = "bold" if ours else "normal"
            _write(axes, -0.015, y, row["init"], ha="right", weight=weight, color=ACCENT if ours else INK)
            spread = f"{mean:.3f}" + (f" ± {std:.3f}" if math.isfinite(std) else "")
            _write(axes, 1.02, y, spread, weight=weight, color=ACCENT if ours else INK)
        y += 1.5
    axes.grid(axis="x", color=RULE)
    if chance is not None:
        axes.axvline(chance, color=INK, linewidth=1, linestyle=(0, (5, 3)))
        _write(axes, chance, -1.0, f"chance {chance:.3g}", ha="center")
    axes.set_xlim(0, 1)
    axes.set_ylim(y - 0.8, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_color(INK)
    axes.set_xlabel("accuracy on the test split, mean ± standard deviation over seeds", color=FAINT, size=8.5)
    return _save(figure, path)


def _chart(width: float, height: float, title: str = "") -> tuple[Figure, Axes]:
    """A plain chart with axes of so many inches and a title that is text, not mathematics."""
    figure = Figure(figsize=(width, height), dpi=DPI)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(RULE)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=FAINT)
    axes.set_title(title, loc="left", size=10, color=INK, weight="bold", parse_math=False)
    return figure, axes


def _write(axes: Axes, x: float, y: float, text: str, *, color: str = INK, **style: Any) -> None:
    """Text at data coordinates, inside the axes or out."""
    axes.text(x, y, text, va="center_baseline", size=8.5, color=color, parse_math=False, **style)


def _beside(
    axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], *, color: str = INK, **style: Any
) -> None:
    """Text beside a point, `offset` typographic points away."""
    axes.annotate(text, point, offset, textcoords="offset points", size=8.5, color=color, parse_math=False, **style)


def _save(figure: Figure, path: Path) -> Path:
    """Write a chart with all of its text, however long."""
    figure.savefig(path, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.12)
    return path


def _finite(value: float | None) -> float:
    """The number, or NaN for anything that cannot be drawn."""
    return value if value is not None and math.isfinite(value) else math.nan
