"""A rank that scores and trains a Hugging Face causal language model with transformers' code, for any sharding.

    worker            `Worker` and its optional Protocols, on top of a `Shards` that the backend implements
    shards            the interface to a rank's parameters, whole or sharded
    rank_mesh         the ranks of one model, and the groups that split sequences
    start             loads a model into the shards of all ranks and checks their scores
    distributing      broadcasts rank 0's weights, one layer at a time
    token_scorer      tokens to log-probs; a loaded model is checked against its own code
    value_head        tokens to values
    micro_batch       a micro-batch as model input
    packed_sequences  where the sequences of a packed stream are
    attention         causal attention inside a packed stream
    shared_attention  attention that computes prefixes shared by several sequences once
    ulysses           sequences split over ranks
    recomputation     gradient checkpointing
    lora              adapters
    router_replay     sends tokens to the experts that the engine chose
    weights           which tensors are saved and sent, and under which names
    state             named tensors on disk that any number of ranks can read
    flat_pieces       runs of a tensor's elements in such a state
    rehearsal         a rank's step on tensors without data
    memory_tracker    peak memory of a rank's tensors
    planned_memory    the parts of memory plans that do not depend on the sharding

A backend that uses this package requires `rl-transformers[rank]`, which installs peft for adapters.
"""

from __future__ import annotations
