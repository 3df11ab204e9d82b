"""Training: the schedule against timm's and the paper's values, checkpoints, the run folder, and the loop itself."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from training import CONFIG, build, digits, equal, moments, train

from mpp import Encoder, Supervised, UserError
from mpp.data import Loader, Plan
from mpp.data.loader import Images
from mpp.recipes.common import make_optimizer, make_rate
from mpp.train import Run, fit, learning_rate
from mpp.train.checkpoint import checkpoints, load_checkpoint
from mpp.train.run import read_metrics


@pytest.fixture(scope="module")
def images() -> Images:
    return digits()


# ---------------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (250, 0.015), (500, 0.03), (10_250, 0.015), (20_000, 0.0)])
def test_the_papers_cosine(step: int, rate: float):
    assert learning_rate(step, base=0.03, steps=20_000, warmup_steps=500) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize(("steps", "warmup", "end"), [(100, 10, 0.0), (57, 0, 1e-3), (40, 39, 1e-5)])
def test_cosine_equals_timms_scheduler(steps: int, warmup: int, end: float):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=steps - warmup, warmup_epochs=warmup, warmup_lr=0.0, min_lr=end,
        warmup_prefix=True, step_on_epochs=False, updates_per_epoch=1,
    )  # fmt: skip
    for step in range(steps + 1):
        scheduler.step_update(step)
        ours = learning_rate(step, base=0.3, steps=steps, warmup_steps=warmup, end=end)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-12)


def test_linear_and_constant():
    linear = [learning_rate(s, base=1.0, steps=20, warmup_steps=4, decay="linear", end=0.2) for s in (0, 2, 4, 12, 20)]
    assert linear == pytest.approx([0, 0.5, 1.0, 0.6, 0.2])
    constant = [learning_rate(s, base=1.0, steps=20, warmup_steps=4, decay="constant") for s in (0, 1, 4, 19)]
    assert constant == pytest.approx([0, 0.25, 1.0, 1.0])
    assert learning_rate(5, base=1.0, steps=200) == pytest.approx(0.5)  # a twentieth warms up
    assert learning_rate(0, base=1.0, steps=5) == 1.0


def test_impossible_schedules_are_refused_before_the_first_step():
    with pytest.raises(UserError, match="warmup_steps=20 must be shorter than the run of 20 steps"):
        make_rate(base=1.0, steps=20, warmup_steps=20)
    with pytest.raises(UserError, match="warmup_steps=-1"):
        make_rate(base=1.0, steps=20, warmup_steps=-1)
    with pytest.raises(UserError, match="cosine, linear or constant, got 'step'"):
        make_rate(base=1.0, steps=20, decay="step")


# ---------------------------------------------------------------------------------------------------- optimizer


def test_weights_decay_and_biases_norms_positions_and_tokens_do_not():
    objective = build()
    optimizer = make_optimizer(objective, opt="adamw", lr=1e-3, weight_decay=0.1)
    names = {parameter: name for name, parameter in objective.named_parameters()}
    decayed = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    kept = {names[p] for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}
    assert decayed == {
        "encoder.vit.patch_embed.proj.weight", "encoder.vit.blocks.0.attn.qkv.weight",
        "encoder.vit.blocks.0.attn.proj.weight", "encoder.vit.blocks.0.mlp.fc1.weight",
        "encoder.vit.blocks.0.mlp.fc2.weight", "head.weight",
    }  # fmt: skip
    assert decayed | kept == set(names.values())
    assert {"corruption.mask_token", "encoder.vit.pos_embed", "encoder.vit.cls_token", "head.bias"} <= kept
    supervised = Supervised(objective.encoder, 10, head="tanh")
    optimizer = make_optimizer(supervised, opt="momentum", lr=1e-3, weight_decay=0.1)
    names = {parameter: name for name, parameter in supervised.named_parameters()}
    decayed_too = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed_too == decayed | {"pre_logits.0.weight"}


def test_momentum_is_the_papers_and_not_nesterovs():
    group = make_optimizer(build(), opt="momentum", lr=0.1).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.9, False)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(UserError, match=r"optim\.opt=adamm"):
        make_optimizer(build(), opt="adamm", lr=1e-3)


# ---------------------------------------------------------------------------------------------------- the loop


class MachineGoneError(Exception):
    """Stands for a machine that goes away."""


@pytest.mark.parametrize(("opt", "ema", "log_every"), [("adamw", None, 1), ("adamw", 0.8, 2), ("momentum", None, 4)])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, images: Images, opt: str, ema: float | None, log_every: int
):
    """With dropout, accumulation and clipping; checkpoints in the middle of logging intervals."""

    def go(out: Path, stop_at: int | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Any]]]:
        def report(row: dict[str, float]) -> None:
            if stop_at is not None and row["step"] >= stop_at:
                raise MachineGoneError

        objective, run = build(proj_drop_rate=0.2, drop_path_rate=0.1), Run(out, CONFIG)
        options = dict(opt=opt, accumulation=2, clip=0.5, save_every=3, run=run, report=report, seed=5)
        with run:
            optimizer = train(objective, images, 6, ema=ema, log_every=log_every, **options)
        timings = ("images_per_second", "seconds_left", "data_wait")
        rows = [{name: value for name, value in row.items() if name not in timings} for row in read_metrics(run.out)]
        return objective.state_dict(), moments(optimizer), rows

    weights, state, rows = go(tmp_path / "straight")
    with pytest.raises(MachineGoneError):
        go(tmp_path / "stopped", stop_at=4)
    assert [step for step, _ in checkpoints(tmp_path / "stopped" / "checkpoints")] == [0, 3]
    torch.manual_seed(99)  # the state of the generator must not matter
    weights_again, state_again, rows_again = go(tmp_path / "stopped")
    assert equal(weights, weights_again)
    assert equal(state, state_again)
    assert [row["step"] for row in rows] == [step for step in range(1, 7) if step % log_every == 0 or step == 6]
    assert all({"loss", "accuracy", "lr", "grad_norm"} <= row.keys() for row in rows)
    assert rows_again == rows
    assert equal(go(tmp_path / "straight")[0], weights)  # a finished run is left as it is


def test_accumulation_changes_nothing_but_rounding(tmp_path: Path, images: Images):
    results = []
    for accumulation in (1, 2, 4):
        objective, run = build(), Run(tmp_path / str(accumulation), CONFIG)
        train(objective, images, 4, opt="momentum", accumulation=accumulation, log_every=2, run=run,
              rate=lambda step: 0.05)  # fmt: skip
        results.append((objective.state_dict(), [(row["loss"], row["accuracy"]) for row in read_metrics(run.out)]))
    assert len(results[0][1]) == 2
    for weights, rows in results[1:]:
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][0][name], rtol=0, atol=1e-5)
        for row, want in zip(rows, results[0][1], strict=True):
            assert row == pytest.approx(want, abs=1e-5)


def test_a_row_is_the_mean_since_the_row_before(tmp_path: Path, images: Images):
    runs = [Run(tmp_path / str(every), CONFIG) for every in (1, 3)]
    for run, every in zip(runs, (1, 3), strict=True):
        train(build(), images, 5, log_every=every, run=run, extra={"entropy": 1.5})
    each, seldom = (read_metrics(run.out) for run in runs)
    assert [row["step"] for row in seldom] == [3, 5]
    assert seldom[0]["loss"] == pytest.approx(sum(row["loss"] for row in each[:3]) / 3, rel=1e-6)
    assert seldom[1]["loss"] == pytest.approx(sum(row["loss"] for row in each[3:]) / 2, rel=1e-6)
    assert [row["lr"] for row in each] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])
    assert {row["entropy"] for row in each} == {1.5}
    assert each[0]["loss"] == pytest.approx(math.log(8), abs=1e-6)
    assert all(row["images_per_second"] > 0 for row in each)


def test_layer_wise_scales_and_clipping_reach_the_optimizer(images: Images):
    objective = build()
    before = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    optimizer = torch.optim.SGD(
        [{"params": [objective.head.weight], "lr_scale": 0.5}, {"params": [objective.head.bias]}], lr=1.0
    )
    seen: list[dict[str, float]] = []
    plan = Plan(len(images), 16, seed=1)
    fit(objective, Loader(images, plan), optimizer, steps=1, rate=lambda step: 0.5, accelerator=Accelerator(cpu=True),
        clip=1e-3, report=seen.append)  # fmt: skip
    moved = (objective.head.weight.detach() / 0.25).norm() ** 2 + (objective.head.bias.detach() / 0.5).norm() ** 2
    assert seen[0]["grad_norm"] > 1e-3
    assert float(moved**0.5) == pytest.approx(1e-3, rel=1e-3)  # the backbone's gradient is zero at the first step
    assert equal({n: t for n, t in objective.state_dict().items() if "head" not in n},
                 {n: t for n, t in before.items() if "head" not in n})  # fmt: skip


def test_training_learns(tmp_path: Path, images: Images):
    run = Run(tmp_path, CONFIG)
    train(build(), images, 40, batch_size=64, rate=lambda step: 3e-3, log_every=20, run=run)
    assert read_metrics(run.out)[-1]["loss"] < read_metrics(run.out)[0]["loss"] < math.log(8)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, images: Images):
    run = Run(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"not finite at step \d+, after 3 rollback.* Try a lower optim\.lr"):
        train(build(), images, 12, opt="momentum", rate=lambda step: 1e-3 if step < 4 else 1e30, log_every=2,
              save_every=2, run=run)  # fmt: skip
    assert all(math.isfinite(row["loss"]) for row in read_metrics(run.out))
    objective = build()
    run.restore(run.choose(), objective, make_optimizer(objective, opt="momentum", lr=1.0, weight_decay=0.1))
    assert all(torch.isfinite(tensor).all() for tensor in objective.state_dict().values())


class Explodes(nn.Module):
    """From the fourth batch on, its loss is finite, 0, and its gradient is not."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder, self.weight, self.calls = encoder, nn.Parameter(torch.ones(2, 2)), 0

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.calls += 1
        rest = sum(parameter.sum() * 0 for parameter in self.encoder.parameters())
        return {"loss": (self.weight - (self.weight.detach() if self.calls > 3 else 0)).abs().sqrt().mean() + rest}


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, images: Images):
    """The last checkpoint must be one to go back to: what is saved is what the next step starts from."""
    objective, run = Explodes(build().encoder), Run(tmp_path, CONFIG)
    with pytest.raises(UserError, match="not finite"):
        train(objective, images, 9, opt="momentum", log_every=1, save_every=1, run=run)
    for _, path in checkpoints(run.checkpoints):
        load_checkpoint(path, objective)
        assert all(torch.isfinite(tensor).all() for tensor in objective.state_dict().values())


def test_the_mask_token_and_positions_learn(images: Images):
    objective = build()
    before = {name: parameter.detach().clone() for name, parameter in objective.named_parameters()}
    train(objective, images, 3)
    still = [name for name, parameter in objective.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []


def test_an_optimizer_inside_another_is_refused():
    with pytest.raises(UserError, match="lookahead_adamw"):
        make_optimizer(build(), opt="lookahead_adamw", lr=1e-3)
