"""What the core offers by the hook `rlcore_algorithms`: references and metadata, nothing heavy."""

from rlcore.plan import Algorithm, AlgorithmKind, Need, Scope

OFFERS: tuple[Algorithm, ...] = (
    Algorithm("grpo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:grpo", Scope.GROUP),
    Algorithm("dr_grpo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:dr_grpo", Scope.GROUP),
    Algorithm("rloo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:rloo", Scope.GROUP),
    Algorithm(
        "reinforce_pp",
        AlgorithmKind.ADVANTAGE,
        "rlcore.algo.advantage:reinforce_pp",
        Scope.BATCH,
        per_token=True,
    ),
    Algorithm(
        "gae",
        AlgorithmKind.ADVANTAGE,
        "rlcore.algo.advantage:gae",
        Scope.SAMPLE,
        needs=frozenset({Need.VALUES}),
        per_token=True,
    ),
    Algorithm("clip", AlgorithmKind.POLICY_LOSS, "rlcore.algo.loss:clip", Scope.SAMPLE),
)
"""Estimators that are not `per_token` give one advantage a row, and need no tokens."""
