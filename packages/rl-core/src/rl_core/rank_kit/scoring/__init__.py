"""A rank that scores and trains a Hugging Face causal language model with transformers' own code, whatever shards it.

    worker         `Worker` and all its abilities over a `Shards`: what a backend for such models adds is its `Shards`
    shards         what such a rank asks of the parameters it holds, whole or in parts
    rank_mesh      the ranks of one model and the groups that split sequences
    token_scorer   tokens to log-probs; a model is tried against its own code when it is loaded
    value_head     tokens to values
    micro_batch    a micro-batch as the model takes it
    attention      causal attention inside a packed stream
    ulysses        sequences split over ranks
    lora           adapters
    router_replay  tokens go to the experts that the engine chose
    weights        which tensors are saved and sent, under which names
    state          named tensors on disk that any number of ranks reads
    rehearsal      a rank's step on tensors without data
    memory_tracker what a rank's tensors take at their fullest

Needs transformers, and peft for adapters: a backend that uses it declares them.
"""

from __future__ import annotations
