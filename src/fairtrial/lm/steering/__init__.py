"""Anchor coordinate space: carry a behavioural direction from models with labels to a new one without."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "AnchorFrame": ".frames",
        "Reconstruction": ".frames",
        "UnreachableDirection": ".frames",
        "AnchorSpace": ".space",
        "CanonicalDirection": ".space",
        "ContrastiveDirection": ".direction",
        "Direction": ".direction",
        "contrastive_direction": ".direction",
        "score_axes": ".direction",
        "read_control_vector": ".control_vectors",
        "write_control_vector": ".control_vectors",
        "text_states": ".states",
        "procrustes_map": ".baselines",
        "ridge_map": ".baselines",
    },
)
