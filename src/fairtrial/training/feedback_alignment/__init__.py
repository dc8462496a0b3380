"""Direct feedback alignment: a network's blocks trained without the backward chain, by small surrogates (NDFA)."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "BackwardTiming": ".jobs",
        "BlockAlignment": ".alignments",
        "BlockTiming": ".jobs",
        "DirectFeedback": ".direct",
        "LinearSurrogate": ".surrogates",
        "MapSurrogate": ".surrogates",
        "NDFATrainerMixin": ".trainer",
        "RandomFeedback": ".surrogates",
        "TokenSurrogate": ".surrogates",
        "VectorSurrogate": ".surrogates",
        "block_feedback": ".alignments",
        "feedback_alignment": ".baselines",
        "find_blocks": ".blocks",
        "held_bytes": ".memory",
        "resnet8": ".networks",
        "vit4": ".networks",
    },
)
