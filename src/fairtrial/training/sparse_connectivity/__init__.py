"""How strongly the stability of gradient descent restrains a two-layer ReLU network, by the geometry of its patches."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "GeneralizationBound": ".bound",
        "PatchGeometry": ".geometry",
        "StabilityCertificate": ".certificate",
        "StableTwoLayerReLU": ".network",
        "generalization_bound": ".bound",
        "patch_geometry": ".geometry",
        "plan_receptive_field": ".geometry",
        "stability_certificate": ".certificate",
    },
)
