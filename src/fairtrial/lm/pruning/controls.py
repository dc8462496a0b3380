"""Controls that take the graph's structure away from FiedlerPrune and leave everything else: each should do worse.

*fiedler-permuted* is ``FiedlerPermuted(RowScaled(Wanda()))``, *block-norow* is
``OneShotPrune(RowScaled(Wanda()), group="block")``, *degree-intra* is ``OneShotPrune(RIA(exponent=1))``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fairtrial.lm.pruning.fiedler import FiedlerPrune
from fairtrial.lm.pruning.graph import BlockGraph, Fiedler, Resistance
from fairtrial.seeds import torch_generator


@dataclass(frozen=True)
class FiedlerPermuted(FiedlerPrune):
    """FiedlerPrune with the rows and columns of q permuted in each matrix: its structure, on the wrong channels.

    ``seed`` draws the permutations; other parameters as in :class:`~fairtrial.lm.pruning.fiedler.FiedlerPrune`.
    """

    seed: int = 0

    def _sensitivities(
        self, graph: BlockGraph, spectra: Mapping[str, Fiedler | Resistance]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, q in super()._sensitivities(graph, spectra):
            generator = torch_generator(self.seed, "permuted", name)
            rows, columns = (torch.randperm(n, generator=generator).to(q.device) for n in q.shape)
            yield name, q[rows][:, columns]


@dataclass(frozen=True)
class FiedlerShuffled(FiedlerPrune):
    """FiedlerPrune with q permuted inside each row: its values, without any structure along the inputs.

    ``seed`` draws the permutations; other parameters as in :class:`~fairtrial.lm.pruning.fiedler.FiedlerPrune`.
    """

    seed: int = 0

    def _sensitivities(
        self, graph: BlockGraph, spectra: Mapping[str, Fiedler | Resistance]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, q in super()._sensitivities(graph, spectra):
            generator = torch_generator(self.seed, "shuffled", name)
            yield name, q.gather(1, torch.rand(q.shape, generator=generator).argsort(1).to(q.device))


@dataclass(frozen=True)
class FiedlerInverted(FiedlerPrune):
    """FiedlerPrune with its factor turned upside down, S' / (1 + alpha q): well connected weights go first."""

    def _factors(self, graph: BlockGraph, spectra: Mapping[str, Fiedler | Resistance]) -> Iterator[tuple[str, Tensor]]:
        for name, factor in super()._factors(graph, spectra):
            yield name, factor.reciprocal_()
