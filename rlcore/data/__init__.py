"""Prompts: reads them from their sources, checks them, and issues them in an order that any checkpoint can continue.

Importing the package imports no module of it, because a worker needs only the batches.
"""

from typing import TYPE_CHECKING

from rlcore.imports import lazy_names

if TYPE_CHECKING:  # the one list of public names: type checkers read it, and `lazy_names` does
    from rlcore.data.issued import IssuedPrompts as IssuedPrompts
    from rlcore.data.read_prompts import load_prompts as load_prompts
    from rlcore.data.read_prompts import training_sources as training_sources
    from rlcore.data.select import filter_long as filter_long
    from rlcore.data.select import refuse_overlap as refuse_overlap


__getattr__, __dir__ = lazy_names(__name__, __file__)
