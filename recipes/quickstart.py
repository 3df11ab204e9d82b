"""The main job in one command: pre-train, linear-probe and fine-tune with few labels, each beside its controls.

make quickstart        or        accelerate launch recipes/quickstart.py
"""

import time
from dataclasses import replace
from pathlib import Path

from mpp.errors import UserError
from mpp.eval.results import write_results
from mpp.recipes import common
from mpp.recipes.configuration import Config, call, main
from mpp.recipes.display import clock, make_console, results_table
from mpp.recipes.finetune import finetune
from mpp.recipes.linear_probe import probe
from mpp.recipes.pretrain import pretrain, write_run_report
from mpp.train.run import load_config

NOTE = """All choices are made on training images: C and k on a held-out fifth of the labels, the learning rate on
{held_out} more images a class, for each arm by itself. Both arms of fine-tuning have the same {steps} steps; with
more of them training from scratch may catch up, as docs/results.md shows."""


def quickstart(config: Config) -> Path:
    """Run the recipe; returns the run folder."""
    began = time.monotonic()
    if config["objective"]["name"] != "mpp":
        raise UserError(
            "the quickstart shows masked patch prediction; for objective=supervised use recipes/pretrain.py"
        )
    length = call("few", short, config["few"])
    data, _ = common.open_data(config["data"])
    num_test = len(data.labels("test"))  # fails now rather than after pre-training

    out = pretrain(config)
    config = load_config(out)  # with what pre-training has settled
    training = call("train", common.Training, config["train"])
    few = replace(training, epochs=None, steps=length["steps"], batch_size=length["batch_size"])
    accelerator = common.start(training)
    with common.open_run(accelerator, out, config, training, data, after=("probe", "finetune", "few")):
        console = make_console(accelerator.is_main_process)

        console.print("\n[bold]Linear probe[/bold]")
        rows = call(
            "probe",
            probe,
            config["probe"],
            out,
            data,
            accelerator=accelerator,
            seed=training.seed,
            workers=training.workers,
            say=console.print,
        )
        console.print("\n[bold]Fine-tuning with few labels[/bold]")
        rows += call(
            "finetune",
            finetune,
            config["finetune"],
            out,
            data,
            training=few,
            optim=config["optim"],
            schedule=config["schedule"],
            accelerator=accelerator,
            show=True,
        )
        if accelerator.is_main_process:
            write_results(out, rows)
            console.print()
            console.print(results_table(rows, num_test=num_test))
            console.print(NOTE.format(held_out=config["finetune"]["held_out"], steps=few.steps), markup=False)
            page = write_run_report(out, rows, config, chance=1 / len(data.classes or (0,)))
            console.print(f"\n{clock(time.monotonic() - began)} in all. Open {page}; everything else is in {out}/")
    return out


def short(*, steps: int, batch_size: int) -> dict[str, int]:
    """The group `few`: length and batch of the fine-tuning runs."""
    return {"steps": steps, "batch_size": batch_size}


if __name__ == "__main__":
    main("quickstart", quickstart)
