"""Causal language models as methods need them: loaded, laid out, walked through, measured.

=================  ====================================================================================================
``loading``        a model and its tokenizer from a folder or a GGUF file, so that both can be saved again
``layout``         the blocks of a model and every linear in them, as writable (out, in) views
``capture``        each block with the inputs it really gets, one block at a time
``statistics``     second moments of what each linear is given
``windows``        text files as documents, documents as token windows of one length
``likelihood``     log-likelihoods of texts and choices, batched
``prompts``        questions as a chat model expects them
``hidden``         hidden states of chosen layers, and a cache of them on disk
=================  ====================================================================================================

Import from these modules: a trial is computed again when a module it reaches changes, so none is imported here.
"""
