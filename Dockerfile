# An image with everything, for machines with NVIDIA GPUs. Its steps are those of README.md, and a test compares them.
#
#   docker build -t rl . && docker run --gpus all -it rl rl doctor
#
# `devel`: Transformer Engine and flash-attn are compiled by nvcc.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update && apt-get install --yes --no-install-recommends git python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH CUDA_DEVICE_MAX_CONNECTIONS=1

WORKDIR /src
COPY . .
RUN pip install wheel setuptools ninja packaging pybind11
RUN pip wheel --no-deps -w dist packages/rl-core packages/rl-fsdp packages/rl-megatron packages/rl-rollout packages/rl-examples
RUN pip install --find-links dist -c constraints.txt 'rl-core[ray]' rl-fsdp rl-megatron 'rl-rollout[vllm]' rl-examples
RUN pip install --no-deps megatron-bridge==0.3.1
RUN pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]>=2.10,<2.12" flash-attn==2.8.3
