"""Machine-DevBench and grounded learning: what a small model has learned, asked in words it was trained on."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Acquisition": ".acquisition",
        "CausalScorer": ".scorers",
        "Corpus": ".corpus",
        "Counting": ".learners",
        "DevBench": ".devbench",
        "DevReport": ".evaluation",
        "EgoStream": ".egostream",
        "InfoNCE": ".learners",
        "KneserNey": ".ngrams",
        "MILNCE": ".learners",
        "MaskedScorer": ".scorers",
        "Narrator": ".egostream",
        "SimilarityScorer": ".scorers",
        "Unigram": ".ngrams",
        "Vocabulary": ".lexicon",
        "binding": ".vision",
        "binding_pairs": ".vision",
        "build_devbench": ".devbench",
        "child_directed_speech": ".child_directed",
        "evaluate": ".evaluation",
        "fit_acquisition": ".acquisition",
        "items_needed": ".power",
        "label_alignment": ".alignment",
        "linear_probe": ".vision",
        "matched_benches": ".mismatch",
        "retrieval": ".vision",
        "retrieval_alignment": ".alignment",
        "symbolic_features": ".egostream",
        "temporal_grounding": ".vision",
        "train_small_lm": ".small_lm",
        "vocabulary": ".lexicon",
    },
)
