"""Language models as judges: asked fairly, measured before they are believed, corrected by an audit.

===============  ======================================================================================================
``asking``       what a judge is; a rating as an object, a preference in both orders, votes
``models``       judges that are language models behind an endpoint or on this machine, and a cache for any other
``agreement``    Cohen's kappa, and the prediction-powered mean: a judge's rate corrected by an audited part
``strength``     Bradley-Terry with ties: from preferences to a ranking
``controls``     whether a judge can tell known-good items from their corrupted twins at all
===============  ======================================================================================================
"""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "BatchJudge": ".asking",
        "CachedJudge": ".models",
        "Control": ".controls",
        "Judge": ".asking",
        "LocalJudge": ".models",
        "OpenAIJudge": ".models",
        "Preference": ".asking",
        "Reliability": ".controls",
        "Strengths": ".strength",
        "Verdict": ".controls",
        "Votes": ".asking",
        "ask": ".asking",
        "bradley_terry": ".strength",
        "cohen_kappa": ".agreement",
        "prediction_powered_mean": ".agreement",
        "prefer": ".asking",
        "prefer_many": ".asking",
        "rate": ".asking",
        "rate_many": ".asking",
        "reliability": ".controls",
        "votes": ".asking",
        "votes_many": ".asking",
    },
)
