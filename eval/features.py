"""Run a function of images over a whole source, in order, on all processes: features, logits, whatever it returns."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from mpp.data.loader import BadImagesError, Images, read_batches
from mpp.errors import UserError


@torch.inference_mode()
def compute(
    function: Callable[[Tensor], Tensor],
    module: nn.Module,
    images: Images,
    *,
    accelerator: Accelerator,
    batch_size: int = 256,
    workers: int = 0,
) -> Tensor:
    """`function(images uint8 (B, C, H, W)) -> (B, ...)` for every sample: float32 (n, ...) on every process's CPU.

    Args:
        function: what to compute; it may use `module`, which is put on the device and in evaluation mode meanwhile.
        module: whose mode and device matter.
        images: what to run over, with an evaluation transform.
        accelerator: processes share the work; the result is gathered.
        batch_size: for each process.
        workers: see `Loader`.

    Raises:
        UserError: images cannot be read; every process raises it, and it names what any of them met.
    """
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    n = len(images)
    batch_size = min(batch_size, -(-n // world))
    # Every process has as many batches as the others; the last ones are filled up with the last sample and cut below.
    padded = torch.arange(-(-n // (batch_size * world)) * batch_size * world).clamp(max=n - 1)
    mine = list(padded.view(-1, world, batch_size)[:, rank])
    modes = [(part, part.training) for part in module.modules()]
    module.to(device).eval()
    parts, bad = [], {}
    try:
        for batch in read_batches(images, mine, workers=workers, pin=device.type == "cuda"):
            with accelerator.autocast():
                parts.append(function(batch["image"].to(device, non_blocking=True)).float().cpu())
    except BadImagesError as error:
        bad = error.bad
    finally:
        for part, training in modes:
            part.training = training
    # What was met is exchanged before any tensor: a process that stops while others gather would leave them waiting.
    bad = {i: message for i, message in gather_object(list(bad.items()))}
    if bad:
        raise UserError(str(BadImagesError(bad, n)))  # no longer of one process alone
    return torch.cat([accelerator.gather(out.to(device)).cpu() for out in parts])[:n]
