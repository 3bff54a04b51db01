"""From a skewed start: how many updates each balancer takes, with the router's scores standing still.

python -m experiments.s08_balancing.skewed
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from k3jax import config as c
from k3jax.model import balancing

TOKENS, EXPERTS, ACTIVE = 4096, 64, 4
EVEN = 1.1  # largest load over the mean one
BALANCERS: dict[str, c.Balancer] = {
    "quantile": c.QuantileBalancing(),
    "quantile_exact": c.ExactQuantileBalancing(),
    "sign_0.001": c.SignRule(1e-3),
    "sign_0.01": c.SignRule(1e-2),
    "sign_0.1": c.SignRule(1e-1),
    "none": c.NoBalancing(),
}


def scores(seed: int = 0) -> Array:
    """[N, E] float32 scores in (0, 1) of which some experts' lie far above the others'."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((TOKENS, EXPERTS)) + 2.0 * rng.standard_normal(EXPERTS)
    return jnp.asarray(1 / (1 + np.exp(-logits)), jnp.float32)


def course(balancer: c.Balancer, scores_NE: Array, updates: int) -> tuple[np.ndarray, np.ndarray]:
    """Largest load over the mean one, and share of dead experts, before each of ``updates`` and after the last."""
    valid_N = jnp.ones(scores_NE.shape[0], bool)

    @jax.jit
    def run(scores_NE):
        def step(bias_E, _):
            top_NA1, chosen_NA1 = jax.lax.top_k(scores_NE + bias_E, ACTIVE + 1)
            seen = balancing.observe(balancer, scores_NE, bias_E, chosen_NA1[:, :ACTIVE], top_NA1, valid_N)
            found = seen.load.max() / seen.load.mean(), (seen.load == 0).mean()
            return balancing.update(balancer, bias_E, seen, ACTIVE), found

        return jax.lax.scan(step, jnp.zeros(scores_NE.shape[1]), length=updates + 1)[1]

    return tuple(np.asarray(x) for x in run(scores_NE))


def main() -> None:
    print("| balancer | max over mean at 0 | 1 | 10 | 100 | 300 updates | dead at 0 | 10 | updates to 1.1 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, balancer in BALANCERS.items():
        loads, dead = course(balancer, scores(), 300)
        even = np.flatnonzero(loads <= EVEN)
        cells = [f"{loads[at]:.2f}" for at in (0, 1, 10, 100, 300)] + [f"{dead[at]:.0%}" for at in (0, 10)]
        print(f"| {name} | {' | '.join(cells)} | {even[0] if len(even) else 'never'} |", flush=True)


if __name__ == "__main__":
    main()
