"""Sample gain, intervals and paired comparison: what a handful of cells can and cannot tell.

Loads numpy and scipy.special only.
"""

from fairtrial.stats.comparison import Verdict, compare, holm, paired_gain, rope_probability, sign_flip_p
from fairtrial.stats.components import Components, design_variance, variance_components
from fairtrial.stats.gain import SampleGain, StopWhenFlat, sample_gain
from fairtrial.stats.influence import auc_influence, pseudo_values
from fairtrial.stats.intervals import (
    Interval,
    anytime_half_width,
    anytime_p_value,
    combine,
    interval,
    mean_interval,
)
from fairtrial.stats.moments import MODES as VARIANCE_MODES
from fairtrial.stats.resampling import bootstrap, bootstrap_interval
from fairtrial.stats.tables import SplitScores

__all__ = [
    "VARIANCE_MODES",
    "Components",
    "Interval",
    "SampleGain",
    "SplitScores",
    "StopWhenFlat",
    "Verdict",
    "anytime_half_width",
    "anytime_p_value",
    "auc_influence",
    "bootstrap",
    "bootstrap_interval",
    "combine",
    "compare",
    "design_variance",
    "holm",
    "interval",
    "mean_interval",
    "paired_gain",
    "pseudo_values",
    "rope_probability",
    "sample_gain",
    "sign_flip_p",
    "variance_components",
]
