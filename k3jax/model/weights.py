"""Weights as plain nested dicts: how they are made, and how a model is put together from them.

Outside of a forward pass nobody handles modules: optimizer, checkpoints and import see dicts of arrays.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
from flax import nnx

from k3jax import config as c
from k3jax import nn
from k3jax.model import layout
from k3jax.model.transformer import Transformer

type Tree = dict[Any, Any]


class Weights(NamedTuple):
    """``params`` are trained by gradients; ``router`` holds the router biases, which the balancer moves."""

    params: Tree
    router: Tree


class Structure(NamedTuple):
    """What a configuration implies, without an array: shapes (ShapeDtypeStructs), roles, and the module graph."""

    graph: Any
    shapes: Weights
    meta: Tree


@lru_cache(maxsize=16)
def structure(model: c.ModelConfig, segments: tuple[layout.Segment, ...] | None = None) -> Structure:
    """The structure of a model's weights; nothing is allocated."""
    abstract = jax.eval_shape(lambda: Transformer(model, segments=segments))
    graph, params, router = nnx.split(abstract, nnx.Param, nn.State)
    return Structure(graph, Weights(nnx.to_pure_dict(params), nnx.to_pure_dict(router)), nn.metadata(params))


def init(model: c.ModelConfig, seed: int, segments: tuple[layout.Segment, ...] | None = None) -> Weights:
    """Fresh weights: a pure function of the configuration and the seed."""
    module = nn.initialize(lambda: Transformer(model, segments=segments), seed)
    _, params, router = nnx.split(module, nnx.Param, nn.State)
    return Weights(nnx.to_pure_dict(params), nnx.to_pure_dict(router))


def bind(model: c.ModelConfig, weights: Weights, segments: tuple[layout.Segment, ...] | None = None) -> Transformer:
    """The model that uses these weights."""
    graph = structure(model, segments).graph
    return nnx.merge(graph, weights.params, weights.router)
