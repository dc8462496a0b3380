"""DivMoE: one dense model and its domain fine-tunes become a mixture of experts, at most one expert a domain and token.

Importing this package registers ``DivMoEForCausalLM`` with the Auto classes of transformers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "CoverageDecay": ".callback",
        "DivMoEConfig": ".configuration",
        "DivMoEFeedForward": ".experts",
        "DivMoEForCausalLM": ".modeling",
        "GroupTopRouter": ".router",
        "Recipe": ".recipes",
        "Routing": ".router",
        "UpcycleReport": ".start_report",
        "routing_report": ".inspection",
        "save_as_mixtral": ".mixtral",
        "upcycle": ".converting",
    },
)

if find_spec("transformers") is not None:  # what save_pretrained wrote loads after ``import fairtrial.lm.upcycling``
    import_module(".modeling", __name__)
