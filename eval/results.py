"""Rows of results: the one form in which every evaluation reports, and the file they go to."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpp.train.run import write_json

Row = dict[str, Any]


def make_row(protocol: str, init: str, values: Sequence[float], *, labels: int | None = None, chosen: str = "") -> Row:
    """One line of results.json.

    Args:
        protocol: "linear_probe", "finetune" or "baseline".
        init: what the encoder started from: "mpp", "untrained", "scratch", "raw_knn", "histogram", ...
        values: accuracy for each seed.
        labels: labelled images a class, None for all.
        chosen: what was chosen on held-out training images.

    Returns:
        mean, std (sample standard deviation, None for one seed), the number of seeds, and the values themselves.
    """
    return {
        "protocol": protocol,
        "labels": labels,
        "init": init,
        "mean": round(statistics.fmean(values), 6),
        "std": round(statistics.stdev(values), 6) if len(values) > 1 else None,
        "seeds": len(values),
        "values": [round(value, 6) for value in values],
        "chosen": chosen,
    }


def write_results(out: Path, rows: list[Row]) -> Path:
    """Write `out`/results.json."""
    path = out / "results.json"
    write_json(path, rows)
    return path
