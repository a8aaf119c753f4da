"""Checkpoints: a model folder in Hugging Face format with the learner's own state inside.

Invariants: everything outside ``state/`` loads in Transformers and vLLM; the state loads into the world size and ZeRO
stage that wrote it, nothing else. Whoever asks for a checkpoint has it written aside (:mod:`asyncrl.track.aside`).
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from asyncrl.learner.gather import full_weights

STATE = "state"
FACTS = "learner.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def save(engine: Any, model_path: str, path: str, counts: Mapping[str, int]) -> None:
    """Write a checkpoint to the new folder ``path``; it is whole when all ranks, which call this together, are done.

    ``counts`` are the learner's own: ``updates`` made and ``rows`` trained on. Config and tokenizer are copied from
    ``model_path``, the folder the model was loaded from.
    """
    folder, first = Path(path), dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True)
        for file in sorted(Path(model_path).iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copy2(file, folder / file.name)
    dist.barrier()
    weights = {}
    for name, tensor in full_weights(engine.module):
        if first:
            # Copied: safetensors refuses tensors that share memory, as DeepSpeed's flattened ones do.
            weights[name] = tensor.cpu().clone().contiguous()
    if first:
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    del weights
    engine.save_checkpoint(path, tag=STATE, client_state=dict(counts), save_latest=False)
    if first:
        facts = {**counts, "world_size": dist.get_world_size(), "zero_stage": engine.zero_optimization_stage()}
        (folder / STATE / FACTS).write_text(json.dumps(facts))


def load(engine: Any, path: str) -> dict[str, int]:
    """Restore weights and optimizer from a checkpoint; returns its counts. All ranks call this together.

    Raises:
        FileNotFoundError: no learner state at ``path``.
        ValueError: the state was written by another world size or ZeRO stage.
    """
    facts_file = Path(path) / STATE / FACTS
    if not facts_file.is_file():
        raise FileNotFoundError(f"{path}: no learner state ({STATE}/{FACTS} is missing); give a checkpoint folder")
    facts = json.loads(facts_file.read_text())
    here = {"world_size": dist.get_world_size(), "zero_stage": engine.zero_optimization_stage()}
    for name, value in here.items():
        if facts[name] != value:
            raise ValueError(
                f"{path}: written with learner.{name}={facts[name]}, this run has {value}; "
                f"resume with learner.{name}={facts[name]}"
            )
    loaded, _ = engine.load_checkpoint(path, tag=STATE)
    if loaded is None:
        raise FileNotFoundError(f"{path}: DeepSpeed found no state in {STATE}/ for rank {dist.get_rank()}")
    return {name: facts[name] for name in facts if name not in here}
