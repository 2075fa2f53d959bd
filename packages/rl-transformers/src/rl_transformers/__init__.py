"""Hugging Face models for training backends and engines. No other package of this project below them imports
transformers.

    rank             a complete rank for a model of transformers, for any kind of sharding
    proof            proves that other model code computes a model as transformers does
    testing          conformance suites of backends, engines and generators
    pretrained       what transformers reads of a model besides its weights
    model_checks     what a model's configuration shows before the run
    kept_tensors     a checkpoint's tensors that are not trained, for the saved model
    expert_choices   recording and replaying the routes of mixture-of-experts models
    attention_proof  finds attention functions that ignore a setting of a model's layers

Import from the modules.
"""
