"""What all processes must agree on in each step: is the loss still sound, and does anyone want to stop.

One small reduction a step carries both. On an accelerator it is read two steps later, when it has long arrived, so the
host never waits for the device; on the CPU at once.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

PAST, RECENT = 128, 8  # losses that say what is usual, and losses in a row that must be unusual
LAG = 2  # steps, on an accelerator


@dataclass(frozen=True)
class Trouble:
    """A step that is not well.

    Attributes:
        first, last: the steps to leave out.
        reason: what is wrong with them.
    """

    first: int
    last: int
    reason: str


class Pulse:
    """One reduction a step.

    A loss *explodes* when the last `RECENT` losses all lie above median + spike * MAD of the `PAST` ones before them,
    where the MAD (median absolute deviation) counts as at least a tenth of the median, so that a quiet loss may
    move. Then the steps to leave out begin `RECENT` before the first high loss: it was an update before it that did it.

    Args:
        accelerator: device and processes.
        spike: see above; None watches for losses and gradients that are not finite alone.

    Attributes:
        stop: number of a signal that some process has received, or 0.
    """

    def __init__(self, accelerator: Accelerator, *, spike: float | None) -> None:
        self.accelerator, self.spike = accelerator, spike
        self.stop = 0
        self.lag = 0 if accelerator.device.type == "cpu" else LAG
        self._losses = torch.zeros(PAST + RECENT, device=accelerator.device)
        self._steps: deque[int] = deque(maxlen=PAST + RECENT)
        self._sent: deque[tuple[int, Tensor, Any]] = deque()

    def state(self) -> dict[str, list[Any]]:
        """JSON-like, for checkpoints: the losses so far and their steps."""
        count = len(self._steps)
        return {"losses": self._losses[len(self._losses) - count :].tolist(), "steps": list(self._steps)}

    def restore(self, state: dict[str, list[Any]] | None) -> None:
        """Take back what `state` gave, or begin anew."""
        losses, steps = (state["losses"], state["steps"]) if state else ([], [])
        self._losses.zero_()
        if losses:
            self._losses[-len(losses) :] = torch.tensor(losses)
        self._steps = deque(steps, maxlen=PAST + RECENT)
        self._sent.clear()

    def send(self, step: int, loss: Tensor, sound: Tensor, weights: Tensor, stop: int | None) -> None:
        """After an update: its mean loss on this process, whether loss and gradient are finite and whether the weights
        are (bool, on the device), and the signal that this process has received."""
        bad = torch.where(sound, (~weights).float() * 2, 1.0)
        ours = torch.stack([loss.nan_to_num(0.0, 0.0, 0.0), bad, torch.full_like(loss, stop or 0)])
        if self.accelerator.num_processes > 1:
            everyone = self.accelerator.gather(ours[None])
            mean, bad, stopped = everyone[:, 0].mean(), everyone[:, 1].amax(), everyone[:, 2].amax()
        else:
            mean, bad, stopped = ours
        self._losses = torch.cat([self._losses[1:], mean[None]])
        self._steps.append(step)
        exploded = torch.zeros_like(bad)
        if self.spike is not None and len(self._steps) == PAST + RECENT:
            past, recent = self._losses[:PAST], self._losses[PAST:]
            median = past.median()
            deviation = torch.maximum((past - median).abs().median(), 0.1 * median.abs())
            exploded = (recent > median + self.spike * deviation).all().float()
        self._send(step, torch.stack([bad, exploded, stopped]))

    def _send(self, step: int, numbers: Tensor) -> None:
        arrived = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers, arrived = host.copy_(numbers, non_blocking=True), torch.cuda.Event()
            arrived.record()
        self._sent.append((step, numbers, arrived))

    def read(self, *, everything: bool = False) -> Trouble | None:
        """The first trouble in what has arrived by now, the same on every process; it sets `stop`, too. With
        `everything` it waits for the steps that are under way."""
        while len(self._sent) > (0 if everything else self.lag):
            step, numbers, arrived = self._sent.popleft()
            if arrived is not None:
                arrived.synchronize()
            bad, exploded, stop = numbers.tolist()
            self.stop = self.stop or int(stop)
            if bad:
                what = "the loss or its gradient is" if bad == 1 else "the update made weights that are"
                return Trouble(step, step, f"{what} not finite")
            if exploded:
                high = [one for one in self._steps if one <= step][-RECENT]
                return Trouble(max(0, high - RECENT), step, "the loss has exploded")
        return None
