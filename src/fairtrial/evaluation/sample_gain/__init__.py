"""Sample gain: what many cross-validation splits are worth, when to stop them, and whether A beats B."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Comparison": ".comparison",
        "compare_estimators": ".comparison",
        "compare_scores": ".comparison",
        "cross_validate": ".cross_validation",
        "read_scores": ".score_table",
        "almost_stochastic_order": ".baselines",
        "five_by_two_f_test": ".baselines",
        "nested_cross_validation": ".baselines",
        "stratified_bootstrap": ".baselines",
        "two_on_single": ".baselines",
        "RandomCoin": ".controls",
        "sign_test": ".controls",
        "SplitScores": "fairtrial.stats",
        "StopWhenFlat": "fairtrial.stats",
        "interval": "fairtrial.stats",
        "sample_gain": "fairtrial.stats",
    },
)
