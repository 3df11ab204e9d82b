"""Evaluations: choices on training data alone, balanced draws, controls against other libraries, features in order."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from sklearn.neighbors import KNeighborsClassifier

from mpp import Encoder, UserError
from mpp.data import Transform, load_data
from mpp.data.loader import Images
from mpp.eval.baselines import colour_histogram, nearest_neighbours, raw_pixels
from mpp.eval.features import compute
from mpp.eval.linear_probe import STRENGTHS, classifier, linear_probe
from mpp.eval.results import make_row, write_results
from mpp.eval.subsets import draw_labels, hold_out
from mpp.objectives.mpp import to_pixels

RNG = np.random.default_rng(0)
LABELS = np.repeat([3, 5, 8], [40, 25, 60])[RNG.permutation(125)]


def clouds(labels: np.ndarray, spread: float) -> np.ndarray:
    """A point near the corner of its class, in 20 dimensions of which most are noise."""
    rng = np.random.default_rng(len(labels))
    points = rng.normal(size=(len(labels), 20)) * spread
    points[np.arange(len(labels)), labels % 7] += 1
    return points.astype(np.float32)


# ---------------------------------------------------------------------------------------------------- subsets


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_balanced_and_fixed_by_the_seed(seed: int):
    drawn = draw_labels(LABELS, 10, seed)
    assert np.bincount(LABELS[drawn]).tolist() == [0, 0, 0, 10, 0, 10, 0, 0, 10]
    assert np.array_equal(drawn, np.unique(drawn))
    assert np.array_equal(drawn, draw_labels(LABELS, 10, seed))
    assert not np.array_equal(drawn, draw_labels(LABELS, 10, seed + 1))
    assert set(drawn) < set(draw_labels(LABELS, 20, seed))  # more labels are those and others
    assert np.array_equal(draw_labels(LABELS, None, seed), np.arange(125))


def test_a_class_with_too_few_images_is_refused():
    assert len(draw_labels(LABELS, 25, 0)) == 75
    with pytest.raises(UserError, match="labels=26 a class, but the smallest class has 25 training images"):
        draw_labels(LABELS, 26, 0)


def test_a_share_of_every_class_is_held_out():
    fitted, held = hold_out(LABELS, 0.2, 0)
    assert np.array_equal(np.sort(np.concatenate([fitted, held])), np.arange(125))
    assert np.bincount(LABELS[held]).tolist() == [0, 0, 0, 8, 0, 5, 0, 0, 12]
    assert not np.array_equal(held, hold_out(LABELS, 0.2, 1)[1])
    fitted, held = hold_out(np.array([0, 0, 1, 2, 2, 2]), 0.2, 0)
    assert len(held) == 2  # one of each class that has two
    assert 2 in fitted


# ---------------------------------------------------------------------------------------------------- linear probe


def test_a_probe_separates_what_is_separable():
    result = linear_probe(clouds(LABELS, 0.1), LABELS, clouds(LABELS[:90], 0.1), LABELS[:90])
    assert result["accuracy"] == 1
    assert result["C"] in STRENGTHS


def test_the_strength_is_chosen_on_held_out_training_images_alone():
    train, test = clouds(LABELS, 1.0), clouds(LABELS[:90], 1.0)
    strengths, chosen = (0.001, 0.01, 1.0), set()
    for seed in range(4):
        result = linear_probe(train, LABELS, test, LABELS[:90], seed=seed, strengths=strengths)
        shuffled = linear_probe(
            train, LABELS, test, np.random.default_rng(1).permutation(LABELS[:90]), seed=seed, strengths=strengths
        )
        assert shuffled["C"] == result["C"]
        assert shuffled["accuracy"] < result["accuracy"]
        fitted, held = hold_out(LABELS, 0.2, seed)
        scores = [classifier(c).fit(train[fitted], LABELS[fitted]).score(train[held], LABELS[held]) for c in strengths]
        assert scores[strengths.index(result["C"])] == max(scores)
        assert result["C"] == min(c for c, score in zip(strengths, scores, strict=True) if score == max(scores))
        final = classifier(result["C"]).fit(train, LABELS)  # on all training images
        assert result["accuracy"] == final.score(test, LABELS[:90])
        chosen.add(result["C"])
    assert len(chosen) > 1


def test_one_label_a_class_leaves_nothing_to_choose_on():
    """k-NN takes the nearest; logistic regression keeps scikit-learn's C."""
    labels = np.array([0, 1, 2])
    data = clouds(labels, 0.01), labels, clouds(LABELS % 3, 0.01), LABELS % 3
    assert nearest_neighbours(*data) == {"accuracy": 1.0, "k": 1}
    assert linear_probe(*data)["C"] == 1.0


# ---------------------------------------------------------------------------------------------------- controls


