"""Linear probe: logistic regression on frozen, cached features."""

import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from mpp.eval.subsets import hold_out

STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)


def threads_for(features: np.ndarray) -> int | None:
    """One thread for small problems: threads that wait for each other made a 0.05 s fit take 0.5 s on busy cores."""
    return 1 if features.size < 2 * 10**7 else None


def classifier(strength: float) -> Pipeline:
    """Standardised features, then multinomial logistic regression with l2 penalty 1 / (2 C), C = `strength`."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=300))


def linear_probe(
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    test_labels: np.ndarray,
    *,
    seed: int = 0,
    strengths: tuple[float, ...] = STRENGTHS,
    held_out: float = 0.2,
) -> dict[str, float]:
    """Choose the regularisation on a held-out fifth of the training images, fit on all of them, test once.

    Args:
        train, test: features (n, D) and (m, D).
        train_labels, test_labels: int (n,) and (m,).
        seed: of the held-out part.
        strengths: values of C to choose from; the smaller wins a tie.
        held_out: share of the training images to choose on.

    Returns:
        "accuracy" on the test images and the chosen "C".
    """
    fitted, held = hold_out(train_labels, held_out, seed)
    with warnings.catch_warnings(), threadpool_limits(limits=threads_for(train)):
        # Nearly separable few-label sets run into max_iter at large C; their scores are what they are.
        warnings.simplefilter("ignore", ConvergenceWarning)
        strength = 1.0  # scikit-learn's default, where a single label a class leaves nothing to choose on
        if len(held):
            scores = [
                classifier(c).fit(train[fitted], train_labels[fitted]).score(train[held], train_labels[held])
                for c in strengths
            ]
            strength = strengths[int(np.argmax(scores))]
        accuracy = classifier(strength).fit(train, train_labels).score(test, test_labels)
    return {"accuracy": float(accuracy), "C": strength}
