"""What happens to the patches that are to be predicted: [mask], another patch, or unchanged (80 / 10 / 10).

Paper, section 4.6 and appendix B.1.2; the readings of what it leaves open are rows 1 to 6 and 16 of paper.md 3.3:
corruption acts on embeddings after the projection and before positions, one draw a corrupted patch, the donor of the
10 % is a patch of another image of the batch, taken clean.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpp.errors import UserError
from mpp.masking import num_masked, random_mask, take
from mpp.randomness import integers, uniform

UNTOUCHED, MASK, DONOR, KEPT = 0, 1, 2, 3


class Draw(NamedTuple):
    """What is done to each patch of a batch, decided from the keys alone."""

    kind: Tensor
    """uint8 (B, N): UNTOUCHED, MASK ([mask]), DONOR (another patch) or KEPT (to be predicted, yet unchanged)."""
    donor_image: Tensor
    """int64 (B,): the image of the batch that donates to this one."""
    donor_patch: Tensor
    """int64 (B, N): the position there that would be donated."""

    @property
    def masked(self) -> Tensor:
        """bool (B, N), True = to be predicted."""
        return self.kind != UNTOUCHED


class Corruption(nn.Module):
    """Corrupts exactly `count` of N tokens of each image.

    Args:
        dim: D, the width of the tokens.
        num_patches: N.
        ratio: share of the patches that is corrupted; 0.5 in the paper, and 0.15 as its variant.
        mask_ratio, donor_ratio: shares of those that become [mask] and another patch; the rest stays unchanged.
        donor: "partner" takes the other patch from the partner image, 2i for 2i+1 and back; "same" takes another
            position of the same image, never its own.

    Raises:
        UserError: shares that are negative or exceed 1, or an unknown donor.
    """

    def __init__(
        self,
        dim: int,
        num_patches: int,
        *,
        ratio: float = 0.5,
        mask_ratio: float = 0.8,
        donor_ratio: float = 0.1,
        donor: str = "partner",
    ) -> None:
        super().__init__()
        if mask_ratio < 0 or donor_ratio < 0 or mask_ratio + donor_ratio > 1 + 1e-9:
            raise UserError(
                f"mask_ratio and donor_ratio are shares of the corrupted patches and may sum to 1 at most, "
                f"got {mask_ratio} and {donor_ratio}"
            )
        if donor not in ("partner", "same"):
            raise UserError(f"donor must be partner or same, got {donor!r}")
        if donor == "same" and donor_ratio > 0 and num_patches < 2:
            raise UserError("donor=same needs at least two patches an image")
        self.num_patches = num_patches
        self.count = num_masked(num_patches, ratio)
        self.mask_ratio, self.donor_ratio, self.donor = mask_ratio, donor_ratio, donor
        self.mask_token = nn.Parameter(torch.empty(dim).normal_(std=0.02))

    def draw(self, keys: Tensor) -> Draw:
        """Decide for a batch: keys int64 (B,) -> Draw. A pure function, the same on every device.

        Raises:
            UserError: partners are needed and the batch is odd.
        """
        batch, n = len(keys), self.num_patches
        masked = random_mask(keys, n, self.count)
        u = uniform(keys, "kind", n)
        kind = torch.where(u < self.mask_ratio, MASK, torch.where(u < self.mask_ratio + self.donor_ratio, DONOR, KEPT))
        image = torch.arange(batch, device=keys.device)
        if self.donor == "partner":
            if batch % 2 and self.donor_ratio > 0:
                raise UserError(f"images are donors in pairs, so a process needs an even batch; got {batch}")
            image = image ^ 1
            patch = integers(keys, "donor", n, n)
        else:  # one of the n - 1 positions that follow its own, cyclically
            own = torch.arange(n, device=keys.device)
            patch = (own + 1 + integers(keys, "donor", n, max(n - 1, 1))) % n
        return Draw(kind.mul(masked).to(torch.uint8), image, patch)

    def forward(self, tokens: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Clean tokens (B, N, D) and keys int64 (B,) -> corrupted tokens (B, N, D) and masked bool (B, N)."""
        draw = self.draw(keys)
        if self.donor_ratio > 0:
            # Clean, and gradients flow to the donor. The swap is `tokens[draw.donor_image]` with a cheap backward.
            donors = tokens if self.donor == "same" else tokens.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
            donated = take(donors, draw.donor_patch)
            tokens = torch.where((draw.kind == DONOR)[..., None], donated, tokens)
        # Under autocast the tokens are bfloat16 and the parameter float32.
        tokens = torch.where((draw.kind == MASK)[..., None], self.mask_token.to(tokens.dtype), tokens)
        return tokens, draw.masked
