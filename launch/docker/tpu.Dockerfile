# docker build -f launch/docker/tpu.Dockerfile -t REGISTRY/k3jax:tpu .
FROM python:3.12.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /k3jax
COPY requirements.txt requirements-tpu.txt ./
RUN pip install --no-cache-dir -r requirements-tpu.txt
# With .git, from which a run reads its commit.
COPY . .
ENV PYTHONUNBUFFERED=1
