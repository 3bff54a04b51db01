"""What runs inside ``jax.shard_map``, each function equal to its counterpart on one device."""
