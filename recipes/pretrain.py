"""Pre-train an encoder by masked patch prediction, or with labels (objective=supervised).

accelerate launch recipes/pretrain.py out=runs/a data=folder data.path=DIR encoder.name=vit_small_patch16_224
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from mpp.data.loader import Images
from mpp.data.plan import Plan
from mpp.data.sources import Data
from mpp.encoder import Encoder
from mpp.errors import UserError
from mpp.eval.pictures import loss_curve, prediction_panel, results_bars
from mpp.eval.report import write_report
from mpp.eval.results import Row
from mpp.objectives.mpp import MaskedPatchPrediction
from mpp.objectives.supervised import Supervised
from mpp.recipes import common
from mpp.recipes.configuration import Config, call, main
from mpp.recipes.display import Display, banner, make_console
from mpp.train import Run
from mpp.train.run import read_metrics, to_yaml
from mpp.weights import EXPORT, export_encoder

PICTURES = (
    ("panel.png", "What the model sees and predicts, on test images."),
    ("loss.png", "The loss, and the entropy of the labels: below it, the model has learned from the context."),
    ("results.png", "Accuracy on the test split, each beside its controls."),
)
LABELLED_PATCHES = 131072  # whose labels give the entropy that a loss is compared with


@dataclass
class Job:
    """What a configuration stands for: `prepare` builds it, and settles what the configuration left open."""

    training: common.Training
    data: Data
    encoder: Encoder
    objective: nn.Module
    images: Images
    steps: int
    batch_size: int


def prepare(config: Config) -> Job:
    """Build data, encoder and objective, and fill in what `config` leaves open."""
    training = call("train", common.Training, config["train"])
    data, config["data"] = common.open_data(config["data"])
    config["encoder"] |= {
        "name": config["encoder"]["name"] or common.default_encoder(data),
        "channels": config["encoder"]["channels"] or data.channels,
        "size": common.pair(config["encoder"]["size"]),
    }
    common.seed_weights(training.seed)
    encoder = call("encoder", Encoder, config["encoder"])
    objective = call("objective", build_objective, config["objective"], encoder, data)

    steps, batch_size = common.settle(training, len(data.train), is_small=common.small(data))
    config["train"] |= {"steps": steps, "epochs": None, "batch_size": batch_size}
    if config["optim"]["lr"] is None:
        config["optim"]["lr"] = 2e-3 if common.small(data) else 5e-4 * batch_size / 512
    config["out"] = config["out"] or common.default_out(
        "pretrain", data.name, encoder.name, config["objective"]["name"] * (config["objective"]["name"] != "mpp")
    )
    images = Images(data.train, data.transform(encoder.size), channels=encoder.channels, seed=training.seed)
    return Job(training, data, encoder, objective, images, steps, batch_size)


def pretrain(config: Config) -> Path:
    """Run the recipe; returns the run folder."""
    job = prepare(config)
    training, data, objective, steps, batch_size = job.training, job.data, job.objective, job.steps, job.batch_size
    out = Path(config["out"])
    accelerator = common.start(training, out, config)
    accumulation = common.split_batch(training, batch_size, accelerator.num_processes)
    # Refused, if so, before the run folder is touched.
    Plan(len(data.train), batch_size, seed=0, world=accelerator.num_processes, accumulation=accumulation)
    with common.open_run(accelerator, out, config, training, data, after=("probe", "finetune", "few")) as run:
        extra = label_entropy(objective, job.images)
        console = make_console(accelerator.is_main_process)
        banner(
            console,
            "Pre-training by masked patch prediction" if objective.name == "mpp" else "Pre-training with labels",
            data=common.data_line(data),
            encoder=common.describe_encoder(job.encoder),
            objective=objective_line(objective, extra),
            training=f"{steps:,} steps of {batch_size} images, {steps * batch_size / len(data.train):.1f} epochs; "
            f"{config['optim']['opt']}, learning rate {config['optim']['lr']:g}",
            machine=machine_line(accelerator, batch_size, accumulation),
            out=str(out) + (f", continued from step {run.step()}" if run.step() else ""),
            changed="; ".join(run.changed),
        )
        with Display("pre-training", steps, main=accelerator.is_main_process) as display:
            common.train(
                objective,
                job.images,
                training=training,
                steps=steps,
                batch_size=batch_size,
                optim=config["optim"],
                schedule=config["schedule"],
                accelerator=accelerator,
                run=run,
                display=display,
                extra=extra,
            )
        if accelerator.is_main_process:
            finish(objective, job.encoder, run, data, console)
        accelerator.wait_for_everyone()
        for tracker in accelerator.trackers:
            tracker.finish()
    return out


def build_objective(encoder: Encoder, data: Data, *, name: str, **arguments: Any) -> nn.Module:
    """The objective of the group `objective`: its name and its class's keyword arguments.

    Raises:
        UserError: an unknown name or argument, or labels are needed and there are none.
    """
    if name == "mpp":
        return call("objective", MaskedPatchPrediction, arguments, encoder)
    if name == "supervised":
        data.labels()
        return call("objective", Supervised, arguments, encoder, len(data.classes or ()))
    raise UserError(f"objective.name must be mpp or supervised, got {name!r}")


def label_entropy(objective: nn.Module, images: Images) -> dict[str, float]:
    """{"label_entropy": nats} of masked patch prediction, measured on crops of the training images; else {}.

    It is the loss of the best constant guess: a loss below it has learned from the context.

    Raises:
        UserError: all labels are the same, so there is nothing to learn.
    """
    if not isinstance(objective, MaskedPatchPrediction):
        return {}
    count = min(LABELLED_PATCHES // objective.encoder.num_patches, len(images))
    order = torch.linspace(0, len(images) - 1, max(1, count)).long()
    target, patch = objective.target, objective.encoder.patch
    labels = []
    for ids in order.split(64):
        batch = images[0, ids]
        if "error" in batch:
            raise UserError(batch["error"])
        labels.append(target.labels(batch["image"], patch))
    entropy = target.entropy(torch.cat(labels))
    if entropy == 0:
        raise UserError(
            "every patch of the data has the same colour label, so there is nothing to predict; look at the images"
        )
    return {"label_entropy": round(entropy, 4)}


def objective_line(objective: nn.Module, extra: dict[str, float]) -> str:
    """What is predicted, for the banner."""
    if isinstance(objective, MaskedPatchPrediction):
        target, count = objective.target, objective.corruption.count
        classes = f"{target.size} classes" if target.joint else f"{target.channels} x {target.levels} classes"
        return (
            f"predict the mean colour of {count} of {objective.encoder.num_patches} patches, {classes}; "
            f"entropy of the labels {extra['label_entropy']:.3f} nats"
        )
    return f"{objective.num_classes} classes"


def machine_line(accelerator: Accelerator, batch_size: int, accumulation: int) -> str:
    """Devices, processes, precision and how the batch is cut, for the banner."""
    world = accelerator.num_processes
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else str(accelerator.device)
    per_process = batch_size // (world * accumulation)
    return (
        f"{world} process{'es' * (world > 1)} on {device}, precision {accelerator.mixed_precision}, "
        f"batch {batch_size} = {world} x {accumulation} x {per_process} (processes x accumulation x images)"
    )


def finish(objective: nn.Module, encoder: Encoder, run: Run, data: Data, console: Any) -> None:
    """Export the encoder and draw the pictures (main process)."""
    objective.cpu().eval()
    about = {"objective": objective.name, "data": data.name}
    if isinstance(objective, Supervised):
        about["pool"] = objective.pool
    export_encoder(encoder, run.out / EXPORT, **about)
    pictures = run.out / "pictures"
    pictures.mkdir(exist_ok=True)
    rows = read_metrics(run.out)
    loss_curve(rows, pictures / "loss.png", title=data.name)
    if isinstance(objective, MaskedPatchPrediction):
        panel(objective, data, pictures / "panel.png")
    write_run_report(run.out, [], run.config)
    if rows:
        console.print(f"pre-trained: loss {rows[-1]['loss']:.4f}; encoder in {run.out / EXPORT}", highlight=False)


def panel(objective: MaskedPatchPrediction, data: Data, path: Path, *, rows: int = 6) -> None:
    """Draw what the model predicts on images it was not trained on, where there are any: one of each class first.

    Among the first images of a class it takes the first that is not nearly of one colour, whatever is predicted for it.
    """
    source = data.test if data.test is not None and len(data.test) > 1 else data.train
    transform = data.transform(objective.encoder.size).evaluation()
    # For a picture, another image in place of one that cannot be read will do.
    images = Images(source, transform, channels=objective.encoder.channels, strict=False)
    labels = np.asarray(source["label"]) if "label" in source.column_names else np.zeros(len(source), dtype=np.int64)
    groups = [np.flatnonzero(labels == label)[:32] for label in np.unique(labels)]
    chosen: list[int] = []
    for group in groups * rows:
        left = [int(i) for i in group if i not in chosen]
        if left and len(chosen) < rows:
            chosen.append(next((i for i in left if _colours(objective, images, i) >= 8), left[0]))
    batch = images[0, torch.tensor(chosen[: len(chosen) // 2 * 2], dtype=torch.int64)]
    if "error" in batch:
        raise UserError(batch["error"])
    prediction_panel(objective, batch["image"], batch["key"], path)


def _colours(objective: MaskedPatchPrediction, images: Images, index: int) -> int:
    """How many colours the patches of an image have, as far as labels tell; 0 if it cannot be read."""
    batch = images[0, torch.tensor([index])]
    return 0 if "error" in batch else len(objective.target.labels(batch["image"], objective.encoder.patch).unique())


def write_run_report(out: Path, results: list[Row], config: Config, *, chance: float | None = None) -> Path:
    """Write report.html from what lies in a run folder (main process)."""
    rows = read_metrics(out)
    last = rows[-1] if rows else {}
    facts = {
        "data": config["data"]["source"],
        "encoder": config["encoder"]["name"],
        "steps": f"{last.get('step', 0):,}",
    }
    if "loss" in last:
        facts["loss at the end"] = f"{last['loss']:.4f} nats"
    if "label_entropy" in last:
        facts["entropy of the labels"] = f"{last['label_entropy']:.4f} nats, the loss of the best constant guess"
    if rows:
        facts["images a second"] = f"{statistics.median(row['images_per_second'] for row in rows):,.0f} (median)"
    pictures = []
    if results:
        results_bars(results, out / "pictures" / "results.png", chance=chance)
    for name, caption in PICTURES:
        if (out / "pictures" / name).is_file():
            pictures.append((out / "pictures" / name, caption))
    return write_report(
        out,
        title=f"{out.name}: masked patch prediction"
        if config["objective"]["name"] == "mpp"
        else f"{out.name}: training with labels",
        rows=results,
        pictures=pictures,
        facts=facts,
        config_yaml=to_yaml(config),
        environment=json.loads((out / "environment.json").read_text()),
    )


if __name__ == "__main__":
    main("pretrain", pretrain)
