"""The tables of tokens in a model, by the names of embeddings."""

from __future__ import annotations

from adapterzoo.anatomy import Anatomy
from adapterzoo.errors import SiteError, listing

from ._patterns import matches


def tables_in(
    anatomy: Anatomy, names: str | tuple[str, ...] | None, hint: str
) -> list[tuple[str, ...]]:
    """Return the tables of a model, each as the paths of the embeddings that share it.

    Args:
        anatomy: of the model.
        names: of embeddings, as in `target_modules`; None: the model's own table of tokens.
        hint: how to name an embedding.

    Raises:
        SiteError: there is no such table.
    """
    tables = [site.path for site in anatomy if site.kind == "embedding"]
    if names is None:
        found = [path for path in tables if path == anatomy.own_table]
    else:
        found = [path for path in tables if matches(path, names)]
    parts = names if isinstance(names, tuple) else ()
    if not found or [name for name in parts if not any(matches(p, (name,)) for p in found)]:
        what = (
            "no table of tokens"
            if names is None
            else f"no embedding {names if isinstance(names, str) else listing(names)}"
        )
        raise SiteError(
            f"rows of embeddings are to be trained, and this model has {what}; embeddings: "
            f"{listing(tables) or 'none'}. Write {hint}."
        )
    tied = {path: group for group in anatomy.shared_tables for path in group}
    return list(dict.fromkeys(tied.get(path, (path,)) for path in found))
