# An image with everything, for machines with NVIDIA GPUs. Its steps are those of docs/install_gpu.md, and a test compares them.
#
#   docker build -t rl . && docker run --gpus all -it rl rl doctor
#
# `devel`: Transformer Engine and flash-attn are compiled by nvcc.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update && apt-get install --yes --no-install-recommends git python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH CUDA_DEVICE_MAX_CONNECTIONS=1

WORKDIR /src
# The locks first, so that a change of the code does not compile the kernels again.
COPY requirements-cu13.lock requirements-cu13-kernels.lock ./
RUN pip install --no-deps --require-hashes -r requirements-cu13.lock
RUN pip install --no-deps --require-hashes --no-build-isolation -r requirements-cu13-kernels.lock
COPY . .
RUN pip install --no-deps --no-build-isolation packages/rl-core packages/rl-transformers packages/rl-fsdp packages/rl-deepspeed packages/rl-megatron packages/rl-rollout packages/rl-environments packages/rl-examples
