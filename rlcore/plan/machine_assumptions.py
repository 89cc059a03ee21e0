"""The assumptions behind the estimated seconds of a step, for people."""

from rlcore.plan.machine_cards import Machine
from rlcore.plan.machine_times import (
    COLLECTIVE_S,
    DECODE_STEP_S,
    DISK_READ_GB_S,
    DISK_WRITE_GB_S,
    EAGER_LAYER_S,
    FORWARD_SHARE,
    IPC_PASSES,
    MEMORY_SHARE,
    NODE_GB_S,
    NODES_COLLECTIVE_S,
    PAGEABLE_GB_S,
    TCP_GB_S,
    TRAIN_SHARE,
)


def assumptions(machine: Machine) -> list[str]:
    """The assumptions behind the seconds, for people."""
    card = machine.card
    return [
        f"{card.name}: {card.tflops:g} TFLOP/s in bfloat16 without sparsity, {card.memory_gb_s:g} GB/s of memory, "
        f"{card.link_gb_s:g} GB/s to the cards of its node ({card.source}); {NODE_GB_S:g} GB/s to other nodes",
        f"of the peak products of an update reach {TRAIN_SHARE:.0%}, of a forward pass {FORWARD_SHARE:.0%}; decoding "
        f"and values between products {MEMORY_SHARE:.0%} of the memory's bandwidth; {DECODE_STEP_S * 1e3:g} ms per "
        f"decoded token of all rows on top, and {EAGER_LAYER_S * 1e3:g} ms per layer without CUDA graphs",
        f"devices of an engine add up values twice per layer: {COLLECTIVE_S * 1e6:g} us, over nodes "
        f"{NODES_COLLECTIVE_S * 1e6:g} us, and bytes over the links",
        f"weights travel at {DISK_WRITE_GB_S:g} GB/s into files and {DISK_READ_GB_S:g} GB/s out of them, or "
        f"{TCP_GB_S:g} GB/s over tcp; through shared memory or to be broadcast they cross host links twice at "
        f"{PAGEABLE_GB_S:g} GB/s each: through shared memory those of all ranks, and of all devices of an engine; "
        f"over IPC they are gathered over the links and pass the device's memory {IPC_PASSES} times",
        "reward functions, judges, tools and the controller take no time",
    ]
