"""k3jax: train, shard, ablate and study Kimi K3-class models in JAX."""
