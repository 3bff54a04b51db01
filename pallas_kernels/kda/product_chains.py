"""The longest chain of matrix products that wait for each other, in the kernels of a traced program.

The compiler's schedule leaves out stalls on results of long latency; a chain of dependent products is where they would
be. References count as one value each: a read depends on every write before it.
"""

from jax.extend.core import Literal

UNREACHED = float("-inf")
READS = {"get", "masked_load", "load", "program_id"}
MOST_TURNS = 64  # of a loop that are followed


def chains(program) -> tuple[int, int]:
    """(longest chain within a step of the grid, added up over kernels; longest from a reference to itself, of any).

    program: what ``jax.make_jaxpr`` gives. The second is a state's way through one step.
    """
    longest, carried = 0, 0
    for kernel in _kernels(program.jaxpr):
        start = [0] * len(kernel.invars)
        longest += max(0, _follow(kernel, start)[2])
        for i in range(len(start)):
            own = [0 if j == i else UNREACHED for j in range(len(start))]
            carried = max(carried, _follow(kernel, own)[0][i])
    return int(longest), int(carried)


def _kernels(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["jaxpr"]
        else:
            for inner in _inner(equation):
                yield from _kernels(inner)


def _inner(equation):
    """Programs inside an equation: branches, or one body."""
    nested = (x if isinstance(x, tuple | list) else (x,) for x in equation.params.values())
    found = [getattr(x, "jaxpr", x) for values in nested for x in values]
    return [x for x in found if hasattr(x, "eqns") and hasattr(x, "invars")]


def _follow(jaxpr, before):
    """(chains that end in the inputs after the program, in its outputs, the longest one of any value).

    before: chains that end in the inputs. References among the inputs may end longer ones afterwards.
    """
    chain, longest = dict(zip(jaxpr.invars, before)), UNREACHED

    def at(x):
        return UNREACHED if isinstance(x, Literal) else chain.get(x, UNREACHED)

    for equation in jaxpr.eqns:
        arguments = [at(x) for x in equation.invars]
        if _inner(equation):
            arguments, outputs, most = _follow_inner(equation, arguments)
        else:
            most = max(arguments, default=UNREACHED) + (equation.primitive.name == "dot_general")
            outputs = [most] * len(equation.outvars)
            if equation.primitive.name not in READS:
                arguments = [max(most, x) for x in arguments]
        longest = max(longest, most)
        chain |= {x: c for x, c in zip(equation.invars, arguments) if hasattr(x.aval, "inner_aval")}
        chain |= dict(zip(equation.outvars, outputs))
    return [at(x) for x in jaxpr.invars], [at(x) for x in jaxpr.outvars], longest


def _follow_inner(equation, arguments):
    """(chains of the arguments afterwards, of the outputs, the longest) of an equation with programs inside."""
    name, bodies = equation.primitive.name, _inner(equation)
    if name == "cond":
        branches = [_follow(body, arguments[1:]) for body in bodies]
        after, outputs = ([max(x) for x in zip(*(branch[n] for branch in branches))] for n in range(2))
        return [arguments[0], *after], outputs, max(branch[2] for branch in branches)
    if name != "scan":
        missing = [UNREACHED] * (len(bodies[-1].invars) - len(arguments))
        after, outputs, longest = _follow(bodies[-1], arguments + missing)
        return after[: len(arguments)], outputs[: len(equation.outvars)], longest
    # Kernels loop over what they carry alone: no inputs or outputs by turn.
    first, longest = len(equation.invars) - len(equation.outvars), UNREACHED
    for _ in range(min(equation.params["length"], MOST_TURNS)):
        after, outputs, most = _follow(bodies[0], arguments)
        arguments = after[:first] + outputs
        longest = max(longest, most)
    return arguments, outputs, longest
