"""Look at a batch that training has left out: `python -m mpp.replay RUN [STEP]`.

When a loss is not finite, or explodes, training goes back to a checkpoint and leaves the steps out. This command takes
that very checkpoint, trains the steps in between again and then runs the batch, pair by pair: images 2i and 2i + 1 are
each other's donors. It prints what each pair does to the loss and draws the images, worst first.

STEP is a step that skipped.jsonl names, counted from 1 as in all messages; without it, the last one.
"""

import argparse
import copy
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from mpp.data.loader import Loader
from mpp.data.plan import Plan
from mpp.errors import UserError
from mpp.eval.pictures import image_sheet
from mpp.randomness import fold
from mpp.recipes import common
from mpp.recipes.configuration import call
from mpp.recipes.display import make_console
from mpp.recipes.pretrain import Job, prepare
from mpp.train import fit
from mpp.train.checkpoint import load_checkpoint
from mpp.train.run import load_config, read_skipped

SHOWN = 16  # images in the picture and rows in the table


def replay(out: Path, step: int | None = None) -> dict[str, Any]:
    """Run a batch that was left out once more.

    Args:
        out: run folder of recipes/pretrain.py.
        step: counted from 1; None: the last step that was left out.

    Returns:
        `step`, `reason`, `loss` and `grad_norm` of the whole batch; `pairs`, the worst first: `ids`, `names`, `loss`
        and `grad_norm` of each; `picture`, a file.

    Raises:
        UserError: nothing was left out, or not this step, or the folder is no run of recipes/pretrain.py.
    """
    if not (out / "config.yaml").is_file():
        raise UserError(f"{out} is no run folder; give the out= of a recipes/pretrain.py run")
    rows = read_skipped(out)
    if not rows:
        raise UserError(f"{out} has no skipped.jsonl: no step of this run was left out")
    row = next((row for row in reversed(rows) if step is None or row["first"] < step <= row["last"] + 1), None)
    if row is None:
        known = ", ".join(
            f"{row['first'] + 1}" + (f" to {row['last'] + 1}" if row["last"] > row["first"] else "") for row in rows
        )
        raise UserError(f"step {step} was not left out; these were: {known}")
    index = row["last"] if step is None else step - 1
    config = load_config(out)
    if "objective" not in config:
        raise UserError(f"{out} is no run of recipes/pretrain.py, which is all that can be replayed")
    job = prepare(copy.deepcopy(config))
    accelerator = common.start(job.training)
    plan = Plan(len(job.images), job.batch_size, seed=job.training.seed, accumulation=common.split_batch(
        job.training, job.batch_size, 1))  # fmt: skip
    optimizer = call("optim", common.make_optimizer, config["optim"], job.objective)
    rate = call("schedule", common.make_rate, config["schedule"], base=config["optim"]["lr"], steps=job.steps)

    faults = out / "faults" / f"step-{row['first']:08d}"
    kept = faults / "checkpoints" / f"step-{row['checkpoint']:08d}"
    load_checkpoint(kept, job.objective, optimizer)
    fit(
        job.objective,
        Loader(job.images, plan),
        optimizer,
        steps=index,
        rate=rate,
        accelerator=accelerator,
        seed=job.training.seed,
        clip=job.training.clip,
        spike=None,
        start=row["checkpoint"],
        # In the timeline that was left, the steps of this row were trained; those of rows before it were not.
        leave_out={step for one in rows if one["last"] < row["first"] for step in range(one["first"], one["last"] + 1)},
    )
    return {"step": index + 1, "reason": row["reason"], **_look(job, plan, index, faults / f"batch-{index + 1}.png")}


def _look(job: Job, plan: Plan, index: int, picture: Path) -> dict[str, Any]:
    objective, device = job.objective, next(job.objective.parameters()).device
    epoch, ids = plan.batch(index)
    pairs: list[dict[str, Any]] = []
    images: list[Tensor] = []
    weights = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter) for parameter in weights]
    for pair in ids.view(-1, 2):
        batch = job.images[epoch, pair]
        if "error" in batch:
            raise UserError(batch["error"])
        bad = dict(batch.pop("bad", ()))
        torch.manual_seed(fold(job.training.seed, "replay", int(pair[0])) & (2**63 - 1))
        loss = objective({name: tensor.to(device) for name, tensor in batch.items()})["loss"]
        gradient = torch.autograd.grad(loss, weights, allow_unused=True)
        parts = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradient, strict=True)]
        total = [sum_ + part / (len(ids) // 2) for sum_, part in zip(total, parts, strict=True)]
        names = [bad.get(i) or job.images.source[i]["image"]["path"] or f"sample {i}" for i in pair.tolist()]
        norm = float(nn.utils.get_total_norm(parts))
        pairs.append({"ids": pair.tolist(), "names": names, "loss": float(loss.detach()), "grad_norm": norm})
        images.append(batch["image"])
    # Whatever is not finite first, then by the gradient.
    worst = sorted(range(len(pairs)), key=lambda i: (math.isfinite(pairs[i]["grad_norm"]), -pairs[i]["grad_norm"]))
    shown = worst[: SHOWN // 2]
    captions = [f"{i}\nloss {pairs[p]['loss']:.4g}" for p in shown for i in pairs[p]["ids"]]
    image_sheet(torch.cat([images[p] for p in shown]), captions, picture)
    return {
        "loss": sum(pair["loss"] for pair in pairs) / len(pairs),
        "grad_norm": float(nn.utils.get_total_norm(total)),
        "pairs": [pairs[p] for p in worst],
        "picture": picture,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m mpp.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder of recipes/pretrain.py")
    parser.add_argument("step", type=int, nargs="?", help="a step that was left out, counted from 1")
    given = parser.parse_args()
    try:
        found = replay(given.run, given.step)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    console = make_console()
    table = Table(title=f"Step {found['step']}, left out because {found['reason']}", title_justify="left")
    for heading in ("loss", "gradient", "images"):
        table.add_column(heading, justify="left" if heading == "images" else "right")
    for pair in found["pairs"][: SHOWN // 2]:
        table.add_row(f"{pair['loss']:.4g}", f"{pair['grad_norm']:.4g}", escape(", ".join(pair["names"])))
    console.print(table)
    console.print(
        f"the whole batch: loss {found['loss']:.4g}, norm of its gradient {found['grad_norm']:.4g}; "
        f"the worst pairs are drawn in {found['picture']}"
    )


if __name__ == "__main__":
    main()
