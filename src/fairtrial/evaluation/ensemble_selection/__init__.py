"""Which of many correlated models to query, how to fuse their answers, and how good any ensemble of them can get."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "ErrorCopula": ".copula",
        "MajorityVote": ".fusion",
        "MutualInformationSelector": ".selector",
        "NaiveBayesFusion": ".fusion",
        "SoftmaxFusion": ".fusion",
        "WeightedVote": ".fusion",
        "collect": ".collecting",
        "equicorrelated_floor": ".copula",
        "equicorrelated_information": ".copula",
        "equicorrelated_majority": ".copula",
        "fano_floor": ".selector",
        "label_parser": ".collecting",
        "mutual_information": ".information",
    },
)
