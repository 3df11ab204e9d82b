"""The one training loop. Supervised, masked, pre-training and fine-tuning all run through it.

It reads from top to bottom: restore, then for each step rate, micro-batches, clip, update, and now and then a report
and a checkpoint. Nothing inside a step waits for the device: sums stay there until a report, and what must be known in
every step, a loss that is not sound or a signal, is read two steps later (pulse.py).
"""

import logging
import time
from collections.abc import Callable, Set
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from mpp.data.loader import Loader
from mpp.errors import UserError
from mpp.randomness import fold
from mpp.stopping import Preempted, listen
from mpp.train.pulse import Pulse, Trouble
from mpp.train.run import Run, on_main
from mpp.train.trace import Trace

_LOG = logging.getLogger(__name__)


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
    ema: float | None = None,
    log_every: int = 50,
    save_every: int | None = None,
    spike: float | None = 10.0,
    max_rollbacks: int = 3,
    max_bad: float = 0.01,
    trace: bool = False,
    start: int = 0,
    leave_out: Set[int] = frozenset(),
    run: Run | None = None,
    report: Callable[[dict[str, float]], None] | None = None,
    say: Callable[[str], object] = _LOG.warning,
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
        ema: decay of a running average of the weights (Polyak averaging), which the objective ends with; None: no.
        log_every: steps between reports.
        save_every: steps between checkpoints; the last step is always saved. None: the last alone.
        spike: when a loss counts as exploded, see `Pulse`; None: never.
        max_rollbacks: how often, in the whole run, training goes back to a checkpoint and leaves out the steps whose
            loss was not finite or exploded.
        max_bad: largest share of the images that may be unreadable; they are replaced (see `Images`).
        trace: whether to write a line of checksums for each step.
        start: steps that are done already, where there is no run to tell.
        leave_out: steps that are not to be trained, in addition to those that the run has left out.
        run: where to restore from and write to; None keeps nothing.
        report: called on the main process with each row: step, loss and the objective's other numbers (means since the
            row before), lr, grad_norm, images_per_second, seconds_left, data_wait (share of the time).
        say: called on the main process with one line about each thing that went wrong and was dealt with.
        extra: constants that join every row, such as the entropy of the labels.

    Raises:
        UserError: the loss is not sound and there is nothing to go back to; too many images are bad; or the last
            checkpoint could not be written.
        Preempted: a signal came; the steps done are saved.
    """
    device, plan = accelerator.device, loader.plan
    averaged = ModelEmaV3(objective.to(device), decay=ema) if ema is not None else None
    ema_model = averaged.module if averaged is not None else None
    model, wrapped_optimizer = accelerator.prepare(objective, optimizer)
    window, pulse, tracer = _Window(device), Pulse(accelerator, spike=spike), Trace(objective) if trace else None
    bad_images, left_out = _BadImages(len(loader.images), max_bad), set(leave_out)

    def tell(line: str) -> None:
        if line and accelerator.is_main_process:
            say(line)

    def restore(at_most: int | None = None) -> int:
        """Go to the last sound checkpoint; returns the steps done there."""
        if run is None:
            return start
        chosen = on_main(accelerator, lambda: run.choose(at_most, tell))
        # After `prepare`, which would move counters of steps to the device, where AdamW waits for each of them.
        state = run.restore(chosen, objective, optimizer, ema_model)
        window.restore(state.get("window"), accelerator)
        pulse.restore(state.get("losses"))
        if accelerator.scaler is not None and "scaler" in state:
            accelerator.scaler.load_state_dict(state["scaler"])
        for row in on_main(accelerator, run.skipped):
            left_out.update(range(row["first"], row["last"] + 1))
        if chosen is None:
            save(0)  # what a rollback goes back to before the first interval, and whether the disk takes it
        return int(state["step"])

    def save(done: int) -> None:
        assert run is not None
        bad_images.settle(accelerator, run, tell)
        state: dict[str, Any] = {"window": window.state(accelerator), "losses": pulse.state()}
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler.state_dict()
        tell(run.saved())
        run.save(done, objective, optimizer, ema_model, state)

    def finish_saving() -> None:
        assert run is not None
        if problem := on_main(accelerator, lambda: run.saved() or run.save_failed):
            raise UserError(f"{problem}; the checkpoint before is whole: make room and run the same command again")

    def roll_back(trouble: Trouble) -> int:
        """Go back to before the trouble and leave its steps out; returns the steps done there."""
        where = f"{trouble.reason} at step {trouble.last + 1}"
        advice = "Try a lower optim.lr, train.clip=1, or train.precision=bf16 in place of fp16"
        advice += ", in a new out=" if run is not None and run.step() else ""
        if run is None:
            raise UserError(f"{where}; nothing was saved. {advice}")
        tell(run.saved())

        def begin() -> int:
            if len(run.skipped()) >= max_rollbacks:
                raise UserError(
                    f"{where}, after {max_rollbacks} rollback(s) (train.max_rollbacks) that did not help; the last "
                    f"checkpoint in {run.checkpoints} is from before, and `python -m mpp.replay {run.out}` shows the "
                    f"batches that were left out. {advice}"
                )
            found = run.saved_steps()
            if not found or found[0] > trouble.last:
                raise UserError(f"{where}, and there is no checkpoint from before it. {advice}")
            return max(found[0], trouble.first)

        first = on_main(accelerator, begin)
        chosen = on_main(accelerator, lambda: run.choose(first, tell))
        row = {
            "first": first,
            "last": trouble.last,
            "reason": trouble.reason,
            "checkpoint": chosen,
            "ids": {step: plan.batch(step)[1].tolist() for step in range(first, trouble.last + 1)},
        }
        on_main(accelerator, lambda: run.skip(row, chosen))
        done = restore(first)
        steps_left_out = f"step {first + 1}" + (f" to {trouble.last + 1}" if first != trouble.last else "")
        tell(
            f"{where}: going back to step {done} and leaving out {steps_left_out}; "
            f"to see the batch: python -m mpp.replay {run.out}"
        )
        return done

    with listen() as wish:
        done = restore()
        if done > steps:
            raise UserError(f"the run has done {done:,} steps already, more than train.steps={steps:,}; give more")
        model.train()
        batches = loader.batches(done, steps, skip=left_out)
        window.begin()
        try:
            while done < steps:
                step, done = done, done + 1
                lr = rate(step)
                if step not in left_out:
                    # -------------------------------------------------------------- learning rate
                    for group in optimizer.param_groups:
                        group["lr"] = lr * group.get("lr_scale", 1.0)

                    # -------------------------------------------------------------- gradients
                    loss, sound = torch.zeros((), device=device), torch.ones((), dtype=torch.bool, device=device)
                    for micro in range(plan.accumulation):
                        waited = time.perf_counter()
                        batch = next(batches)
                        bad_images.note(batch)
                        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
                        window.waited += time.perf_counter() - waited
                        # After the batch: making a loader's iterator draws from the global generator.
                        torch.manual_seed(fold(seed, "model", step, plan.rank, micro) & (2**63 - 1))
                        last = micro == plan.accumulation - 1
                        with nullcontext() if last else accelerator.no_sync(model):
                            outputs = model(batch)
                            accelerator.backward(outputs["loss"] / plan.accumulation)
                        window.add(outputs, share=1 / plan.accumulation)
                        loss = loss + outputs["loss"].detach().float() / plan.accumulation
                        sound = sound & torch.isfinite(outputs["loss"].detach())
                        if tracer is not None:
                            tracer.add(batch, outputs["loss"])

                    # -------------------------------------------------------------- update
                    norm = _gradient_norm(accelerator, objective, clip)
                    window.add({"grad_norm": norm})
                    window.steps += 1
                    if accelerator.scaler is None:  # which leaves out updates whose gradient overflows
                        sound = sound & torch.isfinite(norm)
                    wrapped_optimizer.step()
                    wrapped_optimizer.zero_grad()
                    if averaged is not None:
                        averaged.update(objective)
                    pulse.send(step, loss, sound, _finite_weights(objective), wish.signal)
                    if tracer is not None and run is not None:
                        line = tracer.close(accelerator, done, lr)
                        if accelerator.is_main_process:
                            tell(run.trace.append([line]))

                # ------------------------------------------------------------------ is all well
                logging_now = done == steps or done % log_every == 0
                saving = run is not None and (done == steps or (save_every is not None and done % save_every == 0))
                trouble = pulse.read(everything=logging_now or saving)
                if trouble is None and pulse.stop:
                    trouble = pulse.read(everything=True)  # weights that are saved must be ones to go back to
                if trouble is not None:
                    done = roll_back(trouble)
                    batches.close()
                    batches = loader.batches(done, steps, skip=left_out)
                    window.begin()
                    continue

                # ------------------------------------------------------------------ report and save
                if logging_now and window.sums:
                    bad_images.settle(accelerator, run, tell)
                    row = window.close(accelerator, done, steps, images=plan.batch_size) | {"lr": lr, **(extra or {})}
                    if run is not None:
                        tell(run.log(row))
                        accelerator.log(row, step=done)
                    if report is not None and accelerator.is_main_process:
                        report(row)
                if run is not None and (saving or pulse.stop):
                    save(done)
                elif run is not None:
                    tell(run.saved(block=False))
                if pulse.stop and done < steps:
                    if run is not None:
                        finish_saving()
                    raise Preempted(pulse.stop, done if run is not None else None)
        finally:
            batches.close()  # and with it the workers, who would be waited for at the exit
        if run is not None:
            finish_saving()
    if ema_model is not None:
        objective.load_state_dict(ema_model.state_dict())
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # takes autocast off the objective's forward
    accelerator.free_memory()


def _gradient_norm(accelerator: Accelerator, objective: nn.Module, clip: float | None) -> Tensor:
    """The global norm of the gradient, before it is cut to `clip`."""
    if clip is not None or accelerator.scaler is not None:
        return accelerator.clip_grad_norm_(objective.parameters(), clip or torch.inf)
    return nn.utils.get_total_norm([p.grad for p in objective.parameters() if p.grad is not None])


def _finite_weights(objective: nn.Module) -> Tensor:
    """bool, on the device: one pass over the weights, a fraction of what the optimizer does."""
    return torch.isfinite(torch.stack(torch._foreach_norm([p.detach() for p in objective.parameters()])).sum())


class _BadImages:
    """Images that could not be read: told to the user, listed in the run folder, and too many of them stop the run."""

    def __init__(self, num_images: int, share: float) -> None:
        self.num_images, self.share = num_images, share
        self.limit = max(int(share * num_images), 1 if share > 0 else 0)
        self.known: dict[int, str] = {}
        self.new: dict[int, str] = {}

    def note(self, batch: dict[str, Any]) -> None:
        """Take the news out of a batch."""
        self.new |= {number: message for number, message in batch.pop("bad", ()) if number not in self.known}

    def settle(self, accelerator: Accelerator, run: Run | None, tell: Callable[[str], None]) -> None:
        """Share the news with all processes.

        Raises:
            UserError: more are bad than may be.
        """
        count = accelerator.gather(torch.tensor([len(self.new)], device=accelerator.device)).sum()
        if not count:
            return
        if not self.known and run is not None:
            self.known = on_main(accelerator, run.known_bad)
        everyone = dict(gather_object(list(self.new.items())))
        new = {number: message for number, message in sorted(everyone.items()) if number not in self.known}
        self.known |= new
        self.new = {}
        if not new:
            return
        if run is not None:
            run.note_bad(new)
        where = f"; all in {run.bad_images}" if run is not None else ""
        first = "; ".join(list(new.values())[:2])
        if len(self.known) > self.limit:
            raise UserError(
                f"{len(self.known):,} of {self.num_images:,} images cannot be read, more than "
                f"train.max_bad={self.share:g} allows ({first}{where}); repair them, raise train.max_bad, or remove "
                "them and choose another out="
            )
        tell(f"{len(new)} image(s) cannot be read and are replaced by others: {first}{where}")


class _Window:
    """Means since the last report. Sums stay on the device; `close` and `state` are the places that wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Start the clock."""
        self.steps, self.waited, self.began = 0, 0.0, time.perf_counter()

    def add(self, values: dict[str, Tensor], *, share: float = 1.0) -> None:
        for name, value in values.items():
            value = value.detach().float()
            # fp16 skips steps whose gradient overflows; their norm says nothing.
            counts = torch.isfinite(value) if name == "grad_norm" else torch.ones_like(value, dtype=torch.bool)
            zero = torch.zeros((), device=self.device)
            self.sums[name] = self.sums.get(name, zero) + torch.where(counts, value * share, zero)
            self.counts[name] = self.counts.get(name, zero) + counts * share

    def state(self, accelerator: Accelerator) -> dict[str, list[list[float]]]:
        """JSON-like, for checkpoints: for each name, sum and count on each process (a collective call)."""
        if not self.sums:
            return {}
        ours = torch.stack([torch.stack([self.sums[name], self.counts[name]]) for name in sorted(self.sums)])
        everyone = accelerator.gather(ours[None]).transpose(0, 1).tolist()
        return dict(zip(sorted(self.sums), everyone, strict=True))

    def restore(self, state: dict[str, list[list[float]]] | None, accelerator: Accelerator) -> None:
        """Take back this process's share; another number of processes shares the mean."""
        self.sums, self.counts = {}, {}
        for name, everyone in (state or {}).items():
            values = torch.tensor(everyone, device=self.device)
            same = len(values) == accelerator.num_processes
            self.sums[name], self.counts[name] = values[accelerator.process_index] if same else values.mean(dim=0)

    def close(self, accelerator: Accelerator, done: int, steps: int, *, images: int) -> dict[str, Any]:
        names = sorted(self.sums)
        means = torch.stack([self.sums[name] / self.counts[name].clamp(min=1e-9) for name in names])
        numbers = accelerator.reduce(means, "mean").tolist()
        row = {"step": done, **dict(zip(names, numbers, strict=True))}
        seconds = time.perf_counter() - self.began
        row["images_per_second"] = round(self.steps * images / seconds, 1)
        row["seconds_left"] = round((steps - done) * seconds / max(1, self.steps), 1)
        row["data_wait"] = round(self.waited / seconds, 4)
        self.sums, self.counts = {}, {}
        self.begin()
        return row
