"""Fast Gauss-Newton: second-order softmax training with one row an example, and what it drops of the curvature."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "CurvatureGap": ".gap",
        "FGNClassifier": ".classifier",
        "FastGaussNewton": ".optimizer",
        "MarginMap": ".operators",
        "StepInfo": ".optimizer",
        "curvature_gap": ".gap",
        "split_softmax_hessian": ".margins",
    },
)
