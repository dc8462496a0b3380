"""MEC-MMD and its baselines: compare or fit distributions from noisy measurements, corrected by a small audit."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Bernoulli": ".designs",
        "CorrectedMMDLoss": ".loss",
        "EnergyKernel": ".kernels",
        "GaussianKernel": ".kernels",
        "MMDEstimate": ".mec_mmd",
        "Stratified": ".designs",
        "TestResult": ".mec_mmd",
        "audit_parts": ".mec_mmd",
        "corrected_sample": ".mec_mmd",
        "mec_mmd2": ".mec_mmd",
        "mec_mmd_test": ".mec_mmd",
        "median_kernel": ".kernels",
        "plain_mmd2": ".baselines",
        "plan_audit": ".mec_mmd",
    },
)
