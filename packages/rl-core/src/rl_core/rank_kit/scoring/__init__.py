"""A rank that scores and trains a Hugging Face causal language model with transformers' code, for any sharding.

    worker         `Worker` and its optional Protocols, on top of a `Shards` that the backend implements
    shards         the interface to a rank's parameters, whole or sharded
    rank_mesh      the ranks of one model, and the groups that split sequences
    token_scorer   tokens to log-probs; a loaded model is checked against its own code
    value_head     tokens to values
    micro_batch    a micro-batch as model input
    attention      causal attention inside a packed stream
    ulysses        sequences split over ranks
    lora           adapters
    router_replay  sends tokens to the experts that the engine chose
    weights        which tensors are saved and sent, and under which names
    state          named tensors on disk that any number of ranks can read
    rehearsal      a rank's step on tensors without data
    memory_tracker peak memory of a rank's tensors

The package needs transformers, and peft for adapters. A backend that uses it must declare these dependencies.
"""

from __future__ import annotations
