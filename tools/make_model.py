#!/usr/bin/env python3
"""Generates a Llama model with random weights: a real file of any size that llama.cpp loads and decodes with.

    tools/make_model.py OUT.gguf --size 700M
    tools/make_model.py model.safetensors --format safetensors --size 2G --split 3
    tools/make_model.py mixture.gguf --size 2G --experts 64 --used 4

The same arguments give the same bytes. A file that is already right (its parameters stand in OUT.json) is kept.
The words it writes mean nothing; what it reads, and in which order, is what a model of that size reads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

# Run as a script, Python looks for modules in tools/ and not in the repository above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmcache.errors import EnvironmentProblem, UsageError, run_cli
from llmcache.units import format_size, parse_size
from tools.modelgen import gguf_file, safetensors_file
from tools.modelgen.shape import MixtureShape, Shape, choose_shape

# Raise it when the bytes that the same parameters give change.
_GENERATOR_VERSION = 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write; shards are named after it")
    parser.add_argument("--size", default="700M", help="about how large the model gets (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="number of layers, whatever size that gives")
    parser.add_argument("--format", choices=("gguf", "safetensors"), default="gguf", help="Q8_0 GGUF or BF16")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="a mixture of N experts in each layer")
    parser.add_argument("--used", type=int, default=4, metavar="K", help="of which a token uses K (default: %(default)s)")
    parser.add_argument("--slice", default="500K", metavar="SIZE", help="of one expert in one tensor (default: %(default)s)")
    parser.add_argument("--fused", action="store_true", help="safetensors: one tensor for all experts of a layer")
    parser.add_argument("--tied", action="store_true", help="no output tensor: the embedding serves as one")
    parser.add_argument("--split", type=int, default=1, metavar="N", help="write N shards")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(out: Path, shape: Shape, model_format: str, shards: int, seed: int, fused: bool = False) -> list[Path]:
    """The files of the model described by the arguments: those that exist where they are right, else new ones."""
    paths = (gguf_file.shard_paths if model_format == "gguf" else safetensors_file.shard_paths)(out, shards)
    parameters = {"version": _GENERATOR_VERSION, "format": model_format, "shards": shards, "seed": seed}
    parameters |= asdict(shape) | {"fused": fused}
    sidecar = out.with_name(out.name + ".json")
    if _is_right(sidecar, parameters, paths):
        return paths
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sidecar.unlink(missing_ok=True)
        _write(paths, shape, model_format, seed, fused)
        sizes = {path.name: path.stat().st_size for path in paths}
        sidecar.write_text(json.dumps({"parameters": parameters, "files": sizes}, indent=1) + "\n")
    except OSError as error:
        hint = "name a place that is writable and has the room"
        raise EnvironmentProblem(f"cannot write {out}: {error.strerror}", hint) from error
    return paths


def _is_right(sidecar: Path, parameters: dict[str, object], paths: list[Path]) -> bool:
    """Whether `sidecar` describes `parameters`, and all files are there with the sizes it tells."""
    try:
        known = json.loads(sidecar.read_text())
        sizes = {path.name: path.stat().st_size for path in paths}
        return bool(known["parameters"] == parameters and known["files"] == sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(paths: list[Path], shape: Shape, model_format: str, seed: int, fused: bool) -> None:
    """Write under temporary names first: a file with the final name is always whole."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = [stack.enter_context(open(path, "wb")) for path in temporary]
            if model_format == "gguf":
                gguf_file.write(files, shape, seed)
            else:
                safetensors_file.write(files, [path.name for path in paths], shape, seed, fused)
            for file in files:
                _settle(file)
        for source, target in zip(temporary, paths, strict=True):
            source.replace(target)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _settle(file: BinaryIO) -> None:
    """Bring the file to the disk and out of the page cache: what reads it next starts cold, and nothing is dirty."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    """Make what the command line asks for, and print the paths."""
    arguments = _arguments()
    if arguments.layers is not None and arguments.layers < 1:
        raise UsageError("--layers must be at least 1")
    value_bytes = gguf_file.BYTES_PER_VALUE if arguments.format == "gguf" else safetensors_file.BYTES_PER_VALUE
    if arguments.experts and not 1 <= arguments.used <= arguments.experts:
        raise UsageError(f"--used must be between 1 and the number of experts, {arguments.experts}")
    mixture = MixtureShape(arguments.experts, arguments.used, parse_size(arguments.slice)) if arguments.experts else None
    shape = choose_shape(parse_size(arguments.size), value_bytes, arguments.layers, arguments.tied, mixture)
    if not 1 <= arguments.split <= len(list(shape.weights())):
        raise UsageError(f"--split must be between 1 and the number of tensors, {len(list(shape.weights()))}")
    paths = make_model(arguments.out, shape, arguments.format, arguments.split, arguments.seed, arguments.fused)
    total = sum(path.stat().st_size for path in paths)
    experts = f", {shape.experts} experts, {shape.used} used" if mixture else ""
    print(f"{format_size(total)}, {shape.layers} layers, width {shape.width}{experts}", file=sys.stderr)
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
