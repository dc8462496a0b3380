"""Seconds of patch geometry on all of Fashion-MNIST, and of a certificate against the descent it certifies."""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from fairtrial.data.images import fashion_mnist
from fairtrial.training.sparse_connectivity import StableTwoLayerReLU, patch_geometry, stability_certificate


def main() -> None:
    images, _ = fashion_mnist("train")
    table = Table("", "s", "")
    start = time.perf_counter()
    told = patch_geometry(images, size=3, most=20_000, samples=200)
    seconds = time.perf_counter() - start
    table.add_row("geometry of 60,000 images, 3 x 3", f"{seconds:.1f}", f"isolable {told.isolable_fraction(0.1):.2f}")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 32)), rng.standard_normal(400)
    start = time.perf_counter()
    net = StableTwoLayerReLU("conv", patch=4, width=120, learning_rate=0.05, steps=500, random_state=0).fit(x, y)
    step = (time.perf_counter() - start) / net.n_iter_
    start = time.perf_counter()
    stability_certificate(net.module_, x, y, tol=1e-4)
    seconds = time.perf_counter() - start
    table.add_row("certificate, 400 inputs, 120 neurons", f"{seconds:.2f}", f"{seconds / step:.0f} steps of descent")
    Console().print(table)


if __name__ == "__main__":
    main()
