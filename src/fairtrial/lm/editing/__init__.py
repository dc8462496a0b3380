"""Norm-Anchor Scaling: sequential locate-and-edit model editing that does not blow up.

>>> from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
>>> from fairtrial.lm.editing import MEMIT, Edit, EditStream, NormAnchor
>>> model, tokenizer = tiny_causal_lm()
>>> editor = MEMIT(model, tokenizer, layers=[0], text=tiny_texts(), hooks=[NormAnchor()])
>>> EditStream(editor).apply([Edit("w4 {} w5", "w9", "w11")])
"""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "AlphaEdit": ".editors",
        "ClampIncrement": ".hooks",
        "Edit": ".edits",
        "EditCollapse": ".stream",
        "EditContext": ".editors",
        "EditStream": ".stream",
        "FineTune": ".editors",
        "MEMIT": ".editors",
        "NormAnchor": ".hooks",
        "ROME": ".editors",
        "Score": ".scoring",
        "Solver": ".solving",
        "ValueHook": ".editors",
        "expected_growth": ".memory",
        "key_covariance": ".covariance",
        "read_edits": ".edits",
        "save_covariance": ".covariance",
        "score": ".scoring",
        "simulate": ".memory",
    },
)