def test_histograms_equal_numpys():
    images = torch.from_numpy(RNG.integers(0, 256, (5, 3, 6, 7), dtype=np.uint8))
    histogram = colour_histogram(images)
    assert histogram.shape == (5, 512)
    torch.testing.assert_close(histogram.sum(1), torch.ones(5))
    edges = [np.arange(9) * 255 / 8] * 3  # 8 bins of [0, 255], the last one closed
    for image, ours in zip(images, histogram, strict=True):
        theirs, _ = np.histogramdd(image.flatten(1).T.numpy(), bins=edges)
        np.testing.assert_allclose(ours.view(8, 8, 8).numpy(), theirs / 42, atol=1e-7)


def test_histograms_of_many_channels_are_one_for_each():
    images = torch.from_numpy(RNG.integers(0, 256, (2, 5, 4, 4), dtype=np.uint8))
    histogram = colour_histogram(images).view(2, 5, 8)
    torch.testing.assert_close(histogram.sum(2), torch.ones(2, 5))
    torch.testing.assert_close(histogram[:, 3], colour_histogram(images[:, 3:4]))


def test_raw_pixels_are_averaged_to_at_most_32():
    small = torch.from_numpy(RNG.integers(0, 256, (2, 3, 32, 8), dtype=np.uint8))
    assert torch.equal(raw_pixels(small), to_pixels(small).flatten(1))
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(raw_pixels(large), to_pixels(small).flatten(1))


def test_nearest_neighbours_equal_scikit_learns():
    train, test = clouds(LABELS, 0.8), clouds(LABELS[:90], 0.8)
    result = nearest_neighbours(train, LABELS, test, LABELS[:90], seed=2)
    fitted, held = hold_out(LABELS, 0.2, 2)
    scores = {
        k: KNeighborsClassifier(k).fit(train[fitted], LABELS[fitted]).score(train[held], LABELS[held])
        for k in (1, 3, 5, 10, 20)
    }
    assert scores[result["k"]] == max(scores.values())
    assert len(set(scores.values())) > 1
    assert result["accuracy"] == KNeighborsClassifier(int(result["k"])).fit(train, LABELS).score(test, LABELS[:90])
    permuted = nearest_neighbours(train, LABELS, test, np.roll(LABELS[:90], 1), seed=2)
    assert permuted["k"] == result["k"]
    few = np.array([0, 1, 0, 1])
    assert nearest_neighbours(clouds(few, 0.01), few, clouds(few, 0.01), few)["k"] == 1


# ---------------------------------------------------------------------------------------------------- features


@pytest.fixture(scope="module")
def images() -> Images:
    data = load_data("digits")
    return Images(data.test, Transform((8, 8)).evaluation(), channels=1)


@pytest.mark.parametrize("batch_size", [1, 100, 359, 1000])
def test_every_sample_comes_once_and_in_order(images: Images, batch_size: int):
    module = torch.nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True)
    out = compute(lambda x: x.flatten(1), module, images, accelerator=accelerator, batch_size=batch_size)
    assert out.shape == (359, 64)
    assert out.dtype == torch.float32
    assert torch.equal(out.to(torch.uint8).view(-1, 1, 8, 8), images[0, torch.arange(359)]["image"])


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_evaluation_meanwhile_and_then_what_it_was(images: Images, training: bool):
    encoder = Encoder("vit_micro_patch2_8", channels=1, depth=1, proj_drop_rate=0.5).train(training)
    encoder.vit.norm.train(not training)  # every part is put back as it was
    accelerator = Accelerator(cpu=True)
    features = {
        pool: compute(
            lambda batch, pool=pool: encoder(to_pixels(batch)).pool(pool),
            encoder,
            images,
            accelerator=accelerator,
            batch_size=64,
        )
        for pool in ("cls", "mean")
    }
    assert encoder.training is training
    assert encoder.vit.blocks[0].training is training
    assert encoder.vit.norm.training is not training
    with torch.no_grad():
        want = encoder.eval()(to_pixels(images[0, torch.arange(359)]["image"]))
    torch.testing.assert_close(features["cls"], want.cls, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features["mean"], want.patches.mean(1), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- results


def test_rows_hold_mean_and_sample_deviation_and_come_back_from_disk(tmp_path: Path):
    rows = [
        make_row("linear_probe", "mpp", [0.5, 0.7, 0.9], labels=10, chosen="C=1"),
        make_row("baseline", "raw_knn", [0.25]),
    ]
    assert (rows[0]["mean"], rows[0]["std"], rows[0]["seeds"]) == (0.7, 0.2, 3)
    assert (rows[1]["mean"], rows[1]["std"], rows[1]["labels"]) == (0.25, None, None)
    assert json.loads(write_results(tmp_path, rows).read_text()) == rows
