"""scikit-learn, imported when an estimator is first asked for."""

from __future__ import annotations

from ..errors import MissingExtra

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", "sklearn") from error

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "ConvergenceWarning",
    "MultiOutputMixin",
    "RegressorMixin",
    "_check_sample_weight",
    "check_classification_targets",
    "check_is_fitted",
    "validate_data",
]
