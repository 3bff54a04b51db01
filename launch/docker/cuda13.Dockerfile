# docker build -f launch/docker/cuda13.Dockerfile -t REGISTRY/k3jax:cuda13 .
# CUDA comes as Python wheels; the host has the driver and NVIDIA's container toolkit.
FROM python:3.12.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /k3jax
COPY requirements.txt requirements-cuda13.txt ./
RUN pip install --no-cache-dir -r requirements-cuda13.txt
# With .git, from which a run reads its commit.
COPY . .
ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
