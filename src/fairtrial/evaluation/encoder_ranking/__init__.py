"""Subspace-Corrected Ranking: pick a pretrained encoder for unlabelled data, across architectures."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "EncoderScore": ".subspace",
        "Features": ".subspace",
        "FewLabelSelector": ".few_labels",
        "Ranking": ".ranking",
        "RidgeProbe": ".probe",
        "SCORES": ".subspace",
        "alpha_req": ".baselines",
        "cka": ".subspace",
        "extract": ".extraction",
        "h_score": ".baselines",
        "logme": ".baselines",
        "nesum": ".baselines",
        "projected_rankme": ".subspace",
        "rank_encoders": ".ranking",
        "rankme": ".subspace",
        "rankme_per_width": ".baselines",
        "ssr": ".subspace",
        "ssr_dagger": ".subspace",
        "ssr_z": ".subspace",
        "stable_rank": ".baselines",
    },
)
