"""The algorithms: pure functions of tensors. Planning reads `rlcore.algo.offers` only, which imports no torch."""
