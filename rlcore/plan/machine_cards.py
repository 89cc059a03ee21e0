"""GPUs by name with their data-sheet figures, and machines composed of them: `2x8xH100-80GB`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.errors import ConfigError, nearest
from rlcore.plan.machine_facts import GIB, Facts

USABLE = 0.98
"""Share of a card's memory that CUDA reports; error correction and the driver use the rest."""
CORES_PER_GPU, HOST_GIB_PER_GPU = 16, 128
"""CPU cores and host memory per GPU, as is usual for cloud machines."""


@dataclass(frozen=True)
class Card:
    """A GPU, with the figures of its data sheet, without sparsity."""

    name: str
    memory_gb: int
    tflops: float
    """TFLOP/s of bfloat16 and float16 on tensor cores, accumulating in float32."""
    tf32_tflops: float
    memory_gb_s: float
    link_gb_s: float
    """Bandwidth to the other cards of its node, in one direction."""
    source: str


_SHEETS = (
    Card("A10-24GB", 24, 125, 62.5, 600, 32, "NVIDIA A10 data sheet"),
    Card("A100-40GB", 40, 312, 156, 1555, 300, "NVIDIA A100 data sheet, SXM"),
    Card("A100-80GB", 80, 312, 156, 2039, 300, "NVIDIA A100 data sheet, SXM"),
    Card("A100-PCIE-40GB", 40, 312, 156, 1555, 32, "NVIDIA A100 data sheet, PCIe"),
    Card("A100-PCIE-80GB", 80, 312, 156, 1935, 32, "NVIDIA A100 data sheet, PCIe"),
    Card("B200-180GB", 180, 2250, 1100, 7700, 900, "NVIDIA DGX B200 data sheet, an eighth"),
    Card("GH200-96GB", 96, 989, 494, 4000, 450, "NVIDIA GH200 data sheet, HBM3"),
    Card("H100-80GB", 80, 989, 494, 3350, 450, "NVIDIA H100 data sheet, SXM"),
    Card("H100-NVL-94GB", 94, 835, 418, 3900, 300, "NVIDIA H100 NVL data sheet"),
    Card("H100-PCIE-80GB", 80, 756, 378, 2000, 64, "NVIDIA H100 data sheet, PCIe"),
    Card("H20-96GB", 96, 148, 74, 4000, 450, "NVIDIA H20, as vendors list it"),
    Card("H200-141GB", 141, 989, 494, 4800, 450, "NVIDIA H200 data sheet, SXM"),
    Card("H800-80GB", 80, 989, 494, 3350, 200, "NVIDIA H800, as vendors list it, SXM"),
    Card("L4-24GB", 24, 121, 60, 300, 32, "NVIDIA L4 data sheet"),
    Card("L40S-48GB", 48, 362, 183, 864, 32, "NVIDIA L40S data sheet"),
    Card("RTX4090-24GB", 24, 165, 82.6, 1008, 32, "NVIDIA Ada GPU architecture whitepaper"),
    Card("RTX5090-32GB", 32, 209.5, 104.8, 1792, 64, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    Card("RTXA6000-48GB", 48, 155, 77.4, 768, 56, "NVIDIA RTX A6000 data sheet"),
)
CARDS = {card.name: card for card in _SHEETS}
DRIVER_NAMES = {
    "A10": "A10-24GB",
    "A100-PCIE-40GB": "A100-PCIE-40GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB",
    "A100 80GB PCIe": "A100-PCIE-80GB",
    "B200": "B200-180GB",
    "GH200 120GB": "GH200-96GB",
    "GH200 480GB": "GH200-96GB",
    "GeForce RTX 4090": "RTX4090-24GB",
    "GeForce RTX 5090": "RTX5090-32GB",
    "H100 80GB HBM3": "H100-80GB",
    "H100 NVL": "H100-NVL-94GB",
    "H100 PCIe": "H100-PCIE-80GB",
    "H20": "H20-96GB",
    "H200": "H200-141GB",
    "H800": "H800-80GB",
    "L4": "L4-24GB",
    "L40S": "L40S-48GB",
    "RTX A6000": "RTXA6000-48GB",
}
"""Cards by the names that NVIDIA's driver reports, without the vendor, as its README lists them. Whole names are
compared: `A10G`, `H200 NVL` and `GeForce RTX 4090 D` are other cards. The GH200's name has the memory of its CPU."""
LEAST_REPORTED, MOST_REPORTED = 0.92, 1.01
"""Bounds of the memory that the driver reports for a card, as a share of the card's GiB. Error correction in GDDR
memory takes a sixteenth. Cards with the same name and other memory exist, too; the figures are not theirs."""
FORM = "[NODESx]GPUSxCARD, such as 8xH100-80GB or 2x8xH100-80GB"


@dataclass(frozen=True)
class Machine:
    """Nodes of equal cards."""

    nodes: int
    gpus_per_node: int
    card: Card

    @property
    def gpus(self) -> int:
        """GPUs in all nodes."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node}x{self.card.name}"


def machine_of(text: str) -> Machine:
    """The machine that a text such as `8xH100-80GB` names; ConfigError naming the form or the known cards."""
    parts = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)", text.strip())
    if parts is None:
        raise ConfigError(f"--on: found '{text}'; needs {FORM}")
    nodes, gpus = int(parts[1] or 1), int(parts[2])
    if not nodes or not gpus:
        raise ConfigError(f"--on: found '{text}', which has no GPU; needs {FORM}")
    return Machine(nodes, gpus, _card(parts[3]))


def facts_of(machine: Machine) -> Facts:
    """The facts of that machine, with nothing else running on it."""
    size = int(USABLE * machine.card.memory_gb * GIB)
    # of all nodes together, with which the sums over all ranks are compared: ranks are spread evenly
    cores, host = machine.gpus * CORES_PER_GPU, machine.gpus * HOST_GIB_PER_GPU * GIB
    return Facts(
        cpus=cores,
        gpus=machine.gpus,
        gpus_per_node=machine.gpus_per_node,
        memory_bytes=host,
        gpu_memory_bytes=size,
        gpu_free_bytes=size,
        card=machine.card.name,
        of_workers=True,
    )


def card_in_all(devices: Sequence[tuple[str, int | None]]) -> str:
    """The name of the card that all these devices are, by the names and the total bytes that the driver reports; empty
    if there are several cards or none, or an unknown one."""
    found = {_reported_card(name, size) for name, size in devices}
    return found.pop() if len(found) == 1 else ""


def _reported_card(name: str, size: int | None) -> str:
    """The name of a device's card; empty if it is not in the table."""
    card = CARDS.get(DRIVER_NAMES.get(name.removeprefix("NVIDIA "), ""))
    if card is None or size is None:
        return ""
    return card.name if LEAST_REPORTED <= size / (card.memory_gb * GIB) <= MOST_REPORTED else ""


def machine_like(facts: Facts) -> Machine:
    """The machine with these devices. A card that is unknown is taken for the one whose memory is closest."""
    size, on_node = facts.gpu_memory_bytes or 0, max(1, facts.gpus_per_node or facts.gpus)
    card = CARDS.get(facts.card) or min(_SHEETS, key=lambda card: abs(card.memory_gb * GIB - size))
    return Machine(max(1, facts.gpus // on_node), on_node, card)


def _card(name: str) -> Card:
    """The card with this name, ignoring case; the memory size may be omitted if only one is known."""
    named = name.upper()
    found = [card for key, card in CARDS.items() if named in (key.upper(), key.rpartition("-")[0].upper())]
    if len(found) > 1:
        raise ConfigError(f"--on: there are several '{name}'; choose from: {', '.join(card.name for card in found)}")
    if not found:
        raise ConfigError(f"--on: there is no card '{name}'; {nearest(named, tuple(CARDS))}")
    return found[0]
