"""Roles and metadata: a parameter that cannot be placed is refused by name."""

import jax
import pytest

from k3jax.roles import ParamMeta, Role, meta_by_path, meta_of


def test_meta_is_a_leaf():
    meta = {"kda": {"q": ParamMeta(Role.HEADS, ("embed", "heads", "key"))}}
    assert meta_by_path(meta) == {"kda/q": meta["kda"]["q"]}
    assert jax.tree.structure(meta).num_leaves == 1


@pytest.mark.parametrize(
    ("role", "axes", "message"),
    [
        (Role.HEADS, ("embed", "key"), "heads"),
        (Role.HEADS, ("heads", "heads", "key"), "heads"),
        (Role.HEADS, ("heads", "key"), "two axes"),
        (Role.EXPERTS, ("latent", "ffn"), "experts"),
        (Role.MATRIX, ("embed",), "two axes"),
        (Role.ROUTER, ("experts",), "two axes"),
    ],
)
def test_axes_that_do_not_fit_the_role(role, axes, message):
    with pytest.raises(ValueError, match=message):
        ParamMeta(role, axes)


def test_types():
    with pytest.raises(TypeError, match="role"):
        ParamMeta("matrix", ("embed", "ffn"))
    with pytest.raises(TypeError, match="axes"):
        ParamMeta(Role.NORM, "embed")


def test_errors_name_the_path():
    with pytest.raises(ValueError, match=r"without a role.*'mla/gate'"):
        meta_by_path({"mla": {"gate": None}})
    metas = meta_by_path({"w": ParamMeta(Role.MATRIX, ("embed", "ffn"))})
    with pytest.raises(ValueError, match=r"without a role.*'v'"):
        meta_of(metas, (jax.tree_util.DictKey("v"),), 2)
    with pytest.raises(ValueError, match="1 dimensions"):
        meta_of(metas, (jax.tree_util.DictKey("w"),), 1)


def test_every_role_has_a_row_in_the_table():
    rows = {line.split("|")[1].strip(): line for line in Role.__doc__.splitlines() if line.count("|") > 4}
    for role in Role:
        group, decay = (rows[role.name].split("|")[i].strip() for i in (3, 5))
        assert (group, decay) == (role.group, "yes" if role.decayed else "no")
