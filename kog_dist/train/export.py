"""`export`: from a training state to a model folder in the published form, with its model card."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError
from kog_dist.foreign_file import read_text
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import write_checkpoint, write_manifest
from kog_dist.train.cleaning import END_OF_TEXT
from kog_dist.train.state import load_progress, load_tensors

_MAX_SHARD_BYTES = 15 * 2**20
_TEMPERATURE = 0.2  # what its completions are evaluated with; the default of HTTP requests that say nothing


def export(state: Path, tokenizer_file: Path, sources_file: Path, out: Path, *, evaluation_file: Path | None = None) -> None:
    """Write `out`: bfloat16 weights, tokenizer, generation config, model card, manifest.

    Raises CheckpointError if the state holds no run.
    """
    progress = load_progress(state)
    if progress is None:
        raise CheckpointError(f"{state} has no progress.json; run `python -m kog_dist.train run` first")
    spec = read_config(progress["spec"])
    tensors = {name: tensor.numpy() for name, tensor in load_tensors(state, "weights").items()}
    write_checkpoint(out, spec, tensors, dtype="bfloat16", max_shard_bytes=_MAX_SHARD_BYTES, manifest=False)
    tokenizer = read_text(tokenizer_file)
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    end_id = int(json.loads(tokenizer)["model"]["vocab"][END_OF_TEXT])
    _write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT})
    _write_json(out / "generation_config.json", {"eos_token_id": end_id, "temperature": _TEMPERATURE})
    evaluation = json.loads(read_text(evaluation_file)) if evaluation_file else None
    sources = json.loads(read_text(sources_file))
    (out / "README.md").write_text(model_card(spec, progress, sources, evaluation), encoding="utf-8")
    write_manifest(out)


def model_card(spec: ModelSpec, progress: dict[str, Any], sources: dict[str, Any], evaluation: dict[str, object] | None) -> str:
    """Markdown: what the model is, how it was trained, on what, under which licences, and how well it does."""
    loss = progress["held_out_losses"][-1][1] if progress["held_out_losses"] else None
    num_processes = progress.get("num_processes", 1)
    processes = "one process" if num_processes == 1 else f"{num_processes} processes"
    lines = [
        "---",
        "license: apache-2.0",
        "tags: [laneformer, code]",
        "---",
        "# Demo Laneformer",
        "",
        "A small Laneformer that continues Python source. It exists so that the decoding engine has a really trained model to",
        "show and to test with; it knows what Python looks like, not how to program. Do not use its output unread.",
        "",
        f"- {spec.num_parameters:,} parameters, {spec.bytes_per_token() // 2:,} of them read per token; bfloat16",
        f"- {spec.num_layers} layers of hidden size {spec.hidden_size}, {spec.num_lanes} lanes, delay {spec.delay}, "
        f"{spec.num_heads} heads, FFN {spec.intermediate_size}, context {spec.max_context}",
        f"- layers {', '.join(map(str, spec.window_layers))} see a window of {spec.sliding_window} tokens, the others all",
        f"- byte-level BPE of {sources['vocab_size']} ids of its own; `{END_OF_TEXT}` ends a file",
        "",
        "## Training",
        "",
        f"{progress['step']:,} steps, {progress['trained_tokens']:,} tokens ({progress['num_unique_tokens']:,} different ones), "
        f"{progress['trained_seconds']:.0f} s in {processes}, seed {progress['settings']['seed']}.",
        "Muon for the lanes' matrices, AdamW for the rest, bfloat16 autocast, flat learning rate with linear decay.",
    ]
    if loss is not None:
        bits = loss / math.log(2) / sources["held_out_bytes_per_token"]
        lines.append(f"Final loss on held-out projects: {loss:.3f} nats per token, {bits:.3f} bits per byte.")
    lines.append(f"Data set (SHA-256): `{sources['digest']}`.")
    if evaluation is not None:
        lines += ["", "## How well it does", "", _evaluation_text(evaluation)]
    lines += _source_table(sources)
    return "\n".join(lines) + "\n"


def _evaluation_text(evaluation: dict[str, Any]) -> str:
    cut, whole = evaluation["num_cut_at_limit"], evaluation["num_functions"] - evaluation["num_cut_at_limit"]
    return (
        f"Of {evaluation['num_functions']} functions and methods from held-out projects, given up to signature and docstring\n"
        f"(or first line) and completed at temperature {evaluation['temperature']} with seed {evaluation['seed']}, "
        f"**{evaluation['num_parsed']} ({evaluation['parse_share']:.1%}) parse** with `ast`.\n"
        f"{whole} completions came to an end of their own, and {evaluation['num_ended_parsed']} of these parse; {cut} were\n"
        f"still going on after {evaluation['max_new_tokens']} tokens, lost their unfinished end, and "
        f"{evaluation['num_parsed'] - evaluation['num_ended_parsed']} of these parse.\n"
        "An empty completion counts as failed. Parsing says nothing about whether the code is right.\n\n"
        f"Of {evaluation['num_tested']} functions with unit tests, made by calling the originals on invented arguments,\n"
        f"**{evaluation['num_passed']} ({evaluation['pass_share']:.1%}) pass** all of theirs."
    )


def _source_table(sources: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Sources",
        "",
        f"{sources['num_train_bytes']:,} bytes of Python source from installed packages whose own metadata names only",
        "permissive licences, without tests, generated files, tables, vendored copies and duplicates, near ones included.",
        "In brackets are the bytes of each. Projects in bold are held out: kept from training whole.",
        "",
        "| licence | projects |",
        "|---|---|",
    ]
    projects: dict[str, list[str]] = {}
    for source in sources["sources"]:
        name = f"**{source['name']}**" if source["held_out"] else source["name"]
        projects.setdefault(source["licence"], []).append(f"{name} {source['version']} ({source['bytes']})")
    lines += [f"| {licence} | {', '.join(of_licence)} |" for licence, of_licence in sorted(projects.items())]
    return lines


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
