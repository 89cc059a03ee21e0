"""The algorithms: pure functions of tensors. Planning reads `rlcore.algo.core_offers` only, which imports no torch."""
