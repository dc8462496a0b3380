"""Ask language models, remote or on this machine, and keep what they said.

==============  =======================================================================================================
``OpenAIChat``  any endpoint that speaks OpenAI's chat protocol: asked in parallel, retried, stopped when it is gone
``LocalChat``   a causal model of transformers, generating in batches
==============  =======================================================================================================

Both answer one prompt (``complete``) or many (``complete_many``), as text or as a pydantic object, from a cache on disk
where the same request was answered before.
"""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Chat": ".base",
        "ChatError": ".replies",
        "EndpointError": ".replies",
        "LocalChat": ".local",
        "OpenAIChat": ".endpoint",
        "Reply": ".replies",
        "ReplyCache": ".cache",
        "Usage": ".replies",
    },
)
