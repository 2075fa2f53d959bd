"""Proves on a small copy of a model that a backend computes it as transformers does.

model_proof       the proof and its cache
shrunken_models   a small version of a model's configuration
reference_models  a small model with random weights, and its scores and gradients
proof_process     the process in which a backend is compared with transformers
"""
