"""The one training loop. Supervised, masked, pre-training and fine-tuning all run through it.

It reads from top to bottom: restore, then for each step rate, micro-batches, clip, update, and now and then a report
and a checkpoint. Nothing inside a step waits for the device: sums stay there until a report.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mpp.data.loader import Loader
from mpp.errors import UserError
from mpp.randomness import fold
from mpp.train.run import Run


def fit(
    objective: nn.Module,
    loader: Loader,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    rate: Callable[[int], float],
    accelerator: Accelerator,
    seed: int = 0,
    clip: float | None = None,
    log_every: int = 50,
    save_every: int | None = None,
    keep: int = 2,
    run: Run | None = None,
    report: Callable[[dict[str, float]], None] | None = None,
    extra: dict[str, float] | None = None,
) -> None:
    """Train an objective in place; it stays on the accelerator's device.

    Args:
        objective: `forward(batch) -> {"loss": scalar, name: scalar, ...}`.
        loader: micro-batches; its plan knows the process, the accumulation and the batch.
        optimizer: over the objective's parameters; groups may carry `lr_scale`.
        steps: optimizer steps in all, those of a restored checkpoint included.
        rate: learning rate of a step.
        accelerator: device, precision, processes, and trackers, which get every row.
        seed: dropout and the like are drawn from (seed, step, process, micro-batch).
        clip: largest global norm of the gradient; None leaves it.
        log_every: steps between reports.
        save_every: steps between checkpoints; the last step is always saved. None: the last alone.
        keep: checkpoints to keep.
        run: where to restore from and write to; None keeps nothing.
        report: called on the main process with each row: step, loss and the objective's other numbers (means since the
            row before), lr, grad_norm if clipped, images_per_second, seconds_left, data_wait (share of the time).
        extra: constants that join every row, such as the entropy of the labels.

    Raises:
        UserError: the loss is not finite.
    """
    device, plan = accelerator.device, loader.plan
    model, wrapped_optimizer = accelerator.prepare(objective, optimizer)
    # After `prepare`, which would move counters of steps to the device, where AdamW waits for each of them.
    start = run.restore(objective, optimizer) if run is not None else 0
    starts = accelerator.gather(torch.tensor([start], device=device)).tolist()
    if len(set(starts)) > 1:
        raise UserError(
            f"the processes would continue from different steps ({starts}); give every machine the same run folder"
        )
    model.train()

    batches = loader.batches(start, steps)
    window = _Window(device)
    for step in range(start, steps):
        # ------------------------------------------------------------------ learning rate
        lr = rate(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

        # ------------------------------------------------------------------ gradients
        for micro in range(plan.accumulation):
            waited = time.perf_counter()
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
            window.waited += time.perf_counter() - waited
            # After the batch: making a loader's iterator draws from the global generator.
            torch.manual_seed(fold(seed, "model", step, plan.rank, micro) & (2**63 - 1))
            last = micro == plan.accumulation - 1
            with nullcontext() if last else accelerator.no_sync(model):
                outputs = model(batch)
                accelerator.backward(outputs["loss"] / plan.accumulation)
            window.add(outputs, step, share=1 / plan.accumulation)

        # ------------------------------------------------------------------ update
        if clip is not None:
            norm = accelerator.clip_grad_norm_(objective.parameters(), clip)
            window.add({"grad_norm": norm}, step)
        wrapped_optimizer.step()
        wrapped_optimizer.zero_grad()

        # ------------------------------------------------------------------ report and save
        done = step + 1
        saving = run is not None and (done == steps or (save_every is not None and done % save_every == 0))
        if saving or done == steps or done % log_every == 0:
            if saving:  # a finite loss may have led to weights that are not
                window.check(objective, step)
            row = window.close(accelerator, done, steps, images=plan.batch_size)
            if (bad := row.pop("first_bad_step")) >= 0:
                kept = (
                    f"the last checkpoint in {run.checkpoints} is from before"
                    if run is not None
                    else "nothing was saved"
                )
                raise UserError(
                    f"loss or weights are not finite since step {int(bad) + 1}; {kept}. Try a lower optim.lr, "
                    "train.clip=1, or train.precision=bf16 in place of fp16"
                )
            row |= {"lr": lr, **(extra or {})}
            if run is not None:
                run.log(row)
                accelerator.log(row, step=done)
            if report is not None and accelerator.is_main_process:
                report(row)
        if saving and run is not None:
            run.save(done, objective, optimizer, keep=keep)
            accelerator.wait_for_everyone()
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # takes autocast off the objective's forward
    accelerator.free_memory()


class _Window:
    """Means since the last report. Sums stay on the device; `close` is the one place that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.first_bad = torch.full((), -1.0, device=device)
        self._open()

    def _open(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.steps: set[int] = set()
        self.waited, self.began = 0.0, time.perf_counter()

    def add(self, values: dict[str, Tensor], step: int, *, share: float = 1.0) -> None:
        self.steps.add(step)
        for name, value in values.items():
            value = value.detach().float()
            # fp16 skips steps whose gradient overflows; their norm says nothing. A loss must show.
            counts = torch.isfinite(value) if name == "grad_norm" else torch.ones_like(value, dtype=torch.bool)
            zero = torch.zeros((), device=self.device)
            self.sums[name] = self.sums.get(name, zero) + torch.where(counts, value * share, zero)
            self.counts[name] = self.counts.get(name, zero) + counts * share
        if "loss" in values:
            self._note(~torch.isfinite(values["loss"].detach()), step)

    def check(self, model: nn.Module, step: int) -> None:
        """Note the step as bad if any parameter is not finite."""
        norm = torch.stack(torch._foreach_norm([p.detach() for p in model.parameters()])).sum()
        self._note(~torch.isfinite(norm), step)

    def _note(self, bad: Tensor, step: int) -> None:
        self.first_bad = torch.where(bad & (self.first_bad < 0), torch.full_like(self.first_bad, step), self.first_bad)

    def close(self, accelerator: Accelerator, done: int, steps: int, *, images: int) -> dict[str, Any]:
        names = sorted(self.sums)
        means = torch.stack([self.sums[name] / self.counts[name].clamp(min=1e-9) for name in names])
        means = accelerator.reduce(means, "mean")
        first_bad_steps = accelerator.gather(self.first_bad[None])
        bad = torch.where(first_bad_steps >= 0, first_bad_steps, torch.inf).min()
        bad = torch.where(torch.isfinite(bad), bad, -1.0)
        *numbers, first_bad = torch.cat([means, bad[None]]).tolist()
        seconds = time.perf_counter() - self.began
        row = {"step": done, **dict(zip(names, numbers, strict=True)), "first_bad_step": first_bad}
        row["images_per_second"] = round(len(self.steps) * images / seconds, 1)
        row["seconds_left"] = round((steps - done) * seconds / len(self.steps), 1)
        row["data_wait"] = round(self.waited / seconds, 4)
        self._open()
        return row
