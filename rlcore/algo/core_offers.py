"""The core's offers for the hook `rlcore_algorithms`: targets and metadata, without importing torch."""

from rlcore.contracts.offers import Algorithm, AlgorithmKind, Need, Scope

OFFERS: tuple[Algorithm, ...] = (
    Algorithm("grpo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:grpo", Scope.GROUP),
    Algorithm("dr_grpo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:dr_grpo", Scope.GROUP),
    Algorithm("rloo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:rloo", Scope.GROUP),
    Algorithm("turn_rloo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:turn_rloo", Scope.GROUP, per_token=True),
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
    Algorithm("none", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:none", Scope.SAMPLE),
    Algorithm("opo", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:opo", Scope.GROUP),
    Algorithm("pass_at_k", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:pass_at_k", Scope.GROUP),
    *(
        Algorithm(
            name,
            AlgorithmKind.ADVANTAGE,
            f"rlcore.algo.advantage:{name}",
            Scope.BATCH,
            needs=frozenset({Need.GROUP}),
        )
        for name in ("gpg", "reinforce_pp_baseline")
    ),
    Algorithm(
        "gdpo",
        AlgorithmKind.ADVANTAGE,
        "rlcore.algo.decoupled:gdpo",
        Scope.BATCH,
        needs=frozenset({Need.GROUP, Need.FUNCTION_SCORES}),
    ),
    Algorithm(
        "remax",
        AlgorithmKind.ADVANTAGE,
        "rlcore.algo.advantage:remax",
        Scope.SAMPLE,
        needs=frozenset({Need.GREEDY_BASELINE}),
    ),
    *(
        Algorithm(
            name, AlgorithmKind.POLICY_LOSS, f"rlcore.algo.loss:{name}", Scope.SAMPLE, ignores_zero_advantages=True
        )
        for name in ("clip", "gspo", "cispo", "sapo", "gpg", "gmpo")
    ),
    *(
        Algorithm(
            name,
            AlgorithmKind.POLICY_LOSS,
            f"rlcore.algo.covariance:{name}",
            Scope.SAMPLE,
            needs=frozenset({Need.MINIBATCH_STATISTICS}),
            selection=f"rlcore.algo.covariance:select_{name}",
            ignores_zero_advantages=name == "clip_cov",
        )
        for name in ("clip_cov", "kl_cov")
    ),
)
"""Estimators that are not `per_token` give one advantage per row and do not use tokens."""
