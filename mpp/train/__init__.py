"""Training: the one loop, its schedule, and the run folder with its checkpoints."""

from mpp.train.fit import fit
from mpp.train.run import Run
from mpp.train.schedule import learning_rate

__all__ = ["Run", "fit", "learning_rate"]
