"""How tokens travel to experts that lie on other devices: one type per transport."""

from dataclasses import dataclass

from k3jax.config import require


def _require_factor(transport: "AllGather | RaggedAllToAll") -> None:
    name, factor = type(transport).__name__, transport.factor
    require(factor > 0, f"{name}.factor = {factor}, but a pass must have room for some rows: the factor is above 0")


@dataclass(frozen=True)
class AllGather:
    """Every rank receives all tokens, computes its own experts and scatters the sums (MaxText's "ring of experts").

    Simplest, for few ranks: each token's latent goes to every rank and back. ``factor``: rows that a rank computes in
    one pass, as a multiple of the number that perfect balance would give it. A rank with more rows takes more passes.
    """

    factor: float = 1.25

    def __post_init__(self):
        _require_factor(self)


@dataclass(frozen=True)
class RaggedAllToAll:
    """Every copy of a token goes to its expert's rank and back, and nothing else does.

    ``factor``: rows of the receive buffer, as a multiple of the number that perfect balance would give a rank. If any
    rank is sent more, all take another pass: nothing is dropped.
    """

    factor: float = 1.25

    def __post_init__(self):
        _require_factor(self)


@dataclass(frozen=True)
class Balanced:
    """Every rank computes exactly as many rows as it has copies of tokens: experts that are in demand are lent, for one
    layer of one step, to ranks with rows to spare (MoonEP, K3 report, section 5.2.1 and appendix E)."""


Transport = AllGather | RaggedAllToAll | Balanced
