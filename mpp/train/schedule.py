"""The learning rate as a pure function of the step."""

import math

from mpp.errors import UserError


def learning_rate(
    step: int, *, base: float, steps: int, warmup_steps: int | None = None, decay: str = "cosine", end: float = 0.0
) -> float:
    """The rate of optimizer step `step` of `steps`: linear from 0 to `base`, then decay to `end`.

    Args:
        step: from 0; the rate at `steps` is `end`.
        base: the highest rate, reached at `warmup_steps`.
        steps: length of the run.
        warmup_steps: None takes a twentieth of the run.
        decay: "cosine" (paper, Table 3 for ImageNet, B.1.2 for masked patch prediction), "linear" (Table 3) or
            "constant".
        end: the rate after decay; the paper's code ends the linear decay at 1e-5.

    Raises:
        UserError: warm-up that is not shorter than the run, or an unknown decay.
    """
    warmup = steps // 20 if warmup_steps is None else warmup_steps
    if not 0 <= warmup < steps:
        raise UserError(f"schedule.warmup_steps={warmup} must be shorter than the run of {steps} steps")
    if step < warmup:
        return base * step / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    if decay == "cosine":
        return end + (base - end) * 0.5 * (1 + math.cos(math.pi * done))
    if decay == "linear":
        return end + (base - end) * (1 - done)
    if decay == "constant":
        return base
    raise UserError(f"schedule.decay must be cosine, linear or constant, got {decay!r}")
