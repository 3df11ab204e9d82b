"""One page for people about a run: a file that needs nothing beside it, to be mailed, archived or printed."""

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from mpp.train.run import flatten

TEMPLATE = Path(__file__).with_name("report.html")


def write_report(
    out: Path,
    *,
    title: str,
    rows: list[dict[str, Any]],
    pictures: list[tuple[Path, str]],
    facts: dict[str, str],
    config_yaml: str,
    environment: dict[str, Any],
) -> Path:
    """Write `out`/report.html: self-contained, without scripts, all text escaped.

    Args:
        out: the run folder.
        title: of the page.
        rows: of results.json, see `mpp.eval.results.make_row`; none leaves the table out.
        pictures: PNG files, which are embedded, and their captions.
        facts: what is to be known at a glance, a line each.
        config_yaml: the resolved configuration.
        environment: versions and machine, see `mpp.train.run.environment`.
    """
    # Autoescape for all: what is shown are names that users gave to folders, classes and runs.
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        rows=rows,
        pictures=[(base64.b64encode(path.read_bytes()).decode("ascii"), caption) for path, caption in pictures],
        facts=facts,
        config_yaml=config_yaml,
        environment=flatten(environment),
    )
    path = out / "report.html"
    # File names that are not text come in as lone surrogates, which UTF-8 refuses.
    path.write_text(page, encoding="utf-8", errors="replace")
    return path
